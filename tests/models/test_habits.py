"""What people do with models of Hugging Face (tests/support/habits), done with each of ours: it works, or is refused in a
sentence. The table of docs/howto/huggingface.md is made from what stands there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from habits.subjects import HABITS, WORKS, Subject, is_decoder
from small_models import SMALL, shake

import pnn
from pnn.data.tokenizers import of_synthetic_language
from pnn.models.loading import save_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "huggingface.md"
REORGANISED = ["PNN", "BERT baseline", "DDL"]
NAMES = ["PNN", "BERT baseline", "DDL", "causal PNN", *(f"reorganised {name}" for name in REORGANISED)]
TRIED = [
    (name, subject)
    for name, one in HABITS.items()
    for subject in NAMES
    if (one.decoders if is_decoder(subject) else one.encoders) is not None
]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory) -> dict[str, Subject]:
    tokenizer = of_synthetic_language(32)
    size = SMALL | {"vocab_size": len(tokenizer), "max_position_embeddings": 32, "dropout": 0.1}
    ends = {"pad_token_id": 0, "bos_token_id": tokenizer.sep_token_id, "eos_token_id": tokenizer.sep_token_id}
    decoder = {key: value for key, value in size.items() if key != "dropout"} | ends
    torch.manual_seed(0)
    models = {
        "PNN": pnn.PNNForMaskedLM(pnn.PNNConfig(**size, schedule=[0, 1, 0])),
        "BERT baseline": pnn.BertBaselineForMaskedLM(pnn.BertBaselineConfig(**size, num_hidden_layers=3)),
        "DDL": pnn.DDLForCausalLM(pnn.DDLConfig(**decoder, num_hidden_layers=2, compressor="token")),
        "causal PNN": pnn.PNNForCausalLM(pnn.PNNCausalConfig(**size | ends, schedule=[0, 1, 0], initializer_range=0.2)),
    }
    models |= {f"reorganised {name}": pnn.plasticity.prune(shake(models[name]), [(0, 1)]) for name in REORGANISED}
    found = {}
    for name, model in models.items():
        folder = tmp_path_factory.mktemp("habits") / name.replace(" ", "_")
        model.save_pretrained(folder)
        save_tokenizer(tokenizer, model, folder)
        found[name] = Subject(name, folder)
    return found


@pytest.mark.parametrize(("name", "subject"), TRIED)
def test_it_works_or_is_refused_in_a_sentence(name, subject, subjects):
    tried, one = HABITS[name], subjects[subject]
    said = tried.decoders if one.causal else tried.encoders
    if said == WORKS:
        tried.does(one)
        return
    with pytest.raises((ValueError, RuntimeError)) as refusal:
        tried.does(one)
    assert said in str(refusal.value).splitlines()[0]


def cell(said: str | None) -> str:
    if said is None:
        return "–"
    if said.startswith("AutoModel"):
        return "refused: no such head"
    return said if said == WORKS else f"refused: “{said}”"


def test_the_page_has_every_habit():
    rows = [f"| {name} | {cell(one.encoders)} | {cell(one.decoders)} |" for name, one in HABITS.items()]
    table = "\n".join(["| habit | PNN, BERT baseline | DDL, causal PNN |", "|---|---|---|", *rows])
    assert table in PAGE.read_text(encoding="utf-8"), f"the table of {PAGE.name} should be:\n\n{table}"


def test_a_forgotten_import_is_named_on_the_page(subjects):
    script = "import sys, transformers; transformers.AutoConfig.from_pretrained(sys.argv[1])"
    folder = str(subjects["PNN"].folder)
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, timeout=120)
    sentence = "but Transformers does not recognize this architecture"
    assert sentence in done.stderr
    assert sentence in PAGE.read_text(encoding="utf-8")
