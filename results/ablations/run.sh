#!/usr/bin/env bash
# All arms with three seeds, one after another, about 35 minutes of one core. Usage: results/ablations/run.sh SWEEP
# Stopped, the same command goes on.
set -euo pipefail
arms=()
for arm in pnn no_gate steps_2 steps_8 ffn_64 published tied_head delta_rule four_refiners_twice rewrite rewrite_four_refiners_twice; do
  arms+=("$(dirname "$0")/configs/$arm.yaml")
done
OMP_NUM_THREADS=1 python3 -m pnn sweep "${arms[@]}" --seeds 3 --jobs 1 --output "$1"
