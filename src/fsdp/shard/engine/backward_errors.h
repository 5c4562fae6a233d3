// Errors of ours inside a backward, which reach the program through autograd.
#pragma once

#include "fsdp/base/error.h"

namespace fsdp {

// Another language's room throws its own error in place of an Error that leaves a hook of autograd;
// nullptr: none does. Set once, before the first backward.
using BackwardErrorTranslator = void (*)(const Error& error);
inline BackwardErrorTranslator backward_error_translator = nullptr;

inline void translate_backward_errors(BackwardErrorTranslator translator) {
  backward_error_translator = translator;
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
