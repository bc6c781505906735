"""What PNN and the BERT baseline share: how inputs are arranged, how weights start, and the head that predicts masked tokens.

An encoder turns tokens into `states`: h⁰ (the embeddings), h¹, …, hᵀ, one per refinement step or layer. A head reads
them (the other heads: `models/heads`). All are `PreTrainedModel`s, so `save_pretrained`, pipelines and the HF `Trainer` work
with no adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.utils import ModelOutput, can_return_tuple

from pnn.models.pretrained import OwnPreTrainedModel
from pnn.nn.embeddings import TokenPositionEmbeddings
from pnn.nn.fast import average_row, for_kernels, nothing_to_compile, plain, read_out
from pnn.nn.feed_forward import FEED_FORWARDS
from pnn.nn.guess import Average, Gaps
from pnn.nn.halting import Halt, Read, Rule
from pnn.nn.head import VocabularyHead
from pnn.nn.packing import Layout, Rows, only_at
from pnn.nn.rotary import rotation
from pnn.objectives import IGNORE, count_targets, divisor, step_weighted_loss

ROTARY_BASE = 10000.0
# What HF Trainer's predictions leave out: logits remain
KEYS_TO_IGNORE = [
    *("step_losses", "states", "deltas", "gates", "last_loss", "hidden_states", "attentions", "halted_at", "step_cost"),
]
Halting = Halt | Mapping[str, Any] | Literal[False] | None  # None: as the config says; False: not at all


@dataclass
class EncoderOutput(ModelOutput):
    """`states`: T+1 tensors h⁰ … hᵀ. `deltas` and `gates`: T tensors each, on request and where the model has them.
    transformers' names: `hidden_states` are the states, `attentions` one (B, heads, L, L) tensor for each step or layer.
    Where tokens halt: `halted_at`, how many steps each token took, (B, L); `step_cost`, what a learned unit pays for them."""

    last_hidden_state: Tensor | None = None
    states: tuple[Tensor, ...] | None = None
    deltas: tuple[Tensor, ...] | None = None
    gates: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    halted_at: Tensor | None = None
    step_cost: Tensor | None = None


@dataclass
class MaskedLMOutput(ModelOutput):
    """`step_losses`: the unweighted loss of each supervised step, without gradient; `last_loss`: the last of them, which is
    what a model that is read once has for a loss."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    step_losses: Tensor | None = None
    states: tuple[Tensor, ...] | None = None
    deltas: tuple[Tensor, ...] | None = None
    gates: tuple[Tensor, ...] | None = None
    last_loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    halted_at: Tensor | None = None
    step_cost: Tensor | None = None


def check_encoder(config: Any) -> None:
    """What both encoders' configs can get wrong."""
    for key, choices in (("ffn", FEED_FORWARDS), ("positions", ("learned", "rotary"))):
        if getattr(config, key) not in choices:
            raise ValueError(f"{key}={getattr(config, key)!r} is none of {', '.join(choices)}")
    check_heads(config, rotary=config.positions == "rotary")


def token_size(config: Any) -> int:
    """The width of the table of tokens: that of the states, or less where a config says so."""
    size: int | None = getattr(config, "embedding_size", None)
    return int(config.hidden_size) if size is None else size


def vocabulary_head(config: Any) -> VocabularyHead:
    return VocabularyHead(
        config.hidden_size,
        config.vocab_size,
        transform=config.head_transform,
        eps=config.layer_norm_eps,
        token_size=token_size(config),
    )


def check_heads(config: Any, rotary: bool) -> None:
    width, rest = divmod(config.hidden_size, config.num_attention_heads)
    if rest:
        raise ValueError(f"num_attention_heads={config.num_attention_heads} does not divide hidden_size={config.hidden_size}")
    if rotary and width % 2:
        raise ValueError(f"heads of {width} numbers cannot be rotated in pairs")


