"""The naive baseline: PNN as its published code computes it, in plain eager PyTorch.

    h⁰ = dropout(LN(E_token + E_position)),   a = LN(h + dropout(Attn(h))),   δ = dropout(FFN(a))  [LN(δ) where configured]
    g = σ(W_q h ⊙ W_k δ / τ),   hᵗ = hᵗ⁻¹ + g ⊙ δ,   loss = Σ_t w_t CE(W hᵗ + b)

What makes it slow is kept on purpose: rows are padded to `max_length`, q, k and v are three products, attention is an
explicit softmax, logits are computed at every position of every step, every step's accuracy is read back to the host after
every micro-batch, autocast is fp16 with a loss scaler on a GPU, and an update is micro-batches of 384 rows.

Two departures, which cost nothing and let its loss curve be laid over ours: the loss is divided by the targets of the whole
update (the published code averages micro-batch means), and weight decay and learning rate are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pnn.bench.padding import Padded
from pnn.config import TrainingConfig
from pnn.errors import UserError
from pnn.models.pnn import PNNConfig, PNNForMaskedLM
from pnn.objectives import IGNORE, step_weights
from pnn.training.optim import learning_rate, set_learning_rate

MICRO_BATCH_ROWS = 384  # of the published code, three to an update
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class NaiveRefiner(nn.Module):
    """One refinement step: what is to be added to h."""

    def __init__(self, config: PNNConfig):
        super().__init__()
        width, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.heads = config.num_attention_heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.weights_dropout = nn.Dropout(config.attention_dropout)
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.delta_norm = nn.LayerNorm(width, eps=eps) if config.delta_norm else None
        gated = config.gate == "query_key"
        self.gate_query = nn.Linear(width, width, bias=config.gate_bias) if gated else None
        self.gate_key = nn.Linear(width, width, bias=config.gate_bias) if gated else None
        self.temperature = nn.Parameter(torch.tensor([math.sqrt(width)])) if gated else None
        self.dropout = nn.Dropout(config.dropout)

    def attention(self, h: Tensor, keep: Tensor) -> Tensor:
        rows, length, width = h.shape

        def split(x: Tensor) -> Tensor:
            return x.view(rows, length, self.heads, width // self.heads).transpose(1, 2)

        q, k, v = split(self.query(h)), split(self.key(h)), split(self.value(h))
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)
        scores = scores.masked_fill(~keep[:, None, None, :], -math.inf)
        weights = self.weights_dropout(torch.softmax(scores, dim=-1))
        return self.out((weights @ v).transpose(1, 2).reshape(rows, length, width))

    def forward(self, h: Tensor, keep: Tensor) -> Tensor:
        attended = self.attention_norm(h + self.dropout(self.attention(h, keep)))
        delta = self.dropout(self.down(self.dropout(F.gelu(self.up(attended)))))
        if self.delta_norm is not None:
            delta = self.delta_norm(delta)
        if self.gate_query is None or self.gate_key is None:
            return delta
        return torch.sigmoid(self.gate_query(h) * self.gate_key(delta) / self.temperature) * delta


class NaivePNN(nn.Module):
    def __init__(self, config: PNNConfig):
        super().__init__()
        check_published_design(config)
        assert config.schedule is not None
        assert config.num_steps is not None
        self.schedule = config.schedule
        self.weights = config.step_weights or step_weights(config.num_steps)
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.refiners = nn.ModuleList(NaiveRefiner(config) for _ in range(config.num_refiners))
        self.head = nn.Linear(config.hidden_size, config.vocab_size)

    @classmethod
    def from_pnn(cls, model: PNNForMaskedLM) -> NaivePNN:
        """The same weights in this form."""
        naive = cls(model.config)
        naive.load_state_dict(naive_weights(model.state_dict()))
        return naive

    def states(self, input_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
        """h¹ … hᵀ."""
        keep = attention_mask.bool()
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        h = self.dropout(self.norm(self.token(input_ids) + self.position(positions)))
        states = []
        for refiner in self.schedule:
            h = h + self.refiners[refiner](h, keep)
            states.append(h)
        return states

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
        """Logits after every step, at every position."""
        return [self.head(h) for h in self.states(input_ids, attention_mask)]

    def loss(self, logits: Sequence[Tensor], labels: Tensor, targets: int) -> Tensor:
        """Σ w_t CE_t, each cross-entropy a sum over this micro-batch divided by the update's `targets`."""
        total = torch.zeros((), device=labels.device)
        for weight, step in zip(self.weights, logits, strict=True):
            rows = step.reshape(-1, step.shape[-1])
            total = total + weight * F.cross_entropy(rows, labels.flatten(), ignore_index=IGNORE, reduction="sum") / targets
        return total


