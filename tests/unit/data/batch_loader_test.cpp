// The thread that prepares microbatches: what it delivers, where it resumes, how it fails and ends.
#include "fsdp/data/batch_loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>

#include "fsdp/base/error.h"
#include "support/temp_dir.h"
#include "support/token_files.h"

namespace fsdp::testing::batch_loader_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Json = nlohmann::json;

class Loader : public ::testing::Test {
 protected:
  TokenWindows counting_windows(int64_t num_tokens = 531, int64_t sequence = 10) const {
    write_counting_tokens(directory_ / "tokens.bin", num_tokens);
    return all_windows(open_corpus({directory_ / "tokens.bin"}), sequence);
  }

  TempDir directory_{TempDir::On::kMemory};
};

TEST_F(Loader, DeliversWhatRandomAccessReads) {
  const TrainingBatches batches(counting_windows(),
                                {.batch = 12, .microbatches = 3, .ranks = 2, .rank = 1, .seed = 8});
  BatchLoader loader(batches, first_position(batches.windows(), 8));
  for (int64_t step = 0; step < 20; ++step)
    for (int64_t microbatch = 0; microbatch < 3; ++microbatch)
      EXPECT_EQ(loader.next().tokens, batches.read(step * 12, microbatch).tokens);
  EXPECT_EQ(loader.position().windows_used, 240);
  EXPECT_THAT(loader.epochs(), ::testing::ElementsAre(240.0 / 53));
}

// The tokens of `num_steps` steps, in order.
std::vector<int64_t> take(BatchLoader& loader, int64_t num_microbatches) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < num_microbatches; ++i) {
    const TokenBatch batch = loader.next();
    tokens.insert(tokens.end(), batch.tokens.begin(), batch.tokens.end());
  }
  return tokens;
}

TEST_F(Loader, ResumingAtAnyStepEqualsNeverStopping) {
  const TrainingBatches batches(counting_windows(), {.batch = 4, .microbatches = 2, .seed = 1});
  const DataPosition start = first_position(batches.windows(), 1);
  for (const int64_t stop : {0, 1, 2, 13, 14, 29}) {
    BatchLoader whole(batches, start);
    take(whole, 2 * stop);
    const std::string saved = to_json(whole.position());
    BatchLoader resumed(batches, parse_data_position(saved, "checkpoint"));
    EXPECT_EQ(take(resumed, 10), take(whole, 10)) << "stopped after step " << stop;
    EXPECT_EQ(resumed.position(), whole.position());
    take(whole, 1);  // a step that was begun is taken again
    EXPECT_EQ(resumed.position(), whole.position());
  }
}

TEST_F(Loader, AnotherBatchOrNumberOfRanksGoesOnWithTheNextWindow) {
  const TokenWindows windows = counting_windows();
  BatchLoader before({windows, {.batch = 6, .seed = 2}}, first_position(windows, 2));
  take(before, 3);
  const DataPosition position = before.position();
  ASSERT_EQ(position.windows_used, 18);
  const TrainingBatches one_by_one(windows, {.batch = 1, .seed = 2});
  for (int64_t rank = 0; rank < 2; ++rank) {
    BatchLoader after({windows, {.batch = 4, .ranks = 2, .rank = rank, .seed = 2}}, position);
    EXPECT_EQ(after.next().tokens.front(), one_by_one.read(18 + 2 * rank, 0).tokens.front());
  }
}

TEST_F(Loader, PositionsOfOtherOrdersAreRefused) {
  const TokenWindows windows = counting_windows();
  const DataPosition good = first_position(windows, 7);
  const auto refused = [&](int64_t DataPosition::*field, int64_t value, const std::string& says) {
    DataPosition other = good;
    other.*field = value;
    EXPECT_THAT(
        [&] {
          BatchLoader({windows, {.seed = 7}}, other);
        },
        ThrowsMessage<UsageError>(HasSubstr(says)));
  };
  EXPECT_NO_THROW(BatchLoader({windows, {.seed = 7}}, good));
  refused(
      &DataPosition::sequence, 11,
      "sequence was 11 when the run was saved and is 10 now, so its place in the data cannot be "
      "found; use the same, or begin the data anew (--restart-data)");
  refused(&DataPosition::num_windows, 54, "was 54 when the run was saved");
  EXPECT_THAT(
      [&] {
        BatchLoader({windows, {.seed = 8}}, good);
      },
      ThrowsMessage<UsageError>(HasSubstr("seed was 7 when the run was saved and is 8")));
  DataPosition other = good;
  other.fingerprint ^= 1;
  EXPECT_THAT(
      [&] {
        BatchLoader({windows, {.seed = 7}}, other);
      },
      ThrowsMessage<UsageError>(AllOf(HasSubstr("fingerprint"), HasSubstr("same files"))));
}

