// `fsdp data` as users run it: packing, looking, and every wrong use answered with a sentence.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <string>

#include "processes/run_command.h"
#include "support/temp_dir.h"
#include "support/token_files.h"

namespace fsdp::testing::cli_data_test {
namespace {

using test::CommandResult;
using test::run_fsdp;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Json = nlohmann::json;

// Works in a directory of its own, with books in it.
class DataCommand : public ::testing::Test {
 protected:
  DataCommand() {
    make_directories(directory_ / "books/poems");
    write_text_file(directory_ / "books/b.txt", "second\n");
    write_text_file(directory_ / "books/a.txt", "\"first\"\t\x01");
    write_text_file(directory_ / "books/poems/c.txt", "third");
    write_text_file(directory_ / "books/.hidden", "no");
    write_text_file(directory_ / "books/picture", std::string("\0\1", 2));
    write_text_file(directory_ / "more.txt", "more");
    write_text_file(directory_ / "picture.png", std::string("\0\1", 2));
    EXPECT_EQ(::chdir(directory_.path().c_str()), 0);
  }
  ~DataCommand() override { EXPECT_EQ(::chdir("/"), 0); }

  // Whatever the test's own environment says.
  static CommandResult data(const std::string& arguments) {
    return run_fsdp("data " + arguments, "FSDP_LOG=info");
  }

  static void expect_error(const std::string& arguments, int exit_code, const std::string& says) {
    SCOPED_TRACE(arguments);
    test::expect_only_error(data(arguments), exit_code, says);
  }

  TempDir directory_;
};

TEST_F(DataCommand, PacksTextAndShowsIt) {
  const CommandResult packed = data("pack books --output books.bin");
  EXPECT_EQ(packed.exit_code, 0) << packed.err;
  // 9 + 7 + 5 bytes and three ends.
  EXPECT_THAT(packed.out,
              AllOf(StartsWith("wrote books.bin: 24 tokens, 3 documents from 3 files, 176 B, "),
                    HasSubstr("fingerprint 0x")));
  EXPECT_THAT(packed.err, AllOf(HasSubstr("pack 100 % of 21 B\n"),
                                HasSubstr("left out: 1 hidden, 1 binary\n")));
  const CommandResult info = data("info books.bin --verify");
  EXPECT_EQ(info.exit_code, 0) << info.err;
  EXPECT_THAT(info.out,
              AllOf(HasSubstr("data         books.bin\n"), HasSubstr("tokens       24 of 2 bytes"),
                    HasSubstr("documents    3\n"), HasSubstr("'bytes', vocabulary 257"),
                    HasSubstr("verified     checksums and all tokens are right\n"),
                    HasSubstr("begins       \"\"first\"\\x09\\x01second\\x0athird\"\n")));
}

TEST_F(DataCommand, TextAndItsPackedFileAreTheSameData) {
  data("pack books --output books.bin");
  const Json packed = Json::parse(data("info books.bin --json").out);
  const Json text = Json::parse(data("info books --json").out);
  EXPECT_EQ(packed["fingerprint"], text["fingerprint"]);
  EXPECT_EQ(packed["tokens"], 24);
  EXPECT_EQ(packed["files"], 1);
  EXPECT_EQ(text["files"], 3);
  EXPECT_EQ(text["left_out"], (Json{{"hidden", 1},
                                    {"binary", 1},
                                    {"not_utf8", 0},
                                    {"rows", 0},
                                    {"beside_rows", 0},
                                    {"empty", 0},
                                    {"other", 0}}));
  for (const char* key : {"documents", "vocabulary", "tokenizer", "end_of_document", "token_bytes",
                          "data_bytes", "begins"})
    EXPECT_EQ(packed[key], text[key]) << key;
  EXPECT_EQ(packed["paths"], Json::array({"books.bin"}));
  EXPECT_EQ(packed["verified"], false);
  data("pack books.bin books/a.txt --output more.bin");
  EXPECT_EQ(Json::parse(data("info more.bin --json").out)["documents"], 4);
}

TEST_F(DataCommand, OtherTokenizersShowNoText) {
  write_counting_tokens("counting.bin", 5);
  const CommandResult info = data("info counting.bin");
  EXPECT_THAT(info.out, AllOf(HasSubstr("'counting'"), HasSubstr("end of document none")));
  EXPECT_THAT(info.out, ::testing::Not(HasSubstr("begins")));
  const Json json = Json::parse(data("info counting.bin --json").out);
  EXPECT_EQ(json["end_of_document"], nullptr);
}

TEST_F(DataCommand, AnswersEveryWrongUseWithOneSentence) {
  data("pack books --output books.bin");
  write_counting_tokens("counting.bin", 5);
  write_text_file("text.bin", "text");
  expect_error("", 2, "no subcommand was given; use fsdp data pack or fsdp data info");
  expect_error("pck books", 2, "subcommand 'pck' is not known to fsdp data; did you mean 'pack'?");
  expect_error("pack", 2, "INPUT is missing; e.g. fsdp data pack");
  expect_error("pack books", 2, "--output is missing");
  expect_error("pack books --ouput x.bin", 2, "--ouput");
  expect_error("info --jsn books.bin", 2, "option '--jsn' is not known to fsdp data info; did you");
  expect_error("info", 2, "PATH is missing");
  expect_error("pack none --output x.bin", 1, "none: cannot be read: No such file or directory");
  expect_error("pack books --output books.bin", 1, "is there already; name another file, or");
  expect_error("pack books --output books", 1, "books: is a directory; name a file");
  expect_error("pack books --output no/x.bin", 1, "cannot create the file");
  expect_error("pack books counting.bin --output x.bin", 1, "has other tokens");
  expect_error("info text.bin", 1, "text.bin: does not begin as a packed token file does");
  expect_error("info none.bin", 1, "none.bin: cannot open the file");
  expect_error("pack books/picture --output x.bin", 1, "is no text (a zero byte at 0); name text");
  write_text_file("rows.jsonl", "{\"text\": \"a\"}\n{\"body\": \"b\"}\n");
  expect_error("info rows.jsonl", 1,
               "rows.jsonl: line 2 lacks a text named 'text', which the rows");
  EXPECT_FALSE(path_exists("x.bin"));
  EXPECT_EQ(data("pack books --output books.bin --overwrite").exit_code, 0);
  EXPECT_EQ(data("pack books/picture --output x.bin --any-bytes").exit_code, 0);
}

TEST_F(DataCommand, FindsDamageWhenItVerifies) {
  data("pack books --output books.bin");
  std::string bytes = read_text_file("books.bin", 1 << 20);
  bytes[kTokenHeaderBytes] = 'X';
  write_text_file("books.bin", bytes);
  EXPECT_EQ(data("info books.bin").exit_code, 0);
  const CommandResult result = data("info books.bin --verify");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("books.bin: its tokens are damaged (the checksum differs)"));
  bytes[kTokenHeaderBytes + 1] = '\x7f';
  write_text_file("books.bin", bytes);
  EXPECT_THAT(data("info books.bin --verify").err, HasSubstr("outside the vocabulary of 257"));
}

}  // namespace
}  // namespace fsdp::testing::cli_data_test
