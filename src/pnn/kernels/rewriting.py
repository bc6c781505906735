"""What lies between two branches of a Deep Delta decoder, as one pass over its state: the kernels of `rewrite_passes`, called.

Kept for the backward pass are the branches' outputs b, a few numbers a token, and the state at every few sublayers only: those
between are made again, which moves less than it saves (see `Tape`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from pnn.kernels import rewrite_passes

WIDEST = 2048
TAPS = 4  # tokens of a compressor over tokens
STATES_KEPT_EVERY = 4  # sublayers


class Launch(NamedTuple):
    """How a pass is spread over a GPU. Programs are counted for each of its multiprocessors."""

    warps: int
    programs: int
    stages: int  # tokens in flight
    registers: int | None = None  # a thread's, at most; None: as the compiler likes


# Measured on an H200 at a width of 768, by channels and taps. Backward has few programs: each has gradients to add up.
FORWARD = {(1, 1): Launch(1, 64, 3), (4, 1): Launch(2, 16, 3), (4, 4): Launch(4, 2, 3)}
BACKWARD = {(1, 1): Launch(4, 3, 3, 128), (4, 1): Launch(4, 2, 3), (4, 4): Launch(4, 4, 1)}
MIX_BACKWARD = Launch(2, 2, 3)
MAKE_AGAIN_WARPS = 4


def _pieces(width: int) -> tuple[int, int]:
    """(pieces, block) of a row: the fewest numbers in vain, then the fewest pieces. A block is a power of two."""
    whole = triton.next_power_of_2(width)
    splits = [(triton.cdiv(width, block), block) for block in (whole, whole // 2, whole // 4) if block > 0]
    return min(splits, key=lambda split: (split[0] * split[1], split[0]))


def _launch(table: dict[tuple[int, int], Launch], channels: int, taps: int, width: int) -> Launch:
    """Other widths keep a thread's share of a row."""
    launch = table.get((channels, taps)) or table[(4 if channels > 1 else 1, taps)]
    return launch._replace(warps=min(16, 2 ** max(0, round(math.log2(launch.warps * width / 768)))))


def takes(width: int, channels: int, taps: int) -> bool:
    return width <= WIDEST and channels in (1, 2, 4) and taps in (1, TAPS)


class Write(NamedTuple):
    """What a sublayer writes: its branch's output b (tokens, d), values v (tokens, c), gates β (tokens,)."""

    branch: Tensor
    values: Tensor
    betas: Tensor


class Reader(NamedTuple):
    """What reads the state: the compressor's weights (c, d) or (taps, c, d), None for one channel; the norm's, (d,); and the
    next sublayer's generators (c, d), (c,), (d,) and (1,), None at the end. `from_state`: values are 4σ(W x + a), else W c."""

    mix: Tensor | None
    norm: Tensor
    value: Tensor | None
    value_bias: Tensor | None
    gate: Tensor | None
    gate_bias: Tensor | None
    eps: float
    from_state: bool

    @property
    def taps(self) -> int:
        return len(self.mix) if self.mix is not None and self.mix.dim() == 3 else 1


class Read(NamedTuple):
    """What was read: c for the next branch, and the next sublayer's values and gates."""

    context: Tensor
    values: Tensor | None
    betas: Tensor | None


def _each(tokens: int, device: torch.device, launch: Launch) -> int:
    """Tokens of a program."""
    if device.type != "cuda":
        return triton.cdiv(tokens, 3)  # in Triton's interpreter: several programs, of uneven lengths
    return triton.cdiv(tokens, torch.cuda.get_device_properties(device).multi_processor_count * launch.programs)


class Kept(NamedTuple):
    """Sums of the forward pass: 1/‖b‖ (tokens,), what was written along k (tokens, c), 1/√(mean x² + ε) (tokens,)."""

    inverses: Tensor | None
    writtens: Tensor | None
    norm_inverses: Tensor


class Past(NamedTuple):
    """Of a step of one token for each text: the states before it, (texts, taps − 1, c, d), which are moved on in place, and
    whether the token counts, 1 or 0, (texts,) in fp32."""

    history: Tensor
    kept: Tensor


