#!/usr/bin/env bash
# Pretrains a small encoder (or takes a finished run), fine-tunes it on SST-2 with a loss after every step, three seeds, and measures
# every way of stopping early on dev. Usage: results/halting/classifier/run.sh DATA RUNS [ENCODER]
# DATA holds wikipedia/part-00.txt.xz and glue/ with the official files. With a GPU and a better ENCODER the same command serves:
# OPTIONS="--rate 5e-5 --epochs 3" results/halting/classifier/run.sh DATA RUNS RUN (all training examples)
set -euo pipefail
data=$1 runs=$2 here=$(cd "$(dirname "$0")" && pwd)
encoder=${3:-$runs/encoder}
options=${OPTIONS:---limit 12000}
mkdir -p "$runs"
if [ ! -e "$encoder/evaluation.json" ]; then
  sed "s#DATA/#$data/#" "$here/encoder.yaml" > "$runs/encoder.yaml"
  python3 -m pnn train "$runs/encoder.yaml" --output "$encoder" --set data.prepared="$runs/prepared"
fi
# shellcheck disable=SC2086
python3 "$here/measure.py" "$encoder" "$data/glue" "$runs/tuned" "$here/measured.json" $options
python3 "$here/collect.py"
