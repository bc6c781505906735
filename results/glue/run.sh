#!/usr/bin/env bash
# Pretrains an encoder and fine-tunes it on every task that has a training set. Usage: results/glue/run.sh DATA RUNS [MODEL…]
# DATA holds wikipedia/part-0[0-4].txt.xz, vocab.txt (BERT uncased), and glue/ and superglue/ with the official files. MODEL: pnn, pnn_tied, bert.
# What is done is left alone; what was stopped goes on. Fine-tuning waits for the host more than for the GPU: run it for several models at once.
set -euo pipefail
data=$1 runs=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$runs"
for model in ${*:-pnn pnn_tied bert}; do
  sed "s#DATA/#$data/#" "$here/configs/$model.yaml" > "$runs/$model.yaml"
  [ -e "$runs/$model/evaluation.json" ] || python3 -m pnn train "$runs/$model.yaml" --output "$runs/$model" --resume --set data.prepared="$runs/prepared"
  for benchmark in glue superglue; do
    [ -n "${PRETRAIN_ONLY:-}" ] || python3 -m pnn finetune "$runs/$model" --task $benchmark --data "$data/$benchmark" --output "$runs/$model-$benchmark" \
      --learning-rates "${RATES:-5e-5,1e-4,2e-4}" --epochs 3 --seeds 3
  done
done
