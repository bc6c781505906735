#!/usr/bin/env bash
# Every analysis and all ten experiments on finished runs. Usage: results/pnn_evidence/run.sh RUN…   (run folders of full-size PNNs)
# Results stay in the run folders; collect.py copies them here.
set -euo pipefail
for run in "$@"; do
  for analysis in convergence gates optimisation; do
    python3 -m pnn analyze "$analysis" "$run"
  done
  python3 -m pnn evidence "$run"
done
