"""Training an image classifier on one device, seeded; and what it says after each step.

Any model that takes `pixel_values` and `labels` can be trained: a PNN, or one of transformers' beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from pnn.config import TrainingConfig
from pnn.errors import UserError
from pnn.images.sets import Images
from pnn.models.image_processor import scaled
from pnn.models.pnn_image import PNNForImageClassification
from pnn.progress import Bars
from pnn.training.optim import descend, learning_rate, make_optimizer

WARM_UP = 0.1  # of all updates


@dataclass(frozen=True)
class Recipe:
    """AdamW with a warm-up and a cosine to zero. `shift`: every image is moved by up to so many pixels each time it is seen,
    its border repeated; 0 leaves it where it is."""

    epochs: int = 30
    batch_size: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    shift: int = 1
    seed: int = 0


def train(model: PreTrainedModel, images: Images, recipe: Recipe | None = None) -> list[float]:
    """The mean loss of each epoch. The order of images, shifts and dropout follow from the seed; weights that the model starts
    from are the caller's."""
    recipe = recipe or Recipe()
    if not len(images):
        raise UserError("there are no images to learn from")
    outputs = model.config.num_labels
    if outputs != len(images.classes):
        raise UserError(f"the model has num_labels={outputs}, but the images have {len(images.classes)} classes")
    updates = recipe.epochs * math.ceil(len(images) / recipe.batch_size)
    training = TrainingConfig(
        learning_rate=recipe.learning_rate,
        min_learning_rate=0.0,
        warmup_steps=max(1, round(WARM_UP * updates)),
        weight_decay=recipe.weight_decay,
    )
    optimizer, generator = make_optimizer(model, training), torch.Generator().manual_seed(recipe.seed)
    devices = [model.device] if model.device.type == "cuda" else []
    means: list[float] = []
    model.train()
    with torch.random.fork_rng(devices=devices), Bars({"training": updates}) as bars:
        torch.manual_seed(recipe.seed)
        step = 0
        for _ in range(recipe.epochs):
            total = torch.zeros((), device=model.device)
            for rows in torch.randperm(len(images), generator=generator).split(recipe.batch_size):
                inputs = shifted(scaled(images.pixels[rows]), recipe.shift, generator).to(model.device)
                loss = model(pixel_values=inputs, labels=images.labels[rows].to(model.device)).loss
                descend(model, optimizer, loss, learning_rate(step, updates, training))
                total += loss.detach() * len(rows)
                step += 1
            means.append(total.item() / len(images))
            if not math.isfinite(means[-1]):
                raise UserError(f"the loss is not a number after {step} updates: try a lower learning_rate")
            bars.update("training", step, f"loss {means[-1]:.3f}")
    model.eval()
    return means


def shifted(images: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Each moved by −most … most pixels down and to the right."""
    if most == 0:
        return images
    count, _, height, width = images.shape
    padded = F.pad(images, (most,) * 4, mode="replicate")
    down, right = torch.randint(2 * most + 1, (2, count, 1), generator=generator)
    rows, columns = down + torch.arange(height), right + torch.arange(width)
    # one index a dimension: (count, channels, height, width)
    return padded[
        torch.arange(count)[:, None, None, None],
        torch.arange(images.shape[1])[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


@torch.no_grad()
def hits_by_step(
    model: PreTrainedModel, images: Images, num_steps: int | None = None, batch_size: int = 256
) -> NDArray[np.bool_]:
    """Which images are right after each step, (T + 1, N): of a PNN after steps 0 (the embeddings) … T, of another model
    once, (1, N). `hits.mean(axis=1)` is the accuracy after each step."""
    model.eval()
    found = []
    for rows in torch.arange(len(images)).split(batch_size):
        inputs = scaled(images.pixels[rows]).to(model.device)
        if isinstance(model, PNNForImageClassification):
            logits = model.read(model(inputs, num_steps=num_steps, output_states=True).states)
        else:
            logits = model(pixel_values=inputs).logits[None]
        found.append(logits.argmax(-1).cpu() == images.labels[rows])
    return torch.cat(found, dim=1).numpy()
