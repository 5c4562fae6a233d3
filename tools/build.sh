#!/usr/bin/env bash
# Configures a preset when that is needed, and builds it: tools/build.sh <preset> [cmake --build options]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preset=$1
shift
folder=build/$preset

# Ninja reruns CMake by itself when a CMakeLists.txt changes; these are the changes it cannot see: the
# presets, FSDP_TORCH, and optional tools that came or went since the last time.
found_tools="torch: ${FSDP_TORCH:-} $(command -v clang++ mpicxx ccache nvcc || true)"
stamp=build/$preset-tools
if [[ ! -f $folder/build.ninja || CMakePresets.json -nt $folder/build.ninja ||
      $(cat "$stamp" 2>/dev/null) != "$found_tools" ]]; then
  mkdir -p build
  # The table at the end and everything that went wrong are on stderr; the rest is for the log.
  cmake --preset "$preset" >"build/$preset-configure.log"
  echo "$found_tools" >"$stamp"
fi
# Ninja shows how many of how many steps are done, and after how many seconds.
export NINJA_STATUS=${NINJA_STATUS:-[%f/%t, %e s] }
cmake --build --preset "$preset" "$@"
