// The settings all communicators share.
#pragma once

namespace fsdp {

struct CommOptions {
  // How long any wait for other ranks may take before it is an error that says who is missing.
  // Environment: FSDP_TIMEOUT_S.
  double timeout_seconds = 600.0;

  // Ranks compare what they are about to do (sequence, operation, dtype, bytes, tag) before data
  // moves. `threads` always does, since there it costs nothing; `mpi` pays one small message per
  // rank and operation. Environment: FSDP_CHECKED=1.
  bool checked = false;

  // The defaults above, overridden by the environment.
  static CommOptions from_environment();
};

}  // namespace fsdp