def _run_forward(
    states: Tensor, write: Write | None, reader: Reader, erase: bool, row_length: int, past: Past | None = None
) -> tuple[Tensor, Tensor | None, Read, Kept]:
    """(X⁺, x where the compressor looks over tokens, what was read, what is kept)."""
    tokens, channels, width = states.shape
    pieces, block = _pieces(width)

    def numbers(*shape: int, wanted: bool = True) -> Tensor | None:
        return states.new_empty(shape, dtype=torch.float32) if wanted else None

    writes, generates = write is not None, reader.gate is not None
    new_states = torch.empty_like(states) if writes else states
    context = states.new_empty(tokens, width)
    compressed = torch.empty_like(context) if reader.taps > 1 and past is None else None
    values, betas = numbers(tokens, channels, wanted=generates), numbers(tokens, wanted=generates)
    inverses, writtens = numbers(tokens, wanted=writes), numbers(tokens, channels, wanted=writes)
    norm_inverses = states.new_empty(tokens, dtype=torch.float32)
    launch = _launch(FORWARD, channels, reader.taps, width)
    each = _each(tokens, states.device, launch) if past is None else 1
    rewrite_passes.forward[(triton.cdiv(tokens, each),)](
        states, *_or(states, *(write or [None] * 3)), *_or(states, *reader[:6]),
        new_states, *_or(states, compressed, context, values, betas, inverses, writtens, norm_inverses, *(past or [None] * 2)),
        tokens, row_length, reader.eps, each=each, stages=launch.stages,
        width=width, pieces=pieces, block=block, count=channels, taps=reader.taps,
        rewrites=writes, erase=erase, generates=generates, from_state=reader.from_state, steps=past is not None,
        num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip
    return new_states, compressed, Read(context, values, betas), Kept(inverses, writtens, norm_inverses)


def _or(stand_in: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """What is not there is passed as something else, which is not touched."""
    return [stand_in if tensor is None else tensor for tensor in tensors]


class Written(NamedTuple):
    """What makes a state again from the one before."""

    branch: Tensor
    betas: Tensor
    inverses: Tensor
    writtens: Tensor


def _made_again(states: Tensor, writes: list[Written]) -> list[Tensor]:
    """The states after each of these writes."""
    tokens, channels, width = states.shape
    pieces, block = _pieces(width)
    made = [torch.empty_like(states) for _ in writes]
    rewrite_passes.make_again[(tokens,)](
        states, *(tuple(part) for part in zip(*writes, strict=True)), tuple(made),
        width=width, pieces=pieces, block=block, count=channels, num_warps=MAKE_AGAIN_WARPS,
    )  # fmt: skip
    return made


class Tape:
    """The states of one forward pass, for the backward pass: some are kept, those between are made again when they are asked
    for, from the last kept one on. Backward asks from the end, so each is made once."""

    def __init__(self, erase: bool, row_length: int, every: int = STATES_KEPT_EVERY, keeps: bool = True):
        self.erase, self.row_length, self.every, self.keeps = erase, row_length, every, keeps
        self.written: list[Written] = []
        self.kept: dict[int, Tensor] = {}

    def add(self, state: Tensor, write: Write, sums: Kept) -> int:
        """A state and what was written to it; returns its number. Without history: a tape is no part of the graph."""
        number = len(self.written)
        if number % self.every == 0:
            self.kept[number] = state.detach()
        assert sums.inverses is not None
        assert sums.writtens is not None
        self.written.append(Written(write.branch.detach(), write.betas.detach(), sums.inverses, sums.writtens))
        return number

    def take(self, number: int) -> Tensor:
        """A state, for the last time."""
        start = max((kept for kept in self.kept if kept <= number), default=None)
        if start is None:
            raise RuntimeError("the states of this pass are gone: a second backward pass needs another forward pass")
        if start < number:
            made = _made_again(self.kept[start], self.written[start:number])
            self.kept |= dict(enumerate(made, start + 1))
        return self.kept.pop(number)


class _Sublayer(torch.autograd.Function):
    """Rewrite, then read; without a write, only read."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, settings: tuple[float, bool], states: Tensor, *inputs: Tensor | None) -> Any:
        branch, values, betas, *weights = inputs
        write = None if branch is None else Write(branch, values, betas)  # type: ignore[arg-type]
        reader = Reader(*weights, *settings)  # type: ignore[arg-type,call-arg]
        new_states, compressed, read, sums = _run_forward(states, write, reader, tape.erase, tape.row_length)
        ctx.tape, ctx.settings, ctx.number = tape, settings, None
        if write is not None and tape.keeps:  # (needs_input_grad is true of parameters in evaluation too)
            ctx.number = tape.add(states, write, sums)
        first = states if write is None else None
        ctx.save_for_backward(first, branch, values, betas, *weights, compressed, read.values, read.betas, *sums)
        ctx.set_materialize_grads(False)
        return (states.view_as(states) if write is None else new_states), *read

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        grad_states, grad_context, grad_values, grad_betas = grads
        states, branch, values, betas, *rest = ctx.saved_tensors
        weights, (compressed, new_values, new_betas), sums = rest[:6], rest[6:9], Kept(*rest[9:])
        if states is None:
            states = ctx.tape.take(ctx.number)
        if grad_context is None:
            grad_context = states.new_zeros(states.shape[:2])
        if new_betas is not None:
            grad_values = torch.zeros_like(new_values) if grad_values is None else grad_values.contiguous()
            grad_betas = torch.zeros_like(new_betas) if grad_betas is None else grad_betas.contiguous()
        found = _run_backward(
            states,
            None if branch is None else Write(branch, values, betas),
            Reader(*weights, *ctx.settings),
            ctx.tape,
            sums,
            compressed,
            Read(grad_context.contiguous(), new_values, new_betas),
            (None if grad_states is None else grad_states.contiguous(), grad_values, grad_betas),
        )
        return None, None, *found


def _run_backward(
    states: Tensor,
    write: Write | None,
    reader: Reader,
    tape: Tape,
    sums: Kept,
    compressed: Tensor | None,
    read: Read,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> list[Tensor | None]:
    """Gradients of the state, of what was written, and of the reader's weights. `read.context` is the gradient of c, `grads`
    those of X⁺, v⁺ and β⁺."""
    tokens, channels, width = states.shape
    pieces, block = _pieces(width)
    launch = _launch(BACKWARD, channels, reader.taps, width)
    each = _each(tokens, states.device, launch)
    programs = triton.cdiv(tokens, each)

    grad_states = torch.empty_like(states)
    grad_write = [None] * 3 if write is None else [torch.empty_like(part) for part in write]
    mixes_alone = reader.taps > 1
    # in the order of a program's share
    weights = [reader.norm, reader.value, reader.gate, reader.gate_bias, reader.value_bias, None if mixes_alone else reader.mix]
    sizes = [0 if part is None else part.numel() for part in weights]
    if reader.gate is not None:
        sizes[4] = channels  # the values' biases have a place whether or not they exist
    shares = states.new_empty(programs, sum(sizes), dtype=torch.float32)
    grad_compressed = None if compressed is None else torch.empty_like(compressed)
    grad_new_states, grad_values, grad_betas = grads
    rewrite_passes.backward[(programs,)](
        states, *_or(states, *(write or [None] * 3), sums.inverses, sums.writtens),
        *_or(states, reader.mix, reader.norm, reader.value, reader.gate),
        *_or(states, compressed, sums.norm_inverses, read.values, read.betas),
        *_or(states, grad_new_states, read.context, grad_values, grad_betas),
        grad_states, *_or(states, *grad_write, grad_compressed), shares,
        tokens, tape.row_length, each=each, stages=launch.stages,
        width=width, pieces=pieces, block=block, count=channels, taps=reader.taps,
        rewrites=write is not None, erase=tape.erase, generates=read.betas is not None, from_state=reader.from_state,
        has_grad=grad_new_states is not None, num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip
    parts = shares.sum(0).split(sizes)
    norm, value, gate, gate_bias, value_bias, mix = (
        None if part is None else found.view(part.shape).to(part.dtype) for part, found in zip(weights, parts, strict=True)
    )
    if mixes_alone:
        mix = _mix_gradient(states, write, reader, tape, sums, grad_compressed)
    return [grad_states, *grad_write, mix, norm, value, value_bias, gate, gate_bias]


def _mix_gradient(
    states: Tensor, write: Write | None, reader: Reader, tape: Tape, sums: Kept, grad_compressed: Tensor | None
) -> Tensor:
    assert reader.mix is not None
    tokens, channels, width = states.shape
    pieces, block = _pieces(width)
    each = _each(tokens, states.device, MIX_BACKWARD)
    shares = states.new_empty(triton.cdiv(tokens, each), *reader.mix.shape, dtype=torch.float32)
    branch, _, betas = write or [None] * 3
    rewrite_passes.mix_backward[(len(shares), pieces)](
        *_or(states, states, branch, betas, sums.inverses, sums.writtens, grad_compressed), shares, tokens, tape.row_length,
        each=each, stages=MIX_BACKWARD.stages, width=width, block=block, count=channels, taps=reader.taps,
        rewrites=write is not None, num_warps=MIX_BACKWARD.warps,
    )  # fmt: skip
    return shares.sum(0).to(reader.mix.dtype)


def sublayer(tape: Tape, states: Tensor, write: Write | None, reader: Reader) -> tuple[Tensor, Read]:
    """states: (tokens, c, d) → (X⁺, what was read). Without a write the state stays as it is."""
    parts = (None, None, None) if write is None else tuple(part.contiguous() for part in write)
    weights = tuple(None if part is None else part.contiguous() for part in reader[:6])
    new_states, *read = _Sublayer.apply(tape, (reader.eps, reader.from_state), states.contiguous(), *parts, *weights)
    return new_states, Read(*read)


def step(erase: bool, states: Tensor, write: Write | None, reader: Reader, past: Past) -> tuple[Tensor, Read]:
    """`sublayer` for the next token of each text, where the compressor looks over tokens; without gradients."""
    states = states.contiguous()
    write = None if write is None else Write(*(part.contiguous() for part in write))
    weights = [None if part is None else part.contiguous() for part in reader[:6]]
    reader = Reader(*weights, reader.eps, reader.from_state)  # type: ignore[arg-type,call-arg]
    new_states, _, read, _ = _run_forward(states, write, reader, erase, 1, past)
    return new_states, read
