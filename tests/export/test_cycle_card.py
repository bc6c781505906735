"""The card of a model that a plasticity cycle made, from the cycle's own folder."""

import json
import math
import shutil

import pytest
import torch

from pnn.errors import UserError
from pnn.export.card import model_card
from pnn.export.loading import open_for_export
from pnn.models.loading import load_any
from pnn.plasticity import CycleSettings, Text, cycle
from pnn.runs import read_metrics

SETTINGS = CycleSettings(
    rounds=2, prune=0.5, grow=0.25, learn_steps=2, learning_rate=0.003, batch_rows=2, score_rows=4, evaluate_every=2
)


def card(run) -> str:
    return model_card(open_for_export(str(run)), bf16=False, remote_code=False, onnx_steps=None, licence=None)


@pytest.fixture(scope="module")
def made(checkpoints, tmp_path_factory):
    loaded = load_any(checkpoints["ddl"])
    rows = torch.randint(5, 40, (20, 16), generator=torch.Generator().manual_seed(0))
    folder = tmp_path_factory.mktemp("cycles") / "cyc"
    text = Text(rows[:-6], rows[-6:], source="/home/somebody/secret/fables.txt")
    cycle(loaded.model, text, folder, SETTINGS, tokenizer=loaded.tokenizer, name="small-ddl")
    return folder


@pytest.fixture
def folder(made, tmp_path):
    shutil.copytree(made, tmp_path / "cyc", symlinks=True)
    return tmp_path / "cyc"


def row(name: str, record: dict) -> str:
    low, high = (math.exp(end) for end in record["loss_interval"])
    sizes = f"{record['heads']} of {record['original_heads']} | {record['parameters']:,}"
    return f"| {name} | {sizes} | {record['perplexity']:,.2f} | {low:,.2f}–{high:,.2f} |"


def test_it_tells_what_the_cycle_did_and_measured(folder):
    text = card(folder)
    for false in ("Not known", "Not measured", "is not known", "somebody", "secret"):
        assert false not in text
    for known in (
        "# cyc\n",
        "started from `small-ddl`: 4 → 2 → 3 → 2 → 3 attention heads",
        "scored heads on `fables.txt` and learned from it",
        "Measured on 6 held-out rows of at most 16 tokens",
        "2 round(s). Each pruned 0.5 of the heads by gradient, grew 0.25 of the original number by gradient",
        "2 updates of 2 rows, at a learning rate of 0.003",
        "seed 0",
        "Hardware: ",
        "perplexity by token",
        "no proof that nothing was lost",
    ):
        assert known in text, known
    records = read_metrics(folder / "metrics.jsonl")
    assert row("before", records[0]) in text
    words = {"measurement": "pruned", "growth": "grown", "final": "learned"}
    measured = [one for one in records if one["phase"] in words]
    assert len(measured) == 6
    for one in measured:
        assert row(f"round {one['cycle']}, {words[one['phase']]}", one) in text


def test_what_came_back_is_said_of_the_last_round(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    pruned = next(one for one in reversed(lines) if one["phase"] == "measurement")
    pruned["loss"], lines[-1]["recovery"] = lines[0]["loss"] + 1, 0.625
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert "In round 2, 62 % of what" in card(folder)
    pruned["loss"] = lines[0]["loss"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert "In round 2 the pruned model was no worse" in card(folder)


def test_an_earlier_checkpoint_and_a_cycle_that_was_stopped(folder):
    """Of later rounds the card of an earlier model says nothing."""
    records = read_metrics(folder / "metrics.jsonl")
    (folder / "checkpoints/round-2-learned").rename(folder / "checkpoints/round-1-pruned")
    (folder / "summary.json").unlink()
    text = card(folder / "checkpoints/round-1-pruned")
    assert "round 1, pruned" in text
    assert "round 1, grown" not in text
    assert "0 of 2 round(s)" in text
    # a copy that made a folder of the link `last`, in the second round
    (folder / "checkpoints/last").unlink()
    (folder / "checkpoints/round-1-pruned").rename(folder / "checkpoints/last")
    kept = [one for one in records if (one.get("cycle"), one["phase"]) != (2, "final")]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in kept))
    text = card(folder)
    assert "round 1, learned" in text
    assert "round 2" not in text
    assert "1 of 2 round(s)" in text


def test_rows_without_an_interval(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    changed = json.dumps(json.loads(lines[0]) | {"loss_interval": None})
    (folder / "metrics.jsonl").write_text("\n".join([changed, *lines[1:]]) + "\n")
    assert "| not known |" in next(line for line in card(folder).splitlines() if line.startswith("| before"))


def test_a_damaged_cycle(folder):
    (folder / "cycle.json").write_text("[]")
    with pytest.raises(UserError, match=r"cycle\.json does not say"):
        card(folder)


def test_other_commands_say_what_the_folder_is(folder, pnn_command):
    for command in ("evaluate", "report", ("analyze", "rewrites")):
        words = command if isinstance(command, tuple) else (command,)
        code, _, err = pnn_command(*words, folder)
        assert code == 2, err
        assert "plasticity cycle" in err, err
        assert "without a run folder" not in err
        assert "summary.json" in err
