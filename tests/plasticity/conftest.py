"""A tiny model of every architecture, with weights large enough that each head matters. Tests never change them: that `prune`
and the others leave their input alone is tested, and these are shared."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from small_cycles import LENGTH, language

import pnn
from pnn.data.tokenizers import of_synthetic_language
from pnn.plasticity import Text

COMMON = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 40}
LLAMA = COMMON | {"hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
GROUPED = LLAMA | {"num_key_value_heads": 3, "bos_token_id": None, "eos_token_id": None}
OWN = COMMON | {"intermediate_size": 48, "dropout": 0.1}

BUILDERS = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=50, n_embd=32, n_head=4, n_layer=3, n_positions=40, bos_token_id=None, eos_token_id=None)
    ),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**COMMON, ffn_dim=48, num_hidden_layers=3, bos_token_id=None, eos_token_id=None)
    ),
    # OPT-350M: words of another width, norms behind the residual
    "opt post-norm": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            **COMMON,
            ffn_dim=48,
            num_hidden_layers=3,
            word_embed_proj_dim=16,
            do_layer_norm_before=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "llama plain": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED | {"num_key_value_heads": 6})),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)),
    "ddl": lambda: pnn.DDLForCausalLM(pnn.DDLConfig(**COMMON, num_hidden_layers=3)),
    "ddl token": lambda: pnn.DDLForCausalLM(pnn.DDLConfig(**COMMON, num_hidden_layers=3, compressor="token")),
    "ddl two rounds": lambda: pnn.DDLForCausalLM(pnn.DDLConfig(**COMMON, num_hidden_layers=3, num_rounds=2)),
    "pnn causal": lambda: pnn.PNNForCausalLM(pnn.PNNCausalConfig(**OWN, schedule=[0, 1, 2, 0])),
    # its middle refiner three times: 0 1 1 1 2
    "pnn causal repeat": lambda: pnn.PNNForCausalLM(
        pnn.PNNCausalConfig(**OWN, update="rewrite", ffn="geglu", schedule=[0, 1, 2], repeat=[1, 2], num_steps=5)
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**COMMON, intermediate_size=48, num_hidden_layers=3)),
    "pnn": lambda: pnn.PNNForMaskedLM(pnn.PNNConfig(**OWN, schedule=[0, 1, 2, 0])),
    "pnn bert": lambda: pnn.BertBaselineForMaskedLM(pnn.BertBaselineConfig(**OWN, num_hidden_layers=3)),
}
ENCODERS = ("bert", "pnn", "pnn bert")


def made(name: str) -> hf.PreTrainedModel:
    torch.manual_seed(sorted(BUILDERS).index(name))
    model = BUILDERS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


@pytest.fixture(scope="session")
def built():
    """`built("gpt2")`: a model, the same one each time."""
    models: dict[str, hf.PreTrainedModel] = {}

    def get(name: str) -> hf.PreTrainedModel:
        if name not in models:
            models[name] = made(name)
        return models[name]

    return get


@pytest.fixture(scope="session", params=list(BUILDERS))
def model(request, built):
    return built(request.param)


@pytest.fixture
def precise(model):
    """In double precision: in fp32 some CPUs add up products of other shapes in another order, by more than 1e-6."""
    return copy.deepcopy(model).double()


@pytest.fixture(scope="session", params=[name for name in BUILDERS if name not in ENCODERS])
def decoder(request, built):
    return built(request.param)


@pytest.fixture
def own(model):
    """A copy that may be changed."""
    return copy.deepcopy(model)


@pytest.fixture(scope="session")
def texts():
    """`texts(model)`: two batches with labels, the second with padding at its end."""

    def of(model, rows: int = 2, length: int = 12) -> list[dict[str, torch.Tensor]]:
        draw = torch.Generator().manual_seed(1)
        batches = []
        for number in range(2):
            ids = torch.randint(1, 50, (rows, length), generator=draw)
            mask = torch.ones_like(ids)
            if number:
                mask[1, -5:] = 0
            labels = ids.masked_fill(mask == 0, -100)
            if not model.can_generate():
                labels = labels.masked_fill(torch.rand(labels.shape, generator=draw) > 0.4, -100)
            batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
        return batches

    return of


@pytest.fixture(scope="session")
def logits():
    """`logits(model)`: on the same tokens each time, two rows, the second shorter where the model takes a mask."""

    @torch.no_grad()
    def of(model, length: int = 11) -> torch.Tensor:
        ids = torch.randint(1, 50, (2, length), generator=torch.Generator().manual_seed(2))
        mask = torch.ones_like(ids)
        mask[1, length - 3 :] = 0
        return model(input_ids=ids, attention_mask=mask).logits * mask[..., None]

    return of


# Models that read the embedded language --------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tokenizer():
    return of_synthetic_language(LENGTH)


@pytest.fixture(scope="session")
def rows(tokenizer) -> torch.Tensor:
    ids = [token for line in language().splitlines() for token in tokenizer.encode(line)]
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)


@pytest.fixture(scope="session")
def text(rows) -> Text:
    return Text(rows[:-16], rows[-16:], source="embedded")


@pytest.fixture(scope="session")
def model_of(tokenizer):
    """`model_of("gpt2")`: a fresh tiny model that reads the embedded language."""
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": LENGTH}

    def make(kind: str) -> hf.PreTrainedModel:
        torch.manual_seed(3)
        if kind == "gpt2":
            config = hf.GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_head=4, n_layer=3, n_positions=LENGTH)
            config.bos_token_id = config.eos_token_id = tokenizer.sep_token_id
            return hf.GPT2LMHeadModel(config).eval()
        if kind == "ddl":
            return pnn.DDLForCausalLM(pnn.DDLConfig(**sizes, num_hidden_layers=3)).eval()
        if kind == "bert":
            return hf.BertForMaskedLM(hf.BertConfig(**sizes, intermediate_size=48, num_hidden_layers=3)).eval()
        assert kind == "pnn"
        return pnn.PNNForMaskedLM(pnn.PNNConfig(**sizes, intermediate_size=48, schedule=[0, 1, 2, 0])).eval()

    return make
