"""Filling and evaluating on a GPU: the numbers of the CPU, and loops that never wait for the device. Run by hand."""

import warnings

import pytest
import torch

import pnn
from pnn.config import DataConfig
from pnn.data.shards import prepare
from pnn.data.tokenizers import of_synthetic_language
from pnn.evaluation import fill as module
from pnn.evaluation.fill import fill
from pnn.evaluation.masked import evaluate_masked

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TEXTS = ["the fox of avon wore amber hats . it has old [MASK] boots .", "[MASK] [MASK]", "the [MASK] of avon"] * 40


def tiny():
    torch.manual_seed(0)
    config = pnn.PNNConfig(
        vocab_size=80,
        hidden_size=128,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
        zero_init=False,
        initializer_range=0.1,
    )
    return pnn.PNNForMaskedLM(config).eval()


@pytest.mark.parametrize(("precision", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
def test_probabilities_are_those_of_the_cpu(precision, tolerance, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_TEXTS", 50)
    tokenizer = of_synthetic_language(64)
    here = fill(tiny(), tokenizer, TEXTS, top=80, by_step=True)
    there = fill(tiny().cuda(), tokenizer, TEXTS, top=80, by_step=True, precision=precision)
    for ours, theirs in zip(here, there, strict=True):
        assert ours["text"] == theirs["text"]
        for one, other in zip(ours["predictions"], theirs["predictions"], strict=True):
            expected = {p["token"]: p["probability"] for p in one}
            assert {p["token"]: p["probability"] for p in other} == pytest.approx(expected, abs=tolerance)
        for one, other in zip(ours["by_step"], theirs["by_step"], strict=True):
            expected = [p["probability"] for p in one]
            assert [p["probability"] for p in other] == pytest.approx(expected, abs=tolerance)


def waits(work) -> int:
    """How often the host waited for the device."""
    for _ in range(2):  # what is compiled at first use, and recorded at the second, may wait
        work()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def test_more_batches_are_no_more_waits(prepared_folder):
    model, tokenizer = tiny().cuda(), of_synthetic_language(64)
    data = DataConfig(synthetic_paragraphs=400, validation_sequences=200, max_length=64, prepared=str(prepared_folder))
    prepared = prepare(data, lambda items, _: items)

    def evaluating(batch_tokens):
        options = {"batch_tokens": batch_tokens, "precision": torch.bfloat16}
        return lambda: evaluate_masked(model, prepared.validation, prepared.validation_sequences, **options)

    def filling(batch_tokens):
        options = {"batch_tokens": batch_tokens, "precision": torch.bfloat16, "by_step": True}
        return lambda: list(fill(model, tokenizer, TEXTS, **options))

    for job in (evaluating, filling):
        many, few = waits(job(100)), waits(job(100_000))  # about a hundred batches, and one
        assert 0 < many <= few + 2
