#include "fsdp/data/rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/data/row_files.h"
#include "support/temp_dir.h"
#include "support/token_files.h"

namespace fsdp::testing::rows_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;
using Json = nlohmann::json;

Json chat_of(const std::string& row) {
  const Document document = RowReader("a.jsonl", "line", "").read(row, 1);
  EXPECT_TRUE(document.is_chat) << row;
  return Json::parse(document.text);
}

const std::string kTurns =
    R"([{"content":"Hi","role":"user"},{"content":"Ho","role":"assistant"}])";

// The forms in which the common data sets have one chat of a question and its answer.
TEST(Rows, OfEveryFormOfChatsAreTheSameChat) {
  for (
      const char* row :
      {R"({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]})",
       R"({"messages": [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Ho"}]})",
       R"({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]})",
       R"({"conversations": [{"role": "user", "content": "Hi"}, {"role": "model", "content": "Ho"}]})",
       R"({"conversations": [{"from": "human", "value": "Hi", "role": null, "content": null},
                             {"from": null, "value": null, "role": "model", "content": "Ho"}]})",
       R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, "i"]},
                         {"role": "assistant", "content": [{"type": "text", "text": "Ho"}]}]})",
       R"({"prompt": [{"role": "user", "content": "Hi"}],
            "completion": [{"role": "assistant", "content": "Ho"}]})",
       R"({"instruction": "Hi", "output": "Ho"})",
       R"([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}])",
       R"({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}],
           "system": ""})",
       R"({"instruction": "Hi", "output": "Ho", "system": null, "history": null})",
       R"({"instruction": "Hi", "output": "Ho", "system": "", "history": []})",
       R"({"instruction": "Hi", "input": "", "output": "Ho", "text": "all of it"})"})
    EXPECT_EQ(chat_of(row), Json({{"messages", Json::parse(kTurns)}})) << row;
}

TEST(Rows, KeepWhatTemplatesRead) {
  EXPECT_EQ(
      chat_of(R"({"instruction": "Add.", "input": "1 2", "output": "3", "system": "Count."})"),
      Json::parse(R"({"messages": [{"role": "system", "content": "Count."},
                                         {"role": "user", "content": "Add.\n\n1 2"},
                                         {"role": "assistant", "content": "3"}]})"));
  const Json earlier = Json::parse(
      R"({"messages": [{"role": "system", "content": "Count."}, {"role": "user", "content": "1"},
                       {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"},
                       {"role": "assistant", "content": "4"}]})");
  for (const char* row :
       {R"({"instruction": "3", "output": "4", "system": "Count.", "history": [["1", "2"]]})",
        R"({"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"},
                              {"from": "human", "value": "3"}, {"from": "gpt", "value": "4"}],
            "system": "Count."})",
        R"({"conversations": [{"from": "system", "value": "Count."},
                              {"from": "human", "value": "1"}, {"from": "gpt", "value": "2"},
                              {"from": "human", "value": "3"}, {"from": "gpt", "value": "4"}],
            "system": "It has its own."})"})
    EXPECT_EQ(chat_of(row), earlier) << row;
  const char* const tools =
      R"({"messages": [{"role": "assistant", "content": null, "tool_calls": [{"name": "f"}]},
                       {"role": "tool", "content": "1", "name": "f"}], "tools": [{"name": "f"}]})";
  EXPECT_EQ(chat_of(tools), Json::parse(tools));
}

TEST(Rows, OfATextOrAPromptAreNoChats) {
  EXPECT_EQ(row_kind_of_text(R"({"text": "a", "label": 1})", ""), RowKind::kText);
  EXPECT_EQ(row_kind_of_text(R"({"prompt": "a", "completion": "b", "text": "c"})", ""),
            RowKind::kCompletion);
  EXPECT_EQ(row_kind_of_text(R"({"messages": [], "body": "a"})", "body"), RowKind::kText);
  EXPECT_EQ(row_kind_of_text(R"({"messages": [], "body": "a"})", ""), RowKind::kNone);
}

