#!/usr/bin/env bash
# One run at size mini, as run.sh does them, for a GPU that is there for half an hour at a time.
# Usage: results/causal_pnn/one.sh PART ARM RATE SEED DATA RUNS [pnn train arguments]
# PART: rates or main. DATA: a folder with text/part-0[0-4].txt.xz and gpt2/tokenizer.json. Stopped, the same command goes on.
set -euo pipefail
part=$1 arm=$2 rate=$3 seed=$4 data=$5 runs=$6
shift 6
here=$(cd "$(dirname "$0")" && pwd)
python3 "$here/arms.py" "$runs/tried" --size mini
folder=$runs/$part/$arm
[ "$part" = main ] || folder=$folder-learning_rate=$rate
python3 -m pnn train "$runs/tried/$arm.yaml" --seed "$seed" --output "$folder/seed-$seed" --resume --set data.train="$data/text/*.txt.xz" \
  --set data.tokenizer="$data/gpt2/tokenizer.json" --set data.prepared="$runs/prepared" --set training.learning_rate="$rate" \
  --set training.min_learning_rate="$(python3 -c "print($rate / 10)")" "$@"
