"""The grid of one text, against the same model's own predictions and gates."""

import json
import re

import numpy as np
import pytest
import torch

from pnn.config import DataConfig
from pnn.data import synthetic
from pnn.data.corpora import open_source
from pnn.data.shards import prepare_source
from pnn.errors import UserError
from pnn.evaluation.fill import fill
from pnn.evaluation.refining import example, refining
from pnn.models.bert import BertBaselineConfig, BertBaselineForMaskedLM
from pnn.models.loading import Loaded, load_run
from pnn.report.refining import grid

TEXT = "the fox of avon wore amber hats . it has old [MASK] boots ."


@pytest.fixture(scope="module")
def loaded(trained_run):
    return load_run(trained_run, device="cpu")


def test_masks_are_read_as_fill_reads_them(loaded):
    (filled,) = fill(loaded.model, loaded.tokenizer, [TEXT], top=3, by_step=True)
    found = refining(loaded, TEXT, top=3)
    (masked,) = [row for row in found["rows"] if row["masked"]]
    assert [p["token"] for p in masked["cells"][-1]["top"]] == [p["token"] for p in filled["predictions"][0]]
    for cell, best in zip(masked["cells"], filled["by_step"][0], strict=True):
        assert cell["top"][0]["token"] == best["token"]
        assert cell["top"][0]["probability"] == pytest.approx(best["probability"], abs=1e-5)


def test_gates_are_those_of_the_model_and_rows_the_words_of_the_text(loaded):
    found = refining(loaded, TEXT, num_steps=6)
    assert [row["token"] for row in found["rows"]] == TEXT.split()
    assert (found["unit"], found["trained"], found["read"]) == ("step", 4, [1, 2, 3, 4])
    assert {len(row["cells"]) for row in found["rows"]} == {7}  # two steps more than it was trained with
    ids = torch.tensor([loaded.tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        gate = loaded.model(ids, output_gates=True).gates[1][0, 3]  # the third word behind [CLS], second step
    told = found["rows"][2]["cells"][2]["gate"]
    assert told == pytest.approx(
        {"mean": gate.mean().item(), "lowest": gate.min().item(), "highest": gate.max().item()}, abs=1e-5
    )
    assert "gate" not in found["rows"][2]["cells"][0]


def test_where_tokens_halt_the_grid_says_when(loaded, monkeypatch):
    assert "stopped" not in refining(loaded, TEXT)["rows"][0]
    monkeypatch.setattr(loaded.model.config, "halt", {"criterion": "context", "min_steps": 2})
    found = refining(loaded, TEXT)
    assert [row["stopped"] for row in found["rows"]] == [4 if row["masked"] else 2 for row in found["rows"]]
    page = str(grid(found, "a model"))
    assert page.count('class="stopped"') == len(found["rows"])
    assert "A bar: in use the token stops after that step." in page
    reading = page.partition('class="reading">')[2].partition("</p>")[0]
    words = re.findall(r'<span title="stops after step (\d)" class="stop" style="--s:(.*?)">(<mark)?', reading)
    assert words == [("4", "1.000", "<mark") if row["masked"] else ("2", "0.500", "") for row in found["rows"]]
    legend = page.partition("In use a token stops after step")[2].partition("</p>")[0]
    assert re.findall(r'style="--s:(.*?)">(\d)<', legend) == [("0.500", "2"), ("1.000", "4")]


def test_a_model_that_halts_nobody_has_no_tints(loaded):
    page = str(grid(refining(loaded, TEXT), "a model"))
    assert 'class="stop' not in page
    assert "In use" not in page


def test_a_calibrated_model_is_read_after_the_last_step_that_it_takes(loaded, monkeypatch):
    monkeypatch.setattr(loaded.model.config, "num_steps", 2)
    monkeypatch.setattr(loaded.model.config, "trained_steps", 4)
    found = refining(loaded, TEXT)
    assert (len(found["rows"][0]["cells"]), found["trained"]) == (3, 4)
    assert 'max="2" value="2"' in str(grid(found, "a model"))


def test_a_bert_is_read_after_its_layers_and_has_no_gates(loaded):
    config = BertBaselineConfig(
        vocab_size=len(loaded.tokenizer), hidden_size=16, num_attention_heads=2, intermediate_size=16, num_hidden_layers=3
    )
    bert = Loaded("bert", BertBaselineForMaskedLM(config).eval(), loaded.tokenizer, torch.float32)
    found = refining(bert, TEXT)
    assert (found["unit"], found["trained"], found["read"]) == ("layer", 3, [3])
    assert not any("gate" in cell for row in found["rows"] for cell in row["cells"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (" ", "no text"),
        ("fox " * 200, "202 tokens, but the model takes 64"),
        ("fox " * 20_000, "more than 64 tokens"),
        ("[CLS] [SEP]", "special tokens only"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_sentence(loaded, text, says):
    with pytest.raises(UserError, match=says):
        refining(loaded, text)


def test_a_held_out_text_that_holds_a_mask_is_no_example(loaded, tmp_path):
    words = synthetic.language().words[len(synthetic.SPECIAL_WORDS) :]
    lines = [f"{' '.join(words[:6])} [MASK] {' '.join(words[6:30])}", " ".join(words[:8]), " ".join(words[8:16])]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    data = DataConfig(filter="none", prepared=str(tmp_path / "prepared"), max_length=64)
    source = open_source(str(tmp_path / "text.txt"), data, "validation")
    tokens = prepare_source(source, loaded.tokenizer, data, lambda lines, *_: lines)
    found = example(loaded, tokens, np.arange(3), 0.5, 0)
    assert len(found["rows"]) == 8  # one of the short ones
    assert all("answer" in row for row in found["rows"] if row["masked"])


def test_a_run_keeps_a_held_out_text_with_the_answers(trained_run):
    found = json.loads((trained_run / "refining.json").read_text())
    masked = [row for row in found["rows"] if row["masked"]]
    assert len(masked) >= 4
    assert all(row["answer"] in synthetic.language().words for row in masked)
    assert not any("answer" in row for row in found["rows"] if not row["masked"])
    assert {len(row["cells"]) for row in found["rows"]} == {5}
