// main() of the test programs. A program holds the tests of a room; names of its source files
// select those files' tests: `unit_layout box_test`.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

namespace {

// "Boxes.Cut:Boxes.Join:..."; empty when no test stands in a file of these names.
std::string tests_in_files(const std::vector<std::string>& names) {
  std::string filter;
  const ::testing::UnitTest& all = *::testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const ::testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int k = 0; k < suite.total_test_count(); ++k) {
      const ::testing::TestInfo& test = *suite.GetTestInfo(k);
      if (std::count(names.begin(), names.end(), std::filesystem::path(test.file()).stem()) == 0)
        continue;
      filter += std::string(filter.empty() ? "" : ":") + suite.name() + "." + test.name();
    }
  }
  return filter;
}

}  // namespace

// The sanitizers ask a program for these when it starts. Tests ask for more memory than there is
// and expect std::bad_alloc. libtorch is not instrumented: locks inside it are not seen, so its
// random number generator, which ranks in threads share, looks unprotected.
extern "C" {
const char* __asan_default_options();
const char* __tsan_default_options();
const char* __tsan_default_suppressions();

const char* __asan_default_options() { return "allocator_may_return_null=1"; }
const char* __tsan_default_options() { return "allocator_may_return_null=1"; }
const char* __tsan_default_suppressions() {
  return "race:at::detail::createCPUGenerator\n"
         "race:at::native::*uniform_kernel\n";
}
}

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const std::vector<std::string> files(argv + 1, argv + argc);
  // A filter that says which tests to run goes before names; death tests start the program again
  // with one. A filter that only takes tests away ("-Boxes.*") applies to the named files.
  const std::string given = GTEST_FLAG_GET(filter);
  if (!files.empty() && (given == "*" || given.starts_with("-"))) {
    const std::string named = tests_in_files(files);
    if (named.empty()) {
      std::fprintf(stderr, "%s has no tests of a file '%s'\n", argv[0], argv[1]);
      return 2;
    }
    GTEST_FLAG_SET(filter, given == "*" ? named : named + given);
  }
  return RUN_ALL_TESTS();
}
