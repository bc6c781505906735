#!/usr/bin/env bash
# Train all models with three seeds and ask more_steps of each. Usage: results/more_steps/run.sh RUNS [pnn sweep arguments]
# Stopped, the same command goes on. At another size: --set model.hidden_size=768 and so on.
set -euo pipefail
runs=$1
shift
configs=$(cd "$(dirname "$0")" && pwd)/configs
for update in gated rewrite; do
  python3 -m pnn sweep "$configs/${update}_fixed.yaml" "$configs/${update}_random.yaml" --seeds 3 --output "$runs/$update" "$@"
  for run in "$runs/$update"/*/seed-*; do
    python3 -m pnn analyze more_steps "$run"
  done
done
