"""The speeds of all studies once more, in one run on a machine that does nothing else. Shapes matter, weights do not.

python results/plasticity_study/speeds.py RUNS MODEL=CONFIG…      # CONFIG: a folder with a config.json, or a shipped config
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pnn.config import load_config
from pnn.files import write_json
from pnn.models.sections import build_model, model_config
from pnn.runs import read_json
from pnn.studies.plasticity.study import shape_speeds


def of_this_shape(config: str) -> PreTrainedModel:
    if Path(config).is_dir():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    return build_model(model_config(load_config(config, []).model))


def main() -> None:
    runs, configs = Path(sys.argv[1]), dict(one.split("=", 1) for one in sys.argv[2:])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for study in sorted(runs.glob("study_*")):
        for name in read_json(study / "plan.json")["models"]:
            model = of_this_shape(configs[name]).float().to(device)
            found = shape_speeds(study, name, model, read_json(study / "models" / f"{name}.json")["row_tokens"])
            write_json(study / "speed" / f"{name}.json", found)
            rates = found["rows"][-1]["tokens_per_second"]
            print(f"{name}: {rates['retrained']:,.0f} tokens/s whole, {rates['gradient-0.5']:,.0f} with half of the heads")


if __name__ == "__main__":
    main()
