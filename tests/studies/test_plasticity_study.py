"""The study: its arms are cycles, paired and equally long; a killed one goes on to the same results; processes share it."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import transformers as hf

from pnn.data import synthetic
from pnn.data.tokenizers import of_synthetic_language
from pnn.errors import UserError
from pnn.files import write_json
from pnn.plasticity import CycleSettings, Scores, Text, cycle, phases, save
from pnn.plasticity.phases import score_heads
from pnn.runs import read_json, read_metrics
from pnn.studies.plasticity import study as study_module
from pnn.studies.plasticity.arms import CONTROL, CYCLE, Arm, StudySettings, all_arms, cycle_of, run_arm
from pnn.studies.plasticity.study import claimed, collect, run_study, sources_of, timed_arms

LENGTH = 16
PLAN = StudySettings(seeds=2, learn_steps=4, learning_rate=1e-3, batch_rows=2, score_rows=4, evaluate_every=2)
FEW = [CONTROL, CYCLE, *(arm for arm in all_arms() if arm.prune_by == "random")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two tiny models of one architecture, and a text."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = of_synthetic_language(LENGTH)
    for name, layers in (("small", 2), ("large", 3)):
        torch.manual_seed(3)
        config = hf.GPT2Config(vocab_size=len(tokenizer), n_embd=20, n_head=5, n_layer=layers, n_positions=LENGTH)
        config.bos_token_id = config.eos_token_id = tokenizer.sep_token_id
        save(hf.GPT2LMHeadModel(config), folder / name, tokenizer)
    (folder / "text.txt").write_text("\n\n".join(synthetic.paragraphs(60, seed=0)))
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def sources(*names):
    return sources_of(names or ("small", "large"), ["text.txt"], None, LENGTH, 8)


@pytest.fixture(scope="module")
def unbroken(folder):
    """One study, whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_study(Path("whole"), sources(), PLAN)
    return folder / "whole"


# Arms -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(folder) -> Text:
    rows = torch.randint(1, 60, (60, LENGTH), generator=torch.Generator().manual_seed(0))
    return Text(rows[:50], rows[50:], source="random")