def check_published_design(config: PNNConfig) -> None:
    published: dict[str, tuple[Any, ...]] = {
        "update": ("gated",),
        "gate": ("query_key", "none"),
        "gate_start": (0.5,),
        "ffn": ("gelu",),
        "positions": ("learned",),
        "head_transform": (False,),
        "tie_word_embeddings": (False,),
        "random_steps": (None,),
        "random_halt": (False,),
        "recall": (False,),
        "guess_after": (None,),
        "embedding_size": (None,),
        "shared_attention": (False,),
        "halt": (None,),
    }
    for key, values in published.items():
        if getattr(config, key) not in values:
            raise UserError(
                f"model.{key}: {getattr(config, key)} is not in the published design, so there is no naive baseline of it: "
                f"set it to {'null' if values[0] is None else str(values[0]).lower()}, or leave naive out of --against"
            )


def naive_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict under this module's names; the fused q, k, v matrix comes apart."""
    names = {
        "encoder.embeddings.": "",
        "encoder.refiners.": "refiners.",
        "attention.out.": "out.",
        "ffn.": "",
        "gate.query.": "gate_query.",
        "gate.key.": "gate_key.",
        "gate.temperature": "temperature",
        "head.decoder.": "head.",
    }
    out = {}
    for name, tensor in weights.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        if "attention.qkv." in name:
            for part, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                out[name.replace("attention.qkv.", f"{part}.")] = piece.clone()
        else:
            out[name] = tensor.clone()
    return out


class NaiveTrainer:
    """The published training loop's body: one call, one update."""

    def __init__(
        self, model: NaivePNN, training: TrainingConfig, updates: int, device: torch.device, precision: str | None = None
    ):
        """`precision`: fp16 on a GPU and fp32 on a CPU, as published, unless another is asked for."""
        self.model = model.to(device).train()
        self.training, self.updates, self.device = training, updates, device
        self.precision = precision or ("fp16" if device.type == "cuda" else "fp32")
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": training.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        betas = (training.adam_beta1, training.adam_beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=training.learning_rate, betas=betas)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
        self.step = 0
        self.accuracies: list[float] = []  # of each step, in the last micro-batch

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, DTYPES[self.precision], enabled=self.precision != "fp32")

    def update(self, micro_batches: Sequence[Padded]) -> float:
        """One optimiser step; returns its loss."""
        targets = sum(int((batch.labels != IGNORE).sum()) for batch in micro_batches)
        set_learning_rate(self.optimizer, learning_rate(self.step, self.updates, self.training))
        total = 0.0
        for batch in micro_batches:
            here = batch.to(self.device)
            with self.autocast():
                logits = self.model(here.input_ids, here.attention_mask)
                loss = self.model.loss(logits, here.labels, max(1, targets))
            self.scaler.scale(loss).backward()
            total += loss.item()
            self.accuracies = [accuracy(step, here.labels) for step in logits]
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.training.gradient_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step += 1
        return total


def accuracy(logits: Tensor, labels: Tensor) -> float:
    predicted = labels != IGNORE
    correct = (logits.argmax(dim=-1) == labels) & predicted
    return correct.sum().item() / max(1, predicted.sum().item())
