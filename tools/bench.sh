#!/usr/bin/env bash
# Runs every benchmark that was built, one after the other. A benchmark is a program bench_<x>; where
# bench/<x>.py exists, that script runs the program beside its rival in PyTorch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
if [[ -n ${FSDP_TORCH:-} || ! -x $python ]]; then python=python3; fi

for program in build/release/bin/bench_*; do
  name=${program##*/bench_}
  if [[ $name == gpu ]]; then  # takes minutes of a GPU
    echo "# bench_gpu: make bench-gpu runs it"
    continue
  fi
  if [[ ! -f bench/$name.py ]]; then
    "$program"
  elif "$python" -c 'import torch.distributed' 2>/dev/null; then
    "$python" "bench/$name.py" --bench "$program"
  else
    echo "# $python has no PyTorch: $name without its comparison"
    "$program"
  fi
done
