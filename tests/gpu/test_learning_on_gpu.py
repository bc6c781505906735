"""Learning of Llama-like decoders with kernels, on a GPU in bf16, beside the same without. Run by hand: pytest -m gpu."""

from contextlib import nullcontext

import pytest
import torch
import transformers as hf

from pnn.plasticity import learning, prune
from pnn.plasticity.learning import learn
from pnn.plasticity.teaching import Teacher
from pnn.plasticity.units import Unit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SIZE = {"vocab_size": 1000, "hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 512}


def build() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE, num_hidden_layers=3, max_position_embeddings=128)).cuda()


def losses(taught: bool) -> list[float]:
    model = prune(build(), [Unit("head", 0, 0), *(Unit("neuron", 1, index) for index in range(64))])
    rows = torch.randint(0, 1000, (8, 100), generator=torch.Generator().manual_seed(0))
    plan = {"steps": 20, "peak_rate": 3e-3, "multiplier": 1.0, "seed": 0, "teacher": Teacher(build()) if taught else None}
    return [loss for _, loss in learn(model, [], lambda _: {"input_ids": rows, "labels": rows}, **plan)]


@pytest.mark.parametrize("taught", [False, True])
def test_with_kernels_it_learns_the_same(taught, monkeypatch):
    fast = losses(taught)
    monkeypatch.setattr(learning, "fused", lambda *models: nullcontext())
    plain = losses(taught)
    assert plain[-1] < 0.8 * plain[0]
    torch.testing.assert_close(torch.tensor(fast), torch.tensor(plain), rtol=0.03, atol=0.003)
