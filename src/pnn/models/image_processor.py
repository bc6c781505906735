"""From pictures to numbers: any PIL image, array or tensor becomes (channels, size, size) in −1 … 1.

It is resized to a square (bilinear) and made grey or coloured as the model wants it. Pillow and numpy are all that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

MODES = {1: "L", 3: "RGB"}  # Pillow's names by the number of channels


class PNNImageProcessor(BaseImageProcessor):
    """`PNNImageProcessor(image_size=8, num_channels=1)(image, return_tensors="pt")["pixel_values"]` is what a model takes."""

    model_input_names = ["pixel_values"]  # noqa: RUF012  (transformers' name and form)

    def __init__(self, image_size: int = 224, num_channels: int = 3, **kwargs: Any):
        super().__init__(**kwargs)
        if num_channels not in MODES:
            raise ValueError(f"num_channels={num_channels}: images are grey (1) or coloured (3)")
        self.image_size, self.num_channels = image_size, num_channels

    def preprocess(self, images: Any, return_tensors: str | None = None, **kwargs: Any) -> BatchFeature:
        if kwargs:
            raise ValueError(f"{', '.join(kwargs)}: a PNNImageProcessor takes images and return_tensors, nothing else")
        several = isinstance(images, (list, tuple)) or getattr(images, "ndim", 0) == 4
        values = scaled(self.pixels(images if several else [images]))
        return BatchFeature({"pixel_values": list(values.numpy())}, tensor_type=return_tensors)

    def pixels(self, images: Sequence[Any]) -> Tensor:
        """(N, channels, size, size) in bytes, as images are kept where many wait to be read."""
        square = (self.image_size, self.image_size)
        found = torch.empty((len(images), self.num_channels, *square), dtype=torch.uint8)
        for row, image in zip(found, images, strict=True):
            picture = ImageOps.exif_transpose(as_picture(image))
            if picture.mode.startswith("I;16"):  # Pillow would cut these off at 255 instead of dividing them
                picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
            picture = picture.convert(MODES[self.num_channels])
            if picture.size != square:
                picture = picture.resize(square, Image.Resampling.BILINEAR)
            row.copy_(torch.from_numpy(np.array(picture)).view(*square, self.num_channels).permute(2, 0, 1))
        return found


def scaled(pixels: Tensor) -> Tensor:
    """0 … 255 → −1 … 1."""
    return pixels.float() / 127.5 - 1


def as_picture(image: Any) -> Image.Image:
    """Of arrays and tensors: (height, width), or with channels first or last; bytes, or numbers in 0 … 1."""
    if isinstance(image, Image.Image):
        return image
    values = np.asarray(image)
    if values.ndim == 3 and values.shape[0] in MODES and values.shape[2] not in MODES:
        values = values.transpose(1, 2, 0)
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] not in MODES):
        raise ValueError(f"an image is (height, width) with 1 or 3 channels, not an array of shape {values.shape}")
    if values.dtype != np.uint8:
        if not (values.size and values.min() >= 0 and values.max() <= 1):
            raise ValueError("an image is an array of bytes (uint8), or of numbers between 0 and 1")
        values = np.round(values * 255).astype(np.uint8)
    return Image.fromarray(values[..., 0] if values.ndim == 3 and values.shape[2] == 1 else values)
