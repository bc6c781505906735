"""Adapters of a low rank: they alone learn, they end in the weights, and `pnn shrink --lora` leaves a folder like any other."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from small_cycles import language, stopped_at_update

from pnn.errors import UserError
from pnn.plasticity import Unit, prune
from pnn.plasticity.learning import learn
from pnn.plasticity.lora import low_rank
from pnn.plasticity.shrink import ShrinkSettings, shrink

SETTINGS = {"fewer": 0.2, "learn_steps": 3, "learning_rate": 3e-3, "batch_rows": 2, "evaluate_every": 2, "score_rows": 4}
QUICK = ("--learn-steps", 3, "--batch-size", 2, "--learning-rate", 0.003, "--score-rows", 4, "--validation-rows", 4)


@pytest.fixture(autouse=True)
def _with_peft():
    pytest.importorskip("peft", reason="in the extra dev")


def state(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_only_adapters_learn_and_they_end_in_the_weights(model, texts, logits):
    small = prune(model, [Unit("layer", 0, 0), Unit("neuron", 1, 3), (2, 1)])
    small.get_input_embeddings().requires_grad_(False)
    before, held, random = state(small), {n: p.requires_grad for n, p in small.named_parameters()}, torch.get_rng_state()
    with low_rank(small, 2):
        assert torch.equal(torch.get_rng_state(), random)  # that adapters are drawn disturbs nobody
        learnt = [name for name, parameter in small.named_parameters() if parameter.requires_grad]
        assert learnt
        assert all("lora_" in name for name in learnt)
        list(learn(small, [], lambda _: texts(model)[0], steps=2, peak_rate=1e-2, multiplier=1.0, seed=0))
        inside = {name.replace(".base_layer", ""): value for name, value in state(small).items() if "lora_" not in name}
        assert all(torch.equal(value, before[name]) for name, value in inside.items())
        assert inside.keys() == before.keys()
        expected = logits(small)
    assert (logits(small) - expected).abs().max() < 1e-4
    assert {n: p.requires_grad for n, p in small.named_parameters()} == held
    changed = [name for name, value in state(small).items() if not torch.equal(value, before[name])]
    assert len(changed) == len(learnt) // 2  # a pair for each matrix


def test_the_command_leaves_a_folder_like_any_other(pnn_command, model_of, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model_of("gpt2").save_pretrained("model")
    tokenizer.save_pretrained("model")
    Path("text.txt").write_text(language())
    words = ("shrink", "model", "--parameters", "-20%", "--data", "text.txt", *QUICK)
    still = ("--learning-rate", 1e-12)  # pruned on the same rows, and as good as not learnt
    for name, more in {"plain": (), "adapted": ("--lora", 2), "pruned": still}.items():
        code, _, err = pnn_command(*words, *more, "--output", name)
        assert code == 0, err
    assert {path.name for path in Path("adapted").iterdir()} == {path.name for path in Path("plain").iterdir()}
    assert json.loads(Path("adapted/summary.json").read_text())["settings"]["lora"] == 2
    assert "LoRA of rank 2" in Path("adapted/README.md").read_text()
    assert "LoRA" not in Path("plain/README.md").read_text()
    adapted, pruned = (state(hf.AutoModelForCausalLM.from_pretrained(name)) for name in ("adapted", "pruned"))
    assert {name: value.shape for name, value in adapted.items()} == {name: value.shape for name, value in pruned.items()}
    changes = {name: value - pruned[name] for name, value in adapted.items()}
    changed = {name: change for name, change in changes.items() if change.abs().max() > 1e-9}
    assert changed
    for name, change in changed.items():  # norms, biases and words stayed; matrices changed by their adapters' rank
        assert ".c_" in name
        sizes = torch.linalg.svdvals(change)
        assert sizes[2] < 1e-3 * sizes[1]


def test_stopped_while_adapters_learn_it_gives_the_same_bits(model_of, text, tmp_path):
    plan = ShrinkSettings(**SETTINGS, lora=2)
    straight, _, *_ = shrink(model_of("gpt2"), text, tmp_path / "straight", plan)
    with stopped_at_update(2):
        shrink(model_of("gpt2"), text, tmp_path / "work", plan)
    with pytest.raises(UserError, match="lora was 2"):
        shrink(model_of("gpt2"), text, tmp_path / "work", ShrinkSettings(**SETTINGS), resume=True)
    torch.manual_seed(99)  # where adapters begin follows from the plan's seed alone
    resumed, _, *_ = shrink(model_of("gpt2"), text, tmp_path / "work", plan, resume=True)
    assert all(torch.equal(value, straight.state_dict()[name]) for name, value in resumed.state_dict().items())


def test_what_is_refused(monkeypatch):
    for rank in (0, -1):
        with pytest.raises(UserError, match=f"LoRA of rank {rank}: expected 1 or more"):
            ShrinkSettings(fewer=0.2, lora=rank)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="LoRA needs peft: pip install peft"):
        ShrinkSettings(fewer=0.2, lora=2)
