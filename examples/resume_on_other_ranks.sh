#!/usr/bin/env bash
# Trains on 2 ranks, goes on with 3, and compares with a run on 1 rank that nobody interrupted.
#
#   examples/resume_on_other_ranks.sh [WORK [DATA]]      fsdp: in PATH, or where FSDP says
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=${1:-$(mktemp -d)}
data=${2:-$here/docs}
fsdp=${FSDP:-fsdp}

# 12 sequences per step can be shared by 1, 2, 3 and 4 ranks. A constant rate does not depend on --steps, which the
# first part gives lower; a run that SIGTERM stops keeps its --steps, and then any schedule goes on as it was.
settings=(--data "$data" --batch 12 --sequence 64 --schedule constant --lr 1e-3 --warmup 2 --validate-every 0
          --sample "" --log-every 1 --report none)

echo "== 2 ranks, steps 1 to 4"
"$fsdp" train "${settings[@]}" --steps 4 --ranks 2 --checkpoint-dir "$work/interrupted" | tail -n 7
echo "== 3 ranks, steps 5 to 8"
"$fsdp" train "${settings[@]}" --steps 8 --ranks 3 --checkpoint-dir "$work/interrupted" | tail -n 7
echo "== 1 rank, without interruption"
"$fsdp" train "${settings[@]}" --steps 8 --ranks 1 --checkpoint-dir "$work/whole" | tail -n 11

# The batches are the same whatever the ranks, so the losses differ only by the order in which fp32 numbers are added:
# about 1e-7 of them per step at first, and a little more with every step that builds on it.
python3 - "$work/interrupted/log.jsonl" "$work/whole/log.jsonl" <<'END'
import json, sys

def losses(path):
    lines = (json.loads(line) for line in open(path))
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}

interrupted, whole = map(losses, sys.argv[1:])
assert sorted(interrupted) == sorted(whole) == list(range(1, 9)), (interrupted, whole)
largest = max(abs(interrupted[step] - whole[step]) for step in whole)
print(f"== largest difference of a loss: {largest:.1e}")
sys.exit(largest > 1e-4)
END
