"""The order in which gradients are complete, which docs/scaling.md rests on."""

import pytest
import torch

import pnn


@pytest.mark.parametrize("shape", [{"num_steps": 4}, {"num_steps": 2}])
def test_a_shared_refiners_gradient_is_complete_only_at_the_end(shape):
    """What DDP waits for: the head first, the refiner not before the backward pass has come to step 1, the embeddings last."""
    size = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    model = pnn.PNNForMaskedLM(pnn.PNNConfig(**size, **shape, zero_init=False))
    events = []
    for part in ("head", "encoder.refiners", "encoder.embeddings"):
        for p in model.get_submodule(part).parameters():
            p.register_post_accumulate_grad_hook(lambda _, part=part: events.append(part))
    model.encoder.refiners[0].register_full_backward_pre_hook(lambda *_: events.append("step"))
    ids = torch.randint(5, 50, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    refiner, embeddings = (len(list(model.get_submodule(f"encoder.{p}").parameters())) for p in ("refiners", "embeddings"))
    order = ["head"] * 2 + ["step"] * shape["num_steps"]
    order += ["encoder.refiners"] * refiner + ["encoder.embeddings"] * embeddings
    assert events == order
