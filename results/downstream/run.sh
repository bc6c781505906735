#!/usr/bin/env bash
# Fine-tunes the checkpoints of results/better_than_bert (b) as results/glue does its own. Usage:
#   results/downstream/run.sh DATA RUNS [MODEL…]     # pnn_rewrite, bert4, bert12
# DATA holds glue/ and superglue/ with the official files; RUNS is the folder that results/better_than_bert/run.sh filled. If
# pnn_rewrite is not in it, models/pnn-base, which has its weights in bf16, stands for it.
set -euo pipefail
data=$1 runs=$2
shift 2
models=${*:-pnn_rewrite bert4 bert12}
here=$(cd "$(dirname "$0")" && pwd)
for model in $models; do
  if [ "$model" = pnn_rewrite ] && [ ! -e "$runs/b/$model/seed-0" ]; then # beside what is collected there
    mkdir -p "$runs/committed/checkpoints"
    cp "$here/../better_than_bert/measured/b1/$model/seed-0"/* "$runs/committed"
    ln -sfn "$(cd "$here/../../models/pnn-base" && pwd)" "$runs/committed/checkpoints/best"
    ln -sfn committed "$runs/$model"
  else
    ln -sfn "b/$model/seed-0" "$runs/$model"
  fi
done
# shellcheck disable=SC2086
"$here/../glue/run.sh" "$data" "$runs" $models
[ -n "${TASKS:-}" ] || for model in $models; do touch "$runs/$model.tuned"; done # all tasks, not some