def arrange(
    tokens: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    config: Any,
) -> tuple[Tensor, Layout]:
    """Position ids and layout of a padded (B, L, d) or packed (1, N, d) batch of token embeddings."""
    rows, length = tokens.shape[:2]
    max_positions, heads = config.max_position_embeddings, config.num_attention_heads
    if cu_seqlens is not None:
        if rows != 1:
            raise ValueError(f"packed input is one row of tokens, got {rows} rows")
        layout = Layout(cu_seqlens=cu_seqlens, max_seqlen=max_positions)
        if position_ids is None:
            position_ids = (torch.arange(length, device=tokens.device) - layout.sequence_starts(length))[None]
        if not for_kernels(tokens):  # kernels go by the borders
            alone = len(cu_seqlens) == 2  # one sequence is a row as it is
            layout = Layout() if alone else replace(layout, rows=Rows.of(cu_seqlens, length, heads))
    else:
        if length > max_positions:
            raise ValueError(f"a sequence of {length} tokens, but the model takes {max_positions} (truncate it)")
        if position_ids is None:
            position_ids = torch.arange(length, device=tokens.device)[None]
        layout = Layout(keep=None if attention_mask is None else attention_mask.bool())
    if config.positions == "rotary":
        layout = replace(layout, rotation=rotation(position_ids, config.hidden_size // heads, ROTARY_BASE))
    return position_ids, layout


class PnnPreTrainedModel(OwnPreTrainedModel):
    base_model_prefix = "encoder"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """N(0, σ²) for matrices, zero for biases; then what the paper starts elsewhere. Runs over every module after the
        constructors: an initial value that matters has to be set here or it is lost."""
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            if getattr(module, "zero_start", False):
                init.zeros_(module.weight)
            else:
                init.normal_(module.weight, mean=0.0, std=getattr(module, "start_std", std))
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        for name, value in getattr(module, "starts", {}).items():  # numbers that a part starts elsewhere
            init.constant_(getattr(module, name), value)


class EncoderBase(PnnPreTrainedModel):
    """Embeddings, then `refine` (the subclass's own steps)."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.embeddings = TokenPositionEmbeddings(
            config.vocab_size,
            None if config.positions == "rotary" else config.max_position_embeddings,
            config.hidden_size,
            config.dropout,
            config.layer_norm_eps,
            token_size(config),
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.token

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.token = value  # type: ignore[assignment]

    @property
    def blocks(self) -> nn.ModuleList:
        """What `refine` applies, one at a time."""
        raise NotImplementedError

    def refine(
        self,
        h: Tensor,
        layout: Layout,
        num_steps: int | None,
        details: bool,
        last_at: Tensor | None,
        rule: Rule | None = None,
        gaps: Gaps | None = None,
    ) -> EncoderOutput:
        """States h⁰ … hᵀ, the last at `last_at` only; with `details` also each step's Δ and gate, where there are any. `rule`:
        when tokens halt. `gaps`: where masked tokens read their own guess, and of what."""
        raise NotImplementedError

    def gaps_in(
        self, input_ids: Tensor | None, position_ids: Tensor | None, at: Tensor | None, average: Average | None
    ) -> Gaps | None:
        """For models whose masked tokens read their own guess."""
        return None

    def halting_rule(self, halt: Halting, num_steps: int | None, every_token: bool, read: Read | None) -> Rule | None:
        """When tokens of this pass halt. `every_token`: somebody wants to see each of them at each step."""
        if halt:
            raise ValueError(f"halt is for refinement steps, and a {type(self).__name__} has none")
        return None

    def compile_blocks(self, with_kernels: bool = False) -> None:
        """Compile in place what runs again and again. Blocks of one shape share one compiled graph, so this takes as long for
        one step or layer as for twelve. `with_kernels`: it will train in 16 bit on a GPU that our kernels know. Where these
        write out whole blocks there is nothing left to compile."""
        if with_kernels and nothing_to_compile(list(self.blocks), self.config.max_position_embeddings):
            return
        self.embeddings.compile()
        for block in self.blocks:
            block.compile()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_steps: int | None = None,
        output_states: bool = False,
        output_gates: bool = False,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        last_at: Tensor | None = None,
        halt: Halting = None,
        read_out: Read | None = None,
        average_token: Average | None = None,
        gaps_at: Tensor | None = None,
    ) -> EncoderOutput:
        """Padded input is (B, L) with an `attention_mask`; packed input is (1, N) with `cu_seqlens` (int32 borders).
        `last_at` (flat indices into the B·L or N tokens) asks for the last state of these tokens alone, (1, len(last_at), d):
        what nobody reads is not computed, which is most of the last step where a few tokens are predicted.
        `halt` says when tokens stop being refined, in place of the config, which holds for its own number of steps alone: who
        asks for `num_steps` gets them all. `read_out` is the head, for criteria that ask it.
        `average_token` is for masked tokens that read their own guess (without a head that chooses between tokens they read
        none); `gaps_at`, the flat indices of [MASK], ascending, spares looking for them.
        `token_type_ids` is taken, because BERT tokenizers send it, and not used: there is no segment embedding."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if num_steps is not None and num_steps < 0:
            raise ValueError(f"num_steps={num_steps} is below zero")
        tokens = self.embeddings.token(input_ids) if inputs_embeds is None else inputs_embeds
        position_ids, layout = arrange(tokens, attention_mask, position_ids, cu_seqlens, self.config)
        if last_at is not None and output_gates:
            raise ValueError("gates come for every token: leave out last_at")
        watched: list[Tensor] = []
        if self.wants(output_attentions, "output_attentions"):
            layout = replace(layout, watched=watched)
        rule = self.halting_rule(halt, num_steps, output_gates or layout.watched is not None, read_out)
        h = self.embeddings(tokens, position_ids)
        if num_steps == 0:  # h⁰ is the last state
            h = only_at(h, last_at)
        gaps = self.gaps_in(input_ids, position_ids, gaps_at, average_token)
        out = self.refine(h, layout, num_steps, output_gates, last_at, rule, gaps)
        return EncoderOutput(
            last_hidden_state=out.last_hidden_state,
            states=out.states if output_states else None,
            deltas=out.deltas if output_gates else None,
            gates=out.gates if output_gates else None,
            hidden_states=out.states if self.wants(output_hidden_states, "output_hidden_states") else None,
            attentions=tuple(watched) if layout.watched is not None else None,
            halted_at=out.halted_at,
            step_cost=out.step_cost,
        )


class MaskedLMBase(PnnPreTrainedModel):
    """Predicts masked tokens, at the positions that are asked for.

    `logit_positions` (flat indices into the B·L or N tokens) limits both logits and loss to those rows; `labels` then has
    one entry per position. Without it, logits cover every position and the loss every label that is not −100.
    `output_logits=False` leaves them out where only the loss is wanted.
    """

    accepts_loss_kwargs = True  # HF Trainer: we divide by `num_items_in_batch` ourselves
    encoder_class: ClassVar[type[EncoderBase]]
    _tied_weights_keys: ClassVar[dict[str, str]] = {"head.decoder.weight": "encoder.embeddings.token.weight"}

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.encoder = type(self).encoder_class(config)
        self.head = vocabulary_head(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.head.decoder

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.head.decoder = value  # type: ignore[assignment]

    def read_out(self, h: Tensor) -> Tensor:
        return read_out(self.head, h)

    def average_token(self, h: Tensor) -> Tensor:
        """E p: the rows of the table of tokens, averaged by what the head thinks likely."""
        token = self.encoder.embeddings.token
        if plain(token, nn.Embedding):
            return average_row(self.head, h, token.weight)
        every = torch.arange(self.config.vocab_size, device=h.device)  # what is adapted, or lies elsewhere, is called
        return average_row(self.head, h, token(every))

    def supervised(self, states: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], list[float]]:
        """The states whose predictions are trained, and the weight of each."""
        raise NotImplementedError

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logit_positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_steps: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_logits: bool = True,
        output_states: bool = False,
        output_gates: bool = False,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        halt: Halting = None,
        gaps_at: Tensor | None = None,
    ) -> MaskedLMOutput:
        at = logit_positions
        if labels is not None:
            labels = labels.flatten()
            if at is None:
                at = (labels != IGNORE).nonzero().squeeze(1)
                labels = labels[at]
        # the last state is read at `at` alone, unless someone asks for all of it
        output_hidden_states = self.wants(output_hidden_states, "output_hidden_states")
        whole = output_states or output_gates or output_hidden_states or (output_logits and logit_positions is None)
        out = self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            cu_seqlens=cu_seqlens,
            num_steps=num_steps,
            output_states=True,
            output_gates=output_gates,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            last_at=None if whole else at,
            halt=halt,
            read_out=self.read_out,
            average_token=self.average_token,
            gaps_at=gaps_at,
            return_dict=True,
        )
        states: tuple[Tensor, ...] = out.states
        last = only_at(out.last_hidden_state, at if whole else None).flatten(0, 1)  # at the rows that are asked for

        loss = step_losses = logits = None
        if labels is not None:
            trained, weights = self.supervised(states)
            rows = [*(only_at(h, at)[0] for h in trained[:-1]), last]
            features = [self.head.features(h) for h in rows]
            loss, step_losses = step_weighted_loss(features, self.head.decoder, labels, weights, num_items_in_batch)
            share = None if num_items_in_batch is None else count_targets(labels) / divisor(num_items_in_batch, labels)
            loss = with_cost(loss, out.step_cost, share)
        if output_logits:
            logits = self.head(out.last_hidden_state if logit_positions is None else last)
        return MaskedLMOutput(
            loss=loss,
            logits=logits,
            step_losses=step_losses,
            states=states if output_states else None,
            deltas=out.deltas,
            gates=out.gates,
            last_loss=None if step_losses is None else step_losses[-1],
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            halted_at=out.halted_at,
            step_cost=out.step_cost,
        )


def with_cost(loss: Tensor, step_cost: Tensor | None, share: Tensor | None = None) -> Tensor:
    """The loss, and what a learned unit pays for steps where it is trained. `share`: this batch's, of an update of several."""
    if step_cost is None:
        return loss
    return loss + (step_cost if share is None else share * step_cost)


def parts_of(model: Any) -> dict[str, int]:
    """Parameters of the embeddings, of one block and of the head (without what it shares with the embeddings), of any of
    ours. An attention that all blocks share is a part of its own."""
    embeddings = set(model.base_model.embeddings.parameters())
    own = [p for p in model.head.parameters() if p not in embeddings]
    first, last = model.base_model.blocks[0], model.base_model.blocks[-1]
    parts = {"embeddings": embeddings, "block": last.parameters(), "head": own}
    if first is not last and getattr(model.config, "shared_attention", False):
        parts["attention"] = first.attention.parameters()
    return {name: sum(p.numel() for p in part) for name, part in parts.items()}
