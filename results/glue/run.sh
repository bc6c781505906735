#!/usr/bin/env bash
# Pretrains encoders and fine-tunes each on every task that has a training set. Usage: results/glue/run.sh DATA RUNS [MODEL…]
# DATA holds wikipedia/part-0[0-4].txt.xz, vocab.txt (BERT uncased), and glue/ and superglue/ with the official files.
# MODEL: pnn, pnn_tied, bert, or any finished run RUNS/MODEL. What is done is left alone; what was stopped goes on.
# Fine-tuning on small batches waits for the host and not for the GPU, so JOBS tasks share it (with CUDA's multi-process service, if
# it runs, they compute side by side). TASKS="cola stsb" takes some tasks only, RATES=1e-4 one rate instead of three.
set -euo pipefail
data=$1 runs=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
models=${*:-pnn pnn_tied bert}
mkdir -p "$runs"
for model in $models; do
  [ -e "$runs/$model/evaluation.json" ] && continue
  sed "s#DATA/#$data/#" "$here/configs/$model.yaml" > "$runs/$model.yaml"
  python3 -m pnn train "$runs/$model.yaml" --output "$runs/$model" --resume --set data.prepared="$runs/prepared"
done
[ -z "${PRETRAIN_ONLY:-}" ] || exit 0
for task in "glue sst2 128" "glue cola 32" "superglue wic 32" "glue stsb 32" "glue mrpc 32" "glue rte 32" "glue wnli 32" "superglue copa 32" "superglue cb 32"; do
  name=${task#* }
  [[ " ${TASKS:-${name% *}} " == *" ${name% *} "* ]] || continue
  for model in $models; do echo "$model $task"; done
done | xargs -P "${JOBS:-4}" -L 1 bash -c 'python3 -m pnn finetune "$1/$2" --task "$4" --data "$0/$3" --output "$1/$2-$3" --batch-size "$5" \
  --learning-rates "${RATES:-5e-5,1e-4,2e-4}" --epochs 3 --seeds 3 > "$1/$2-$4.log" 2>&1 || { echo "failed: $2 on $4, see $1/$2-$4.log"; exit 1; }' "$data" "$runs"
