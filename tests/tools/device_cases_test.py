"""Every case under tests/device needs a device and says so first. One that does not could never fail where there is none: ctest
takes a whole program for skipped when one of its cases is.
"""

import pathlib
import re
import unittest

CASES = re.compile(r"^TEST(?:_P|_F)?\((\w+), (\w+)\) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
FIXTURES = re.compile(r"^class (\w+) : public ([\w:]+)(?:[^\n]*\{\};|.*?^\};)", re.MULTILINE | re.DOTALL)
DEVICE = pathlib.Path(__file__).resolve().parents[1] / "device"


def cases_without_device(text):
    """The cases that begin without FSDP_REQUIRE_..., and whose fixtures do, too."""
    asks = {}
    for fixture in FIXTURES.finditer(text):
        asks[fixture[1]] = "FSDP_REQUIRE_" in fixture[0] or asks.get(fixture[2], False)
    return [f"{suite}.{name}" for suite, name, body in CASES.findall(text)
            if not body.lstrip().startswith("FSDP_REQUIRE_") and not asks.get(suite, False)]


class DeviceCases(unittest.TestCase):
    def test_a_case_without_device_is_found(self):
        plain = "TEST(Sum, IsExact) {\n  EXPECT_EQ(1 + 1, 2);\n}\n"
        asking = "TEST_P(Sum, OnDevice) {\n  FSDP_REQUIRE_GPU();\n}\n"
        fixture = "class Sum : public ::testing::Test {\n  void SetUp() override { FSDP_REQUIRE_GPU(); }\n};\n"
        derived = "class More : public Sum {};\n" + plain.replace("Sum", "More")
        self.assertEqual(cases_without_device(plain + asking), ["Sum.IsExact"])
        self.assertEqual(cases_without_device(fixture + plain + derived), [])

    def test_there_is_none(self):
        files = sorted(DEVICE.glob("*.cpp"))
        self.assertGreater(sum(len(CASES.findall(file.read_text())) for file in files), 80)
        for file in files:
            self.assertEqual(cases_without_device(file.read_text()), [], file.name)


if __name__ == "__main__":
    unittest.main()
