"""Exported folders give the same logits, with the package and without it."""

import ast
import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file

from pnn.export.loading import open_for_export
from pnn.export.remote_code import flattened
from pnn.export.run import export_run
from pnn.models.registry import ENTRIES, IMAGES

# A process that cannot import this package: what people have who only installed transformers
STRANGER = """
import json, sys
sys.modules["pnn"] = None
try:
    import pnn
    raise SystemExit("pnn can be imported")
except ImportError:
    pass
import torch, transformers
from safetensors.torch import save_file
torch.set_num_threads(1)
for folder, auto, output in json.loads(sys.argv[1]):
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert tokenizer("the red fox")["input_ids"]
    ids = torch.arange(5, 29).view(2, 12) if "Choice" not in auto else torch.arange(5, 29).view(1, 2, 12)
    mask = torch.ones_like(ids)
    mask[..., -1, 9:] = 0
    with torch.no_grad():
        found = {"logits": model(input_ids=ids, attention_mask=mask).logits}
        if model.can_generate():
            found["generated"] = model.generate(ids[:1], max_new_tokens=6, do_sample=False, pad_token_id=0)
    save_file({name: x.contiguous() for name, x in found.items()}, output)
    assert "pnn" not in {name for name, module in sys.modules.items() if module is not None}
"""


