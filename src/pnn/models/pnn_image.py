"""A PNN that sees: the refiners of `models/pnn` over the patches of an image (`nn/patches`).

    h⁰ = embed([c, W p₁, …, W p_N]),   hᵗ = hᵗ⁻¹ + Δᵗ,   t = 1 … T,   logits after step t = head(hᵗ of the first token)

The first token is learnt, and the only row of the encoder's table of tokens. Every patch has a learnt position. The loss is the
paper's, of the class: Σ_t w_t CE(head(hᵗ)), so the model may be read after each of its steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers.utils import ModelOutput, can_return_tuple

from pnn.models.base import EncoderBase, EncoderOutput
from pnn.models.config_checks import check_kinds
from pnn.models.heads import EncoderWithHead
from pnn.models.pnn import PNNConfig, PNNForMaskedLM, PNNModel
from pnn.models.pretrained import Asked
from pnn.nn.patches import PatchTokens
from pnn.objectives import cross_entropy, weighted_sum


@strict
class PNNImageConfig(PNNConfig):
    """A PNN for images: what a `PNNConfig` says of the refiners, and how a square image is cut.

    * `image_size`: pixels on each side, to which the image processor brings every image;
    * `patch_size`: of the square patches, which must fill the image: `image_size=224, patch_size=16` gives 14 × 14 tokens;
    * `num_channels`: 1 (grey) or 3 (colours).
    """

    model_type = "pnn_image"

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    dropout: float | int = 0.0
    vocab_size: int = 1  # the token that is read, and no other
    max_position_embeddings: int = 0  # 0: as many as there are, that token and the patches
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        check_kinds(self)
        if self.max_position_embeddings == 0 and min(self.image_size, self.patch_size) > 0:
            self.max_position_embeddings = 1 + (self.image_size // self.patch_size) ** 2
        super().__post_init__(**kwargs)

    def validate_patches(self) -> None:
        """Called by `@strict`, beside what a PNNConfig checks."""
        size, patch = self.image_size, self.patch_size
        if size < 1 or patch < 1:
            raise ValueError(f"image_size={size} and patch_size={patch} must be above zero")
        if size % patch:
            fitting = [one for one in range(1, size + 1) if size % one == 0]
            near = sorted(sorted(fitting, key=lambda one: abs(one - patch))[:4])
            raise ValueError(
                f"patch_size={patch} does not divide image_size={size}: patches of {', '.join(map(str, near))} pixels would "
                f"fit, or images of {max(1, round(size / patch)) * patch} pixels"
            )
        if self.num_channels not in (1, 3):
            raise ValueError(f"num_channels={self.num_channels}: images are grey (1) or coloured (3)")
        if self.positions != "learned":
            raise ValueError(f'positions="{self.positions}": patches lie in a plane, and have learned positions')
        if self.halt is not None or self.random_halt:
            raise ValueError("halt: the patches of an image take all steps; num_steps says how many")
        if self.guess_after is not None:
            raise ValueError("guess_after: an image has no masked tokens")
        if self.embedding_size is not None:
            raise ValueError("embedding_size: patches are as wide as states, and there is no table of tokens")
        tokens = 1 + (size // patch) ** 2
        if (self.vocab_size, self.max_position_embeddings) != (1, tokens):
            raise ValueError(f"an image of {tokens - 1} patches has vocab_size=1 and max_position_embeddings={tokens}")


class PNNImageModel(PNNModel):
    """Images to states, h⁰ … hᵀ, of the token that is read and of every patch after it."""

    config_class = PNNImageConfig
    main_input_name = "pixel_values"

    def __init__(self, config: PNNImageConfig):
        super().__init__(config)
        self.patches = PatchTokens(config.patch_size, config.num_channels, config.hidden_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        num_steps: int | None = None,
        last_at: Tensor | None = None,
        **asked: Unpack[Asked],
    ) -> EncoderOutput:
        """pixel_values: (B, channels, size, size), in −1 … 1. `last_at` as in every encoder."""
        config = self.config
        shape = (config.num_channels, config.image_size, config.image_size)
        if pixel_values.dim() != 4 or pixel_values.shape[1:] != shape:
            raise ValueError(
                f"this model takes images of shape (batch, {', '.join(map(str, shape))}), not {tuple(pixel_values.shape)}: "
                f"its image processor makes them"
            )
        tokens = self.patches(pixel_values.to(self.patches.project.weight.dtype), self.embeddings.token.weight)
        return EncoderBase.forward(
            self, inputs_embeds=tokens, num_steps=num_steps, last_at=last_at, **asked, return_dict=True
        )  # fmt: skip


@dataclass
class ImageClassifierOutput(ModelOutput):
    """`step_losses`: the unweighted loss after each supervised step, without gradient."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    step_losses: Tensor | None = None
    states: tuple[Tensor, ...] | None = None
    deltas: tuple[Tensor, ...] | None = None
    gates: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class PNNForImageClassification(EncoderWithHead):
    """A PNN that says what is in an image, and learns from what it says after each step."""

    config_class = PNNImageConfig
    encoder_class = PNNImageModel
    main_input_name = "pixel_values"
    supervised = PNNForMaskedLM.supervised

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        num_steps: int | None = None,
        **asked: Unpack[Asked],
    ) -> ImageClassifierOutput:
        """labels: the number of each image's class, (B,). `num_steps`: other than trained."""
        hidden = asked["output_hidden_states"] = self.wants(asked.get("output_hidden_states"), "output_hidden_states")
        output_states = asked.pop("output_states", False)
        whole = output_states or hidden or asked.get("output_gates")
        first = torch.arange(len(pixel_values), device=pixel_values.device) * self.config.max_position_embeddings
        out = self.encoder(  # of the last step only the token that is read, unless somebody asked for all of it
            pixel_values,
            num_steps=num_steps,
            last_at=None if whole else first,
            output_states=True,
            **asked,
            return_dict=True,
        )
        last = out.last_hidden_state[:, 0] if whole else out.last_hidden_state[0]
        logits = self.classifier(self.dropout(last))
        loss = step_losses = None
        if labels is not None:
            trained, weights = self.supervised(out.states)
            earlier = [self.classifier(self.dropout(state[:, 0])) for state in trained[:-1]]
            losses = [cross_entropy(one, labels.view(-1)) for one in (*earlier, logits)]
            loss, step_losses = weighted_sum(losses, weights), torch.stack([one.detach() for one in losses])
        return ImageClassifierOutput(
            loss=loss,
            logits=logits,
            step_losses=step_losses,
            states=out.states if output_states else None,
            deltas=out.deltas,
            gates=out.gates,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )

    def read(self, states: tuple[Tensor, ...]) -> Tensor:
        """Logits after every step, h⁰ included: states as `output_states=True` hands them back → (T + 1, B, labels)."""
        return torch.stack([self.classifier(state[:, 0]) for state in states])
