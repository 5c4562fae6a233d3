// The message of an error that a test expects.
#pragma once

#include <exception>
#include <string>

namespace fsdp::testing {

// The message of the error that `body` throws; empty if it throws none. Errors of other types than
// `Expected` are not caught.
template <typename Expected = std::exception, typename Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const Expected& error) {
    return error.what();
  }
  return {};
}

}  // namespace fsdp::testing
