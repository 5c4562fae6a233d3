// The data that --data names: which files, in which order, and as one sequence of tokens.
#include "fsdp/data/corpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <random>

#include "fsdp/base/check.h"
#include "fsdp/data/pack.h"
#include "fsdp/data/tokenizer.h"
#include "support/temp_dir.h"
#include "support/token_files.h"

namespace fsdp::testing::corpus_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class CorpusFiles : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& text) const {
    const std::string path = directory_ / name;
    make_directories(directory_of(path));
    write_text_file(path, text);
    return path;
  }

  std::vector<std::string> found(const std::vector<std::string>& paths) const {
    std::vector<std::string> names;
    for (const TextFile& file : find_text_files(paths).files)
      names.push_back(file.path.substr(directory_.path().size() + 1));
    return names;
  }

  // "one|two|": documents with a mark at each end.
  static std::string text_of(const Corpus& corpus) {
    std::string text;
    for (const int64_t token : tokens_of(corpus))
      text.push_back(token == kByteEndOfDocument ? '|' : static_cast<char>(token));
    return text;
  }

  static std::string refusal(const std::string& path) {
    try {
      open_corpus({path});
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }

  PackSummary pack(const std::vector<std::string>& paths, const std::string& name,
                   const PackOptions& options = {}) const {
    return pack_tokens(paths, directory_ / name, options);
  }

  TempDir directory_{TempDir::On::kMemory};
};

TEST_F(CorpusFiles, DirectoriesAreSortedByPathAndLeaveOutWhatIsNoText) {
  write("d/b.txt", "b");
  write("d/a/z.txt", "z");
  write("d/a.txt", "a");
  write("d/B.txt", "B");
  write("d/.hidden", "h");
  write("d/.git/config", "h");
  write("d/image.png", std::string("PNG\0", 4));
  write("d/late.bin", std::string(65535, 'x') + std::string(1, '\0'));
  write("d/later.txt", std::string(65536, 'x') + std::string(1, '\0'));
  write("d/latin1.txt", "caf\xe9");
  write("d/log.jsonl", "{\"step\": 1}\n");
  write("d/empty", "");
  ASSERT_EQ(::symlink("nowhere", (directory_ / "d/broken").c_str()), 0);
  ASSERT_EQ(::mkfifo((directory_ / "d/pipe").c_str(), 0600), 0);
  EXPECT_THAT(found({directory_ / "d"}),
              ElementsAre("d/B.txt", "d/a.txt", "d/a/z.txt", "d/b.txt", "d/later.txt"));
  const std::vector<std::string> paths = {directory_ / "d"};
  const TextFiles files = find_text_files(paths);
  const std::string left_out =
      "2 hidden, 2 binary, 1 not UTF-8, 1 with other rows, 1 empty, 2 other than files";
  EXPECT_EQ(to_text(files.left_out), left_out);
  EXPECT_THAT(open_corpus(paths)->summary(), EndsWith("; left out: " + left_out));
  EXPECT_EQ(files.bytes, 4 + 65537);
  EXPECT_THAT(found({directory_ / "d/"}), ::testing::SizeIs(5));
}

TEST_F(CorpusFiles, LinksAreFollowedAndLoopsEnd) {
  write("d/sub/a.txt", "a");
  write("elsewhere/b.txt", "b");
  ASSERT_EQ(::symlink("..", (directory_ / "d/sub/up").c_str()), 0);
  ASSERT_EQ(::symlink(".", (directory_ / "d/self").c_str()), 0);
  ASSERT_EQ(::symlink("loop", (directory_ / "d/loop").c_str()), 0);  // of one link alone
  ASSERT_EQ(::symlink("../elsewhere", (directory_ / "d/x").c_str()), 0);
  EXPECT_THAT(found({directory_ / "d"}), ElementsAre("d/sub/a.txt", "d/x/b.txt"));
}

