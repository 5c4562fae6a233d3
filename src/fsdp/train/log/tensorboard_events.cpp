#include "fsdp/train/log/tensorboard_events.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdio>

#include "fsdp/base/crc32c.h"
#include "fsdp/base/text.h"
#include "fsdp/train/log/console.h"

namespace fsdp::train {

namespace {

// Appends the lowest `num_bytes` bytes of `value`, the lowest first.
void append_little_endian(std::string& text, uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) text += static_cast<char>(value >> (8 * i) & 0xff);
}

// --- the wire format of protocol buffers ---------------------------------------------------------

// A message is the text of its fields, one after the other; each has the number and the type of the
// .proto file.
enum class Wire { kVarint = 0, kFixed64 = 1, kLength = 2, kFixed32 = 5 };

std::string varint(uint64_t value) {
  std::string text;
  for (; value >= 0x80; value >>= 7) text += static_cast<char>(value | 0x80);
  return text += static_cast<char>(value);
}

std::string tag_of(int field, Wire wire) {
  return varint(static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(wire));
}

std::string integer_field(int field, int64_t value) {
  return tag_of(field, Wire::kVarint) + varint(static_cast<uint64_t>(value));
}

std::string double_field(int field, double value) {
  std::string text = tag_of(field, Wire::kFixed64);
  append_little_endian(text, std::bit_cast<uint64_t>(value), 8);
  return text;
}

std::string float_field(int field, float value) {
  std::string text = tag_of(field, Wire::kFixed32);
  append_little_endian(text, std::bit_cast<uint32_t>(value), 4);
  return text;
}

// A string, or a message within another.
std::string bytes_field(int field, std::string_view value) {
  return tag_of(field, Wire::kLength) + varint(value.size()) + std::string(value);
}

// --- events --------------------------------------------------------------------------------------

// tensorflow/core/util/event.proto: wall_time = 1, step = 2.
std::string event_at(int64_t step, double time) {
  return double_field(1, time) + integer_field(2, step);
}

// Event.summary = 5, Summary.value = 1, Value.tag = 1.
std::string summary_value(std::string_view tag, const std::string& rest) {
  return bytes_field(1, bytes_field(1, tag) + rest);
}

// Value.simple_value = 2.
std::string scalar(std::string_view tag, double number) {
  return summary_value(tag, float_field(2, static_cast<float>(number)));
}

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

TensorboardEvents::TensorboardEvents(const std::string& directory, int64_t resumed_step,
                                     double time)
    : file_(file_path(directory, time), "--tensorboard") {
  write(double_field(1, time) + bytes_field(3, "brain.Event:2"));  // file_version = 3
  // session_log = 7, whose status = 1 is START = 1.
  if (resumed_step > 0)
    write(event_at(resumed_step + 1, time) + bytes_field(7, integer_field(1, 1)));
}

void TensorboardEvents::step(const StepRecord& record, double time) {
  std::string scalars = scalar("loss/train", record.loss);
  for (const NamedValue& term : record.terms)
    scalars += scalar(concat("loss_terms/", term.name), term.value);
  scalars += scalar("learning_rate", record.learning_rate);
  scalars += scalar("gradient_norm", record.gradient_norm);
  scalars += scalar("speed/tokens_per_s", record.tokens_per_second);
  scalars += scalar("speed/step_ms", record.milliseconds);
  if (record.teraflops > 0) scalars += scalar("speed/tflops", record.teraflops);
  if (record.mfu > 0) scalars += scalar("speed/mfu", record.mfu);
  scalars += scalar("memory/peak_bytes", static_cast<double>(record.peak_bytes));
  write(event_at(record.step, time) + bytes_field(5, scalars));
}

void TensorboardEvents::validation(const ValidationRecord& record, double time) {
  write(event_at(record.step, time) + bytes_field(5, scalar("loss/validation", record.loss)));
}

void TensorboardEvents::settings(std::span<const SettingRow> rows, int64_t step, double time) {
  std::string table = "| | setting | value |\n|---|---|---|\n";
  for (const SettingRow& row : rows)
    table += concat("| ", row.is_changed ? "\\*" : "", " | ", cell_text(row.name), " | ",
                    cell_text(row.value), " |\n");
  write_text("settings", table, step, time);
}

void TensorboardEvents::sample(const TextSample& sample, double time) {
  // Markdown shows indented text verbatim.
  write_text("sample", indented(sample.prompt + sample.continuation), sample.step, time);
}

// framework/summary.proto: Value.tensor = 8, metadata = 9 with plugin_data = 1 (plugin_name = 1)
// and data_class = 4 of DATA_CLASS_TENSOR = 2; framework/tensor.proto: dtype = 1 of DT_STRING = 7,
// tensor_shape = 2 with a dim = 2 of size = 1, string_val = 8.
void TensorboardEvents::write_text(std::string_view tag, std::string_view markdown, int64_t step,
                                   double time) {
  const std::string shape = bytes_field(2, integer_field(1, 1));
  const std::string tensor = integer_field(1, 7) + bytes_field(2, shape) + bytes_field(8, markdown);
  const std::string metadata = bytes_field(1, bytes_field(1, "text")) + integer_field(4, 2);
  write(event_at(step, time) +
        bytes_field(5, summary_value(tag, bytes_field(8, tensor) + bytes_field(9, metadata))));
}

// A TFRecord: length, its checksum, the bytes, their checksum.
void TensorboardEvents::write(const std::string& event) {
  std::string record;
  append_little_endian(record, event.size(), 8);
  append_little_endian(record, masked_crc32c(record), 4);
  record += event;
  append_little_endian(record, masked_crc32c(event), 4);
  file_.append(record);
}

}  // namespace fsdp::train
