from __future__ import annotations

import re
from pathlib import Path

from pnn.cli import app
from pnn.config import RunConfig, load_config, shipped_configs


@app.command()
def configs() -> None:
    """List the shipped configs: name, parameters, and what each is.

    Example: pnn configs
    """
    from transformers.utils import logging

    logging.set_verbosity_error()  # GPT-2's special tokens lie beyond a small vocabulary
    width = max(map(len, shipped_configs()))
    for name, path in shipped_configs().items():
        print(f"{name:{width}}  {parameters(load_config(name)):>13,}  {summary(path)}")


def parameters(run: RunConfig) -> int:
    """Of the model that the config trains. It is never computed with, so it needs no memory."""
    import torch

    from pnn.data.tokenizers import of_synthetic_language
    from pnn.models.sections import build_model, model_config

    words = len(of_synthetic_language(run.data.max_length)) if run.data.tokenizer == "corpus" else None
    with torch.device("meta"):
        model = build_model(model_config(run.model, words, max_position_embeddings=run.data.max_length))
    return sum(parameter.numel() for parameter in model.parameters())


def summary(path: Path) -> str:
    """The first sentence of the comment that the config begins with, without the number of parameters."""
    comment = re.match(r"(#.*\n)+", path.read_text(encoding="utf-8"))
    assert comment is not None, path
    sentence = re.split(r"\.? `pnn train|\. ", " ".join(comment[0].replace("#", " ").split()))[0]
    return re.sub(r"(, at the same|[:.,])? \(?[\d,.]+M? parameters\)?", "", sentence).rstrip(".")
