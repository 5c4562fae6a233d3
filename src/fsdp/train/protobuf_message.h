// Writes the wire format of protocol buffers: as much of it as TensorBoard's events need.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fsdp::train {

// Fields in the order in which they are added. Numbers are those of the .proto file.
class ProtobufMessage {
 public:
  // int64, int32, bool and enums. Negative values take ten bytes, as the format has it.
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

// `value` as `num_bytes` bytes, the lowest first, at the end of `text`.
void append_little_endian(std::string& text, uint64_t value, int num_bytes);

}  // namespace fsdp::train