TEST_F(CorpusFiles, PathsWithoutTextAreRefused) {
  EXPECT_THAT(refusal(directory_ / "none"), HasSubstr("none: cannot be read: No such file or "
                                                      "directory; check the path"));
  make_directories(directory_ / "empty");
  EXPECT_THAT(refusal(directory_ / "empty"), HasSubstr("no text files in this directory; name"));
  write("bin/.hidden", "x");
  EXPECT_THAT(refusal(directory_ / "bin"), HasSubstr("(left out: 1 hidden); name"));
  EXPECT_THAT(refusal(write("nothing.txt", "")), HasSubstr("is empty; name a file with text"));
  EXPECT_THAT(refusal("/dev/null"), HasSubstr("device or a pipe"));
  EXPECT_THAT(refusal(write("wrong.bin", "text")), HasSubstr("does not begin as a packed"));
  EXPECT_THAT([] { open_corpus({}); }, ThrowsMessage<UsageError>(HasSubstr("no data is named")));
}

TEST_F(CorpusFiles, NamedFilesThatAreNoTextAreRefusedByWhatTheyAre) {
  using namespace std::string_view_literals;
  for (const auto& [bytes, says] : std::vector<std::pair<std::string_view, const char*>>{
           {"ARROW1\0\0"sv,
            "data: is an Arrow file; write its text to files first (docs/data.md shows how), or "
            "pack its bytes as they are with fsdp data pack --any-bytes"},
           {"\x1f\x8b\x08\0"sv, "is compressed with gzip; unpack"},
           {"\x28\xb5\x2f\xfd\x24"sv, "is compressed with zstd;"},
           {"\xfd\x37zXZ\0"sv, "is compressed with xz;"},
           {"BZh91AY&SY\x94"sv, "is compressed with bzip2;"},
           {"PK\x03\x04\0\0"sv, "is a zip archive (so are npz and"},
           {"\x93NUMPY\1\0"sv, "is a NumPy array; token ids"},
           {"%PDF-1.7\n"sv, "is a PDF; convert it to text first"},
           {"\x7f\x45LF\2\1\1\0"sv, "is a program;"},
           {"SQLite format 3\0"sv, "is an SQLite database;"},
           {"\x80\x04\x95"sv, "is a Python pickle;"},
           {"\x40\0\0\0\0\0\0\0{\"a\":"sv, "is a safetensors"},
           {"\xff\xfeh\0i\0"sv, "is UTF-16 text; convert it to"},
           {"ab\0"sv, "is no text (a zero byte at 2);"},
           {"caf\xe9"sv, "is not UTF-8 text (byte 0xe9 at 3); convert it first, e.g. iconv"}})
    EXPECT_THAT(refusal(write("data", std::string(bytes))), HasSubstr(says));
}

