// Event files byte by byte; tests/processes/tensorboard_test.py has TensorBoard read them.
#include "fsdp/train/log/tensorboard_events.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "fsdp/base/crc32c.h"
#include "support/temp_dir.h"

namespace fsdp::train::tensorboard_events_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string hex(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    text += kDigits[static_cast<unsigned char>(c) >> 4];
    text += kDigits[static_cast<unsigned char>(c) & 15];
  }
  return text;
}

uint64_t little_endian(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

// Undoes the mask as TensorFlow's crc32c.h documents it.
uint32_t unmasked(uint64_t masked) {
  const auto rotated = static_cast<uint32_t>(masked) - 0xa282ead8u;
  return rotated >> 17 | rotated << 15;
}

uint32_t crc(std::string_view bytes) { return crc32c(std::as_bytes(std::span(bytes))); }

// The records of a file; checks both checksums of each.
std::vector<std::string> records_of(const std::string& path) {
  const std::string text = read_text_file(path, 1 << 20);
  std::vector<std::string> records;
  for (std::string_view rest = text; !rest.empty();) {
    const size_t length = little_endian(rest.substr(0, 8));
    EXPECT_EQ(unmasked(little_endian(rest.substr(8, 4))), crc(rest.substr(0, 8)));
    const std::string_view data = rest.substr(12, length);
    EXPECT_EQ(data.size(), length);
    EXPECT_EQ(unmasked(little_endian(rest.substr(12 + length, 4))), crc(data));
    records.emplace_back(data);
    rest.remove_prefix(16 + length);
  }
  return records;
}

TEST(TensorboardEvents, BeginWithTheVersionAndWhereAResumedRunGoesOn) {
  const testing::TempDir dir;
  const TensorboardEvents first(dir / "runs/x", 0, 1.0);
  EXPECT_THAT(first.path(), HasSubstr("runs/x/events.out.tfevents.0000000001."));
  EXPECT_THAT(records_of(first.path()), ElementsAre(HasSubstr("brain.Event:2")));
  const TensorboardEvents resumed(dir / "runs/x", 300, 1.0);
  EXPECT_NE(resumed.path(), first.path());
  const std::vector<std::string> records = records_of(resumed.path());
  ASSERT_EQ(records.size(), 2);
  // Step 301 (field 2) and a session log (field 7) that says START (1).
  EXPECT_EQ(hex(records[1].substr(9)), "10ad023a020801");
}

TEST(TensorboardEvents, WritesOneRecordPerStep) {
  const testing::TempDir dir;
  TensorboardEvents events(dir.path(), 0, 1.0);
  events.step({.step = 1, .loss = 2.5, .terms = {{"mtp", 0.5}}}, 2.0);
  events.validation({.step = 1, .loss = 2.25}, 2.0);
  events.step({.step = 2, .loss = std::numeric_limits<double>::quiet_NaN(), .mfu = 0.4}, 3.0);
  const std::vector<std::string> records = records_of(events.path());
  ASSERT_EQ(records.size(), 4);
  EXPECT_THAT(records[1], HasSubstr("loss/train"));
  EXPECT_THAT(records[1], HasSubstr("loss_terms/mtp"));
  EXPECT_THAT(records[1], ::testing::Not(HasSubstr("speed/mfu")));
  EXPECT_THAT(records[2], HasSubstr("loss/validation"));
  EXPECT_THAT(records[3], HasSubstr("speed/mfu"));
}

}  // namespace
}  // namespace fsdp::train::tensorboard_events_test
