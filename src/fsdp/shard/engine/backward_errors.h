// Errors of ours that reach the program through libtorch: those inside a backward, and those of
// tensors that nobody may touch.
#pragma once

#include <string>
#include <utility>

#include "fsdp/base/error.h"

namespace fsdp {

// Another language's room throws its own error in place of an Error that leaves a hook of autograd;
// nullptr: none does. Set once, before the first backward.
using BackwardErrorTranslator = void (*)(const Error& error);
inline BackwardErrorTranslator backward_error_translator = nullptr;

// Another language's room says in its own words what libtorch throws when such a tensor is touched;
// nullptr: it stays as it is. Set once, before the first model is sharded.
using SentenceTranslator = std::string (*)(std::string sentence);
inline SentenceTranslator sentence_translator = nullptr;

inline std::string in_language_of_program(std::string sentence) {
  return sentence_translator == nullptr ? sentence : sentence_translator(std::move(sentence));
}

// Runs what a hook does.
template <typename Body>
void in_backward(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    if (backward_error_translator != nullptr) backward_error_translator(error);
    throw;
  }
}

}  // namespace fsdp
