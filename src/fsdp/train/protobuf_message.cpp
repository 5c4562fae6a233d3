#include "fsdp/train/protobuf_message.h"

#include <bit>

namespace fsdp::train {

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

}  // namespace fsdp::train
