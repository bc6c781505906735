"""On a GPU, too, the fast path must follow the naive one's loss. Run by hand: pytest -m gpu tests/gpu"""

import pytest
import torch

from pnn.bench.curves import loss_curves
from pnn.config import load_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize(("precision", "within"), [("fp32", 1e-3), ("bf16", 0.02)])
@pytest.mark.parametrize("published", [False, True])
def test_two_hundred_updates_give_the_naive_curve(tiny_config, precision, within, published):
    model = {"hidden_size": 128, "dropout": 0.0, "delta_norm": published, "gate_bias": published, "zero_init": not published}
    config = tiny_config(model=model, training={"max_steps": 200, "batch_size": 64, "effective_batch_size": 64})
    found = loss_curves(load_config(str(config)), 200, precision)
    assert found["ours"][-1] < found["ours"][0] - 1  # it did learn
    assert found["largest_difference"] < within
