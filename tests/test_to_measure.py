"""results/to_measure.py does what fits into the time, in order, and takes home everything but weights."""

import importlib
import json
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from pnn.config import load_config

RESULTS = Path(__file__).parents[1] / "results"


@pytest.fixture
def to_measure(monkeypatch):
    monkeypatch.syspath_prepend(RESULTS)
    return importlib.import_module("to_measure")


@pytest.fixture
def wanted(to_measure, monkeypatch, tmp_path):
    """As if nothing but speeds was collected."""
    module = importlib.import_module("wanted")
    speeds = tmp_path / "here" / "better_than_bert" / "measured" / "speeds.json"
    speeds.parent.mkdir(parents=True)
    shutil.copy(RESULTS / "better_than_bert" / "measured" / "speeds.json", speeds)
    monkeypatch.setattr(module, "HERE", tmp_path / "here")
    monkeypatch.setattr(module, "BERT", tmp_path / "here" / "better_than_bert")
    return module


def named(module, runs, start):
    return {one.name.removeprefix(start): one for one in module.items(runs) if one.name.startswith(start)}


@pytest.fixture
def item(to_measure):
    def make(name, minutes, code="open(sys.argv[1], 'w').write('{data}')", **more):
        command = shlex.join([sys.executable, "-c", f"import sys; {code}", f"{{runs}}/{name}"])
        return to_measure.Item(name, minutes, command, name, f"nowhere/{name}", **{"needs": (), **more})

    return make


def test_what_does_not_fit_is_not_started(to_measure, item, tmp_path, capfd):
    waiting = [item("first", 0.2), item("long", 60), item("last", 0.2)]
    failed = to_measure.work(lambda: waiting, tmp_path, Path("shards"), 1.0, 1)
    assert failed == []
    assert [one.done(tmp_path) for one in waiting] == [True, False, True]
    assert (tmp_path / "first").read_text() == "shards"
    said = capfd.readouterr().out
    assert said.index("started: first") < said.index("done: first") < said.index("started: last")
    assert "long" not in said


def test_promises_add_up(to_measure, item, tmp_path, capfd):
    """Two at a time share the device: a second item of 0.6 minutes does not fit into one minute beside the first."""
    to_measure.work(lambda: [item("a", 0.6, "import time; time.sleep(2)"), item("b", 0.6)], tmp_path, Path("t"), 1.0, 2)
    said = capfd.readouterr().out
    assert said.index("done: a") < said.index("started: b")


def test_an_item_waits_for_its_data_and_for_what_it_follows(to_measure, item, tmp_path, capfd):
    (tmp_path / "data" / "text").mkdir(parents=True)
    waiting = [item("needy", 0, needs=("glue",)), item("later", 0, after="early"), item("early", 0, needs=("text",))]
    to_measure.work(lambda: waiting, tmp_path, tmp_path / "data", 1.0, 1)
    said = capfd.readouterr().out
    assert said.index("done: early") < said.index("done: later")
    assert "needy" not in said


def test_what_is_timed_has_the_device_to_itself(to_measure, item, tmp_path, capfd):
    slow = "import time; time.sleep(1)"
    waiting = [item("first", 0, slow), item("timed", 0, slow, alone=True), item("last", 0, slow)]
    to_measure.work(lambda: waiting, tmp_path, Path("t"), 1.0, 3)
    said = [line.split(",")[0] for line in capfd.readouterr().out.splitlines()]
    assert said == ["started: first", "done: first", "started: timed", "done: timed", "started: last", "done: last"]


def test_time_is_up_and_failures_are_told(to_measure, item, tmp_path, capfd):
    slow, broken = item("slow", 0.0, "import time; time.sleep(60)"), item("broken", 0.0, "raise SystemExit(3)")
    failed = to_measure.work(lambda: [broken, slow], tmp_path, Path("t"), 0.05, 1)
    assert [one.name for one in failed] == ["broken"]
    assert broken.done(tmp_path)  # it is not tried again
    assert not slow.done(tmp_path)
    said = capfd.readouterr().out
    assert "failed: broken" in said
    assert "stopped: slow" in said


