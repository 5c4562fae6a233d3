#!/usr/bin/env bash
# Trains on two ranks and serves beside it: the trainer writes what changed in its weights to a directory, the server applies it
# and generates. The model learns the server's own text by heart, so that one sees how far it is.
#
#   run.sh [FOLDER]      FOLDER is new; FSDP and PYTHON name the command and an interpreter with torch and transformers
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-weights_out_run}
steps=${STEPS:-200}
mkdir -p "$folder"
"${PYTHON:-python3}" "$here/serve.py" "$here/config.json" "$folder/patches" --until "$steps" >"$folder/served.txt" &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
until [ -s "$folder/served.txt" ]; do
  kill -0 "$server"   # ends the script if the server has ended
  sleep 0.1
done
"${FSDP:-fsdp}" train --model "$here/config.json" --data "$here/serve.py" --ranks 2 --batch 8 --sequence 64 --steps "$steps" \
  --lr 1e-2 --validate-every 0 --sample '' --quiet --patches "$folder/patches" --patch-every 20 --export-dir "$folder/weights"
wait "$server"
trap - EXIT
cat "$folder/served.txt"
