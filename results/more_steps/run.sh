#!/usr/bin/env bash
# Train all models with three seeds and ask more_steps of each. Usage: results/more_steps/run.sh RUNS [pnn sweep arguments]
# UPDATES=rewrite asks for one update alone, ARMS='fixed recall' for some ways of training. Stopped, the same command goes on.
# With TEXT, a file of real text, the models learn that; else the embedded corpus. Other sizes: --set model.hidden_size=768 and so on.
set -euo pipefail
runs=$1
shift
configs=$(cd "$(dirname "$0")" && pwd)/configs
if [ -n "${TEXT:-}" ]; then # as in results/hybrids
  set -- --set data.train="$TEXT" --set data.max_length=128 --set data.max_sequences=20000 --set data.validation_sequences=800 \
    --set data.vocab_size=1024 --set model.vocab_size=1024 --set data.train_mask_probability=0.3 --set model.positions=rotary \
    --set model.tie_word_embeddings=true --set training.batch_size=16 --set training.effective_batch_size=16 \
    --set training.max_steps=1000 --set training.evaluate_every=1000 --set training.save_every=1000 "$@"
fi
read -ra arms <<<"${ARMS:-fixed random long recall recall_long}"
for update in ${UPDATES:-gated rewrite}; do
  files=("${arms[@]/#/$configs/${update}_}")
  python3 -m pnn sweep "${files[@]/%/.yaml}" --seeds 3 --output "$runs/$update" "$@"
  for run in "$runs/$update"/*/seed-*; do
    python3 -m pnn analyze more_steps "$run"
  done
done