def test_everything_but_weights_goes_home(to_measure, tmp_path, monkeypatch):
    for name in ("a/seed-0/evaluation.json", "a/seed-0/checkpoints/last/model.safetensors", "a/large"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x" * (200 if "large" in name else 10))
    monkeypatch.setattr(to_measure, "LARGEST", 100)
    for _ in range(2):  # the first archive is not in the second
        to_measure.take_home(tmp_path)
        with tarfile.open(tmp_path / "home.tar.gz") as home:
            assert home.getnames() == ["a/seed-0/evaluation.json"]


def test_trainings_are_those_of_the_comparison(to_measure, monkeypatch, capsys):
    monkeypatch.syspath_prepend(RESULTS / "better_than_bert")
    comparison, wanted = importlib.import_module("comparison"), importlib.import_module("wanted")
    trainings = [one for one in wanted.items(None) if one.name.startswith(("rates", "(a)", "(b)"))]
    for one in trainings:
        run = comparison.Run(Path("RUNS") / Path(one.leaves).parent)
        assert run.model in one.name
        assert f"seed {run.seed}" in one.name
        assert run.stage in one.name
        assert (RESULTS / "better_than_bert" / "configs" / f"{run.model}.yaml").exists()
    assert len({one.leaves for one in trainings}) == len({one.name for one in trainings})
    monkeypatch.setattr(sys, "argv", ["to_measure.py"])
    to_measure.main()
    said = capsys.readouterr().out
    assert "minutes in all" in said
    undone = [one.name for one in wanted.items(None) if not one.done(None)]
    assert [line[7:] for line in said.splitlines()[:-1]] == list(dict.fromkeys(undone))
    monkeypatch.setattr(sys, "argv", ["to_measure.py", "--only", "llm_pruner-2"])
    to_measure.main()
    assert [line[7:] for line in capsys.readouterr().out.splitlines()[:-1]] == [
        *("shrink, the adapted model", "shrink, less-20-llm_pruner-2")
    ]
    monkeypatch.setattr(sys, "argv", ["to_measure.py", "--only", "(b) bert4", "--only", "(a) pnn_again", "--only", "(b)"])
    to_measure.main()
    names = [line[7:] for line in capsys.readouterr().out.splitlines()[:-1]]
    assert names[:2] == ["(b) bert4, seed 0", "(a) pnn_again, seed 0"]
    assert len(names) == len(set(names)) > 2


def leave(runs, item, accuracy, loss=1.0):
    """What `pnn train` would."""
    (runs / item.leaves).parent.mkdir(parents=True)
    (runs / item.leaves).write_text(json.dumps({"accuracy": accuracy, "loss": loss}))


def test_what_is_best_on_the_tail_is_trained_longer(wanted, tmp_path):
    """Two of three candidates after one epoch, one of them after three; nothing before all of a kind are known."""
    tails = {"pnn_wide": 0.46, "pnn_thrice": 0.48, "pnn_twelve": 0.47}
    for model, tail in tails.items():
        assert not named(wanted, tmp_path, "(a) pnn_thrice")
        leave(tmp_path, named(wanted, tmp_path, "rates ")[f"{model}, seed 0, learning_rate 2e-3"], tail)
    assert set(named(wanted, tmp_path, "(a) pnn_")) >= {
        "thrice, seed 0",
        "twelve, seed 0",
        "rewrite, seed 4",
        "gateless, seed 2",
    }
    assert not named(wanted, tmp_path, "(a) pnn_wide")
    leave(tmp_path, named(wanted, tmp_path, "(a) ")["pnn_rewrite, seed 0"], 0.50)
    leave(tmp_path, named(wanted, tmp_path, "(a) ")["pnn_thrice, seed 0"], 0.51)
    assert not named(wanted, tmp_path, "(a) pnn_twelve, seed 1")
    leave(tmp_path, named(wanted, tmp_path, "(a) ")["pnn_twelve, seed 0"], 0.52)
    assert not named(wanted, tmp_path, "(a) bert12")
    leave(tmp_path, named(wanted, tmp_path, "rates ")["bert12, seed 0, learning_rate 1e-3"], 0.45)
    assert not named(wanted, tmp_path, "(a) bert12")  # its rate is not known yet
    leave(tmp_path, named(wanted, tmp_path, "rates ")["bert12, seed 0, learning_rate 5e-4"], 0.44)
    left = named(wanted, tmp_path, "(a) ")
    seeds = [name for name in left if not name.endswith("seed 0")]
    assert seeds[:4] == ["pnn_twelve, seed 1", "bert12, seed 1", "pnn_twelve, seed 2", "bert12, seed 2"]
    assert {f"pnn_twelve, seed {seed}" for seed in range(5)} <= set(left)
    assert {f"pnn_twelve_gateless, seed {seed}" for seed in range(3)} <= set(left)
    assert not {"pnn_thrice, seed 1", "pnn_rewrite, seed 3", "pnn_gateless, seed 0"} & set(left)
    assert "pnn_rewrite, seed 2" in left
    assert "pnn_twelve, seed 0" in named(wanted, tmp_path, "(b) ")
    (timing,) = named(wanted, tmp_path, "speeds").values()
    assert timing.alone
    assert "FORM=pnn_twelve" in timing.command


def test_what_is_added_to_the_second_form_may_take_its_place(wanted, tmp_path):
    """And then BERT-12 with the same additions is trained as often."""
    for model, tail in {"pnn_wide": 0.48, "pnn_thrice": 0.46, "pnn_twelve": 0.47}.items():
        leave(tmp_path, named(wanted, tmp_path, "rates ")[f"{model}, seed 0, learning_rate 2e-3"], tail)
    for model, tail in {"pnn_rewrite": 0.50, "pnn_wide": 0.52, "pnn_twelve": 0.51}.items():
        leave(tmp_path, named(wanted, tmp_path, "(a) ")[f"{model}, seed 0"], tail)
    longer = named(wanted, tmp_path, "(a) ")
    assert "pnn_wide, seed 1" in longer
    assert not [name for name in longer if name.startswith("bert12_again")]
    leave(tmp_path, longer["pnn_again, seed 0"], 0.53)
    longer = named(wanted, tmp_path, "(a) ")
    assert {f"pnn_again, seed {seed}" for seed in range(5)} <= set(longer)
    assert {f"bert12_again, seed {seed}" for seed in range(3)} <= set(longer)
    assert "pnn_wide, seed 1" not in longer
    assert "pnn_again, seed 0" in named(wanted, tmp_path, "(b) ")


def test_bert12_is_trained_anew_at_a_better_rate(wanted, to_measure, tmp_path):
    """And what was trained at another one no longer counts."""
    comparison = importlib.import_module("comparison")
    for rate, tail in (("1e-3", 0.45), ("5e-4", 0.46)):
        leave(tmp_path, named(wanted, tmp_path, "rates ")[f"bert12, seed 0, learning_rate {rate}"], tail)
    seeds, longer = named(wanted, tmp_path, "(a) bert12"), named(wanted, tmp_path, "(b) bert12")
    assert list(seeds) == [f", seed {seed}, learning_rate 5e-4" for seed in range(3)]
    assert list(longer) == [", seed 0, learning_rate 5e-4"]
    assert all("training.learning_rate=5e-4" in item.command for item in (*seeds.values(), *longer.values()))
    config = load_config(RESULTS / "better_than_bert" / "configs" / "bert12.yaml")
    assert float(wanted.OF_BERT12) == config.training.learning_rate
    runs = [comparison.Run(Path("RUNS") / folder / "bert12" / "seed-0") for folder in ("a", "a2")]
    assert Path(seeds[", seed 0, learning_rate 5e-4"].leaves).parent == Path("better_than_bert/a2/bert12/seed-0")
    assert comparison.at_stage(runs, "a") == {"bert12": {0: runs[1]}}


def fail(runs, item):
    (runs / item.leaves).parent.mkdir(parents=True)
    (runs / f"{item.leaves}.failed").touch()


def test_what_failed_is_none_of_the_best_and_holds_nothing_up(wanted, tmp_path):
    fail(tmp_path, named(wanted, tmp_path, "rates ")["pnn_thrice, seed 0, learning_rate 2e-3"])
    for model in ("pnn_wide", "pnn_twelve"):
        leave(tmp_path, named(wanted, tmp_path, "rates ")[f"{model}, seed 0, learning_rate 2e-3"], 0.4)
    assert {"pnn_wide, seed 0", "pnn_twelve, seed 0"} <= set(named(wanted, tmp_path, "(a) "))
    assert "pnn_thrice, seed 0" not in named(wanted, tmp_path, "(a) ")
    rates = list(named(wanted, tmp_path, "causal_pnn, rates, pnn_once, seed 0, ").values())
    for place, item in enumerate(rates[:2]):
        leave(tmp_path, item, 0, loss=2.0 - place)
    fail(tmp_path, rates[2])
    assert all(" 2e-3 " in item.command for item in named(wanted, tmp_path, "causal_pnn, main, pnn").values())
    assert named(wanted, tmp_path, "causal_pnn, main, pnn")


def test_the_model_that_is_shrunk_adapts_first_and_only_if_something_is_left(wanted, tmp_path):
    first, *others = named(wanted, tmp_path, "shrink, ").values()
    assert first.command.endswith("--seeds")
    assert (first.after, {item.after for item in others}) == (".", {first.leaves})
    assert not any("safetensors" in item.leaves for item in others)
    for item in others:
        (wanted.HERE / item.kept).parent.mkdir(parents=True, exist_ok=True)
        (wanted.HERE / item.kept).touch()
    assert first.name not in [item.name for item in wanted.items(tmp_path)]


def test_if_neither_candidate_is_ahead_there_is_no_second_form(wanted, tmp_path):
    for model, tail in {"pnn_wide": 0.48, "pnn_thrice": 0.46, "pnn_twelve": 0.47}.items():
        leave(tmp_path, named(wanted, tmp_path, "rates ")[f"{model}, seed 0, learning_rate 2e-3"], tail)
    before = set(named(wanted, tmp_path, "(a) "))
    for model in ("pnn_rewrite", "pnn_wide", "pnn_twelve"):
        leave(tmp_path, named(wanted, tmp_path, "(a) ")[f"{model}, seed 0"], 0.5)
    assert set(named(wanted, tmp_path, "(a) ")) == before  # the candidates' first seeds and the first form's five
    assert not named(wanted, tmp_path, "(b) pnn_")
    assert not named(wanted, tmp_path, "speeds")


def test_the_best_three_schedules_are_trained_longer(wanted, tmp_path):
    """Beside `looped`, whose runs are PNN-rewrite's."""
    looks = named(wanted, tmp_path, "hybrids, a look at ")
    assert {name.partition(",")[0] for name in looks} == set(wanted.STEPS) - {"looped"}
    for place, item in enumerate(looks.values()):
        assert not named(wanted, tmp_path, "hybrids, three")
        leave(tmp_path, item, 0.40 + place / 100)
    looped = wanted.HERE / "better_than_bert" / "measured" / "looks" / "rotary" / "seed-0"
    looped.mkdir(parents=True)
    for tail, others in ((0.1, 3), (0.9, 2)):  # it is one of the best three, or goes on beside them
        (looped / "evaluation.json").write_text(json.dumps({"accuracy": tail}))
        longer = named(wanted, tmp_path, "hybrids, three epochs of ")
        assert list(longer) == [f"{name}, seed {seed}" for seed in range(3) for name in BEST_LAST[:others]]
    assert longer["both_ends_long, seed 0"].kept == "hybrids/measured/wide/a/both_ends_long/seed-0/evaluation.json"


BEST_LAST = ["both_ends_long", "four_once", "eight"]  # by the order of STEPS


def test_decoders_train_at_the_best_rate_of_their_family(wanted, tmp_path):
    for place, item in enumerate(named(wanted, tmp_path, "causal_pnn, rates, delta_once, seed 0, ").values()):
        assert not named(wanted, tmp_path, "causal_pnn, main")
        leave(tmp_path, item, 0, loss=(3.0, 2.0, 2.5)[place])
    main = named(wanted, tmp_path, "causal_pnn, main, ")
    assert set(main) == {f"delta_{arm}, seed {seed}" for arm in ("once", "half_twice", "twice") for seed in range(3)}
    assert all(" 2e-3 " in item.command for item in main.values())


def test_every_command_is_there(to_measure, monkeypatch):
    """Scripts and configs that commands name exist; and each leaves a file of its own."""
    module = importlib.import_module("wanted")
    found = list(module.items(None))
    for item in found:
        words = shlex.split(item.command)
        named_files = [word for word in words if word.startswith(str(module.HERE))]
        assert named_files
        assert all(Path(word).exists() for word in named_files), item.name
    leaves = {}
    for item in found:
        assert leaves.setdefault(item.leaves, item.name) == item.name


def test_items_that_follow_are_done_in_the_same_call(to_measure, item, tmp_path, capfd):
    first, second = item("first", 0), item("second", 0)
    assert to_measure.work(lambda: [first, second] if first.done(tmp_path) else [first], tmp_path, Path("t"), 1.0, 1) == []
    assert "done: second" in capfd.readouterr().out


SAVES = "trap 'sleep 0.5; touch saved; exit' TERM; touch began; while :; do sleep 0.05; done"


@pytest.mark.parametrize(("grace", "saved"), [(10.0, True), (0.0, False)])
def test_what_a_script_started_may_save_before_it_is_killed(to_measure, tmp_path, grace, saved):
    """The shell itself ends at once."""
    script = f"bash -c {shlex.quote(SAVES)} & wait"
    process = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, start_new_session=True)
    while not (tmp_path / "began").exists():
        time.sleep(0.02)
    to_measure.stop(process, grace)
    assert (tmp_path / "saved").exists() == saved
    time.sleep(0.7)
    assert (tmp_path / "saved").exists() == saved  # nothing goes on
