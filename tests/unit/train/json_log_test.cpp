// The machine log: lines that any JSON reader takes, and a file that resumes, crashes and full
// disks leave whole.
#include "fsdp/train/log/json_log.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "support/file_size_limit.h"
#include "support/temp_dir.h"

namespace fsdp::train::json_log_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

StepRecord step_record(int64_t step) {
  return {.step = step,
          .total_steps = 300,
          .loss = 1.0 / 3.0 + static_cast<double>(step),
          .loss_z = -0.25,
          .learning_rate = 3e-4,
          .gradient_norm = 1.25,
          .milliseconds = 41.23456789,
          .overhead_milliseconds = 0.25,
          .tokens_per_second = 19876.54321,
          .teraflops = 1.5,
          .mfu = 0.41,
          .peak_bytes = 123456789012,
          .tokens = 8192 * step,
          .is_skipped = false,
          .terms = {{"cross_entropy", 1.5}, {"load \"balance\"", kNan}}};
}

std::string text_of(const std::string& path) { return read_text_file(path, 1 << 20); }

void put(const std::string& path, const std::string& text) { write_file_durably(path, text); }

// "step 3", "validation 2": one per line.
std::vector<std::string> kinds_in(const std::string& path) {
  std::vector<std::string> kinds;
  std::istringstream in(text_of(path));
  for (std::string line; std::getline(in, line);) {
    const auto json = nlohmann::json::parse(line);
    kinds.push_back(
        concat(json.at("kind").get<std::string>(), " ", json.at("step").get<int64_t>()));
  }
  return kinds;
}

TEST(LogLines, NameEveryFigureOfAStep) {
  // Measured figures have six digits, the others all.
  EXPECT_EQ(
      log_line(step_record(7), 1763220479.1239),
      R"({"kind":"step","step":7,"total_steps":300,"loss":7.333333333333333,"loss_z":-0.25,)"
      R"("lr":0.0003,"grad_norm":1.25,"ms":41.2346,"overhead_ms":0.25,"tokens_per_s":19876.5,)"
      R"("tflops":1.5,"mfu":0.41,"peak_bytes":123456789012,"tokens":57344,)"
      R"("terms":{"cross_entropy":1.5,"load \"balance\"":null},"time":1763220479.124})");
}

TEST(LogLines, LeaveOutWhatIsUnknownAndWriteNullForWhatIsNotFinite) {
  StepRecord record = step_record(1);
  record.loss = kNan;
  record.gradient_norm = std::numeric_limits<double>::infinity();
  record.teraflops = record.mfu = 0;
  record.is_skipped = true;
  record.terms.clear();
  const auto json = nlohmann::json::parse(log_line(record, 0));
  EXPECT_TRUE(json["loss"].is_null());
  EXPECT_TRUE(json["grad_norm"].is_null());
  EXPECT_FALSE(json.contains("tflops"));
  EXPECT_FALSE(json.contains("mfu"));
  EXPECT_FALSE(json.contains("terms"));
  EXPECT_EQ(json["skipped"], true);
}

TEST(LogLines, KeepSettingsEnvironmentAndForecastOfTheRun) {
  const RunFacts facts{
      .title = "tiny \xff",  // no UTF-8
      .settings = {{"model", "model", "tiny", false, ""}, {"data", "lr", "0.1", true, ""}},
      .environment = {{"host", "node\n1"}},
      .memory = {{"weights", 100, 0, false}, {"activations", kUnknownBytes, 5, false}},
      .resumed_step = 20};
  const auto json = nlohmann::json::parse(log_line(facts, 1));
  EXPECT_EQ(json["kind"], "run");
  EXPECT_EQ(json["step"], 20);
  EXPECT_EQ(json["settings"]["model"], "tiny");
  EXPECT_EQ(json["changed"], nlohmann::json::array({"lr"}));
  EXPECT_EQ(json["environment"]["host"], "node\n1");
  EXPECT_EQ(json["forecast_bytes"], nlohmann::json({{"weights", 100}}));
  EXPECT_FALSE(json["version"].get<std::string>().empty());
}

TEST(LogLines, AreReadBackAsTheRecordsTheyWere) {
  const std::vector<LogRecord> records = {
      step_record(7), StepRecord{.step = 8, .loss = kNan, .is_skipped = true},
      ValidationRecord{.step = 4, .loss = 2.5, .tokens = 9, .milliseconds = 3},
      CheckpointRecord{
          .step = 5, .path = "a/\"b\"", .bytes = 77, .blocked_milliseconds = 1, .milliseconds = 2},
      EndRecord{.step = 6, .num_steps = 2, .seconds = 1.5, .stopped_by = "SIGTERM"}};
  for (const LogRecord& record : records) {
    const std::string line = log_line(record, 0);
    EXPECT_EQ(log_line(parse_log_line(line).value(), 0), line);
  }
}

