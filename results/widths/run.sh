#!/usr/bin/env bash
# Grids of rates at a narrow width, at three times that width with the rule, and without it. Usage:
#   results/widths/run.sh TOKENS RUNS [pnn sweep arguments]          width 256 and 768, on a GPU
#   TEXT=FILE results/widths/run.sh text RUNS [pnn sweep arguments]  width 32 and 96, on a CPU, from a file of real text
# RATES=5e-3,1e-2 asks for other rates, OPTIMIZERS=muon for one optimiser. Stopped, the same command goes on.
set -euo pipefail
tokens=$1 runs=$2
shift 2
configs=$(cd "$(dirname "$0")" && pwd)/configs
if [ "$tokens" = text ]; then
  narrow=w32 wide=w96 rates=${RATES:-5e-3,1e-2,2e-2,4e-2,8e-2} seeds=3
  set -- --set data.train="${TEXT:?a file of real text}" "$@"
else
  narrow=w256 wide=w768 rates=${RATES:-2.5e-4,5e-4,1e-3,2e-3,4e-3} seeds=1
  set -- --set data.train="$tokens" "$@"
fi
sweep() { # a rate that diverges ends its sweep with an error, and stands in sweep.json as failed
  local name=$1 config=$2
  shift 2
  rm -f "$runs/$name/sweep.json" # of an earlier call
  python3 -m pnn sweep "$configs/$config.yaml" --over training.learning_rate="$rates" --seeds "$seeds" --output "$runs/$name" "$@" ||
    [ -e "$runs/$name/sweep.json" ]
}
for optimizer in ${OPTIMIZERS:-adamw muon}; do
  sweep "${optimizer}_$narrow" "$narrow" --set training.optimizer="$optimizer" "$@"
  sweep "${optimizer}_$wide" "$wide" --set training.optimizer="$optimizer" "$@"
  sweep "${optimizer}_${wide}_plain" "$wide" --set training.optimizer="$optimizer" --set training.base_width=null --seeds 1 "$@"
done