// A token that is out of the vocabulary is found by the thread, and told by next().
TEST_F(Loader, FailuresOfTheThreadReachTheCallerEveryTime) {
  const std::string path = directory_ / "broken.bin";
  write_counting_tokens(path, 101);
  std::string bytes = read_text_file(path, 1 << 20);
  bytes[kTokenHeaderBytes + 4 * 50 + 3] = '\x7f';
  write_text_file(path, bytes);
  const TokenWindows windows = all_windows(open_corpus({path}, {.looked_over_bytes = 0}), 10);
  BatchLoader loader({windows, {.batch = 1}}, first_position(windows, 0));
  const auto take_epoch = [&] { take(loader, 10); };
  for (int i = 0; i < 2; ++i)
    EXPECT_THAT(take_epoch, ThrowsMessage<Error>(AllOf(HasSubstr(path), HasSubstr("number 50"))));
}

TEST_F(Loader, EndsAtOnceWhateverItWasDoing) {
  const TokenWindows windows = counting_windows();
  for (int round = 0; round < 200; ++round) {
    BatchLoader loader({windows, {.batch = 4}}, first_position(windows, 0));
    take(loader, round % 5);
  }
}

// --- its text ------------------------------------------------------------------------------------

constexpr DataPosition kPosition{.windows_used = 123,
                                 .seed = UINT64_MAX,
                                 .sequence = 256,
                                 .num_windows = 999,
                                 .fingerprint = 0xFEDCBA9876543210};

TEST(DataPosition, ItsTextIsReadAsItWasWritten) {
  EXPECT_EQ(parse_data_position(to_json(kPosition), "x"), kPosition);
  EXPECT_EQ(to_json(kPosition),
            "{\"format\":\"fsdp-data-position\",\"version\":1,\"windows_used\":123,"
            "\"seed\":\"0xffffffffffffffff\",\"sequence\":256,\"num_windows\":999,"
            "\"fingerprint\":\"0xfedcba9876543210\"}");
}

TEST(DataPosition, EveryFieldIsNeededAndOfItsKind) {
  const Json good = Json::parse(to_json(kPosition));
  const auto expect_refusal = [](const Json& json, const std::string& says) {
    EXPECT_THAT([&] { parse_data_position(json.dump(), "file"); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("file: "), HasSubstr(says))));
  };
  for (const auto& item : good.items()) {
    Json without = good;
    without.erase(item.key());
    expect_refusal(without, item.key());
    for (const Json& wrong : {Json(-1), Json("x"), Json(1.5), Json::array(), Json(nullptr)}) {
      Json json = good;
      json[item.key()] = wrong;
      expect_refusal(json, item.key());
    }
  }
  for (const char* text :
       {"0x", "0xFEDCBA9876543210", "fedcba9876543210ab", "0xfedcba98765432100"}) {
    Json json = good;
    json["fingerprint"] = text;
    expect_refusal(json, "16 hexadecimal digits");
  }
  Json more = good;
  more["extra"] = 1;
  expect_refusal(more, "extra is not a known field");
  Json newer = good;
  newer["version"] = 3;
  expect_refusal(newer, "version is 3; this program reads 1 and 2; use a newer fsdp");
  EXPECT_THROW(parse_data_position("", "file"), UsageError);
  EXPECT_THROW(parse_data_position("[]", "file"), UsageError);
}

}  // namespace
}  // namespace fsdp::testing::batch_loader_test
