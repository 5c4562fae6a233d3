#include "fsdp/train/log/tensorboard_events.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdio>

#include "fsdp/base/crc32c.h"
#include "fsdp/base/text.h"
#include "fsdp/train/log/utf8_text.h"

namespace fsdp::train {

namespace {

// Numbers of fields, from tensorflow/core/util/event.proto and framework/{summary,tensor}.proto.
namespace event {
constexpr int kWallTime = 1;
constexpr int kStep = 2;
constexpr int kFileVersion = 3;
constexpr int kSummary = 5;
constexpr int kSessionLog = 7;
}  // namespace event
namespace session_log {
constexpr int kStatus = 1;
constexpr int64_t kStart = 1;
}  // namespace session_log
namespace summary {
constexpr int kValue = 1;
}
namespace value {
constexpr int kTag = 1;
constexpr int kSimpleValue = 2;
constexpr int kTensor = 8;
constexpr int kMetadata = 9;
}  // namespace value
namespace metadata {
constexpr int kPluginData = 1;
constexpr int kPluginName = 1;  // of PluginData
constexpr int kDataClass = 4;
constexpr int64_t kTensorClass = 2;
}  // namespace metadata
namespace tensor {
constexpr int kDtype = 1;
constexpr int64_t kString = 7;
constexpr int kShape = 2;
constexpr int kDim = 2;      // of the shape
constexpr int kDimSize = 1;  // of a dim
constexpr int kStringVal = 8;
}  // namespace tensor

// TensorBoard finds files by "events.out.tfevents." and reads them in the order of their names,
// that is, of the time that follows. The rest keeps hosts, processes and writers apart.
std::string file_path(const std::string& directory, double time) {
  static std::atomic<int> num_files{0};
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host = {'h', 'o', 's', 't'};
  std::array<char, 32> seconds{};
  std::snprintf(seconds.data(), seconds.size(), "%017.6f", time);
  return concat(directory, "/events.out.tfevents.", seconds.data(), ".", host.data(), ".",
                ::getpid(), ".", num_files++);
}

// TFRecord masks its checksums, because its data may contain checksums, too.
uint32_t masked_crc32c(std::string_view bytes) {
  const uint32_t crc = crc32c(std::as_bytes(std::span(bytes)));
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

ProtobufMessage event_at(int64_t step, double time) {
  ProtobufMessage message;
  message.add_double(event::kWallTime, time);
  message.add_integer(event::kStep, step);
  return message;
}

void add_scalar(ProtobufMessage& to, std::string_view tag, double number) {
  ProtobufMessage scalar;
  scalar.add_bytes(value::kTag, tag);
  scalar.add_float(value::kSimpleValue, static_cast<float>(number));
  to.add_message(summary::kValue, scalar);
}

// Escapes a cell of a Markdown table: a bar would end the cell, a line break the row.
std::string cell_text(std::string_view text) {
  std::string cell;
  for (const char c : clean_utf8(text)) {
    if (c == '|') cell += '\\';
    cell += c == '\n' || c == '\r' ? ' ' : c;
  }
  return cell;
}

}  // namespace

void append_little_endian(std::string& text, uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) text += static_cast<char>(value >> (8 * i) & 0xff);
}

void ProtobufMessage::add_integer(int field, int64_t value) {
  add_tag(field, Wire::kVarint);
  add_varint(static_cast<uint64_t>(value));
}

void ProtobufMessage::add_double(int field, double value) {
  add_tag(field, Wire::kFixed64);
  append_little_endian(encoded_, std::bit_cast<uint64_t>(value), 8);
}

void ProtobufMessage::add_float(int field, float value) {
  add_tag(field, Wire::kFixed32);
  append_little_endian(encoded_, std::bit_cast<uint32_t>(value), 4);
}

void ProtobufMessage::add_bytes(int field, std::string_view bytes) {
  add_tag(field, Wire::kLength);
  add_varint(bytes.size());
  encoded_ += bytes;
}

void ProtobufMessage::add_tag(int field, Wire wire) {
  add_varint(static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(wire));
}

void ProtobufMessage::add_varint(uint64_t value) {
  for (; value >= 0x80; value >>= 7) encoded_ += static_cast<char>(value | 0x80);
  encoded_ += static_cast<char>(value);
}

TensorboardEvents::TensorboardEvents(const std::string& directory, int64_t resumed_step,
                                     double time)
    : file_(file_path(directory, time), "--tensorboard") {
  ProtobufMessage version;
  version.add_double(event::kWallTime, time);
  version.add_bytes(event::kFileVersion, "brain.Event:2");
  write(version);
  if (resumed_step == 0) return;
  ProtobufMessage session;
  session.add_integer(session_log::kStatus, session_log::kStart);
  ProtobufMessage start = event_at(resumed_step + 1, time);
  start.add_message(event::kSessionLog, session);
  write(start);
}

void TensorboardEvents::step(const StepRecord& record, double time) {
  ProtobufMessage scalars;
  add_scalar(scalars, "loss/train", record.loss);
  for (const NamedValue& term : record.terms)
    add_scalar(scalars, concat("loss_terms/", term.name), term.value);
  add_scalar(scalars, "learning_rate", record.learning_rate);
  add_scalar(scalars, "gradient_norm", record.gradient_norm);
  add_scalar(scalars, "speed/tokens_per_s", record.tokens_per_second);
  add_scalar(scalars, "speed/step_ms", record.milliseconds);
  if (record.teraflops > 0) add_scalar(scalars, "speed/tflops", record.teraflops);
  if (record.mfu > 0) add_scalar(scalars, "speed/mfu", record.mfu);
  add_scalar(scalars, "memory/peak_bytes", static_cast<double>(record.peak_bytes));
  ProtobufMessage message = event_at(record.step, time);
  message.add_message(event::kSummary, scalars);
  write(message);
}

void TensorboardEvents::validation(const ValidationRecord& record, double time) {
  ProtobufMessage scalars;
  add_scalar(scalars, "loss/validation", record.loss);
  ProtobufMessage message = event_at(record.step, time);
  message.add_message(event::kSummary, scalars);
  write(message);
}

void TensorboardEvents::settings(std::span<const SettingRow> rows, int64_t step, double time) {
  std::string table = "| | setting | value |\n|---|---|---|\n";
  for (const SettingRow& row : rows)
    table += concat("| ", row.is_changed ? "\\*" : "", " | ", cell_text(row.name), " | ",
                    cell_text(row.value), " |\n");
  write_text("settings", table, step, time);
}

void TensorboardEvents::sample(const TextSample& sample, double time) {
  // Four spaces: Markdown shows the text verbatim.
  std::string text = "    ";
  for (const char c : clean_utf8(sample.prompt + sample.continuation)) {
    text += c;
    if (c == '\n') text += "    ";
  }
  write_text("sample", text, sample.step, time);
}

void TensorboardEvents::write_text(std::string_view tag, std::string_view markdown, int64_t step,
                                   double time) {
  ProtobufMessage plugin;
  plugin.add_bytes(metadata::kPluginName, "text");
  ProtobufMessage about;
  about.add_message(metadata::kPluginData, plugin);
  about.add_integer(metadata::kDataClass, metadata::kTensorClass);
  ProtobufMessage dim;
  dim.add_integer(tensor::kDimSize, 1);
  ProtobufMessage shape;
  shape.add_message(tensor::kDim, dim);
  ProtobufMessage strings;
  strings.add_integer(tensor::kDtype, tensor::kString);
  strings.add_message(tensor::kShape, shape);
  strings.add_bytes(tensor::kStringVal, markdown);
  ProtobufMessage text;
  text.add_bytes(value::kTag, tag);
  text.add_message(value::kTensor, strings);
  text.add_message(value::kMetadata, about);
  ProtobufMessage texts;
  texts.add_message(summary::kValue, text);
  ProtobufMessage message = event_at(step, time);
  message.add_message(event::kSummary, texts);
  write(message);
}

// A TFRecord: length, its checksum, the bytes, their checksum.
void TensorboardEvents::write(const ProtobufMessage& event) {
  const std::string& bytes = event.encoded();
  std::string record;
  record.reserve(bytes.size() + 16);
  append_little_endian(record, bytes.size(), 8);
  append_little_endian(record, masked_crc32c(record), 4);
  record += bytes;
  append_little_endian(record, masked_crc32c(bytes), 4);
  file_.append(record);
}

}  // namespace fsdp::train
