#!/usr/bin/env bash
# Everything behind this folder's numbers, in steps. Usage: results/plasticity_study/run.sh DATA RUNS [STEP…]
# DATA holds wikipedia/part-0[0-3].txt.xz (to pretrain on), wikipedia/study.txt.xz (12 MB of part-04, see README.md), gpt2/tokenizer.json,
# stories15M/ and SmolLM2-135M-Instruct.Q4_1.gguf. A step that is done is left alone; one that was stopped goes on.
# JOBS: processes that share the GPU in a study. DEFAULT steps: all, in this order.
set -euo pipefail
mkdir -p "$2"
data=$(cd "$1" && pwd) runs=$(cd "$2" && pwd) # some steps work from another folder
shift 2
here=$(cd "$(dirname "$0")" && pwd)
jobs=${JOBS:-8}
pnn="python3 -m pnn"
text=$data/wikipedia/study.txt.xz

pretrain() { # CONFIG [SETTING…]
  name=$1
  shift
  [ -e "$runs/$name/evaluation.json" ] || $pnn train "$name" --output "$runs/$name" --resume \
    --set data.train="$data/wikipedia/part-0[0-3].txt.xz" --set data.validation_sequences=500 \
    --set data.tokenizer="$data/gpt2/tokenizer.json" --set data.prepared="$runs/prepared" \
    --set training.save_every=100000 --set training.keep_checkpoints=1 --set training.tensorboard=false "$@"
}

study() { # NAME MODEL… --data TEXT…
  name=$1
  shift
  (cd "$runs" && $pnn plasticity study "$@" --output "$runs/$name" --max-length 256 --batch-size 16 --validation-rows 128 \
    --learn-steps 100 --jobs "$jobs" --resume)
}

cycle() { # NAME MODEL [OPTION…]
  name=$1 model=$2
  shift 2
  [ -e "$runs/$name/summary.json" ] || (cd "$runs" && $pnn plasticity cycle "$model" --data "$text" --output "$runs/$name" \
    --resume --max-length 512 --batch-size 16 --learn-steps 200 --validation-rows 128 "$@")
}

longer() { # ten times the study's updates, on ten times the text: does growth begin to matter? Twelve small cycles side by side
  [ -e "$runs/more_stories.txt" ] || python3 "$here/stories.py" "$data/stories15M" "$runs/more_stories.txt" 20480
  started=()
  for seed in 0 1 2; do
    for arm in "control --prune 0 --grow 0" "none --grow 0" "gradient --grow-by gradient" "random --grow-by random"; do
      set -- $arm
      name=longer_$1_$seed
      shift
      [ -e "$runs/$name/summary.json" ] || (cd "$runs" && $pnn plasticity cycle "$data/stories15M" --data "$runs/more_stories.txt" --output "$runs/$name" --resume \
        --max-length 256 --batch-size 16 --learn-steps 1000 --evaluate-every 100 --validation-rows 128 --seed "$seed" "$@" > "$runs/$name.log" 2>&1) &
      started+=($!)
    done
  done
  failed=0
  for one in "${started[@]}"; do wait "$one" || failed=$((failed + 1)); done # wait without a name forgets what failed
  [ $failed = 0 ] || { echo "$failed of the cycles failed: see $runs/longer_*.log" >&2 && return 1; }
}

for step in ${*:-convert stories study_llama distil study_distil small study_small longer opt cycle_smollm2 cycle_opt speeds heads}; do
  echo "== $step, $(date +%T)"
  case $step in
    convert) [ -e "$runs/SmolLM2-135M" ] || python3 "$here/convert.py" "$data/SmolLM2-135M-Instruct.Q4_1.gguf" "$runs/SmolLM2-135M" ;;
    stories) [ -e "$runs/stories.txt" ] || python3 "$here/stories.py" "$data/stories15M" "$runs/stories.txt" ;;
    distil) pretrain gpt2_distil ;;
    small) pretrain gpt2_small ;;
    opt) pretrain opt_350m --max-steps 200 --set training.warmup_steps=40 ;; # 13M tokens, which were too few (README.md)
    study_llama) study study_llama "$data/stories15M" "$runs/SmolLM2-135M" --data "$runs/stories.txt" --data "$text" ;;
    study_distil) study study_distil "$runs/gpt2_distil" --data "$text" ;;
    study_small) study study_small "$runs/gpt2_small" --data "$text" ;;
    cycle_smollm2) cycle cycle_smollm2 "$runs/SmolLM2-135M" ;;
    cycle_opt) cycle cycle_opt "$runs/opt_350m" ;;
    longer) longer ;;
    speeds) python3 "$here/speeds.py" "$runs" stories15M="$data/stories15M" SmolLM2-135M="$runs/SmolLM2-135M" gpt2_distil=gpt2_distil gpt2_small=gpt2_small ;;
    heads) python3 "$here/../../benchmarks/heads.py" "$runs/heads.json" ;;
    *) echo "no step $step" >&2 && exit 2 ;;
  esac
done
