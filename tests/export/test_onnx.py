"""The ONNX graph computes what torch computes, for other batches and lengths than it was traced with."""

import builtins

import pytest
import torch

from pnn.export import onnx as ours
from pnn.export.loading import open_for_export
from pnn.export.run import export_run


def test_without_the_packages(pnn_command, checkpoints, tmp_path, monkeypatch):
    real = builtins.__import__

    def no_onnx(name, *rest, **more):
        if name.startswith("onnx"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", no_onnx)
    code, _, err = pnn_command("export", checkpoints["pnn"], "--output", tmp_path / "out", "--onnx")
    assert code == 2
    assert "pip install onnx onnxscript onnxruntime" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
class TestGraph:
    @pytest.fixture(autouse=True)
    def _needs(self):
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package, reason=f"{package} is not installed (pip install -e '.[dev]')")

    def run(self, path, ids, mask):
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(["logits"], {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0])

    def matches(self, path, model, shape=(4, 9), masked=4, **options):
        """On another batch and length than it was traced with, a part of it padding."""
        ids = torch.randint(5, 60, shape, generator=torch.Generator().manual_seed(5))
        ids[-1, ..., 2:4] = masked
        mask = torch.ones_like(ids)
        mask[1, ..., 6:] = 0
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=mask, **options).logits
        found = self.run(path, ids, mask)
        assert found.shape == expected.shape
        if expected.dim() == 3:
            expected, found = expected[mask.bool()], found[mask.bool()]
        assert expected.std() > 1e-3
        return bool((found - expected).abs().max() <= 1e-4)

    # one graph for each way to compute: pnn and pnn_delta have theirs below, where more is asked of it
    @pytest.mark.parametrize(
        "name",
        [
            "pnn_rewrite",
            "pnn_halting",
            "pnn_recall",
            "pnn_learned_recall",
            "pnn_classifier",
            "bert",
            "bert_choice",
            "pnn_causal",
            "ddl",
            "ddl_token",
            "ddl_additive",
        ],
    )
    def test_logits_match(self, name, checkpoints, tmp_path):
        result = export_run(str(checkpoints[name]), tmp_path / "out", with_onnx=True)
        assert result["onnx_difference"] <= 1e-4
        assert b"site-packages" not in (tmp_path / "out" / "model.onnx").read_bytes()  # nothing about this machine
        every_step = {"halt": False} if name == "pnn_halting" else {}  # a graph halts nobody
        shape = (4, 2, 9) if name == "bert_choice" else (4, 9)
        assert self.matches(tmp_path / "out" / "model.onnx", open_for_export(str(checkpoints[name])).model, shape, **every_step)

    def test_masked_tokens_read_their_guess_there_too(self, checkpoints, tmp_path):
        export_run(str(checkpoints["pnn_guess"]), tmp_path / "out", with_onnx=True)
        model, graph = open_for_export(str(checkpoints["pnn_guess"])).model, tmp_path / "out" / "model.onnx"
        assert all((ids == 4).any() for ids, _ in ours._trials(model))  # what it was compared on before it was kept
        assert self.matches(graph, model)
        assert self.matches(graph, model, masked=5)  # a text without [MASK]
        model.encoder.guess = None
        assert self.matches(graph, model, masked=5)
        assert not self.matches(graph, model)

    def test_that_its_tokens_do_not_halt_is_said(self, pnn_command, checkpoints, tmp_path):
        for name, halts in (("pnn_halting", True), ("pnn", False)):
            code, out, err = pnn_command("export", checkpoints[name], "--output", tmp_path / name, "--onnx")
            assert code == 0, err
            assert ("model.onnx halts no token, unlike the model itself" in out) == halts
            card = (tmp_path / name / "README.md").read_text()
            assert ("No token halts there, unlike in the model itself" in card) == halts

    def test_the_number_of_steps_is_fixed(self, checkpoints, tmp_path):
        export_run(str(checkpoints["pnn"]), tmp_path / "out", with_onnx=True, num_steps=2)
        model, graph = open_for_export(str(checkpoints["pnn"])).model, tmp_path / "out" / "model.onnx"
        assert model.config.num_steps == 3
        assert self.matches(graph, model, num_steps=2)
        assert not self.matches(graph, model)
        assert "with 2 refinement steps" in (tmp_path / "out" / "README.md").read_text()

    def test_a_graph_that_differs_is_not_kept(self, pnn_command, checkpoints, tmp_path, monkeypatch):
        monkeypatch.setattr(ours, "TOLERANCE", -1.0)
        code, _, err = pnn_command("export", checkpoints["pnn"], "--output", tmp_path / "out", "--onnx", "--num-steps", 1)
        assert code == 2
        assert "differs from torch" in err
        assert "fewer --num-steps" in err
        assert not (tmp_path / "out").exists()

    def test_in_int8(self, pnn_command, checkpoints, tmp_path):
        out = tmp_path / "out"
        code, said, _ = pnn_command("export", checkpoints["pnn_rewrite"], "--output", out, "--onnx", "--int8", "--num-steps", 1)
        assert code == 0
        assert "% of their spread" in said
        assert "`model_int8.onnx`" in (out / "README.md").read_text()
        assert "model_int8.onnx" in (out / "checksums.json").read_text()
        import onnx

        operations = [node.op_type for node in onnx.load(out / "model_int8.onnx").graph.node]
        model = open_for_export(str(checkpoints["pnn_rewrite"])).model
        used = [*model.encoder.refiners[0].modules(), *model.head.modules()]  # in one step
        assert operations.count("MatMulInteger") == sum(isinstance(module, torch.nn.Linear) for module in used)
        assert operations.count("MatMul") == 2  # attention's: both sides change with the text
        ids = torch.randint(0, 60, (4, 9), generator=torch.Generator().manual_seed(5))
        exact, rounded = (self.run(out / name, ids, torch.ones_like(ids)) for name in ("model.onnx", "model_int8.onnx"))
        off = (rounded - exact).square().mean().sqrt() / exact.std()
        assert 1e-4 < off < 0.1

    def test_in_int8_too_far_off(self, pnn_command, checkpoints, tmp_path, monkeypatch):
        monkeypatch.setattr(ours, "INT8_TOLERANCE", 1e-9)
        options = ("--onnx", "--int8", "--num-steps", 1)
        code, _, err = pnn_command("export", checkpoints["pnn"], "--output", tmp_path / "out", *options)
        assert code == 2
        assert "off by" in err
        assert "export without --int8" in err
        assert not (tmp_path / "out").exists()

    def test_weights_in_bf16_become_a_graph_in_fp32(self, checkpoints, tmp_path):
        half = tmp_path / "half"
        exported = open_for_export(str(checkpoints["pnn_delta"]))
        exported.model.bfloat16().save_pretrained(half)
        exported.tokenizer.save_pretrained(half)
        result = export_run(str(half), tmp_path / "out", with_onnx=True)
        assert result["onnx_difference"] <= 1e-4
        kept = open_for_export(str(tmp_path / "out")).model
        assert kept.dtype == torch.bfloat16  # the weights stay as they were
        assert self.matches(tmp_path / "out" / "model.onnx", kept.float())