@pytest.mark.parametrize("arm", [CYCLE, Arm(0.5, "entropy"), CONTROL, Arm(0.3, "gradient", 0.1, "importance", 5.0)])
def test_an_arm_is_a_cycle(arm, folder, text, tmp_path):
    """The same settings, seed and text give the same losses, bit for bit."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder / "large").eval()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    settings = CycleSettings(
        prune=arm.prune,
        grow=arm.grow,
        prune_by=arm.prune_by,
        grow_by="random" if arm.grow_by == "none" else arm.grow_by,
        multiplier=arm.multiplier,
        learn_steps=PLAN.learn_steps,
        learning_rate=PLAN.learning_rate,
        batch_rows=PLAN.batch_rows,
        score_rows=PLAN.score_rows,
        evaluate_every=PLAN.evaluate_every,
        seed=1,
    )
    found = run_arm(model, text, arm, PLAN, 1, score_heads(model, text, cycle_of(arm, PLAN, 1), 1))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    cycle(model, text, tmp_path / "cycle", settings)
    records = read_metrics(tmp_path / "cycle" / "metrics.jsonl")
    by_phase = {record["phase"]: record for record in records}
    assert found["loss_pruned"] == by_phase["measurement"]["loss"]
    assert found["loss_grown"] == by_phase["growth"]["loss"]
    assert found["loss"] == by_phase["final"]["loss"]
    assert found["head_map"] == by_phase["final"]["head_map"]
    assert [loss for _, loss in found["curve"][1:]] == [one["loss"] for one in records if one["phase"] == "evaluation"]


def test_all_arms_of_a_seed_learn_the_same_rows(folder, text, monkeypatch):
    model = hf.AutoModelForCausalLM.from_pretrained(folder / "small").eval()
    seen: list[list] = []
    learn = phases.learn

    def watched(model, new, batch_at, **how):
        seen.append([batch_at(step)["input_ids"].tolist() for step in range(how["steps"])])
        return learn(model, new, batch_at, **how)

    monkeypatch.setattr(phases, "learn", watched)
    scores = Scores({(layer, index): layer + index / 10 for layer in range(2) for index in range(5)})
    for seed in (0, 1):
        for arm in (CONTROL, CYCLE, Arm(0.5, "magnitude")):
            assert run_arm(model, text, arm, PLAN, seed, scores)["updates"] == PLAN.learn_steps
    assert seen[0] == seen[1] == seen[2] != seen[3] == seen[4] == seen[5]
    assert len(seen[0]) == PLAN.learn_steps


def test_counts_and_sizes(unbroken):
    large = {one.stem: read_json(one) for one in (unbroken / "arms").glob("large-0-*.json")}
    assert len(large) == len(all_arms())
    by_arm = {one["arm"]: one for one in large.values()}
    assert by_arm["retrained"]["heads"] == 15
    assert by_arm["gradient-0.3"]["heads"] == 15 - 4
    assert by_arm["gradient-0.3-gradient-0.1-x3"]["heads"] == 15 - 4 + 1
    assert by_arm["gradient-0.5-gradient-0.2-x3"]["heads"] == 15 - 7 + 3
    assert {one["updates"] for one in large.values()} == {4}
    assert all([step for step, _ in one["curve"]] == [0, 2, 4] for one in large.values())
    # heads are scored once, for all arms that prune by one measure
    assert by_arm["gradient-0.3"]["pruned_heads"] == by_arm["gradient-0.3-random-0.1-x3"]["pruned_heads"]
    assert len(list((unbroken / "scores").glob("*.json"))) == 2 * 2 * 6


def test_what_is_written(unbroken):
    result = read_json(unbroken / "study.json")
    assert list(result["findings"]) == ["F0", "F1", "F2", "F3", "F4"]
    assert list(result["findings"]["F3"]["by_pair"]) == ["small → large"]
    assert len(result["tables"]["small"]["ratios"]) == 12
    timed = result["speed"]["large"]["rows"][-1]["tokens_per_second"]
    assert set(timed) == {arm.name for arm in timed_arms()}
    assert {"retrained", "gradient-0.1", "gradient-0.5-gradient-0.2-x3"} <= set(timed)
    assert min(timed.values()) > 0
    assert not list(unbroken.rglob("*.safetensors"))


# Going on -------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def arms_of(folder: Path, model: str) -> dict[str, dict]:
    return {path.name: read_json(path) for path in (folder / "arms").glob(f"{model}-*.json")}


def test_what_was_done_before_a_kill_is_kept_and_the_rest_is_the_same(here, unbroken, monkeypatch):
    monkeypatch.setattr(study_module, "all_arms", lambda: FEW)
    done = []

    def dying(*arguments):
        if len(done) == 5:
            raise Killed
        done.append(1)
        return run_arm(*arguments)

    monkeypatch.setattr(study_module, "run_arm", dying)
    study_module._start(Path("killed"), sources("small"), PLAN)
    with pytest.raises(Killed):
        study_module.work(Path("killed"), sources("small"), PLAN)
    assert len(arms_of(Path("killed"), "small")) == 5
    again = []
    monkeypatch.setattr(study_module, "run_arm", lambda *arguments: again.append(1) or run_arm(*arguments))
    study_module._start(Path("killed"), sources("small"), PLAN)
    study_module.work(Path("killed"), sources("small"), PLAN)
    assert len(again) == PLAN.seeds * len(FEW) - 5  # none was done twice
    found, whole = arms_of(Path("killed"), "small"), arms_of(unbroken, "small")
    assert len(found) == PLAN.seeds * len(FEW)
    assert found == {name: whole[name] for name in found}


def test_what_another_process_works_on_is_left_to_it(here, monkeypatch):
    """An arm that is claimed is skipped, waited for, and done here if the claim ends without a result."""
    monkeypatch.setattr(study_module, "all_arms", lambda: FEW)
    monkeypatch.setattr(study_module, "WAIT", 0.0)
    plan = StudySettings(seeds=1, learn_steps=1, batch_rows=2, score_rows=2)
    study_module._start(Path("shared"), sources("small"), plan)
    order, other = [], claimed(Path("shared"), "small-0-retrained")
    assert other.__enter__()

    def watched(model, text, arm, *more):
        order.append(arm.name)
        return run_arm(model, text, arm, *more)

    def give_up(seconds):  # called once nothing else is left
        other.__exit__(None, None, None)

    monkeypatch.setattr(study_module, "run_arm", watched)
    monkeypatch.setattr(study_module.time, "sleep", give_up)
    study_module.work(Path("shared"), sources("small"), plan)
    assert order == [arm.name for arm in FEW[1:]] + ["retrained"]


def test_two_folders_make_one_study(here, unbroken, tmp_path):
    """As if both models had been studied together."""
    for name in ("small", "large"):
        part = tmp_path / name
        shutil.copytree(unbroken, part)
        plan = read_json(part / "plan.json")
        write_json(part / "plan.json", plan | {"models": {name: plan["models"][name]}})
    assert collect(tmp_path / "small", tmp_path / "large") == read_json(unbroken / "study.json")
    with pytest.raises(UserError, match="small is in another folder too"):
        collect(tmp_path / "small", tmp_path / "small")


@pytest.mark.slow
def test_killed_for_real_and_gone_on_with_by_two_processes(here, unbroken, start_pnn):
    """One of the two models: its arms are those of the whole study."""
    settings = ["--seeds", 2, "--learn-steps", 4, "--learning-rate", 1e-3, "--batch-size", 2, "--score-rows", 4]
    settings += ["--evaluate-every", 2, "--validation-rows", 8, "--max-length", LENGTH]
    command = ["plasticity", "study", "small", "--data", "text.txt", *settings, "--output", "real"]
    first = start_pnn(*command)
    deadline = time.monotonic() + 300
    while len(list(Path("real/arms").glob("*.json"))) < 20:
        assert first.poll() is None, first.output()
        assert time.monotonic() < deadline, first.output()
        time.sleep(0.01)
    first.kill()
    assert first.returncode == -signal.SIGKILL
    assert not Path("real/study.json").exists()
    again = start_pnn(*command, "--resume", "--jobs", 2)
    assert again.wait() == 0, again.output()
    assert "F4" in again.output()
    assert arms_of(Path("real"), "small") == arms_of(unbroken, "small")
    assert read_json(Path("real/study.json"))["tables"]["small"] == read_json(unbroken / "study.json")["tables"]["small"]
    assert {path.stem for path in Path("real/figures").iterdir()} == {"pruning", "growth", "ratios", "multipliers", "pareto"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"plan": StudySettings(seeds=3)}, "seeds was 2 and is now 3"),
        ({"models": ("small",)}, "its models are small, large"),
    ],
)
def test_only_the_same_study_is_resumed(change, says, here, unbroken):
    with pytest.raises(UserError, match=says):
        run_study(unbroken, sources(*change.get("models", ())), change.get("plan", PLAN), resume=True)


def test_clear_errors(here, tmp_path, pnn_command):
    def study(*arguments):
        return pnn_command("plasticity", "study", *arguments, "--max-length", LENGTH, "--output", tmp_path / "new")

    tokenizer = of_synthetic_language(LENGTH)
    config = hf.GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_head=1, n_layer=2, n_positions=LENGTH)
    save(hf.GPT2LMHeadModel(config), tmp_path / "thin", tokenizer)
    for arguments, says in (
        (("small", "small", "--data", "text.txt"), "two models are called small"),
        (("small", "--data", "text.txt", "--data", "text.txt"), "--data was given 2 times"),
        (("small", "large", "--data", "nowhere.txt"), "nowhere.txt"),
        ((tmp_path / "thin", "--data", "text.txt"), "thin has too few heads for a study"),
        (("small", "--data", "text.txt", "--learning-rate", "0"), "learning_rate: expected more than 0, got 0.0"),
    ):
        code, _, err = study(*arguments)
        assert code == 2
        assert says in err
        assert not (tmp_path / "new").exists()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("something")
    with pytest.raises(UserError, match="exists already"):
        run_study(tmp_path / "taken", sources(), PLAN)
    with pytest.raises(UserError, match=r"no plan\.json"):
        run_study(tmp_path / "taken", sources(), PLAN, resume=True)
    assert json.dumps(sorted(path.name for path in (tmp_path / "taken").iterdir())) == '["file"]'
