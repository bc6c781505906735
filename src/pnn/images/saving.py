"""A folder to share: model, image processor, code for those without this package, checksums and a card."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig, AutoImageProcessor

from pnn.errors import UserError
from pnn.export.remote_code import write_code
from pnn.files import new_folder, write_checksums, write_text
from pnn.models.image_processor import PNNImageProcessor
from pnn.models.pnn_image import PNNForImageClassification
from pnn.models.registry import IMAGES
from pnn.numbers import per_cent

HEAD = """---
library_name: transformers
tags: [plastic-neural-networks, pnn_image]
pipeline_tag: image-classification
---
"""
USE = """```python
from transformers import pipeline

classify = pipeline("image-classification", "FOLDER", trust_remote_code=True)
classify("picture.png")
```

With `trust_remote_code=True` the folder's own code runs. Where `pnn` is imported, leave it out."""


def save(model: PNNForImageClassification, folder: str | Path, hits: NDArray[np.bool_] | None = None) -> None:
    """The folder appears whole or not at all. `hits`: of `hits_by_step` on images that the model has not seen, for the card."""
    folder = Path(folder)
    if folder.exists():
        raise UserError(f"{folder} exists already: choose another folder")
    config = model.config
    with new_folder(folder) as partial:
        model.save_pretrained(partial)
        PNNImageProcessor(config.image_size, config.num_channels).save_pretrained(partial)
        write_code(partial, "config.json", {AutoConfig: IMAGES.config, **IMAGES.classes})
        write_code(partial, "preprocessor_config.json", {AutoImageProcessor: PNNImageProcessor})
        write_checksums(partial)
        write_text(partial / "README.md", card(model, folder.name, hits))


def card(model: PNNForImageClassification, name: str, hits: NDArray[np.bool_] | None) -> str:
    config = model.config
    side = config.image_size // config.patch_size
    rows = {
        "parameters": f"{model.num_parameters():,}",
        "images": f"{config.image_size} × {config.image_size} pixels, {'grey' if config.num_channels == 1 else 'coloured'}",
        "patches": f"{side} × {side}",
        "refinement steps": str(config.num_steps),
        "labels": ", ".join(str(label) for label in config.id2label.values()),
    }
    table = "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())])
    results = "Nothing was measured."
    if hits is not None:
        steps = [f"| {step} | {per_cent(share)} |" for step, share in enumerate(hits.mean(axis=1))]
        results = f"Of {hits.shape[1]:,} images that it has not seen:\n\n" + "\n".join(
            ["| after step | accuracy |", "|---|---|", *steps]
        )
    what = IMAGES.sentence(config)
    return f"{HEAD}\n# {name}\n\n{what}\n\n## Use\n\n{USE}\n\n## Model\n\n{table}\n\n## Results\n\n{results}\n"
