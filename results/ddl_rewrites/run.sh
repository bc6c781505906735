#!/usr/bin/env bash
# Trains every variant with every seed. Usage: results/ddl_rewrites/run.sh DATA RUNS SEEDS JOBS [VARIANT…]
# DATA: folder with wikipedia/part-0[0-4].txt.xz and gpt2/tokenizer.json. SEEDS: "0 1 2". JOBS: runs at a time on one GPU; more than
# one share it, so the time axis comes from `pnn bench` and not from here. A seed is the same order of the same text for all.
set -euo pipefail
data=$1 runs=$2 seeds=$3 jobs=$4
shift 4
here=$(cd "$(dirname "$0")" && pwd)
variants=${*:-additive scalar delta write_only additive_expanded token}
mkdir -p "$runs"
for seed in $seeds; do
  for variant in $variants; do
    sed "s#DATA/#$data/#" "$here/configs/$variant.yaml" > "$runs/$variant.yaml"
    [ -e "$runs/$variant-$seed/evaluation.json" ] || echo "$variant $seed"
  done
done | xargs -P "$jobs" -L 1 bash -c 'python3 -m pnn train "$0/$2.yaml" --seed "$3" --output "$0/$2-$3" --resume --set data.prepared="$1" > "$0/$2-$3.log" 2>&1 || { echo "failed: $2 $3, see $0/$2-$3.log"; exit 1; }' "$runs" "${PREPARED:-$runs/prepared}"
