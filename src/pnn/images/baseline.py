"""What a PNN for images is compared with: transformers' ViT, whose layers are distinct, with about as many parameters."""

from __future__ import annotations

import torch
from transformers import ViTConfig, ViTForImageClassification

from pnn.errors import UserError
from pnn.models.pnn_image import PNNForImageClassification, PNNImageConfig


def vit_config(config: PNNImageConfig, hidden_size: int, layers: int) -> ViTConfig:
    """The PNN's images, patches, heads and labels; a feed-forward part four times as wide as the rest, as ViTs have it."""
    return ViTConfig(
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_channels=config.num_channels,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=4 * hidden_size,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.attention_dropout,
        initializer_range=config.initializer_range,
        id2label=config.id2label,
        label2id=config.label2id,
    )


def vit_of_equal_size(config: PNNImageConfig, layers: int | None = None) -> ViTConfig:
    """As many layers as the PNN has steps, unless told otherwise, and the width whose number of parameters comes nearest to the
    PNN's."""
    layers = layers or config.num_steps or 1
    heads = config.num_attention_heads
    with torch.device("meta"):
        wanted = PNNForImageClassification(config).num_parameters()
        sizes: dict[int, int] = {}  # width → how far off
        for width in range(heads, 4 * config.hidden_size + 1, heads):
            sizes[width] = abs(ViTForImageClassification(vit_config(config, width, layers)).num_parameters() - wanted)
            if sizes[width] > min(sizes.values()):  # past the nearest
                break
    width = min(sizes, key=lambda one: sizes[one])
    if sizes[width] > 0.1 * wanted:
        raise UserError(
            f"no ViT of {layers} layers and {heads} heads has about {wanted:,} parameters: width {width} is {sizes[width]:,} "
            f"off; choose other layers or heads"
        )
    return vit_config(config, width, layers)
