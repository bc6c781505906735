#!/usr/bin/env bash
# One part of the comparison. Usage: results/hybrids/run.sh PART RUNS [pnn sweep arguments]
# PART: look (every arm, one seed) or seeds (the arms named in ARMS, three seeds). Stopped, the same command goes on.
# With TOKENS, a folder of token shards (results/better_than_bert/README.md), it is the question at width 768 on a GPU; with TEXT, a
# file of real text, at the quickstart's width on a CPU; else at the quickstart's size on the embedded corpus.
set -euo pipefail
part=$1 runs=$2
shift 2
configs=$(cd "$(dirname "$0")" && pwd)/configs
case $part in
  look) arms=(looped entering leaving both_ends one eight four_once both_ends_long) seeds=1 ;;
  seeds) read -ra arms <<<"${ARMS:?name the best three after the look, looped first: ARMS='looped both_ends eight'}"; seeds=3 ;;
  *) echo "no part $part: look or seeds" >&2; exit 2 ;;
esac
if [ -n "${TOKENS:-}" ]; then
  set -- --set data.train="$TOKENS" --set data.max_length=128 --set data.max_sequences=1000000 --set data.validation_sequences=3000 \
    --set data.train_mask_probability=0.3 --set model.hidden_size=768 --set model.num_attention_heads=12 \
    --set model.intermediate_size=2048 --set model.initializer_range=0.02 --set model.positions=rotary \
    --set model.tie_word_embeddings=true --set model.head_transform=true --set training.learning_rate=2e-3 \
    --set training.min_learning_rate=1e-5 --set training.warmup_steps=300 --set training.batch_size=625 \
    --set training.effective_batch_size=625 --set training.max_steps=$((seeds == 1 ? 1600 : 4800)) \
    --set training.evaluate_every=1600 --set training.save_every=1600 "$@"
elif [ -n "${TEXT:-}" ]; then
  set -- --set data.train="$TEXT" --set data.max_length=128 --set data.max_sequences=20000 --set data.validation_sequences=800 \
    --set data.vocab_size=1024 --set model.vocab_size=1024 --set data.train_mask_probability=0.3 --set model.positions=rotary \
    --set model.tie_word_embeddings=true --set training.batch_size=16 --set training.effective_batch_size=16 "$@"
fi
files=("${arms[@]/#/$configs/}")
files=("${files[@]/%/.yaml}")
python3 -m pnn sweep "${files[@]}" --seeds "$seeds" --output "$runs/$part" "$@"
