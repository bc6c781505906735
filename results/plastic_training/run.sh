#!/usr/bin/env bash
# Every arm with three seeds. Usage: results/plastic_training/run.sh MODEL SIZE RUNS [pnn sweep arguments]
# MODEL: gpt2, ddl or pnn_causal.
# SIZE: toy (the embedded corpus, a CPU), text (real text by --set data.train='text/*.txt.xz', a CPU) or mini (likewise, a GPU).
# Stopped, the same command goes on.
set -euo pipefail
model=$1 size=$2 runs=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$runs"
# once: how long an update takes is measured, and a second measurement would ask for other runs
[ -f "$runs/configs/costs.json" ] || python3 "$here/arms.py" "$runs/configs" --model "$model" --size "$size"
python3 -m pnn sweep "$runs"/configs/{full,small_flops,growing_flops,small_seconds,growing_seconds,small_updates,turnover,turnover_random}.yaml \
  --seeds 3 --output "$runs/main" "$@"
