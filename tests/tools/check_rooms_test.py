"""Checks what tools/check_rooms.py must catch, and what it must let through."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
import check_rooms  # noqa: E402


def faults(room, name, text):
    return [sentence for _, sentence in check_rooms.faults_of_file(room, name, text)]


class Rooms(unittest.TestCase):
    def test_a_room_may_include_itself_and_what_it_knows(self):
        self.assertEqual(faults("memory", "x.cpp", '#include "fsdp/memory/y.h"\n#include "fsdp/layout/z.h"\n'), [])

    def test_a_room_may_not_include_a_room_above_it(self):
        (sentence,) = faults("layout", "x.cpp", '#include "fsdp/memory/pool.h"\n')
        self.assertIn("room 'layout' may not know 'memory' (it knows base)", sentence)

    def test_neighbours_are_not_known(self):
        self.assertEqual(len(faults("comm", "x.h", '#include "fsdp/layout/strategy.h"\n')), 1)

    def test_the_line_is_named(self):
        text = "#pragma once\n\n#include <vector>\n  #  include \"fsdp/cli/x.h\"\n"
        ((number, _),) = check_rooms.faults_of_file("base", "x.h", text)
        self.assertEqual(number, 4)

    def test_nn_sees_only_the_unit_of_shard(self):
        self.assertEqual(faults("nn", "x.h", '#include "fsdp/shard/unit.h"\n'), [])
        self.assertEqual(len(faults("nn", "x.h", '#include "fsdp/shard/param_group.h"\n')), 1)

    def test_an_unknown_room_and_the_umbrella_are_faults(self):
        self.assertIn("is no room", faults("cli", "x.cpp", '#include "fsdp/utils/x.h"\n')[0])
        self.assertIn("umbrella", faults("cli", "x.cpp", '#include "fsdp/fsdp.h"\n')[0])

    def test_short_paths_and_angle_brackets_are_faults(self):
        self.assertIn('"fsdp/layout/box.h"', faults("layout", "x.cpp", '#include "box.h"\n')[0])
        self.assertIn("with quotes", faults("layout", "x.cpp", "#include <fsdp/base/text.h>\n")[0])

    def test_a_folder_belongs_to_its_room(self):
        self.assertEqual(faults("comm", "tcp/x.cpp", '#include "fsdp/comm/message/y.h"\n#include "fsdp/base/z.h"\n'), [])
        self.assertEqual(len(faults("comm", "tcp/x.cpp", '#include "fsdp/layout/strategy.h"\n')), 1)
        self.assertIn('"fsdp/comm/tcp/y.h"', faults("comm", "tcp/x.cpp", '#include "y.h"\n')[0])

    def test_an_include_in_a_comment_is_none(self):
        self.assertEqual(faults("base", "x.h", '// #include "fsdp/cli/x.h"\n'), [])

    def test_the_table_names_only_rooms_and_has_no_cycle(self):
        for room, known in check_rooms.MAY_KNOW.items():
            for other in known:
                self.assertIn(other, check_rooms.MAY_KNOW)
                self.assertNotIn(room, check_rooms.MAY_KNOW[other], f"{room} and {other} know each other")


class Torch(unittest.TestCase):
    def test_planning_rooms_are_free_of_torch(self):
        for header in ("torch/torch.h", "ATen/core/Tensor.h", "c10/core/Storage.h"):
            for room in ("base", "layout", "memory", "plan"):
                self.assertEqual(len(faults(room, "x.cpp", f"#include <{header}>\n")), 1, f"{room} {header}")

    def test_base_and_memory_may_use_torch_in_the_files_that_say_so(self):
        self.assertEqual(faults("base", "stream.h", "#include <c10/core/Stream.h>\n"), [])
        self.assertEqual(faults("memory", "device_slab_allocator.h", "#include <c10/core/Device.h>\n"), [])
        self.assertNotEqual(faults("layout", "device_x.h", "#include <c10/core/Device.h>\n"), [])

    def test_nobody_uses_the_file_system_library_that_libtorch_replaces(self):
        self.assertIn("libtorch brings another", faults("plan", "model_file.cpp", "#include <filesystem>\n")[0])

    def test_the_whole_of_torch_is_for_sources_alone(self):
        self.assertIn("too heavy", faults("comm", "x.h", "#include <torch/torch.h>\n")[0])
        self.assertEqual(faults("comm", "x.cpp", "#include <torch/torch.h>\n"), [])
        self.assertEqual(faults("comm", "x.h", "#include <ATen/core/Tensor.h>\n"), [])


class Command(unittest.TestCase):
    def run_on(self, files):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                path = pathlib.Path(folder, name if name.startswith("include/") else f"src/fsdp/{name}")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return subprocess.run([sys.executable, TOOLS / "check_rooms.py", folder], capture_output=True, text=True)

    def test_a_clean_tree_is_silent(self):
        result = self.run_on({"base/a.h": "#include <vector>\n", "cli/b.cpp": '#include "fsdp/plan/p.h"\n'})
        self.assertEqual((result.returncode, result.stdout), (0, ""))

    def test_a_fault_is_printed_with_file_and_line(self):
        result = self.run_on({"base/a.h": '\n#include "fsdp/plan/p.h"\n'})
        self.assertEqual(result.returncode, 1)
        self.assertIn("base/a.h:2: room 'base' may not know 'plan' (it knows no other room)", result.stdout)

    def test_a_public_header_includes_public_headers_only(self):
        public = {"include/fsdp/fsdp.h": '#include "fsdp/comm/mesh.h"\n#include "fsdp/base/version.h"\n',
                  "include/fsdp/comm/mesh.h": "#pragma once\n", "comm/inside.h": ""}
        self.assertEqual(self.run_on(public).stdout, "")
        public["include/fsdp/comm/mesh.h"] = '#pragma once\n#include "fsdp/comm/inside.h"\n'
        result = self.run_on(public)
        self.assertEqual(result.returncode, 1)
        self.assertIn("include/fsdp/comm/mesh.h:2: 'fsdp/comm/inside.h' is not public", result.stdout)

    def test_a_room_keeps_its_rule_in_its_public_headers(self):
        result = self.run_on({"base/a.h": "", "include/fsdp/base/b.h": '#include "fsdp/plan/p.h"\n',
                              "include/fsdp/plan/p.h": ""})
        self.assertIn("include/fsdp/base/b.h:1: room 'base' may not know 'plan'", result.stdout)

    def test_a_folder_that_is_no_room_is_a_fault(self):
        self.assertIn("'misc' is no room", self.run_on({"misc/a.h": ""}).stdout)

    def test_a_missing_folder_is_named(self):
        result = subprocess.run([sys.executable, TOOLS / "check_rooms.py", "/no/such"], capture_output=True, text=True)
        self.assertEqual(result.returncode, 1)
        self.assertIn("/no/such", result.stderr)


if __name__ == "__main__":
    unittest.main()
