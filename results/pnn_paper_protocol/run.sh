#!/usr/bin/env bash
# Trains one reading from start to end and evaluates it. Usage: results/pnn_paper_protocol/run.sh READING DATA RUNS [pnn arguments]
# READING: published, equations or bert. DATA: folder with wikipedia/part-0[0-4].txt.xz, wikitext-103/wiki.valid.{raw,tokens} and
# vocab.txt (BERT uncased). Writes RUNS/READING and RUNS/READING.wall.json: the seconds from start to end, evaluation included;
# run `pnn data prepare` first, so that tokenising the text, which all readings share, is not counted.
set -euo pipefail
reading=$1 data=$2 runs=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$runs"
sed "s#DATA/#$data/#" "$here/configs/$reading.yaml" > "$runs/$reading.yaml"
started=$(date +%s.%N)
python3 -m pnn train "$runs/$reading.yaml" --output "$runs/$reading" "$@"
echo "{\"seconds\": $(python3 -c "import sys; print(float(sys.argv[2]) - float(sys.argv[1]))" "$started" "$(date +%s.%N)")}" > "$runs/$reading.wall.json"
