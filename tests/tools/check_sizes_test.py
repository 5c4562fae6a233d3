"""Checks what tools/check_sizes.py counts as a function, and when it complains."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import check_sizes  # noqa: E402


def functions(text):
    return [(name, length) for name, _, length in check_sizes.cpp_functions(text)]


class Functions(unittest.TestCase):
    def test_free_functions_and_methods_are_found(self):
        text = """namespace fsdp {
int one() { return 1; }

class Box {
 public:
  Box(int a, int b) : a_(a), b_(b) {}
  int sum() const {
    return a_ + b_;
  }
};

template <typename T>
T Twice<T>::operator()(T value) {
  if (value) {
    return value;
  }
  return value + value;
}
}  // namespace fsdp
"""
        self.assertEqual(functions(text), [("one", 1), ("Box", 1), ("sum", 3), ("Twice<T>::operator", 7)])

    def test_tests_are_named_by_their_claim(self):
        self.assertEqual(functions("TEST(Layout, PadsEveryShard) {\n  f();\n}\n"), [("TEST(Layout, PadsEveryShard)", 3)])

    def test_lambdas_belong_to_their_function(self):
        text = "void f() {\n  auto g = [](int x) {\n    return x;\n  };\n  g(1);\n}\n"
        self.assertEqual(functions(text), [("f", 6)])

    def test_tables_and_enums_are_no_functions(self):
        self.assertEqual(functions("enum class E { kA, kB };\nconstexpr int kTable[] = {\n    1,\n    2,\n};\n"), [])

    def test_braces_in_text_and_comments_do_not_count(self):
        text = "int f() {\n  // }\n  char c = '}';\n  auto s = \"}\\\"}\";\n  auto r = R\"x(})\")x\";\n  return 1'000;\n}\n"
        self.assertEqual(functions(text), [("f", 7)])

    def test_macros_are_skipped(self):
        self.assertEqual(functions("#define OPEN(x) \\\n  if (x) {\nint f() {\n}\n"), [("f", 2)])


class Limits(unittest.TestCase):
    def body(self, lines):
        return "void f() {\n" + "  g();\n" * (lines - 2) + "}\n"

    def test_sixty_lines_are_fine_sixty_one_a_note_a_hundred_and_one_a_fault(self):
        self.assertEqual(list(check_sizes.findings("a.cpp", self.body(60))), [])
        ((fault, _),) = check_sizes.findings("a.cpp", self.body(61))
        self.assertFalse(fault)
        ((fault, sentence),) = check_sizes.findings("a.cpp", self.body(101))
        self.assertTrue(fault)
        self.assertIn("a.cpp:1: f has 101 lines", sentence)

    def test_long_files_are_notes_however_long(self):
        self.assertEqual(list(check_sizes.findings("a.h", "int x;\n" * 400)), [])
        self.assertEqual([f for f, _ in check_sizes.findings("a.h", "int x;\n" * 401)], [False])
        self.assertEqual([f for f, _ in check_sizes.findings("a.h", "int x;\n" * 1000)], [False])

    def test_python_functions_count_too(self):
        text = "def f():\n" + "    g()\n" * 100
        self.assertEqual([f for f, _ in check_sizes.findings("a.py", text)], [True])


if __name__ == "__main__":
    unittest.main()
