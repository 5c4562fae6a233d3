"""Checks what tools/check_links.py must catch, and what it must let through."""

import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import check_links  # noqa: E402


class Links(unittest.TestCase):
    def broken(self, text):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "docs").mkdir()
            pathlib.Path(folder, "docs", "there.md").write_text("")
            return list(check_links.broken_links(pathlib.Path(folder, "docs", "page.md"), text))

    def test_links_to_files_and_folders_are_followed_from_the_page(self):
        self.assertEqual(self.broken("[a](there.md) [b](../docs) [c](there.md#part)"), [])

    def test_a_missing_file_is_named(self):
        self.assertEqual(self.broken("see [a](gone.md) and [b](docs/there.md)"), ["gone.md", "docs/there.md"])

    def test_addresses_anchors_and_code_are_not_looked_at(self):
        self.assertEqual(self.broken("[a](https://x.org/y) [b](#part)\n```\nf[0](gone)\n```\n"), [])


if __name__ == "__main__":
    unittest.main()