TEST_F(CorpusFiles, RowsOfJsonLinesAreDocuments) {
  const std::string row = "{\"text\": \"a\\n\"}\n";
  const std::string long_text(70'000, 'x');
  const auto text = [&](const std::string& name, const std::string& lines) {
    return text_of(*open_corpus({write(name, lines)}));
  };
  EXPECT_EQ(text("data", row + "\r\n" + row), "a\n|a\n|");
  EXPECT_EQ(text("one.jsonl", row), "a\n|");
  EXPECT_EQ(text("open.jsonl", "{\"text\": \"no end of line\"}"), "no end of line|");
  EXPECT_EQ(text("long.jsonl", "{\"text\": \"" + long_text + "\"}\n" + row), long_text + "|a\n|");
  const std::string huge(5 << 20, 'y');  // longer than what is read at a time
  EXPECT_EQ(text("huge.jsonl", row + "{\"text\": \"" + huge + "\"}\n" + row),
            "a\n|" + huge + "|a\n|");
}

TEST_F(CorpusFiles, RowsAreOfTheKindOfTheFirst) {
  const std::string text = "{\"text\": \"a\", \"body\": \"b\"}\n";
  const std::string pair = "{\"prompt\": \"q\", \"completion\": \"a\", \"text\": \"t\"}\n";
  const std::string chat = "{\"messages\": [{\"role\": \"user\", \"content\": \"c\"}]}\n";
  EXPECT_EQ(text_of(*open_corpus({write("body.jsonl", text)}, {.field = "body"})), "b|");
  const auto masked = open_corpus({write("pairs.jsonl", pair)});
  std::vector<int64_t> tokens(3);
  std::vector<uint8_t> learnt(3);
  masked->read(0, tokens, learnt);
  EXPECT_THAT(tokens, ElementsAre('q', 'a', kByteEndOfDocument));
  EXPECT_THAT(learnt, ElementsAre(0, 1, 1));
  EXPECT_EQ(masked->num_learnt(), 2);
  pack({directory_ / "pairs.jsonl"}, "pairs.bin");
  EXPECT_EQ(open_corpus({directory_ / "pairs.bin"})->fingerprint(), masked->fingerprint());
  EXPECT_EQ(open_corpus({directory_ / "pairs.jsonl"}, {.field = "text"})->num_tokens(), 2);
  EXPECT_THAT(
      refusal(write("mixed.jsonl", pair + "\n" + text)),
      HasSubstr("mixed.jsonl: line 3 lacks texts named 'prompt' and 'completion', which the "
                "rows before it have; keep rows of different kinds in files of their own"));
  EXPECT_THAT(refusal(write("none.jsonl", "{\"a\": 1}\n")),
              HasSubstr("none.jsonl: line 1 lacks a list 'messages' of objects with a 'role'"));
  EXPECT_THAT(refusal(write("array.jsonl", text + "[1]\n")), HasSubstr("line 2 is no JSON object"));
  EXPECT_THAT(refusal(write("chat.jsonl", chat)), HasSubstr("chat.jsonl: line 1: a chat needs a"));
}

TEST_F(CorpusFiles, JsonIsRowsOrRefused) {
  const std::string mark = "\xef\xbb\xbf";
  const auto text = [&](const std::string& name, const std::string& json) {
    return text_of(*open_corpus({write(name, json)}));
  };
  EXPECT_EQ(text("a.json", mark + "[{\"text\": \"a\"}]"), "a|");
  EXPECT_EQ(text("a.jsonl", mark + "{\"text\": \"a\"}\n"), "a|");
  EXPECT_EQ(text("lines", mark + "{\"text\": \"a\"}\n{\"text\": \"b\"}\n"), "a|b|");
  EXPECT_EQ(text("texts.json", "[\n  \"a\",\n  \"b\"\n]\n"), "a|b|");
  EXPECT_EQ(text("array.txt", "[\"a\"] = 1"), "[\"a\"] = 1|");
  const std::string chat = "{\"role\": \"user\", \"content\": \"a\"}";
  EXPECT_THAT(refusal(write("chats.json", "[[" + chat + "]]")),
              HasSubstr("chats.json: row 1: a chat needs a chat template"));
  for (const char* json :
       {"{\"data\": [{\"text\": \"a\"}]}", "{\n  \"text\": \"a\"\n}\n", "[1]", "[]", "a"}) {
    EXPECT_THAT(refusal(write("other/a.json", json)),
                HasSubstr("a.json: has no rows that are known by their form; write a list of"));
    EXPECT_THAT(refusal(directory_ / "other"), HasSubstr("(left out: 1 with other rows)"));
  }
}

TEST_F(CorpusFiles, TextBesideRowsIsLeftOutUnlessItIsNamed) {
  write("d/train/a.jsonl", "{\"text\": \"a\"}\n");
  write("d/README.md", "# Data");
  write("d/notes.txt", "1");
  const std::string told =
      concat("2 of text beside rows (", directory_ / "d/README.md", "; name it to learn it)");
  const auto rows = open_corpus({directory_ / "d"});
  EXPECT_EQ(text_of(*rows), "a|");
  EXPECT_THAT(rows->summary(), EndsWith("; left out: " + told));
  EXPECT_EQ(text_of(*open_corpus({directory_ / "d", directory_ / "d/README.md"})), "a|# Data|");
  const std::vector<std::string> paths = {directory_ / "d"};
  EXPECT_EQ(find_text_files(paths).bytes, 14);
}

TEST_F(CorpusFiles, TextThatLooksLikeSomethingElseIsTaken) {
  const std::string whole = "\xc3\xa4";
  for (const std::string& text :
       {std::string("{\"a\": 1}\n"), std::string("{\n  \"a\": 1,\n  \"b\": 2\n}\n"),
        std::string("{ braces } are text\n{\"a\": 1}\n"), std::string("{\"a\": 1}\nand text\n"),
        std::string("[1]\n[2]\n"), std::string("PAR1 and BZh are magic\n"), std::string("\x1b[1m"),
        "\xef\xbb\xbf" + whole,                      // a mark of UTF-8
        std::string(65'535, 'x') + whole + "\xff"})  // a character cut where looking ends
    EXPECT_EQ(refusal(write("text", text)), "accepted") << text.substr(0, 60);
  EXPECT_THAT(refusal(write("text", "x" + whole.substr(0, 1))), HasSubstr("is not UTF-8"));
}

TEST_F(CorpusFiles, AnyBytesCanBePacked) {
  const std::string file = write("picture", std::string("\xff\0", 2));
  EXPECT_THAT([&] { pack({file}, "a.bin"); }, ThrowsMessage<Error>(HasSubstr("--any-bytes")));
  pack({file}, "a.bin", {.text = {.named = NamedFiles::kAnyBytes}});
  EXPECT_THAT(tokens_of(*open_corpus({directory_ / "a.bin"})), ElementsAre(255, 0, 256));
}

// The file's checksums are right: its writer chose these bytes.
TEST_F(CorpusFiles, TokensOutsideTheVocabularyAreFoundWhenAFileIsOpened) {
  const auto write_one_wrong = [&](size_t at, uint32_t token) {
    std::vector<uint32_t> tokens(200'000, 7);
    tokens[at] = token;
    TokenHeader header = counting_header();
    header.vocabulary = 100;
    TokenFileWriter writer(directory_ / "wrong.bin", header);
    writer.write_stored(std::as_bytes(std::span(tokens)));
    writer.commit();
    return refusal(directory_ / "wrong.bin");
  };
  EXPECT_EQ(write_one_wrong(0, 99), "accepted");
  for (const size_t at : {size_t{0}, size_t{65'536}, size_t{199'999}})
    EXPECT_THAT(write_one_wrong(at, 100),
                EndsWith(concat("wrong.bin: token number ", at, " is 100, outside the vocabulary ",
                                "of 100 that the header names: one of them is wrong; use another ",
                                "copy, or pack the text again")));
  EXPECT_THAT(write_one_wrong(5, UINT32_MAX), HasSubstr("token number 5 is 4294967295, outside"));
  // Where there is more than may be read: the beginning and evenly spread places.
  const CorpusOptions little{.looked_over_bytes = 2 * 65'536 * 4};
  const std::vector<std::string> paths = {directory_ / "wrong.bin"};
  write_one_wrong(65'536 + 5, 100);
  EXPECT_NO_THROW(open_corpus(paths, little));
  write_one_wrong(2 * 65'536 + 5, 100);
  EXPECT_THROW(open_corpus(paths, little), Error);
}

// Both tokens are in the vocabulary, so only the checksum tells.
TEST_F(CorpusFiles, AFlippedBitIsFoundAtOnceOrBesideTheReader) {
  for (const char* name : {"good.bin", "bad.bin"})
    write_counting_tokens(directory_ / name, 300'000);
  std::string bytes = read_text_file(directory_ / "bad.bin", 1 << 24);
  bytes[bytes.size() / 2] ^= 1;
  write_text_file(directory_ / "bad.bin", bytes);
  const auto good = open_corpus({directory_ / "good.bin"});
  const auto bad = open_corpus({directory_ / "bad.bin"});
  const auto says_which = ThrowsMessage<Error>(HasSubstr("bad.bin: its tokens are damaged"));
  const int64_t one_file = good->packed_bytes();
  EXPECT_EQ(one_file, 128 + 4 * 300'000);
  EXPECT_NO_THROW(CorpusCheck({good, good}));
  EXPECT_THAT([&] { CorpusCheck({good, bad}, 2 * one_file); }, says_which);
  const CorpusCheck beside({good, bad}, 2 * one_file - 1);
  EXPECT_THAT([&] { beside.wait(); }, says_which);
  EXPECT_TRUE(beside.has_failed());
  EXPECT_THAT([&] { beside.wait(); }, says_which);
  int64_t told = 0;
  good->verify([&](int64_t done) { told = done; });
  EXPECT_EQ(told, 4 * 300'000);
  const CorpusCheck whole({good}, 0);
  whole.wait();
  EXPECT_FALSE(whole.has_failed());
  // Ends without having read everything; a thread that went on would use what is gone.
  CorpusCheck stopped(std::vector(1000, good), 0);
}

TEST_F(CorpusFiles, TellHowMuchOfTheirTextIsTokenised) {
  write("a.txt", "12345");
  write("b.jsonl", "{\"text\": \"a\"}\n{\"text\": \"b\"}\n");
  std::vector<std::pair<int64_t, int64_t>> told;
  open_corpus({directory_ / "a.txt", directory_ / "b.jsonl"},
              {.progress = [&](int64_t done, int64_t total) { told.emplace_back(done, total); }});
  EXPECT_THAT(told, ElementsAre(std::pair(5, 33), std::pair(33, 33)));
}

TEST_F(CorpusFiles, ADocumentIsAFileAndHasAnEnd) {
  write("d/1", "one");
  write("d/2", "two");
  const auto corpus = open_corpus({write("last", "\x01\n"), directory_ / "d"});
  EXPECT_EQ(text_of(*corpus), "\x01\n|one|two|");
  EXPECT_EQ(corpus->num_tokens(), 11);
  EXPECT_EQ(corpus->num_documents(), 3);
  EXPECT_EQ(corpus->num_files(), 3);
  EXPECT_EQ(corpus->vocabulary(), 257);
  EXPECT_EQ(corpus->tokenizer(), "bytes");
  EXPECT_EQ(corpus->end_of_document(), 256);
  EXPECT_EQ(corpus->summary(), "3 files, 11 tokens of tokenizer 'bytes' (vocabulary 257)");
}

TEST_F(CorpusFiles, TextIsTheSameWhetherPackedJoinedOrNot) {
  write("d/1", "one");
  write("d/2", std::string(3'000'000, 'x'));  // several pieces
  const std::string last = write("last", "last");
  const auto text = open_corpus({directory_ / "d", last});
  std::vector<int64_t> told;
  const PackSummary summary =
      pack({directory_ / "d"}, "d.bin", {.progress = [&](int64_t done, int64_t total) {
             EXPECT_EQ(total, 3'000'003);
             told.push_back(done);
           }});
  EXPECT_EQ(told.back(), 3'000'003);
  EXPECT_EQ(summary.num_files, 2);
  EXPECT_EQ(summary.source_bytes, 3'000'003);
  pack({directory_ / "d.bin", last}, "all.bin");
  pack({last}, "recognised by its first bytes");
  for (const std::vector<std::string>& names : {std::vector<std::string>{"all.bin"},
                                                {"d.bin", "last"},
                                                {"d/1", "d/2", "last"},
                                                {"d", "recognised by its first bytes"}}) {
    std::vector<std::string> paths;
    for (const std::string& name : names) paths.push_back(directory_ / name);
    const auto other = open_corpus(paths);
    EXPECT_TRUE(tokens_of(*other) == tokens_of(*text)) << names[0];
    EXPECT_EQ(other->fingerprint(), text->fingerprint()) << names[0];
    EXPECT_EQ(other->num_documents(), 3);
    EXPECT_NO_THROW(other->verify());
  }
  EXPECT_NE(open_corpus({last, directory_ / "d"})->fingerprint(), text->fingerprint());
}

TEST_F(CorpusFiles, ReadsOverTheSeamsOfFilesAtAnyPlace) {
  std::vector<std::string> paths;
  int64_t num_tokens = 0;
  for (const int64_t count : {3, 0, 1, 10, 2}) {
    paths.push_back(directory_ / ("part" + std::to_string(paths.size()) + ".bin"));
    write_counting_tokens(paths.back(), count, num_tokens);
    num_tokens += count;
  }
  const auto corpus = open_corpus(paths);
  ASSERT_EQ(corpus->num_tokens(), 16);
  for (int64_t first = 0; first <= 16; ++first)
    for (int64_t count = 0; first + count <= 16; ++count) {
      std::vector<int64_t> tokens(static_cast<size_t>(count));
      corpus->read(first, tokens);
      for (int64_t i = 0; i < count; ++i) EXPECT_EQ(tokens[static_cast<size_t>(i)], first + i);
    }
}

TEST_F(CorpusFiles, TokensOfUnlikeKindsAreNotJoined) {
  const std::string text = write("a.txt", "a");
  write_counting_tokens(directory_ / "b.bin", 3);
  const std::string says =
      "b.bin: has other tokens (tokenizer 'counting', vocabulary 16777216, 4 bytes per token, end "
      "of document none) than ";
  const std::vector<std::string> paths = {text, directory_ / "b.bin"};
  EXPECT_THAT(
      [&] { open_corpus(paths); },
      ThrowsMessage<Error>(AllOf(HasSubstr(says), HasSubstr("pack all the text with one"))));
  EXPECT_THAT([&] { pack(paths, "out.bin"); }, ThrowsMessage<Error>(HasSubstr(says)));
  EXPECT_FALSE(path_exists(directory_ / "out.bin"));
}

TEST_F(CorpusFiles, TextBeyondTheLimitMustBePacked) {
  const std::string path = write("a.txt", std::string(1000, 'x'));
  EXPECT_NO_THROW(open_corpus({path}, {.max_text_bytes = 1000}));
  EXPECT_THAT(
      [&] {
        open_corpus({path, path}, {.max_text_bytes = 1999});
      },
      ThrowsMessage<Error>(AllOf(HasSubstr("with it there are"), HasSubstr("fsdp data pack"))));
}

TEST_F(CorpusFiles, AModelNeedsTheVocabularyOfTheData) {
  const auto corpus = open_corpus({write("a.txt", "a")});
  EXPECT_NO_THROW(corpus->check_model_vocabulary(257));
  EXPECT_NO_THROW(corpus->check_model_vocabulary(512));
  EXPECT_THAT([&] { corpus->check_model_vocabulary(256); },
              ThrowsMessage<UsageError>(HasSubstr(
                  "the data's vocabulary is 257 (tokenizer 'bytes') and the model's 256; use")));
}

TEST_F(CorpusFiles, PackingRefusesWhatIsThereAndDamagedTokens) {
  const std::string text = write("a.txt", "abc");
  pack({text}, "a.bin");
  EXPECT_THAT([&] { pack({text}, "a.bin"); },
              ThrowsMessage<Error>(HasSubstr("a.bin: is there already; name another file")));
  EXPECT_NO_THROW(pack({text}, "a.bin", {.existing = PackOptions::Existing::kReplace}));
  EXPECT_THAT([&] { pack({text}, ""); }, ThrowsMessage<Error>(HasSubstr("is a directory; name")));
  EXPECT_THROW(pack({}, "b.bin"), UsageError);
  std::string bytes = read_text_file(directory_ / "a.bin", 1 << 20);
  bytes[kTokenHeaderBytes] = 'A';
  write_text_file(directory_ / "a.bin", bytes);
  EXPECT_THAT([&] { pack({directory_ / "a.bin"}, "b.bin"); },
              ThrowsMessage<Error>(HasSubstr("checksum differs")));
  EXPECT_FALSE(path_exists(directory_ / "b.bin"));
}

}  // namespace
}  // namespace fsdp::testing::corpus_test
