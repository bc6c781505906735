"""Models whose behaviour is known because it was put there: what a token does at each step is read from a table.

The text: every line is [CLS] w1 … w20, three random words, [SEP], so that a word follows from its position. States have one
dimension for each position (set by the position embedding), one that says "I am masked", and free ones that a plan writes to.
The head knows the words of easy positions from the position itself, those of medium ones from a dimension that a plan has to
write, and those of hard ones not at all.
"""

import numpy as np
import torch
from torch import nn

import pnn
from pnn.analysis.trace import Text
from pnn.data.masking import SpecialTokens
from pnn.data.tokenizers import of_synthetic_language
from pnn.nn.packing import only_at
from pnn.nn.refiner import Refinement

CLS, SEP, MASK = 2, 3, 4
WORDS, FILLERS, WIDTH = 20, 10, 64
EASY, MEDIUM, HARD = range(1, 7), range(7, 14), range(14, 21)
FLAG = 31  # "I am masked"
ANSWER = {position: 32 + position - 7 for position in MEDIUM}  # the dimension that tells a medium position's word
WRONG = (40, 41, 42, 43)  # dimensions that each speak for one wrong word
FREE = slice(44, 64)  # dimensions that the head does not read


def word(position):
    return 4 + position


class Lines:
    """As much of a token set as a pass over text needs."""

    def __init__(self, count=60):
        draw = np.random.default_rng(0)
        words = np.arange(1, WORDS + 1) + 4
        self.rows = [
            np.concatenate(([CLS], words, 25 + draw.integers(0, FILLERS, 3), [SEP])).astype(np.int64) for _ in range(count)
        ]
        self.lengths = np.array([len(row) for row in self.rows])
        self.manifest = {"name": "planted", "recipe": {"source": {}, "tokenizer": "", "text": {}}, "max_length": 32}

    def tokenizer(self):
        return of_synthetic_language(32)  # any one with as many words

    def take(self, sequences):
        return np.concatenate([self.rows[i] for i in sequences])


def text(count=60, batch_tokens=700):
    return Text(Lines(count), np.arange(count), SpecialTokens(MASK, 40, (0, 1, 2, 3, 4)), 0.3, 0, batch_tokens)


class Attention(nn.Module):
    """Passes the state on, so that what follows can be made to depend on it or not."""

    def forward(self, h, layout=None):
        return h.clone()


class Lookup(nn.Module):
    """δ of each token by its position and the step."""

    def __init__(self, table):
        super().__init__()
        self.table, self.step = table, 0

    def forward(self, a):
        return self.table[self.step, a[..., :FLAG].argmax(-1)]


class Gate(Lookup):
    def forward(self, h, raw):
        return super().forward(h)


class Planted(nn.Module):
    """A refiner by table. `through_attention`: δ is looked up from what attention put out, else from the state itself.
    `held_back`: how far a token's δ gets, by which tokens near or far from it are masked."""

    def __init__(self, delta, gate=None, through_attention=False, held_back=None, norm=None):
        super().__init__()
        self.attention, self.ffn = Attention(), Lookup(delta)
        self.gate = Gate(torch.ones_like(delta) if gate is None else gate)
        self.delta_norm = norm
        self.through_attention, self.held_back = through_attention, held_back
        self.steps = len(delta)

    def forward(self, h, layout, at=None):
        return only_at(h + self.refine(h, layout).delta, at)

    def refine(self, h, layout):
        if self.held_back is not None:
            factor = self.held_back(h[0, :, FLAG] > 0.5)[None, :, None]
        attended = self.attention(h, layout)
        raw = self.ffn(attended if self.through_attention else h)
        if self.delta_norm is not None:
            raw = self.delta_norm(raw)
        if self.held_back is not None:
            raw = raw * factor
        gate = self.gate(h, raw)
        self.ffn.step = self.gate.step = (self.ffn.step + 1) % self.steps
        return Refinement(gate * raw, raw, gate)


def tables(steps=4):
    """δ that does nothing: (steps, positions, width), to be written to."""
    return torch.zeros(steps, 32, WIDTH)


def answers(delta, step=0, size=4.0):
    """Every medium position learns its word at this step (from 0)."""
    for position, dimension in ANSWER.items():
        delta[step, position, dimension] = size
    return delta


def model(delta, gate=None, **how):
    steps = len(delta)
    config = pnn.PNNConfig(
        vocab_size=40,
        hidden_size=WIDTH,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_steps=steps,
    )
    torch.manual_seed(0)
    built = pnn.PNNForMaskedLM(config).eval()
    embeddings, head = built.encoder.embeddings, built.head.decoder
    with torch.no_grad():
        for parameter in (embeddings.token.weight, embeddings.position.weight, head.weight, head.bias):
            parameter.zero_()
        embeddings.position.weight[torch.arange(FLAG), torch.arange(FLAG)] = 1.0
        embeddings.token.weight[MASK, FLAG] = 0.9
        embeddings.norm.weight.fill_(0.15)  # a hot dimension is then about one
        for position in EASY:
            head.weight[word(position), position] = 9.0
        for position, dimension in ANSWER.items():
            head.weight[word(position), dimension] = 9.0
        for number, dimension in enumerate(WRONG):
            head.weight[36 + number, dimension] = 4.0
    built.encoder.refiners[0] = Planted(delta, gate, **how)
    return built
