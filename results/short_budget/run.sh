#!/usr/bin/env bash
# Trains the four rows of the table, one after the other. Usage: results/short_budget/run.sh DATA RUNS [pnn arguments]
# DATA: folder with wikipedia/part-0[01].txt.xz, wikitext-103/wiki.valid.{tokens,raw} and vocab.txt (BERT uncased).
set -euo pipefail
data=$1 runs=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$runs"
for row in pnn_delta_norm bert pnn pnn_tied; do
  sed "s#DATA/#$data/#" "$here/configs/$row.yaml" > "$runs/$row.yaml"
  python3 -m pnn train "$runs/$row.yaml" --output "$runs/$row" "$@"
done
