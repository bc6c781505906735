"""What a run does on a machine without a GPU, with an old one, or without Triton. The machines are made up: only the questions
to torch are answered for it, the decisions are ours."""

import json

import pytest
import torch
import transformers as hf

from pnn import kernels
from pnn.config import load_config
from pnn.errors import UserError
from pnn.models.precision import width_of
from pnn.models.sections import build_model, model_config
from pnn.nn.fast import for_kernels
from pnn.training import device
from pnn.training.device import compiles, precision_of, trained_in
from pnn.training.recording import can_record


@pytest.fixture
def machine(monkeypatch):
    """`machine(gpus=1, capability=(7, 5))`: torch then says that this is what there is."""

    def has(gpus: int = 1, capability: tuple[int, int] = (9, 0), triton: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
        # emulated, an old GPU says yes to bf16
        supported = lambda including_emulation=True: including_emulation or capability >= (8, 0)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
        monkeypatch.setattr(kernels, "HAS_TRITON", triton)
        monkeypatch.delenv("LOCAL_RANK", raising=False)

    return has


def config(*settings):
    return load_config(
        "quickstart_pnn", ["training.device=auto", "training.precision=auto", "training.compile=null", *settings]
    )


@pytest.mark.parametrize(
    ("there", "settings", "chosen"),
    [
        ({"gpus": 0}, [], ("no", False)),
        ({"gpus": 0}, ["training.precision=bf16"], ("bf16", False)),
        ({"capability": (9, 0)}, [], ("bf16", True)),
        ({"capability": (9, 0)}, ["training.device=cpu"], ("no", False)),
        ({"capability": (7, 5)}, [], ("fp16", True)),
        ({"capability": (7, 5)}, ["training.precision=fp32"], ("no", True)),
    ],
)
def test_precision_follows_from_what_there_is(machine, there, settings, chosen):
    machine(**there)
    assert precision_of(config(*settings)) == chosen


@pytest.mark.parametrize(("width", "can", "chosen"), [(128, True, "bf16"), (64, True, "no"), (128, False, "no")])
def test_a_cpu_trains_in_bf16_where_that_is_faster(machine, monkeypatch, width, can, chosen):
    machine(gpus=0)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": can}, raising=False)
    assert precision_of(config(f"model.hidden_size={width}")) == (chosen, False)
    assert precision_of(config(f"model.hidden_size={width}", "training.precision=fp32")) == ("no", False)


def test_a_run_on_a_cpu_goes_on_in_what_it_began_with(machine, monkeypatch, tmp_path):
    """Also one of an older version, which does not say that it was fp32. A GPU's run has nothing to say to a CPU."""
    machine(gpus=0)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    wide = config("model.hidden_size=128")
    assert trained_in(tmp_path) is None
    hardware = {"cpu": "x86_64", "threads": 1, "gpus": []}
    made = {"hardware": hardware, "versions": {"torch": "2", "transformers": "5"}}
    for more, began in (({}, "fp32"), ({"precision": "bf16"}, "bf16"), ({"hardware": hardware | {"gpus": ["one"]}}, None)):
        (tmp_path / "environment.json").write_text(json.dumps(made | more))
        assert trained_in(tmp_path) == began
        assert precision_of(wide, began) == ("no" if began == "fp32" else "bf16", False)
    assert precision_of(config("training.precision=bf16"), "fp32") == ("bf16", False)  # as asked


def test_a_model_whose_config_has_parts_is_as_wide_as_the_one_that_reads(machine, monkeypatch):
    machine(gpus=0)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    for width, chosen in ((32, "no"), (128, "bf16")):
        text = hf.Qwen3_5TextConfig(hidden_size=width)
        assert width_of(hf.Qwen3_5Config(text_config=text.to_dict())) == width_of(text) == width
        monkeypatch.setattr(device, "model_config", lambda section, text=text: hf.Qwen3_5Config(text_config=text.to_dict()))
        assert precision_of(config())[0] == chosen
    assert width_of(hf.PreTrainedConfig()) == 0


@pytest.mark.parametrize(
    ("there", "setting", "says"),
    [
        ({"gpus": 0}, "training.device=cuda", "no GPU"),
        ({"gpus": 0}, "training.precision=fp16", "needs a GPU"),
        ({"capability": (7, 5)}, "training.precision=bf16", "Tesla T4 cannot compute in it: use fp16"),
    ],
)
def test_what_there_is_not_is_said(machine, there, setting, says):
    machine(**there)
    with pytest.raises(UserError, match=says):
        precision_of(config(setting))


def test_more_processes_than_gpus(machine, monkeypatch):
    machine(gpus=2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    precision_of(config())
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match=r"process 3 .* at most 2 processes"):
        precision_of(config())
    assert precision_of(config("training.device=cpu")) == ("no", False)


def test_only_what_the_compiler_knows_is_compiled(machine):
    default, asked = config().training, config("training.compile=true").training
    machine()
    assert compiles(default, on_gpu=True)
    assert not compiles(default, on_gpu=False)
    assert compiles(asked, on_gpu=False)  # a CPU needs no Triton
    for there, says in (({"capability": (6, 1)}, "does not know this GPU"), ({"triton": False}, "not installed")):
        machine(**there)
        assert not compiles(default, on_gpu=True)
        with pytest.raises(UserError, match=says):
            compiles(asked, on_gpu=True)
    machine(capability=(7, 5))
    assert compiles(default, on_gpu=True)


@pytest.mark.parametrize(
    ("there", "dtype", "taken"),
    [
        ({"capability": (8, 0)}, torch.bfloat16, True),
        ({"capability": (9, 0)}, torch.float16, True),
        ({"capability": (9, 0)}, torch.float32, False),
        ({"capability": (7, 5)}, torch.float16, False),
        ({"capability": (9, 0), "triton": False}, torch.bfloat16, False),
    ],
)
def test_kernels_are_for_16_bit_on_a_gpu_that_triton_knows_well(machine, there, dtype, taken):
    from torch._subclasses.fake_tensor import FakeTensorMode

    machine(**there)
    with FakeTensorMode():  # a tensor on a GPU, without one
        assert for_kernels(torch.empty(2, 8, dtype=dtype, device="cuda")) == taken
    assert not for_kernels(torch.empty(2, 8, dtype=dtype))


@pytest.mark.parametrize(
    ("section", "recorded"),
    [
        ({"type": "pnn", "max_position_embeddings": 128}, True),
        ({"type": "pnn", "max_position_embeddings": 129}, False),  # longer than our kernel's
        ({"type": "bert", "num_hidden_layers": 1, "max_position_embeddings": 128}, True),
        ({"type": "bert", "num_hidden_layers": 1, "max_position_embeddings": 512}, False),
        ({"type": "ddl", "num_hidden_layers": 1, "max_position_embeddings": 512}, True),  # rows of one length: nobody asks
    ],
)
def test_a_pass_is_recorded_where_it_waits_for_nothing(machine, section, recorded):
    pytest.importorskip("triton", reason="Triton is not installed")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 16}
    model = build_model(model_config(sizes | section, vocab_size=20))
    machine()
    on_gpu = torch.device("cuda")
    assert can_record(model, torch.bfloat16, on_gpu) == recorded
    assert not can_record(model, torch.float16, on_gpu)  # has a loss scale to look at
    assert not can_record(model, torch.bfloat16, torch.device("cpu"))
    machine(capability=(7, 5))
    assert not can_record(model, torch.bfloat16, on_gpu)
