"""The baseline a user would pick instead: transformers' `BertForMaskedLM`, trained by its `Trainer`.

Its own defaults, with what its documentation recommends for speed: SDPA, bf16 on a GPU, fused AdamW (its default), special
tokens marked beforehand, loader processes that stay alive. `DataCollatorForLanguageModeling` masks, and pads every row to
`max_length` (as a multiple to pad to, of which no row has more than one).
"""

from __future__ import annotations

import math
import os
import tempfile
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, TrainerCallback, TrainingArguments

from pnn.bench.timing import Budget, Clock
from pnn.config import RunConfig
from pnn.data.shards import Prepared
from pnn.errors import UserError
from pnn.models.bert import BertBaselineConfig

MICRO_BATCH_ROWS = 384  # at most: the paper's; more would not fit with logits at every position
ENDLESS = 1_000_000  # updates; the clock stops it


class TokenRows(Dataset[dict[str, Any]]):
    """A prepared token set as transformers wants it: a list of ids a row."""

    def __init__(self, prepared: Prepared):
        self.tokens, self.sequences = prepared.train, prepared.train_sequences
        self.special = set(prepared.tokenizer.all_special_ids)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.tokens.take(self.sequences[index : index + 1]).tolist()
        return {"input_ids": ids, "special_tokens_mask": [int(token in self.special) for token in ids]}


class StepTimer(TrainerCallback):
    """Ticks the clock after every update and stops the training when it is done."""

    def __init__(self, budget: Budget, device: torch.device, tokens_per_update: float):
        self.budget, self.device, self.tokens = budget, device, tokens_per_update
        self.clock: Clock | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.clock is None:  # from the first update's end: what goes before it is set-up
            self.clock = Clock(self.budget, self.device)
        elif self.clock.tick(self.tokens):
            control.should_training_stop = True
        return control


def check_transformers_has(config: BertBaselineConfig) -> None:
    for key, value in (("ffn", "gelu"), ("positions", "learned")):
        if getattr(config, key) != value:
            raise UserError(
                f"model.{key}: {getattr(config, key)} is not in transformers' BERT: set it to {value}, or leave transformers "
                "out of --against"
            )


def build_bert(config: BertBaselineConfig) -> BertForMaskedLM:
    """transformers' BERT at the size of our baseline: same width, depth, FFN, vocabulary and dropout."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_position_embeddings,
            hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=config.attention_dropout,
            pad_token_id=config.pad_token_id,
            attn_implementation="sdpa",
        )
    )


def micro_batch_rows(run: RunConfig) -> int:
    """Rows of a micro-batch: the config's, or the most below it that memory is likely to take and that divide the update."""
    whole = run.training.effective_batch_size
    most = min(run.training.batch_size, MICRO_BATCH_ROWS)
    return max(rows for rows in range(1, most + 1) if whole % rows == 0)


def time_bert_training(
    model: BertForMaskedLM, run: RunConfig, prepared: Prepared, budget: Budget, device: torch.device, precision: str
) -> dict[str, Any]:
    """Train by HF Trainer until the clock is done; returns what it read. Real tokens are rows times their mean length: the
    collator has dropped the exact number by the time a step ends, and over a block the two agree."""
    rows = micro_batch_rows(run)
    mean_length = float(prepared.train.lengths[prepared.train_sequences].mean())
    workers = min(8, math.ceil((os.cpu_count() or 1) / 2))
    timer = StepTimer(budget, device, run.training.effective_batch_size * mean_length)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=run.training.effective_batch_size // rows,
            max_steps=ENDLESS,
            learning_rate=run.training.learning_rate,
            warmup_steps=run.training.warmup_steps,
            weight_decay=run.training.weight_decay,
            max_grad_norm=run.training.gradient_clip,
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            use_cpu=device.type == "cpu",
            dataloader_num_workers=workers,
            dataloader_persistent_workers=True,
            dataloader_drop_last=True,
            dataloader_pin_memory=device.type == "cuda",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=run.training.seed,
        )
        collator = DataCollatorForLanguageModeling(
            prepared.tokenizer, mlm_probability=run.data.mask_probability, pad_to_multiple_of=run.data.max_length
        )
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=TokenRows(prepared), data_collator=collator, callbacks=[timer]
        )
        trainer.remove_callback(transformers.PrinterCallback)  # its summary on stdout is no part of our table
        trainer.train()
    assert timer.clock is not None
    return timer.clock.result()