TEST(LogLines, AreNotMadeOfOtherText) {
  for (const char* const text :
       {"", "{", "[1]", "7", "{}", "{\"kind\":\"other\"}", "{\"kind\":7}", "step 1"})
    EXPECT_FALSE(parse_log_line(text)) << text;
  // Wrong types where numbers are expected do no harm.
  EXPECT_TRUE(
      parse_log_line(R"({"kind":"step","step":"x","loss":[],"lr":"x","tokens":1e300,"terms":7})"));
}

TEST(JsonLog, ShowsALineAtOnceAndKeepsTheLogOfAnotherRunAside) {
  const testing::TempDir dir(testing::TempDir::On::kMemory);
  const std::string path = dir / "new/folders/log.jsonl";
  JsonLog log(path, 7);  // there is nothing to resume
  log.write("first");
  EXPECT_EQ(text_of(path), "first\n");
  log.write("second");
  EXPECT_EQ(text_of(path), "first\nsecond\n");
  JsonLog(path, 0).write("new");
  EXPECT_EQ(text_of(path), "new\n");
  EXPECT_EQ(text_of(path + ".previous"), "first\nsecond\n");
  EXPECT_THROW(JsonLog(path + "/log", 0), Error);
  EXPECT_THROW(JsonLog(dir.path(), 0), Error);
}

TEST(JsonLog, GoesOnAfterTheResumedStep) {
  const testing::TempDir dir(testing::TempDir::On::kMemory);
  {
    JsonLog log(dir / "log", 0);
    log.write(log_line(RunFacts{}, 0));
    for (int64_t step = 1; step <= 5; ++step) {
      log.write(log_line(step_record(step), 0));
      // A checkpoint is complete some steps later.
      if (step == 4) log.write(log_line(CheckpointRecord{.step = 3}, 0));
    }
  }
  std::vector<int64_t> restored;
  JsonLog log(dir / "log", 3,
              [&](const LogRecord& record) { restored.push_back(step_of(record)); });
  log.write(log_line(step_record(4), 0));
  EXPECT_THAT(kinds_in(dir / "log"),
              ElementsAre("run 0", "step 1", "step 2", "step 3", "checkpoint 3", "step 4"));
  EXPECT_THAT(restored, ElementsAre(0, 1, 2, 3, 3));
  EXPECT_FALSE(path_exists(dir / "log.tmp"));
}

TEST(JsonLog, RepairsAHalfWrittenLine) {
  const testing::TempDir dir(testing::TempDir::On::kMemory);
  const std::string whole = log_line(step_record(1), 0) + "\n";
  const std::string next = log_line(step_record(2), 0);
  for (size_t length = 0; length <= next.size(); ++length) {
    put(dir / "log", whole + next.substr(0, length));
    JsonLog(dir / "log", 2).write(log_line(EndRecord{.step = 2}, 0));
    // All that lacks is the line break: nothing is lost.
    if (length == next.size())
      EXPECT_THAT(kinds_in(dir / "log"), ElementsAre("step 1", "step 2", "end 2"));
    else
      EXPECT_THAT(kinds_in(dir / "log"), ElementsAre("step 1", "end 2")) << length;
  }
}

TEST(JsonLog, LosesLinesButNotTheTrainingWhenTheDiskIsFull) {
  const testing::TempDir dir(testing::TempDir::On::kMemory);
  const std::string line = log_line(step_record(1), 0);
  JsonLog log(dir / "log", 0);
  ::testing::internal::CaptureStderr();
  {
    const testing::FileSizeLimit limit(line.size() * 5 / 2);  // two and a half lines
    for (int i = 0; i < 50; ++i) log.write(line);
  }
  log.write(line);  // there is room again
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(kinds_in(dir / "log"), ElementsAre("step 1", "step 1", "step 1"));
  EXPECT_THAT(said, HasSubstr("training goes on without it"));
  EXPECT_EQ(said.find("goes on"), said.rfind("goes on")) << "said once";
}

// A pipe without a reader is refused at once, where to open it would wait.
TEST(JsonLog, WritesToAPipeThatSomebodyReads) {
  const testing::TempDir dir(testing::TempDir::On::kMemory);
  const std::string path = dir / "pipe";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_THAT([&] { JsonLog(path, 0); },
              ::testing::ThrowsMessage<Error>(
                  HasSubstr("pipe: cannot be opened for writing: nobody reads from it; choose")));
  const FileHandle reader(::open(path.c_str(), O_RDONLY | O_NONBLOCK));
  JsonLog(path, 0).write("line");
  char text[8] = {};
  EXPECT_EQ(::read(reader.descriptor(), text, sizeof text), 5);
  EXPECT_STREQ(text, "line\n");
}

}  // namespace
}  // namespace fsdp::train::json_log_test
