"""Rows of training speed: ours through the real training path, the naive PNN and transformers' BERT beside it.

All three train on the sequences of one config. Speeds are of real tokens: padding that a baseline computes is not counted.
What favours the baselines: the naive one gets its batches padded and masked before the clock starts.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pnn.bench.bounds import rewriting_bytes
from pnn.bench.naive import MICRO_BATCH_ROWS, NaivePNN, NaiveTrainer, check_published_design
from pnn.bench.padding import Padded, micro_batches, pad
from pnn.bench.timing import Budget, clean_slate, peak_memory, time_updates
from pnn.bench.transformers_bert import build_bert, micro_batch_rows, time_bert_training
from pnn.config import RunConfig
from pnn.data.batches import special_tokens
from pnn.models import flops
from pnn.models.bert import BertBaselineConfig
from pnn.models.ddl import DDLConfig
from pnn.models.pnn import PNNConfig
from pnn.models.sections import model_config
from pnn.objectives import count_targets
from pnn.training.device import precision_of
from pnn.training.loop import Trainer
from pnn.training.optim import learning_rate
from pnn.training.updates import Update, updates_ahead

ENDLESS = 1_000_000_000  # updates; the clock stops them
NAIVE_UPDATES = 4  # prepared beforehand, used in turn
OPTIMIZER_BUDGET = Budget(seconds=0.5, blocks=5)
SHARE_UPDATES = 4  # over which the share of targets is counted


@dataclass(frozen=True)
class Text:
    """What speeds and FLOPs depend on in a config's text."""

    mean_length: float
    attended: float  # mean number of tokens that a token attends to
    target_share: float  # predicted positions over tokens


def device_of(run: RunConfig) -> torch.device:
    return torch.device("cuda" if precision_of(run)[1] else "cpu")


def precision_name(run: RunConfig) -> str:
    name = precision_of(run)[0]
    return "fp32" if name == "no" else name


@contextmanager
def trainer_of(run: RunConfig) -> Iterator[Trainer]:
    """Our real trainer, in a folder that is thrown away."""
    run = replace(run, training=replace(run.training, tensorboard=False))
    with tempfile.TemporaryDirectory() as folder:
        yield Trainer(run, Path(folder) / "run", quiet=True)


@contextmanager
def host_trainer_of(run: RunConfig) -> Iterator[Trainer]:
    """The same on the CPU: text, batches, masks and first weights for a baseline, nothing of ours on its GPU."""
    with trainer_of(replace(run, training=replace(run.training, device="cpu", precision="fp32", compile=False))) as trainer:
        yield trainer


def updates_of(trainer: Trainer, count: int = ENDLESS) -> Iterator[Update]:
    """The next updates of the trainer's stream, each with this process's share of the batches."""
    accelerator = trainer.accelerator
    return updates_ahead(trainer.stream, trainer.plan, accelerator.process_index, accelerator.num_processes, count)


def text_of(trainer: Trainer) -> Text:
    """Measured on the config's own text; takes a few updates from the trainer's stream."""
    if trainer.config.kind.causal:
        length = trainer.config.data.max_length
        return Text(length, (length + 1) / 2, (length - 1) / length)
    lengths = trainer.prepared.train.lengths[trainer.prepared.train_sequences].astype(np.float64)
    data, seed = trainer.config.data, trainer.config.training.seed
    targets = tokens = 0
    for update in updates_ahead(trainer.stream, trainer.plan, 0, 1, SHARE_UPDATES):  # every process counts for itself
        masked = [
            batch.mask(special_tokens(trainer.prepared.tokenizer), data.masked_in_training, seed, data.masking)
            for batch in update.batches
        ]
        targets += sum(int(count_targets(part.labels)) for part in masked)
        tokens += update.tokens
    return Text(float(lengths.mean()), float((lengths**2).sum() / lengths.sum()), targets / tokens)


def shapes(run: RunConfig, text: Text, **more: Any) -> dict[str, Any]:
    return {
        "effective_batch_size": run.training.effective_batch_size,
        **more,
        "max_length": run.data.max_length,
        "mean_length": text.mean_length,
        "target_share": text.target_share,
    }


def row_of(name: str, run: RunConfig, what: str, measured: dict[str, Any], per_token: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "what": what, "config": run.name, **more, **measured, "flops_per_token": per_token}


# Ours -------------------------------------------------------------------------------------------------------------


def train_row(run: RunConfig, budget: Budget, name: str | None = None) -> dict[str, Any]:
    """Our training loop's own update: batches assembled ahead, masking, forward, backward, clipping, optimiser."""
    device = device_of(run)
    clean_slate(device)
    with trainer_of(run) as trainer:
        accelerator = trainer.accelerator
        text = text_of(trainer)
        trainer.wrapped.train()
        with closing(updates_of(trainer)) as updates:  # type: ignore[type-var]

            def one_update() -> float:
                update = next(updates)
                trainer.apply(update, learning_rate(trainer.step, trainer.plan.updates, trainer.config.training))
                trainer.step += 1
                return update.tokens

            def agreed(seconds: float) -> float:
                return float(accelerator.reduce(torch.tensor(seconds, device=accelerator.device), "mean"))

            measured = time_updates(one_update, budget, accelerator.device, agreed)
        plan, config = trainer.plan, trainer.model.config
        return row_of(
            name or row_name(run),
            run,
            "train",
            measured,
            flops.training_flops(config, text.attended, text.target_share),
            implementation="pnn",
            parameters=parameters_of(trainer.model),
            precision=precision_name(run),
            compiled=trainer.compiled,
            shapes=shapes(run, text, batch_tokens=plan.batch_tokens, micro_batches=plan.accumulation, **size_of(config)),
            peak_memory_bytes=peak_memory(accelerator.device),
            **_muon(trainer),
            **_bytes_of(config, accelerator.device),
        )


