#include "fsdp/comm/tcp/tcp_connection.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "fsdp/base/check.h"

namespace fsdp {

namespace {

constexpr size_t kBufferBytes = size_t{32} << 10;
// What one read() takes at most before other connections get their turn.
constexpr int64_t kReadBytes = int64_t{1} << 20;

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

std::vector<char> frame_bytes_of(const FrameHeader& header, std::string_view payload) {
  std::vector<char> bytes(sizeof(header) + payload.size());
  std::memcpy(bytes.data(), &header, sizeof(header));
  std::copy(payload.begin(), payload.end(), bytes.begin() + sizeof(header));
  return bytes;
}

}  // namespace

TcpConnection::TcpConnection(int peer, Socket socket)
    : peer_(peer), socket_(std::move(socket)), buffer_(kBufferBytes) {}

void TcpConnection::enqueue_frame(FrameHeader header, std::string_view payload) {
  header.frame_bytes = static_cast<int64_t>(payload.size());
  control_.push_back(frame_bytes_of(header, payload));
}

void TcpConnection::enqueue_message(OutgoingMessage& message) { messages_.push_back(&message); }

void TcpConnection::cancel(const OutgoingMessage& message) noexcept {
  std::erase(messages_, &message);
  if (writing_.message != &message) return;
  const char* rest = message.data + message.sent_bytes + writing_.piece_written;
  writing_.bytes.insert(writing_.bytes.end(), rest,
                        rest + (writing_.piece_bytes - writing_.piece_written));
  writing_.message = nullptr;
  writing_.piece_bytes = writing_.piece_written = 0;
}

bool TcpConnection::wants_to_write() const {
  return is_open() && (is_writing_ || !control_.empty() || !messages_.empty());
}

// Takes the next frame to write; false when there is none.
bool TcpConnection::next_frame() {
  if (is_writing_) return true;
  writing_ = Writing{};
  if (!control_.empty()) {
    writing_.bytes = std::move(control_.front());
    control_.pop_front();
  } else if (!messages_.empty()) {
    OutgoingMessage& message = *messages_.front();
    messages_.pop_front();
    writing_.message = &message;
    writing_.piece_bytes = std::min(kMaxFrameBytes, message.bytes - message.sent_bytes);
    writing_.bytes = frame_bytes_of(
        {FrameKind::kData, message.channel, message.bytes, writing_.piece_bytes}, {});
  } else {
    return false;
  }
  is_writing_ = true;
  return true;
}

bool TcpConnection::note_written(size_t written) {
  const size_t of_bytes = std::min(written, writing_.bytes.size() - writing_.written);
  writing_.written += of_bytes;
  writing_.piece_written += static_cast<int64_t>(written - of_bytes);
  if (!writing_.is_done()) return false;
  is_writing_ = false;
  OutgoingMessage* message = std::exchange(writing_.message, nullptr);
  if (message == nullptr) return false;
  message->sent_bytes += writing_.piece_bytes;
  if (!message->is_sent()) messages_.push_back(message);
  return message->is_sent();
}

bool TcpConnection::write() {
  bool has_sent = false;
  while (is_open() && next_frame()) {
    iovec parts[2] = {};
    size_t num_parts = 0;
    if (writing_.written < writing_.bytes.size())
      parts[num_parts++] = {writing_.bytes.data() + writing_.written,
                            writing_.bytes.size() - writing_.written};
    if (writing_.message != nullptr) {
      const OutgoingMessage& message = *writing_.message;
      const char* piece = message.data + message.sent_bytes + writing_.piece_written;
      parts[num_parts++] = {const_cast<char*>(piece),
                            static_cast<size_t>(writing_.piece_bytes - writing_.piece_written)};
    }
    msghdr request{};
    request.msg_iov = parts;
    request.msg_iovlen = num_parts;
    const ssize_t written = ::sendmsg(socket_.fd(), &request, MSG_NOSIGNAL);
    if (written >= 0) {
      has_sent |= note_written(static_cast<size_t>(written));
    } else if (would_block()) {
      break;
    } else if (errno != EINTR) {
      // Reading will find the end of the connection, after what the peer said before it left.
      stop_writing();
    }
  }
  return has_sent;
}

bool TcpConnection::is_flushed() const {
  if (!is_open()) return true;
  int unacknowledged = 0;
  const bool knows = ::ioctl(socket_.fd(), SIOCOUTQ, &unacknowledged) == 0;
  return !wants_to_write() && (!knows || unacknowledged == 0);
}

bool TcpConnection::is_sound(const FrameHeader& header) const {
  if (header.channel < 0 || header.message_bytes < 0 || header.frame_bytes < 0) return false;
  if (header.frame_bytes > kMaxFrameBytes) return false;
  switch (header.kind) {
    case FrameKind::kData:
      return header.frame_bytes > 0 &&
             (header.message_bytes > kMaxFrameBytes || header.frame_bytes == header.message_bytes);
    case FrameKind::kFailure:
      return true;
    case FrameKind::kAnnounce:
    case FrameKind::kReady:
    case FrameKind::kGoodbye:
    case FrameKind::kTaken:
      return header.frame_bytes == 0;
  }
  return false;
}

bool TcpConnection::parse(FrameReader& reader) {
  while (true) {
    const size_t available = buffer_end_ - buffer_begin_;
    if (!in_frame_) {
      if (available < sizeof(header_)) return true;
      std::memcpy(&header_, buffer_.data() + buffer_begin_, sizeof(header_));
      if (!is_sound(header_)) return false;
      buffer_begin_ += sizeof(header_);
      frame_left_ = header_.frame_bytes;
      const std::optional<char*> place = reader.begin_frame(peer_, header_);
      if (!place) return false;
      place_ = *place;
      in_frame_ = true;
      continue;
    }
    const auto piece = static_cast<size_t>(
        std::min(frame_left_, static_cast<int64_t>(buffer_end_ - buffer_begin_)));
    if (place_ != nullptr && piece > 0) {
      std::memcpy(place_, buffer_.data() + buffer_begin_, piece);
      place_ += piece;
    }
    buffer_begin_ += piece;
    frame_left_ -= static_cast<int64_t>(piece);
    if (frame_left_ > 0) return true;
    in_frame_ = false;
    reader.end_frame(peer_, header_);
  }
}

void TcpConnection::read(FrameReader& reader) {
  for (int64_t taken = 0; is_open() && taken < kReadBytes;) {
    // A long payload goes straight to its place; headers and short ones through the buffer.
    const bool straight = in_frame_ && place_ != nullptr && buffer_begin_ == buffer_end_ &&
                          frame_left_ >= static_cast<int64_t>(kBufferBytes);
    if (!straight) {
      std::memmove(buffer_.data(), buffer_.data() + buffer_begin_, buffer_end_ - buffer_begin_);
      buffer_end_ -= std::exchange(buffer_begin_, 0);
    }
    char* target = straight ? place_ : buffer_.data() + buffer_end_;
    const size_t room = straight ? static_cast<size_t>(frame_left_) : kBufferBytes - buffer_end_;
    const ssize_t received = ::recv(socket_.fd(), target, room, 0);
    if (received == 0) return close("was closed");
    if (received < 0) {
      if (errno == EINTR) continue;
      if (!would_block()) close(concat("failed: ", std::strerror(errno)));
      return;
    }
    taken += received;
    if (straight) {
      place_ += received;
      frame_left_ -= received;
    } else {
      buffer_end_ += static_cast<size_t>(received);
    }
    if (!parse(reader)) return close("carried something that is not of this program");
    if (!straight && static_cast<size_t>(received) < room) return;  // nothing more for now
  }
}

void TcpConnection::stop_reading_into(const char* data, int64_t bytes) {
  if (place_ >= data && place_ < data + bytes) place_ = nullptr;
}

void TcpConnection::close(std::string ending) {
  socket_.close();
  ending_ = std::move(ending);
  stop_writing();
}

void TcpConnection::stop_writing() {
  control_.clear();
  messages_.clear();
  is_writing_ = false;
  writing_ = Writing{};
}

void TcpConnection::end_writing() {
  if (is_open()) ::shutdown(socket_.fd(), SHUT_WR);
}

}  // namespace fsdp
