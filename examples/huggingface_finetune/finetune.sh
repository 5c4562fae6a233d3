#!/usr/bin/env bash
# Fine-tunes a model of HuggingFace's, sharded over 2 ranks, and gives it back to HuggingFace's packages.
#
#   examples/huggingface_finetune/finetune.sh WORK [MODEL [DATA]]
#
# WORK    a directory for everything that is made
# MODEL   a directory with config.json and safetensors files; without it, a tiny random Llama on bytes is made
# DATA    text, JSON lines, or token files of the model's tokenizer; without it, docs/
#
# fsdp is taken from PATH, or from FSDP; Python, with torch and transformers, is python3, or PYTHON.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=${1:?give a directory for what is made}
model=${2:-$work/start}
data=${3:-$here/../../docs}
fsdp=${FSDP:-fsdp}
python=${PYTHON:-python3}
steps=${STEPS:-20}
mkdir -p "$work"

[[ -n ${2:-} ]] || "$python" "$here/make_tiny_llama.py" "$model"

# One token file, so that everybody below reads the same tokens.
tokenizer=bytes
if [[ -f $model/tokenizer.json ]]; then tokenizer=$model; fi
"$fsdp" data pack "$data" --tokenizer "$tokenizer" --output "$work/tokens.bin" --overwrite

echo "== before"
"$fsdp" eval --checkpoint "$model" --data "$work/tokens.bin" --sequence 64 --batches 8

echo "== fine-tuning"
"$fsdp" train --model "$model" --data "$work/tokens.bin" --ranks 2 --steps "$steps" --batch 8 \
  --sequence 64 --lr 1e-3 --validate-every 0 --sample "" --checkpoint-dir "$work/run" | tail -n $((steps + 4))

echo "== back to HuggingFace's format"
# All bits that were trained, to compare them below; without --dtype, the type that the model came in.
"$fsdp" convert "$work/run" "$work/tuned" --to hf --dtype fp32 --overwrite

echo "== the same model in both"
"$fsdp" eval --checkpoint "$work/run" --data "$work/tokens.bin" --sequence 64 --batches 8 --json > "$work/eval.json"
"$python" "$here/compare.py" "$work/tuned" "$work/tokens.bin" "$work/eval.json"
