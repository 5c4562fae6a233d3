#include "fsdp/comm/tcp/handshake.h"

#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

constexpr uint64_t kMagic = 0x3270637470647366;  // "fsdptcp2", also tells the byte order

template <typename Bytes>
void fill_randomly(Bytes& bytes) {
  FSDP_CHECK(::getrandom(bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()),
             "this host gives no random numbers: ", std::strerror(errno));
}

void append(std::vector<std::byte>& bytes, std::span<const std::byte> more) {
  bytes.insert(bytes.end(), more.begin(), more.end());
}

template <typename Field>
std::span<const std::byte> field_bytes(const Field& field) {
  return std::as_bytes(std::span(&field, 1));
}

}  // namespace

Digest job_key(const std::string& secret, const std::string& meeting) {
  return hmac_sha256(std::as_bytes(std::span(secret)), std::as_bytes(std::span(meeting)));
}

Endpoint Introduction::endpoint() const {
  return {std::string(host.data(), ::strnlen(host.data(), host.size())), port};
}

void Introduction::set_endpoint(const Endpoint& endpoint) {
  FSDP_CHECK(endpoint.host.size() < host.size(), "address '", endpoint.host, "' is too long");
  host = {};
  std::copy(endpoint.host.begin(), endpoint.host.end(), host.begin());
  port = endpoint.port;
}

Handshake::Handshake(Socket socket, const Digest& key, const Introduction& own, int callee)
    : socket_(std::move(socket)),
      key_(key),
      own_(own),
      callee_(callee),
      step_(is_called() ? &Handshake::greet : &Handshake::hear_greeting) {
  prepare_for_messages(socket_);
}

Handshake Handshake::as_called(Socket socket, const Digest& key, const Introduction& own) {
  return Handshake(std::move(socket), key, own, -1);
}

Handshake Handshake::as_caller(Socket socket, const Digest& key, const Introduction& own,
                               int callee) {
  return Handshake(std::move(socket), key, own, callee);
}

Handshake::State Handshake::advance() {
  State state = State::kDone;
  while (state == State::kDone && step_ != nullptr) state = (this->*step_)();
  return state;
}

Handshake::State Handshake::greet() {
  greeting_.magic = kMagic;
  fill_randomly(greeting_.nonce);
  step_ = &Handshake::hear_call;
  return send(&greeting_, sizeof(greeting_));
}

Handshake::State Handshake::hear_greeting() {
  const State state = receive(&greeting_, sizeof(greeting_));
  if (state != State::kDone) return state;
  if (greeting_.magic != kMagic) return State::kClosed;
  call_.magic = kMagic;
  fill_randomly(call_.nonce);
  call_.caller = own_;
  call_.callee = callee_;
  call_.code = code_of_call();
  step_ = &Handshake::hear_answer;
  return send(&call_, sizeof(call_));
}

Handshake::State Handshake::hear_call() {
  const State state = receive(&call_, sizeof(call_));
  if (state != State::kDone) return state;
  if (call_.magic != kMagic) return State::kClosed;
  other_ = call_.caller;
  const bool knows_key = is_same(call_.code, code_of_call());
  if (knows_key && call_.callee != own_.rank) return State::kClosed;
  answer_.knows_key = knows_key ? 1 : 0;
  // A stranger learns nothing that is made with the key.
  if (knows_key) {
    answer_.callee = own_;
    answer_.code = code_of_answer();
  }
  step_ = nullptr;
  const State sent = send(&answer_, sizeof(answer_));
  return knows_key ? sent : State::kOtherKey;
}

Handshake::State Handshake::hear_answer() {
  const State state = receive(&answer_, sizeof(answer_));
  if (state != State::kDone) return state;
  step_ = nullptr;
  if (answer_.knows_key == 0 || !is_same(answer_.code, code_of_answer())) return State::kOtherKey;
  other_ = answer_.callee;
  return other_.rank == callee_ ? State::kDone : State::kClosed;
}

Handshake::State Handshake::receive(void* message, size_t bytes) {
  while (received_ < bytes) {
    const ssize_t count =
        ::recv(socket_.fd(), static_cast<char*>(message) + received_, bytes - received_, 0);
    if (count < 0 && errno == EINTR) continue;
    // A socket that is still being connected says ENOTCONN.
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOTCONN))
      return State::kGoing;
    if (count <= 0) {
      error_code_ = count < 0 ? errno : 0;
      return State::kClosed;
    }
    received_ += static_cast<size_t>(count);
  }
  received_ = 0;
  return State::kDone;
}

// These few bytes always fit into the buffer of a new socket.
Handshake::State Handshake::send(const void* message, size_t bytes) {
  const ssize_t sent = ::send(socket_.fd(), message, bytes, MSG_NOSIGNAL);
  if (sent == static_cast<ssize_t>(bytes)) return State::kDone;
  error_code_ = sent < 0 ? errno : 0;
  return State::kClosed;
}

Digest Handshake::code_of_call() const {
  std::vector<std::byte> bytes;
  append(bytes, std::as_bytes(std::span(std::string_view("call"))));
  append(bytes, greeting_.nonce);
  append(bytes, call_.nonce);
  append(bytes, field_bytes(call_.caller));
  append(bytes, field_bytes(call_.callee));
  return hmac_sha256(key_, bytes);
}

Digest Handshake::code_of_answer() const {
  std::vector<std::byte> bytes;
  append(bytes, std::as_bytes(std::span(std::string_view("answer"))));
  append(bytes, call_.code);  // covers all that was said before
  append(bytes, field_bytes(answer_.callee));
  return hmac_sha256(key_, bytes);
}

CommError other_key_error(int peer, int rank) {
  return CommError(concat("rank ", peer, " and rank ", rank,
                          " have not the same FSDP_SECRET, or are of different jobs: start all "
                          "processes of a job with the same"));
}

}  // namespace fsdp
