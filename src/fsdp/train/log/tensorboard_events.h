// Event files for TensorBoard, written without TensorBoard, in the wire format of protocol buffers.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "fsdp/train/log/append_file.h"
#include "fsdp/train/log/run_records.h"

namespace fsdp::train {

// --- messages ------------------------------------------------------------------------------------

// Writes the wire format of protocol buffers: as much of it as TensorBoard's events need.

// Writes fields in the order in which they are added, with the numbers of the .proto file.
class ProtobufMessage {
 public:
  // int64, int32, bool and enums. The format stores negative values in ten bytes.
  void add_integer(int field, int64_t value);
  void add_double(int field, double value);
  void add_float(int field, float value);
  // string and bytes.
  void add_bytes(int field, std::string_view bytes);
  void add_message(int field, const ProtobufMessage& message) {
    add_bytes(field, message.encoded());
  }

  const std::string& encoded() const { return encoded_; }

 private:
  enum class Wire { kVarint = 0, kFixed64 = 1, kLength = 2, kFixed32 = 5 };
  void add_tag(int field, Wire wire);
  void add_varint(uint64_t value);

  std::string encoded_;
};

// Appends the lowest `num_bytes` bytes of `value`, the lowest first.
void append_little_endian(std::string& text, uint64_t value, int num_bytes);

// --- events --------------------------------------------------------------------------------------

// Writes a file of its own into a directory that others may share. For one thread at a time.
class TensorboardEvents {
 public:
  // Begins a file. TensorBoard then shows only steps up to `resumed_step` from the files before,
  // because this run does the later ones again.
  TensorboardEvents(const std::string& directory, int64_t resumed_step, double time);

  // loss/train, loss_terms/NAME, learning_rate, ...; docs/watching.md lists the tags.
  void step(const StepRecord& record, double time);
  // loss/validation
  void validation(const ValidationRecord& record, double time);
  // All settings as a table, under "settings" of TensorBoard's texts.
  void settings(std::span<const SettingRow> rows, int64_t step, double time);
  // Under "sample" of the texts.
  void sample(const TextSample& sample, double time);

  const std::string& path() const { return file_.path(); }

 private:
  void write(const ProtobufMessage& event);
  void write_text(std::string_view tag, std::string_view markdown, int64_t step, double time);

  AppendFile file_;
};

}  // namespace fsdp::train
