#!/usr/bin/env bash
# One part of the measurement; stopped, the same command goes on. Usage:
#   results/halting/real_text/run.sh train TOKENS WIKITEXT RUNS [pnn sweep arguments]   # all models, three epochs
#   results/halting/real_text/run.sh measure RUNS    # oracle, accuracy and speed of every way to stop early, on this machine
#   results/halting/real_text/run.sh gpu TOKENS WIKITEXT RUNS [pnn sweep arguments]     # both of these
#   results/halting/real_text/run.sh pack RUNS       # the weights in bf16, in pieces of 15 MB: RUNS/pieces
#   results/halting/real_text/run.sh cpu RUNS        # speed on two cores, and which tokens stop when; needs RUNS/home.tar.gz
#                                                      # and RUNS/pieces, or the runs themselves
# TOKENS and WIKITEXT: folders of token shards (../../better_than_bert/README.md). What is to be kept lies in RUNS/home, and as one
# file in RUNS/home.tar.gz. WAYS and SPEED may hold further arguments of the two parts of measure.py.
set -euo pipefail
part=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
models=(pnn_paper pnn_rewrite_one pnn_paper_ready pnn_rewrite_one_ready)

train() {
  local tokens=$1 wikitext=$2 runs=$3
  shift 3
  python3 -m pnn sweep "$here"/../../better_than_bert/configs/pnn_paper.yaml "$here"/pnn_*.yaml --output "$runs/trained" \
    --set training.epochs=3 --set data.train="$tokens" --set evaluation.sets.wikitext_tokens.source="$wikitext" "$@"
}

measure() {
  local runs=$1 model run home
  # shellcheck disable=SC2086
  for model in $(known "$runs"); do
    run=$runs/trained/$model/seed-0 home=$runs/home/$model
    [ -e "$home/ways.json" ] || python3 "$here/measure.py" ways "$run" "$home" ${WAYS:-}
    compgen -G "$home/speed-nvidia*.json" > /dev/null || python3 "$here/measure.py" speed "$run" "$home" ${SPEED:-}
    together "$runs"
  done
  for model in $(known "$runs"); do # last, because it may take longest and changes no other number
    run=$runs/trained/$model/seed-0 home=$runs/home/$model
    [ -e "$home/analysis/halting.json" ] || python3 -m pnn analyze halting "$run" --data "$(wikitext_of "$run")" --batch-tokens 65536 --output "$home"
    together "$runs"
  done
}

known() { # those of the models that were trained in RUNS, or came in pieces
  local model
  for model in "${models[@]}"; do
    if [ -d "$1/trained/$model/seed-0" ] || [ -d "$1/weights/$model" ] || compgen -G "$1/pieces/$model.*" > /dev/null; then echo "$model"; fi
  done
}
wikitext_of() { python3 -c 'import sys, yaml; print(yaml.safe_load(open(sys.argv[1]))["evaluation"]["sets"]["wikitext_tokens"]["source"])' "$1/config.yaml"; }
together() { tar -C "$1" -czf "$1/home.tar.gz.new" home && mv "$1/home.tar.gz.new" "$1/home.tar.gz"; }

pack() {
  local runs=$1 model
  mkdir -p "$runs/pieces"
  for model in $(known "$runs"); do
    weights "$runs" "$model"
    tar -C "$runs/weights" -c "$model" | split -b 15000000 -d - "$runs/pieces/$model."
  done
}

weights() { # RUNS/weights/MODEL, from the run or from its pieces
  local runs=$1 model=$2
  [ -e "$runs/weights/$model/config.json" ] && return
  mkdir -p "$runs/weights"
  if [ -d "$runs/trained/$model/seed-0" ]; then
    python3 -m pnn export "$runs/trained/$model/seed-0" --bf16 --no-remote-code --output "$runs/weights/$model"
  else
    rm -rf "$runs/unpacking" && mkdir "$runs/unpacking"
    cat "$runs/pieces/$model."* | tar -C "$runs/unpacking" -x
    mv "$runs/unpacking/$model" "$runs/weights/" # whole or not at all
  fi
}

cpu() {
  local runs=$1 model
  [ -d "$runs/home" ] || tar -C "$runs" -xzf "$runs/home.tar.gz"
  # shellcheck disable=SC2086
  for model in $(known "$runs"); do
    weights "$runs" "$model"
    [ -e "$runs/home/$model/speed-cpu-2-cores.json" ] ||
      CUDA_VISIBLE_DEVICES="" python3 "$here/measure.py" speed "$runs/weights/$model" "$runs/home/$model" ${SPEED:-}
    [ -e "$runs/home/$model/groups.json" ] ||
      CUDA_VISIBLE_DEVICES="" python3 "$here/measure.py" groups "$runs/weights/$model" "$runs/home/$model"
  done
}

case $part in
  train | measure | pack | cpu) "$part" "$@" ;;
  gpu) train "$@" && measure "$3" ;;
  *) echo "no part $part: train, measure, gpu, pack or cpu" >&2; exit 2 ;;
esac
