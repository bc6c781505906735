#!/usr/bin/env bash
# One part of the comparison. Usage: results/hybrids/run.sh PART RUNS [pnn sweep arguments]
# PART: look (every arm, one seed) or seeds (the arms named in ARMS, three seeds). Stopped, the same command goes on.
# At the size of the question: --set data.train=TOKENS --set model.hidden_size=768 … (README.md beside).
set -euo pipefail
part=$1 runs=$2
shift 2
configs=$(cd "$(dirname "$0")" && pwd)/configs
case $part in
  look) arms=(looped entering leaving both_ends one eight four_once both_ends_long) seeds=1 ;;
  seeds) read -ra arms <<<"${ARMS:?name the best three after the look, looped first: ARMS='looped both_ends eight'}"; seeds=3 ;;
  *) echo "no part $part: look or seeds" >&2; exit 2 ;;
esac
files=("${arms[@]/#/$configs/}")
files=("${files[@]/%/.yaml}")
python3 -m pnn sweep "${files[@]}" --seeds "$seeds" --output "$runs/$part" "$@"
