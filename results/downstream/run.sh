#!/usr/bin/env bash
# Fine-tunes the checkpoints of results/better_than_bert (b) as results/glue does its own. Usage: results/downstream/run.sh DATA RUNS
# DATA holds glue/ and superglue/ with the official files; RUNS is the folder that results/better_than_bert/run.sh filled.
set -euo pipefail
data=$1 runs=$2
models="pnn_rewrite bert4 bert12"
for model in $models; do ln -sfn "b/$model/seed-0" "$runs/$model"; done
"$(dirname "$0")"/../glue/run.sh "$data" "$runs" $models
