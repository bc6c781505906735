#!/usr/bin/env bash
# Train all models with three seeds and ask more_steps of each. Usage: results/more_steps/run.sh RUNS [pnn sweep arguments]
# UPDATES=rewrite asks for one update alone. Stopped, the same command goes on. At another size: --set model.hidden_size=768 and so on.
set -euo pipefail
runs=$1
shift
configs=$(cd "$(dirname "$0")" && pwd)/configs
for update in ${UPDATES:-gated rewrite}; do
  arms=(fixed random)
  [ "$update" = rewrite ] && arms+=(long recall recall_long)
  files=("${arms[@]/#/$configs/${update}_}")
  python3 -m pnn sweep "${files[@]/%/.yaml}" --seeds 3 --output "$runs/$update" "$@"
  for run in "$runs/$update"/*/seed-*; do
    python3 -m pnn analyze more_steps "$run"
  done
done