def batch(auto):
    ids = torch.arange(5, 29).view(2, 12) if "Choice" not in auto else torch.arange(5, 29).view(1, 2, 12)
    mask = torch.ones_like(ids)
    mask[..., -1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def fails(pnn_command, *arguments, says):
    code, _, err = pnn_command("export", *arguments)
    lines = [line for line in err.splitlines() if line.startswith("pnn: ")]
    assert code == 2, err
    assert len(lines) == 1
    for text in says:
        assert text in lines[0], lines[0]


def test_people_without_the_package_get_the_same_logits(checkpoints, tmp_path, monkeypatch):
    asked, wanted = [], {}
    monkeypatch.setattr("pnn.export.run.FILE_SIZE", "10KB")
    for name, checkpoint in checkpoints.items():
        bf16 = name == "pnn_rewrite"
        result = export_run(str(checkpoint), tmp_path / name, bf16=bf16, remote_code=True)
        asked.append([str(tmp_path / name), result["auto_class"], str(tmp_path / f"{name}.safetensors")])
        original = open_for_export(str(tmp_path / name if bf16 else checkpoint)).model  # bf16: rounded
        with torch.no_grad():
            wanted[name] = {"logits": original(**batch(result["auto_class"])).logits}
            if original.can_generate():
                ids = batch("")["input_ids"][:1]
                wanted[name]["generated"] = original.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
            # and with the package: our own code, although the folder has code of its own
            ours = getattr(transformers, result["auto_class"]).from_pretrained(tmp_path / name).eval()
            assert type(ours).__module__.startswith("pnn.")
            assert torch.equal(ours(**batch(result["auto_class"])).logits, wanted[name]["logits"])
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HOME": str(tmp_path / "hf")}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", STRANGER, json.dumps(asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "custom code" not in done.stdout + done.stderr  # nobody is asked anything
    for name, expected in wanted.items():
        found = load_file(tmp_path / f"{name}.safetensors")
        assert set(found) == set(expected)
        for what, value in expected.items():
            assert torch.equal(found[what], value), (name, what)
        if name == "pnn_halting":
            full = open_for_export(str(checkpoints[name])).model(**batch(""), halt=False).logits
            assert not torch.equal(full, expected["logits"])  # they do halt, there as here
        assert expected["logits"].std() > 1e-3  # not all alike


@pytest.mark.parametrize("kind", [*ENTRIES, "pnn_image"])
def test_remote_code_needs_nothing_of_ours(kind):
    files = flattened((IMAGES if kind == "pnn_image" else ENTRIES[kind]).config.__module__)
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert (node.module or node.names[0].name) in files, name
            elif isinstance(node, ast.Import | ast.ImportFrom):
                modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert not any(module.split(".")[0] in ("pnn", "triton") for module in modules), name
    assert "nn_fast" in files
    assert ("nn_refiner" in files) == (kind in ("pnn", "pnn_causal", "pnn_image"))  # only what is needed


def test_a_plain_folder_has_the_model_the_tokenizer_and_a_card(pnn_command, trained_run, tmp_path):
    code, out, err = pnn_command("export", trained_run, "--output", tmp_path / "out", "--license", "mit", "--no-remote-code")
    assert code == 0, err
    assert out.strip() == str(tmp_path / "out")
    found = {path.name for path in (tmp_path / "out").iterdir()}
    model = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    sentences = {"modules.json", "sentence_bert_config.json"}
    assert found == {"README.md", "checksums.json", "1_Pooling", *model, *sentences}
    assert set(json.loads((tmp_path / "out" / "checksums.json").read_text())) == model | sentences  # people add to the card
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
    original = transformers.AutoModelForMaskedLM.from_pretrained(trained_run / "checkpoints" / "best").eval()
    exported = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(5, 29).view(2, 12)
    assert torch.equal(original(ids).logits, exported(ids).logits)


def test_weights_in_bf16_are_halved_split_and_computed_with_in_fp32(pnn_command, checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr("pnn.export.run.FILE_SIZE", "10KB")
    code, _, err = pnn_command("export", checkpoints["pnn_rewrite"], "--output", tmp_path / "out", "--bf16")
    assert code == 0, err
    whole = load_file(checkpoints["pnn_rewrite"] / "model.safetensors")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    parts = {key: value for file in files for key, value in load_file(file).items()}
    assert len(files) > 2
    assert {value.dtype for value in parts.values()} == {torch.bfloat16}
    assert parts.keys() == whole.keys()  # tied weights once
    assert all(torch.equal(parts[key], whole[key].bfloat16()) for key in whole)
    for load in (transformers.AutoModelForMaskedLM.from_pretrained, lambda folder: open_for_export(str(folder)).model):
        assert {p.dtype for p in load(tmp_path / "out").parameters()} == {torch.float32}
    # and once more from there, to the bit
    assert pnn_command("export", tmp_path / "out", "--output", tmp_path / "again", "--bf16")[0] == 0
    assert all(file.read_bytes() == (tmp_path / "again" / file.name).read_bytes() for file in files)


def test_a_reorganised_model(pnn_command, checkpoints, tmp_path):
    """Its class is made for it: it needs the package, and its card counts its own heads."""
    from pnn import plasticity

    small = plasticity.prune(open_for_export(str(checkpoints["ddl"])).model, [(0, 1)])
    plasticity.save(small, tmp_path / "small")
    for file in checkpoints["ddl"].glob("tokenizer*"):
        (tmp_path / "small" / file.name).write_bytes(file.read_bytes())
    fails(pnn_command, tmp_path / "small", "--output", tmp_path / "out", "--remote-code", says=("not reorganised",))
    assert not (tmp_path / "out").exists()
    assert pnn_command("export", tmp_path / "small", "--output", tmp_path / "out")[0] == 0
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(5, 29).view(2, 12)
    assert torch.equal(exported(ids).logits, small.eval()(ids).logits)
    assert "| heads | 3 of 4 (pruned or grown" in (tmp_path / "out" / "README.md").read_text()


def test_a_reorganised_model_of_transformers_needs_the_package(pnn_command, checkpoints, tmp_path):
    """transformers knows GPT-2, not a GPT-2 whose layers differ."""
    from pnn import plasticity

    config = transformers.GPT2Config(vocab_size=60, n_embd=32, n_layer=1, n_head=4, n_positions=16)
    plasticity.save(plasticity.prune(transformers.GPT2LMHeadModel(config), [(0, 1)]), tmp_path / "small")
    for file in checkpoints["ddl"].glob("tokenizer*"):
        (tmp_path / "small" / file.name).write_bytes(file.read_bytes())
    assert pnn_command("export", tmp_path / "small", "--output", tmp_path / "out")[0] == 0
    assert "import pnn" in (tmp_path / "out" / "README.md").read_text()


def test_mistakes(pnn_command, checkpoints, tmp_path):
    out = tmp_path / "out"
    fails(pnn_command, tmp_path / "nowhere", "--output", out, says=("nowhere",))
    fails(pnn_command, checkpoints["pnn"], "--output", out, "--num-steps", 2, says=("--num-steps 2", "--onnx"))
    fails(pnn_command, checkpoints["pnn"], "--output", out, "--int8", says=("--int8", "--onnx"))
    fails(pnn_command, checkpoints["pnn"], "--output", tmp_path, says=("exists already",))
    fails(pnn_command, checkpoints["pnn"], "--output", out, "--push-to", "name", says=("owner/name",))
    fails(pnn_command, checkpoints["pnn"], "--output", out, "--push-to", "./shelf", says=("owner/name",))
    config = transformers.BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    other = tmp_path / "other"
    transformers.BertForMaskedLM(config).save_pretrained(other)
    for file in checkpoints["pnn"].glob("tokenizer*"):
        (other / file.name).write_bytes(file.read_bytes())
    fails(pnn_command, other, "--output", out, "--remote-code", says=("a BertForMaskedLM is none of the models",))
    assert not out.exists()
    assert pnn_command("export", other, "--output", out)[0] == 0  # without our code it is a folder like any other
    assert "import pnn" not in (out / "README.md").read_text()
