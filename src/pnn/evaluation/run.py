"""Evaluate a run or checkpoint: on the validation text of its own config, and on any other text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pnn import runs
from pnn.config import DataConfig, EvaluationConfig, EvaluationSet
from pnn.data.corpora import open_source
from pnn.data.shards import Progress, prepare, prepare_source
from pnn.data.tokenizers import fingerprint, load_tokenizer
from pnn.errors import UserError
from pnn.evaluation.masked import evaluate_masked
from pnn.files import write_json
from pnn.models.base import MaskedLMBase
from pnn.models.sections import load_model


def evaluate_run(
    run: str | Path,
    *,
    progress: Progress,
    sets: dict[str, EvaluationSet] | None = None,
    num_steps: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Evaluate RUN's best checkpoint. A run folder is evaluated on its validation text and its config's sets and gets an
    evaluation.json; `sets` adds to them. A bare checkpoint needs `sets`."""
    checkpoint = runs.find_checkpoint(run)
    folder = runs.run_of(Path(checkpoint)) if isinstance(checkpoint, Path) else None
    if isinstance(checkpoint, Path):
        runs.verify_checkpoint(checkpoint)
    model = load_model(checkpoint)
    if not isinstance(model, MaskedLMBase):
        raise UserError(f"{checkpoint}: a {type(model).__name__} is not one of our models: it has no refinement steps to read")
    most = None if model.config.model_type == "pnn" else model.config.num_hidden_layers
    if num_steps is not None and (num_steps < 0 or (most is not None and num_steps > most)):
        raise UserError(f"--num-steps {num_steps}: this model takes 0 to {most or 'any number'}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    tokenizer = load_tokenizer(str(checkpoint), model.config.max_position_embeddings)
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"{checkpoint}: the tokenizer has {len(tokenizer):,} entries, the model {model.config.vocab_size:,}: "
            "they do not match"
        )
    config = runs.read_config(folder) if folder is not None else None
    data = config.data if config is not None else DataConfig(max_length=model.config.max_position_embeddings)
    settings = config.evaluation if config is not None else EvaluationConfig()
    use_bf16 = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)

    def measure(tokens: Any, sequences: Any) -> dict[str, Any]:
        return evaluate_masked(
            model,
            tokens,
            sequences,
            mask_probability=data.mask_probability,
            mask_seed=settings.mask_seed,
            batch_tokens=settings.batch_tokens,
            precision=torch.bfloat16 if use_bf16 else torch.float32,
            num_steps=num_steps,
        )

    result: dict[str, Any] = {
        "checkpoint": Path(checkpoint).name,
        "model_type": model.config.model_type,
        "parameters": sum(p.numel() for p in model.parameters()),
        "precision": "bf16" if use_bf16 else "fp32",
    }
    if config is not None:
        prepared = prepare(data, progress)
        if fingerprint(prepared.tokenizer) != fingerprint(tokenizer):
            raise UserError(f"{checkpoint}: its tokenizer is not the one that the run's config names: they do not match")
        result |= measure(prepared.validation, prepared.validation_sequences)
    wanted = settings.sets | (sets or {})
    if not wanted and config is None:
        raise UserError(f"{run} is a checkpoint without a run folder: say what to evaluate on with --data")
    for name, chosen in wanted.items():
        treatment = replace(data, undo_wikitext_marks=chosen.undo_wikitext_marks)
        tokens = prepare_source(open_source(chosen.source, treatment, "validation"), tokenizer, treatment, progress)
        result.setdefault("sets", {})[name] = measure(tokens, np.arange(len(tokens)))
    if folder is not None and Path(run).resolve() == folder and num_steps is None:
        write_json(folder / "evaluation.json", result)
    return result
