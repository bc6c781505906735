#!/usr/bin/env bash
# Trains the quickstart's PNN and its rewriting form, two seeds each, and the rewriting form on the harder embedded corpus, and
# bounds what halting could save in each. Usage: results/halting/run.sh RUNS
# Any other finished PNN run that lies in RUNS (the paper's, on a GPU) is analysed too.
set -euo pipefail
runs=$1
mkdir -p "$runs"
train() { [ -e "$runs/$1/evaluation.json" ] || python3 -m pnn train "$2" --output "$runs/$1" "${@:3}"; }
for form in pnn rewrite; do
  train "$form" "quickstart_$form"
  train "${form}_1" "quickstart_$form" --set training.seed=1
done
train hard_rewrite quickstart_rewrite --set data.train=synthetic_hard
for run in "$runs"/*/; do
  python3 -m pnn analyze halting "${run%/}"
done
