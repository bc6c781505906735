"""What a model has to beat: always the commonest answer, and logistic regression on a bag of words.

    minimise over W, b    Σ loss(W x + b, y) + ½ ‖W‖²          by L-BFGS, from zero

x has a 1 for each word of the first text, each of the second, and each that both have. The loss is cross-entropy over labels
or over the choices of a question (one column of W scores each); for a regression half the squared error. The penalty is
scikit-learn's default.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pnn.finetuning.examples import Example, TaskData
from pnn.finetuning.metrics import Metrics, measure_sets
from pnn.finetuning.tasks import Pair

WORD = re.compile(r"\w+|[^\w\s]")
ITERATIONS = 200


def baselines(data: TaskData, sets: dict[str, dict[str, Any]]) -> dict[str, Metrics]:
    """Both on the dev sets; `sets` has their labels (and questions)."""
    labels = np.array([example.label for example in data.train], dtype=np.float64)
    if data.task.regression:
        commonest = float(labels.mean())
    else:
        values, counts = np.unique(labels, return_counts=True)
        commonest = float(values[counts.argmax()])

    def on_sets(predictions: dict[str, Any]) -> Metrics:
        return measure_sets(data.task, {name: {**one, "predictions": predictions[name]} for name, one in sets.items()})

    words = BagOfWords(data)
    return {
        "majority": on_sets({name: np.full(len(one["labels"]), commonest) for name, one in sets.items()}),
        "bag_of_words": on_sets({name: words.predict(data.dev[name]) for name in sets}),
    }


def features(pair: Pair) -> list[str]:
    first, second = (set(WORD.findall(text.lower())) if text is not None else set() for text in pair)
    return [
        *(f"a {word}" for word in sorted(first)),
        *(f"b {word}" for word in sorted(second)),
        *(f"both {word}" for word in sorted(first & second)),
    ]


class BagOfWords:
    def __init__(self, data: TaskData):
        self.task = data.task
        self.vocabulary: dict[str, int] = {}
        for example in data.train:
            for pair in example.texts:
                for word in features(pair):
                    self.vocabulary.setdefault(word, len(self.vocabulary))
        labels = torch.tensor([float(example.label or 0) for example in data.train], dtype=torch.float64)
        self.columns = 1 if self.task.choices or self.task.regression else len(self.task.labels)
        self.weights, self.bias = self._fit(self._rows(data.train), labels)

    def _rows(self, examples: list[Example]) -> tuple[Tensor, Tensor]:
        """The columns that are 1, row after row, and how many each row (a text, or a choice's) has."""
        known = [
            [self.vocabulary[word] for word in features(pair) if word in self.vocabulary]
            for example in examples
            for pair in example.texts
        ]
        columns = torch.tensor([column for row in known for column in row], dtype=torch.long)
        return columns, torch.tensor([len(row) for row in known])

    def _logits(self, rows: tuple[Tensor, Tensor], weights: Tensor, bias: Tensor) -> Tensor:
        columns, counts = rows
        starts = counts.cumsum(0) - counts
        logits = torch.nn.functional.embedding_bag(columns, weights, starts, mode="sum") + bias
        return logits.view(-1, self.task.choices) if self.task.choices else logits

    def _fit(self, rows: tuple[Tensor, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.zeros(len(self.vocabulary), self.columns, dtype=torch.float64)
        bias = torch.zeros(self.columns, dtype=torch.float64)
        columns, counts = rows
        row_of = torch.repeat_interleave(torch.arange(len(counts)), counts)
        optimizer = torch.optim.LBFGS([weights, bias], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            logits = self._logits(rows, weights, bias)
            if self.task.regression:
                wrong = logits - labels[:, None]  # the gradient with respect to the logits
                loss = 0.5 * wrong.square().sum()
            else:
                target = torch.nn.functional.one_hot(labels.long(), logits.shape[1])
                loss = -(logits.log_softmax(1) * target).sum()
                wrong = logits.softmax(1) - target
            wrong = wrong.reshape(-1, self.columns)
            weights.grad = weights.index_add(0, columns, wrong[row_of])
            bias.grad = wrong.sum(0)
            return loss + 0.5 * weights.square().sum()

        optimizer.step(closure)
        return weights, bias

    def predict(self, examples: list[Example]) -> Any:
        logits = self._logits(self._rows(examples), self.weights, self.bias)
        return (logits[:, 0] if self.task.regression else logits.argmax(1)).double().numpy()
