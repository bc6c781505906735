#!/usr/bin/env bash
# Grids of rates at width 256, at 768 with the rule, and at 768 without it. Usage: results/widths/run.sh TOKENS RUNS [pnn sweep arguments]
# Stopped, the same command goes on.
set -euo pipefail
tokens=$1 runs=$2
shift 2
configs=$(cd "$(dirname "$0")" && pwd)/configs
rates=training.learning_rate=2.5e-4,5e-4,1e-3,2e-3,4e-3
sweep() { # a rate that diverges ends its sweep with an error, and stands in sweep.json as failed
  local name=$1 config=$2
  shift 2
  rm -f "$runs/$name/sweep.json" # of an earlier call
  python3 -m pnn sweep "$config" "${common[@]}" --output "$runs/$name" "$@" || [ -e "$runs/$name/sweep.json" ]
}
for optimizer in adamw muon; do
  common=(--over "$rates" --set data.train="$tokens" --set training.optimizer="$optimizer")
  sweep "${optimizer}_w256" "$configs/w256.yaml" "$@"
  sweep "${optimizer}_w768" "$configs/w768.yaml" "$@"
  sweep "${optimizer}_w768_plain" "$configs/w768.yaml" --set training.base_width=null "$@"
done
