#!/usr/bin/env bash
# One part of the comparison. Usage: results/better_than_bert/run.sh PART TOKENS WIKITEXT RUNS [pnn sweep arguments]
# PART: looks, rates, second, go_on, speeds, a or b. TOKENS and WIKITEXT: folders of token shards (README.md beside). Every part but speeds is a
# sweep: stopped, the same command goes on. Before `a` each config holds its model's best rate.
set -euo pipefail
part=$1 tokens=$2 wikitext=$3 runs=$4
shift 4
configs=$(cd "$(dirname "$0")" && pwd)/configs
sweep() { # NAME, then what `pnn sweep` takes
  local name=$1
  shift
  python3 -m pnn sweep "$@" --output "$runs/$name" --set data.train="$tokens" --set evaluation.sets.wikitext_tokens.source="$wikitext"
}
case $part in
  looks) sweep looks "$configs"/looks/{base,token,rounds3,open,last,rotary,geglu,recall,learned_recall,narrow,recalls,guess,halfway}.yaml "$configs"/bert12_again.yaml --set training.epochs=1 "$@" ;;
  rates)
    for model in pnn_rewrite pnn_gateless bert4 bert12 pnn_paper; do
      sweep "rates_$model" "$configs/$model.yaml" --over training.learning_rate=5e-4,1e-3,2e-3 --set training.epochs=1 "$@"
    done ;;
  second) # the candidates for the second form, rule 10, and what rule 13 adds to it
    for model in pnn_thrice pnn_wide pnn_twelve pnn_again; do
      sweep "rates_$model" "$configs/$model.yaml" --over training.learning_rate=2e-3 --set training.epochs=1 "$@"
    done ;;
  go_on) # the best of these, for three epochs: FORMS='pnn_wide pnn_twelve'
    read -ra forms <<<"${FORMS:?the best candidates after one epoch}"
    forms=("${forms[@]/#/$configs/}")
    sweep a2 "${forms[@]/%/.yaml}" --set training.epochs=3 "$@" ;;
  speeds) # with nothing else on the GPU
    python3 -m pnn bench "$configs"/{pnn_rewrite,pnn_gateless,${FORM:-pnn_wide},bert4,bert12,pnn_paper}.yaml --what train,inference --against none \
      --output "$runs/speeds.json" --set data.train="$tokens" --set evaluation.sets.wikitext_tokens.source="$wikitext" "$@" ;;
  a)
    sweep a5 "$configs"/pnn_rewrite.yaml "$configs"/bert4.yaml --seeds 5 --set training.epochs=3 "$@"
    sweep a3 "$configs"/pnn_gateless.yaml "$configs"/bert12.yaml --seeds 3 --set training.epochs=3 "$@"
    sweep a1 "$configs"/pnn_paper.yaml --set training.epochs=3 "$@"
    [ -n "${FORM:-}" ] || exit 0 # the second form, if there is one
    sweep a55 "$configs/$FORM.yaml" --seeds 5 --set training.epochs=3 "$@"
    sweep a33 "$configs/${FORM}_gateless.yaml" --seeds 3 --set training.epochs=3 "$@"
    [ "$FORM" != pnn_again ] || sweep a34 "$configs/bert12_again.yaml" --seeds 3 --set training.epochs=3 "$@" ;;
  b) sweep b "$configs"/pnn_rewrite.yaml "$configs"/bert4.yaml "$configs"/bert12.yaml ${FORM:+"$configs/$FORM.yaml"} --set training.epochs=10 "$@" ;;
  *) echo "no part $part: looks, rates, second, go_on, speeds, a or b" >&2; exit 2 ;;
esac
