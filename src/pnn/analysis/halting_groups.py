"""Which tokens stop when? Their steps group by group, whoever told them to halt: an oracle or a criterion.

    by kind           all tokens: masked, special (never masked) or ordinary
    by frequency      ordinary tokens, in quarters by how often they stand in the text
    by kind of word   ordinary tokens: an embedded corpus knows its own kinds, of others the tokenizer tells (`token_kinds`)
    by outcome        masked tokens: right or wrong after all steps
    by loss           masked tokens, in quarters by their loss after all steps

Equal tokens share a quarter, so quarters are as equal as that lets them be. Outcome and loss are those of a pass in which
nobody halts: whoever decides when tokens halt, the groups are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pnn.analysis.token_kinds import TOKEN_KINDS, kinds_by_id, kinds_of
from pnn.analysis.totals import Totals, ratios
from pnn.data import synthetic

KINDS = ("masked", "special", "ordinary")
MASKED, SPECIAL, ORDINARY = range(len(KINDS))
FREQUENCIES = ("rarest quarter", "rare", "frequent", "most frequent quarter")
OUTCOMES = ("right", "wrong")
RIGHT, WRONG = range(len(OUTCOMES))
LOSSES = ("lowest loss", "low loss", "high loss", "highest loss")


@dataclass(frozen=True)
class Tokens:
    """Some sequences of a text, as padded rows or end to end. All of one shape, and on the CPU."""

    words: Tensor  # what stands there in truth
    keep: Tensor  # False at padding
    targets: Tensor  # True at masked tokens
    sequence: Tensor  # the number of its sequence
    correct: Tensor  # one entry a target: whether it is right after all steps
    loss: Tensor  # and its loss there

    def ordinary(self, never_masked: Sequence[int]) -> Tensor:
        return self.keep & ~self.targets & ~torch.isin(self.words, self.words.new_tensor(never_masked))

    def at_targets(self, values: Tensor) -> Tensor:
        """From one entry a target to one a token."""
        return torch.zeros(self.words.shape, dtype=values.dtype).masked_scatter_(self.targets, values)


@dataclass(frozen=True)
class WordKinds:
    labels: tuple[str, ...]
    of: Callable[[Tensor], Tensor]  # words to numbers of labels

    @staticmethod
    def of_corpus(corpus: str) -> WordKinds:
        by_id = torch.from_numpy(synthetic.language(corpus).kind_of_word).long().clamp(min=0)
        return WordKinds(tuple(synthetic.KINDS), lambda words: by_id[words])

    @staticmethod
    def of_tokenizer(tokenizer: Any, vocab_size: int) -> WordKinds:
        by_id = kinds_by_id(tokenizer, vocab_size)
        return WordKinds(TOKEN_KINDS, lambda words: kinds_of(words, by_id))


@dataclass(frozen=True)
class Groups:
    never_masked: tuple[int, ...]
    frequency: Tensor  # how often each id stands in the text
    frequency_edges: Tensor
    loss_edges: Tensor
    word_kinds: WordKinds | None

    @staticmethod
    def of(
        tokens: Sequence[Tokens], never_masked: tuple[int, ...], frequency: Tensor, word_kinds: WordKinds | None = None
    ) -> Groups:
        """Quarters are those of these tokens."""
        often = torch.cat([frequency[some.words[some.ordinary(never_masked)]] for some in tokens])
        losses = torch.cat([some.loss for some in tokens])
        return Groups(never_masked, frequency, _quarters(often), _quarters(losses), word_kinds)

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        found = {"kind": KINDS, "frequency": FREQUENCIES, "outcome": OUTCOMES, "loss": LOSSES}
        return found if self.word_kinds is None else found | {"kind of word": self.word_kinds.labels}

    def split(self, tokens: Tokens) -> dict[str, tuple[Tensor, Tensor]]:
        """Whom it is about, and the number of each token's group."""
        ordinary, targets = tokens.ordinary(self.never_masked), tokens.targets
        loss, correct = tokens.at_targets(tokens.loss.double()), tokens.at_targets(tokens.correct)
        found = {
            "kind": (tokens.keep, torch.where(targets, MASKED, torch.where(ordinary, ORDINARY, SPECIAL))),
            "frequency": (ordinary, torch.bucketize(self.frequency[tokens.words].double(), self.frequency_edges)),
            "outcome": (targets, torch.where(correct, RIGHT, WRONG)),
            "loss": (targets, torch.bucketize(loss, self.loss_edges)),
        }
        if self.word_kinds is not None:
            found["kind of word"] = (ordinary, self.word_kinds.of(tokens.words))
        return found

    def add(self, totals: Totals, tokens: Tokens, steps: Mapping[str, Tensor], most: int) -> None:
        """How many steps each token takes, `most` at most, under the name of whoever decided."""
        labels = self.labels
        for name, (at, number) in self.split(tokens).items():
            which, sequence = F.one_hot(number[at], len(labels[name])), tokens.sequence[at]
            totals.add(f"{name} tokens", sequence, which)
            for who, taken in steps.items():
                totals.add(f"{name} {who}", sequence, which * taken[at][:, None])
                halted = F.one_hot(taken[at], most + 1)
                totals.add(f"{name} {who} halted", sequence, which[:, :, None] * halted[:, None])

    def told(self, totals: Totals, who: str) -> dict[str, dict[str, Any]]:
        """As results have it: `by_kind`, `by_frequency` … Groups without a token are left out."""
        found: dict[str, dict[str, Any]] = {}
        for name, labels in self.labels.items():
            counts = totals.of(f"{name} {who} halted").sum(0).reshape(len(labels), -1)
            means = ratios(totals, f"{name} {who}", f"{name} tokens")
            found[f"by_{name.replace(' ', '_')}"] = {
                label: {"tokens": int(row.sum()), "steps": mean, "halted_after": [int(n) for n in row]}
                for label, row, mean in zip(labels, counts, means, strict=True)
                if row.any()
            }
        return found


def _quarters(values: Tensor) -> Tensor:
    """Three numbers that cut these in four."""
    return values.double().quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