def _muon(trainer: Trainer) -> dict[str, float]:
    """How long Muon's own step takes, by itself."""
    if trainer.config.training.optimizer != "muon":
        return {}
    for p in trainer.model.parameters():
        if p.grad is None:
            p.grad = 1e-3 * torch.randn_like(p)

    def step() -> float:
        trainer.optimizer.step()
        return 1.0

    timed = time_updates(step, OPTIMIZER_BUDGET, trainer.accelerator.device)
    return {"muon_milliseconds": timed["milliseconds_per_update"]}


def _bytes_of(config: Any, device: torch.device) -> dict[str, int]:
    """What a decoder's rewriting moves, where it moves what kernels do."""
    if not isinstance(config, DDLConfig) or config.residual == "additive" or device.type != "cuda":
        return {}
    return {"rewriting_bytes_per_token": rewriting_bytes(config)}


def row_name(run: RunConfig) -> str:
    """What a row is called: the architecture, and of a decoder what carries its state."""
    config = model_config(run.model)
    if isinstance(config, PNNConfig) and config.update == "rewrite":
        return f"{run.kind.type} rewrite"
    if not isinstance(config, DDLConfig):
        return run.kind.type
    carrier = "scalar" if config.value_channels == 1 else config.compressor
    if config.residual == "additive":
        return "ddl additive" if config.value_channels == 1 else f"ddl additive {carrier}"
    return f"ddl {carrier}" if config.residual == "delta" else f"ddl write-only {carrier}"


def size_of(config: Any) -> dict[str, int]:
    return {"width": config.hidden_size, "steps": flops.blocks(config)}


def parameters_of(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# Baselines --------------------------------------------------------------------------------------------------------


def padded_updates(trainer: Trainer, count: int) -> list[tuple[list[Padded], int]]:
    """So many updates as padded micro-batches, with their real tokens: the sequences and masks that our loop would take."""
    data, seed = trainer.config.data, trainer.config.training.seed
    pad_token = trainer.prepared.tokenizer.pad_token_id or 0
    out = []
    for update in updates_of(trainer, count):
        parts = []
        for batch in update.batches:
            masked = batch.mask(special_tokens(trainer.prepared.tokenizer), data.masked_in_training, seed, data.masking)
            parts.append(pad(batch, masked, data.max_length, pad_token))
        rows = min(MICRO_BATCH_ROWS, trainer.config.training.batch_size)
        out.append((micro_batches(parts, rows), update.tokens))
    return out


def naive_train_row(run: RunConfig, budget: Budget) -> dict[str, Any]:
    device = device_of(run)
    clean_slate(device)
    with host_trainer_of(run) as host:
        config = host.model.config
        text = text_of(host)
        assert isinstance(config, PNNConfig)
        check_published_design(config)
        prepared = padded_updates(host, NAIVE_UPDATES)
        trainer = NaiveTrainer(NaivePNN.from_pnn(host.model), run.training, host.plan.updates, device)
    supply = itertools.cycle(prepared)

    def one_update() -> float:
        batches, tokens = next(supply)
        trainer.update(batches)
        return tokens

    measured = time_updates(one_update, budget, device)
    rows = [len(batch.input_ids) for batch in prepared[0][0]]
    return row_of(
        "naive pnn",
        run,
        "train",
        measured,
        flops.training_flops(config, text.attended, text.target_share),
        implementation="naive",
        parameters=parameters_of(trainer.model),
        precision=trainer.precision,
        compiled=False,
        shapes=shapes(run, text, rows=rows[0], micro_batches=len(rows), **size_of(config)),
        peak_memory_bytes=peak_memory(device),
    )


def transformers_train_row(run: RunConfig, budget: Budget) -> dict[str, Any]:
    device, precision = device_of(run), precision_name(run)
    clean_slate(device)
    with host_trainer_of(run) as host:
        config, text, prepared = host.model.config, text_of(host), host.prepared
    assert isinstance(config, BertBaselineConfig)
    clean_slate(device)  # HF Trainer chooses its device itself
    model = build_bert(config)
    parameters = parameters_of(model)
    measured = time_bert_training(model, run, prepared, budget, device, precision)
    rows = micro_batch_rows(run)
    return row_of(
        "transformers bert",
        run,
        "train",
        measured,
        flops.training_flops(with_transform(config), text.attended, text.target_share),
        implementation="transformers",
        parameters=parameters,
        precision=precision,
        compiled=False,
        shapes=shapes(run, text, rows=rows, micro_batches=run.training.effective_batch_size // rows, **size_of(config)),
        peak_memory_bytes=peak_memory(device),
    )


def with_transform(config: BertBaselineConfig) -> BertBaselineConfig:
    """transformers' head has one more matrix than ours."""
    return BertBaselineConfig(**(config.to_dict() | {"head_transform": True}))
