#!/usr/bin/env bash
# One part of the comparison. Usage: results/hybrids/run.sh PART RUNS [pnn sweep arguments]
# PART: look (every arm, one seed) or seeds (the arms named in ARMS, three seeds). Stopped, the same command goes on.
# With TOKENS and WIKITEXT, folders of token shards (results/better_than_bert/README.md), it is the question at width 768 on a GPU; with
# TEXT, a file of real text, at the quickstart's width on a CPU; else at the quickstart's size on the embedded corpus.
set -euo pipefail
part=$1 runs=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
arms=(entering leaving both_ends one eight four_once both_ends_long)
case $part in
  look) seeds=1 ;;
  seeds) read -ra arms <<<"${ARMS:?name arms: ARMS='looped both_ends eight'}"; seeds=3 ;;
  *) echo "no part $part: look or seeds" >&2; exit 2 ;;
esac
if [ -n "${TOKENS:-}" ]; then # looped is trained in results/better_than_bert; folders have the names of its parts
  configs=$here/wide
  if [ "$part" = look ]; then part=looks; else part=a; fi
  set -- --set data.train="$TOKENS" --set evaluation.sets.wikitext_tokens.source="${WIKITEXT:?}" --set training.epochs=$seeds "$@"
else
  configs=$here/configs
  [ "$part" = seeds ] || arms=(looped "${arms[@]}")
  if [ -n "${TEXT:-}" ]; then
    set -- --set data.train="$TEXT" --set data.max_length=128 --set data.max_sequences=20000 --set data.validation_sequences=800 \
      --set data.vocab_size=1024 --set model.vocab_size=1024 --set data.train_mask_probability=0.3 --set model.positions=rotary \
      --set model.tie_word_embeddings=true --set training.batch_size=16 --set training.effective_batch_size=16 "$@"
  fi
fi
files=("${arms[@]/#/$configs/}")
files=("${files[@]/%/.yaml}")
python3 -m pnn sweep "${files[@]}" --seeds "$seeds" --output "$runs/$part" "$@"
