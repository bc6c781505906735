"""Sets of images in memory, in bytes: from a folder with one subfolder for each class, or from pictures that one has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from pnn.errors import UserError
from pnn.models.image_processor import PNNImageProcessor
from pnn.progress import track


@dataclass(frozen=True)
class Images:
    """`pixels`: (N, channels, size, size) bytes. `labels`: (N,), each the number of one of `classes`."""

    pixels: Tensor
    labels: Tensor
    classes: list[str]

    @staticmethod
    def of(pictures: Sequence[Any], labels: Sequence[int], classes: Sequence[str], processor: PNNImageProcessor) -> Images:
        """From PIL images, arrays or tensors."""
        if len(pictures) != len(labels):
            raise UserError(f"{len(pictures)} images, but {len(labels)} labels")
        return Images(processor.pixels(pictures), torch.tensor([int(one) for one in labels]), list(classes))

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, rows: Tensor) -> Images:
        return Images(self.pixels[rows], self.labels[rows], self.classes)

    def split(self, share: float, seed: int = 0) -> tuple[Images, Images]:
        """The rest, and this share of every class (at least one image of each), chosen by the seed: to learn from, and held
        out."""
        generator = torch.Generator().manual_seed(seed)
        held_out = torch.zeros(len(self), dtype=torch.bool)
        for number, name in enumerate(self.classes):
            rows = (self.labels == number).nonzero().squeeze(1)
            if len(rows) < 2:
                raise UserError(f"class {name} has {len(rows)} images: it needs one to learn from and one to hold out")
            count = min(len(rows) - 1, max(1, round(share * len(rows))))
            held_out[rows[torch.randperm(len(rows), generator=generator)[:count]]] = True
        return self.at(~held_out), self.at(held_out)


def from_folder(folder: str | Path, processor: PNNImageProcessor, classes: Sequence[str] | None = None) -> Images:
    """All images of FOLDER/CLASS/…, of any format that Pillow reads. `classes`: of a model that is trained already, in its
    order; else the subfolders' names in alphabetical order."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: put images into FOLDER/CLASS/, one subfolder per class")
    found = sorted(one.name for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))
    if classes is None and len(found) < 2:
        what = f"one subfolder ({found[0]})" if found else "no subfolders"
        raise UserError(f"{folder} has {what}: expected one subfolder per class, and at least two classes")
    unknown = [] if classes is None else sorted(set(found) - set(classes))
    if unknown:
        raise UserError(f"{folder / unknown[0]}: the model has no class of this name (it has {', '.join(classes or ())})")
    classes = list(found if classes is None else classes)
    files: list[tuple[Path, int]] = []
    for name in found:
        inside = sorted(one for one in (folder / name).rglob("*") if one.is_file() and not one.name.startswith("."))
        if not inside:
            raise UserError(f"{folder / name} is empty: put the images of class {name} there, or remove it")
        files += [(file, classes.index(name)) for file in inside]
    pixels = [_read(file, processor) for file, _ in track(files, "reading images")]
    return Images(torch.cat(pixels), torch.tensor([label for _, label in files]), classes)


def _read(file: Path, processor: PNNImageProcessor) -> Tensor:
    try:
        with Image.open(file) as picture:
            return processor.pixels([picture])
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{file}: Pillow cannot read it as an image ({error}): remove or repair it") from error
