#!/usr/bin/env bash
# Configures a preset when that is needed, and builds it: tools/build.sh <preset> [cmake --build options]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preset=$1
shift
folder=build/$preset

# Ninja reruns CMake by itself when a CMakeLists.txt changes; these are the changes it cannot see.
configured_torch=$(sed -n 's/^FSDP_TORCH:[A-Z]*=//p' "$folder/CMakeCache.txt" 2>/dev/null || true)
if [[ ! -f $folder/build.ninja || CMakePresets.json -nt $folder/build.ninja ||
      $configured_torch != "${FSDP_TORCH:-}" ]]; then
  mkdir -p build
  # The table at the end and everything that went wrong are on stderr; the rest is for the log.
  cmake --preset "$preset" >"build/$preset-configure.log"
fi
cmake --build --preset "$preset" "$@"