TEST(Rows, CountUnknownRolesAndNameTheFirst) {
  RowReader reader("a.jsonl", "line", "");
  static_cast<void>(reader.read(R"({"messages": [{"role": "user", "content": "a"}]})", 1));
  EXPECT_EQ(reader.unknown_roles().count, 0);
  for (const int64_t line : {2, 3})
    static_cast<void>(reader.read(R"({"messages": [{"role": "narrator", "content": "a"},
                                                   {"role": "critic", "content": "a"}]})",
                                  line));
  EXPECT_EQ(reader.unknown_roles().count, 2);
  EXPECT_EQ(reader.unknown_roles().first, "a.jsonl: line 2");
  EXPECT_EQ(reader.unknown_roles().detail, "narrator");
}

TEST(Rows, ThatNothingIsTrainedOnAreNamed) {
  const std::vector<std::pair<std::string, std::string>> table = {
      {R"({"chosen": "a", "rejected": "b"})", "line 7 is a row of preferences ('chosen')"},
      {R"({"input_ids": [1]})", "line 7 has tokens ('input_ids')"},
      {R"({"sentence": "a", "label": 1})", "line 7 is a row to classify ('label')"},
      {R"({"body": "a"})", "line 7 lacks a list 'messages' of objects with a 'role', a list"},
      {R"([1])", "line 7 is no JSON object"},
      {R"({"instruction": "a", "output": "b", "history": ["c"]})",
       "line 7 has a 'history' that is no list of questions with their answers"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})",
       "line 7 has a part 'image_url' in a message, which is no text"}};
  for (const auto& [row, says] : table)
    EXPECT_THAT(([&] { static_cast<void>(RowReader("a.jsonl", "line", "").read(row, 7)); }),
                ThrowsMessage<Error>(HasSubstr("a.jsonl: " + says)));
}

// --- files ---------------------------------------------------------------------------------------

class RowFiles : public ::testing::Test {
 protected:
  std::vector<std::string> rows(const std::string& text) {
    std::vector<std::string> found;
    const std::string path = directory_ / "a.json";
    write_text_file(path, text);
    read_rows(path, FileContent::kJsonArray, "",
              [&](std::string_view row, int64_t number, int64_t) {
                found.emplace_back(row);
                EXPECT_EQ(number, static_cast<int64_t>(found.size()));
                return true;
              });
    return found;
  }

  TempDir directory_{TempDir::On::kMemory};
};

TEST_F(RowFiles, HaveTheObjectsOfAnArray) {
  EXPECT_THAT(rows("[]"), IsEmpty());
  EXPECT_THAT(rows(R"( [ {"a": "]}\"{["} , {"b": [{"c": 1}, []]}
                       ,{} ] )"),
              ElementsAre(R"({"a": "]}\"{["})", R"({"b": [{"c": 1}, []]})", "{}"));
  // Rows across the pieces in which a file is read.
  const std::string long_row = R"({"a": ")" + std::string(100'000, 'x') + R"("})";
  EXPECT_THAT(rows("[" + long_row + "," + long_row + "]"), ElementsAre(long_row, long_row));
}

TEST_F(RowFiles, HaveListsAndTextsOfAnArray) {
  EXPECT_THAT(rows(R"(["a", "]\",{" ,"" ])"), ElementsAre(R"("a")", R"("]\",{")", R"("")"));
  EXPECT_THAT(rows("\xef\xbb\xbf[[{\"role\": \"user\"}],\n[]]"),
              ElementsAre("[{\"role\": \"user\"}]", "[]"));
  EXPECT_EQ(row_kind_of_text(R"("a")", ""), RowKind::kText);
  EXPECT_EQ(row_kind_of_text(R"([{"role": "user"}])", ""), RowKind::kChat);
  EXPECT_EQ(row_kind_of_text(R"(["a"])", ""), RowKind::kNone);
  EXPECT_EQ(row_kind_of_text(R"("a")", "body"), RowKind::kNone);
}

TEST_F(RowFiles, ThatAreNoWholeArraysAreRefused) {
  EXPECT_THAT([&] { rows(R"([{"a": 1}, {"b": )"); },
              ThrowsMessage<Error>(HasSubstr("a.json: ends within row 2 of its array")));
  EXPECT_THAT([&] { rows(R"([{"a": 1}, 5])"); },
              ThrowsMessage<Error>(HasSubstr("has a value after row 1 of its array that is no")));
}

}  // namespace
}  // namespace fsdp::testing::rows_test
