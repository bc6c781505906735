#!/usr/bin/env bash
# Rates, then every arm with three seeds. Usage: results/causal_pnn/run.sh SIZE RUNS [pnn sweep arguments]
# SIZE: mini (a GPU; text by --set data.train='text/*.txt.xz'), text (likewise, a CPU) or toy (the embedded corpus, a CPU).
# Stopped, the same command goes on.
set -euo pipefail
size=$1 runs=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$runs"
python3 "$here/arms.py" "$runs/tried" --size "$size"
rm -f "$runs/rates/sweep.json" # of an earlier call
python3 -m pnn sweep "$runs"/tried/{additive,delta,pnn}_once.yaml --over training.learning_rate="$(cat "$runs/tried/rates")" --output "$runs/rates" "$@" ||
  [ -e "$runs/rates/sweep.json" ] # a rate that diverges stands in it as failed
python3 "$here/arms.py" "$runs/configs" --size "$size" --rates "$runs/rates"
python3 -m pnn sweep "$runs"/configs/{additive,delta,pnn}_{once,half_twice,twice}.yaml "$runs/configs/additive_deep.yaml" \
  --seeds 3 --output "$runs/main" "$@"
