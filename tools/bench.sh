#!/usr/bin/env bash
# Runs every benchmark that was built, one after the other: a benchmark is a program bench_<x>.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

found=no
for program in build/release/bin/bench_*; do
  if [[ ! -x $program ]]; then continue; fi
  found=yes
  echo "# ${program##*/}"
  "$program"
done
if [[ $found == no ]]; then echo "bench: no benchmark has been written yet." >&2; fi
