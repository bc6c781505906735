"""One function computes the states that everybody reads: the model's own, whatever a batch is filled up with; and every caller
computes the last step for what it reads alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_models import SMALL, build, every_model, shake
from torch.profiler import profile

import pnn
from pnn.analysis.trace import Text, predict, trace_batch
from pnn.config import DataConfig
from pnn.data.batches import pack, special_tokens
from pnn.data.shards import prepare
from pnn.data.tokenizers import of_synthetic_language
from pnn.errors import UserError
from pnn.evaluation.fill import fill
from pnn.evaluation.masked import evaluate_masked
from pnn.evaluation.passes import PackedShape, RowsShape, _cast_once, states_at
from pnn.evaluation.requests import log_likelihoods
from pnn.finetuning.encoding import Encoded, collate
from pnn.finetuning.loop import outputs
from pnn.nn.packing import SMALLEST, bucket
from pnn.nn.recording import where_weights_lie

LENGTHS = (5, 12, 1, 7, 12, 12, 3)


def batch_of(lengths, seed=0, vocabulary=SMALL["vocab_size"]):
    ids = np.random.default_rng(seed).integers(5, vocabulary, sum(lengths))
    return pack(ids, np.array(lengths), np.zeros(len(lengths), np.int64))


def causal_pnn(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    config = pnn.PNNCausalConfig(
        **sizes, **{"update": "rewrite", "schedule": [0, 1], "head_transform": True, "max_position_embeddings": 200, **changes}
    )
    return shake(pnn.PNNForCausalLM(config))


def decoder(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    return shake(pnn.DDLForCausalLM(pnn.DDLConfig(**sizes, **{"max_position_embeddings": 200, **changes})))


def test_buckets_are_few_and_near():
    sizes = sorted({bucket(count) for count in range(1, 20_000)})
    assert sizes[:6] == [SMALLEST, 80, 96, 112, 128, 160]
    assert len(sizes) < 40
    assert all(count <= bucket(count) <= max(SMALLEST, 1.25 * count) for count in range(1, 20_000))
    assert bucket(16384) == 16384


def test_batches_of_about_one_size_share_a_bucket():
    shapes = set()
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(3, 128, 400)
        batch = batch_of(lengths[: np.searchsorted(np.cumsum(lengths), 16384)])
        masks = torch.arange(0, len(batch.input_ids), 7)
        shapes.add(PackedShape.bucket(batch, masks, 128))
    assert shapes == {PackedShape(16384, 512, 3072)}


@every_model
@pytest.mark.parametrize(("steps", "every_step"), [(None, False), (None, True), (1, True), (0, True), (0, False)])
def test_states_are_the_models_own(name, steps, every_step):
    model, batch, at = build(name), batch_of(LENGTHS), torch.tensor([0, 4, 17, 18, 51])
    ids, borders = batch.input_ids[None], batch.cu_seqlens
    with torch.no_grad():
        expected = model(input_ids=ids, cu_seqlens=borders, num_steps=steps, output_states=True).states
    found = states_at(model, batch, at, steps, every_step)
    assert len(found) == (len(expected) if every_step else 1)
    for ours, whole in zip(reversed(found), reversed(expected), strict=False):
        assert torch.allclose(ours, whole[0, at], atol=1e-5)


@pytest.mark.parametrize("lengths", [LENGTHS, (12,), (1,), (12,) * 5 + (4,)])  # the last fills its bucket
@pytest.mark.parametrize("name", ["pnn_equations", "pnn_delta", "bert", "rotary"])
def test_filling_a_bucket_changes_no_state(name, lengths):
    rotary = {"update": "rewrite", "positions": "rotary", "schedule": [0, 1, 0]}
    model = build("pnn_equations", **rotary) if name == "rotary" else build(name)
    batch, at = batch_of(lengths), torch.arange(0, sum(lengths), 4)
    longest = model.config.max_position_embeddings
    exact, filled = PackedShape.exact(batch, at), PackedShape.bucket(batch, at, longest)
    assert filled.tokens == SMALLEST
    given = filled.inputs(filled.flat(batch, at, longest))
    borders = given["cu_seqlens"]
    assert (len(borders), borders[-1]) == (filled.borders, filled.tokens)
    assert 0 <= borders.diff().min() <= borders.diff().max() <= longest
    with torch.no_grad():
        plain, padded = (
            model.base_model(**shape.inputs(shape.flat(batch, at, longest))).last_hidden_state for shape in (exact, filled)
        )
    assert torch.allclose(plain[0], padded[0, : len(at)], atol=1e-6)


both_decoders = pytest.mark.parametrize("of", [decoder, causal_pnn])


@both_decoders
def test_rows_of_a_decoder_are_filled_up_at_their_end(of):
    model, batch, at = of(), batch_of((70, 9, 33)), torch.tensor([0, 69, 70, 78, 79, 111])
    filled = RowsShape.bucket(batch, at, 200)
    assert filled == (3, 80, 15)
    assert RowsShape.bucket(batch, at, 72).length == 72  # never more than the model takes
    with torch.no_grad():
        for shape in (filled, RowsShape.exact(batch, at)):
            inputs = shape.inputs(shape.flat(batch, at, 200))
            states = model.base_model(input_ids=inputs["input_ids"], use_cache=False).last_hidden_state.flatten(0, 1)
            states = states[inputs["last_at"]][: len(at)]
            assert torch.allclose(states, states_at(model, batch, at)[0], atol=1e-6)
        alone = model.base_model(input_ids=batch.input_ids[None, 70:79], use_cache=False).last_hidden_state[0]
    assert torch.allclose(alone[[0, 8]], states[[2, 3]], atol=1e-5)


def test_a_recorded_pass_casts_each_weight_once():
    """Autocast does so by itself, but not in inference mode, where callers are."""
    model, ids = build("pnn_equations"), torch.arange(5, 15)[None]

    def run():
        return [model.base_model(input_ids=ids, output_states=True).last_hidden_state]

    found, casts = [], []
    for compute in (run, lambda: _cast_once(run)):
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), profile() as seen:
            found += compute()
        casts.append(sum(event.count for event in seen.key_averages() if event.key == "aten::_to_copy"))
    assert torch.equal(*found)
    assert not found[1].requires_grad
    weights = sum(isinstance(module, torch.nn.Linear) for module in model.base_model.modules())
    assert casts[0] - casts[1] >= 3 * weights  # in three of four steps


def test_what_is_recorded_knows_when_the_model_is_another():
    model = build("pnn_equations")
    before = where_weights_lie(model)
    with torch.no_grad():
        model.encoder.refiners[0].ffn.up.weight.mul_(2)  # training goes on: the same memory
    assert where_weights_lie(model) == before
    handle = model.encoder.refiners[0].gate.register_forward_hook(lambda *_: None)
    assert where_weights_lie(model) is None
    handle.remove()
    model.encoder.refiners[0].ffn.up.weight = torch.nn.Parameter(model.encoder.refiners[0].ffn.up.weight.clone())
    assert where_weights_lie(model) != before
    model.encoder.compile_blocks()
    assert where_weights_lie(model) is None


@pytest.mark.parametrize("every_step", [False, True])
def test_tokens_halt_as_the_config_says(every_step):
    model, batch, at = build("pnn_equations"), batch_of(LENGTHS), torch.tensor([0, 4, 17, 18, 51])
    model.encoder.set_halt({"criterion": "confidence", "threshold": 0.1})
    asked = {"cu_seqlens": batch.cu_seqlens, "last_at": at, "read_out": model.read_out, "output_states": True}
    with torch.no_grad():
        expected = model.base_model(batch.input_ids[None], **asked)
    assert 1 <= expected.halted_at[0, at].min() < 4
    found = states_at(model, batch, at, every_step=every_step)
    assert torch.equal(found[-1], expected.last_hidden_state[0])
    if every_step:
        assert all(torch.equal(ours, whole[0, at]) for ours, whole in zip(found, expected.states[:-1], strict=False))
    whole = states_at(model, batch, at, halt=False)[-1]
    assert not torch.allclose(found[-1], whole)
    model.encoder.set_halt(None)
    assert torch.equal(states_at(model, batch, at)[-1], whole)


# Callers --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(prepared_folder):
    data = DataConfig(synthetic_paragraphs=400, validation_sequences=60, max_length=64, prepared=str(prepared_folder))
    return prepare(data, lambda items, _: items)


@pytest.fixture
def model():
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "initializer_range": 0.3, "num_steps": 3}
    config = pnn.PNNConfig(vocab_size=80, max_position_embeddings=64, zero_init=False, **sizes)
    return pnn.PNNForMaskedLM(config).eval()


def rows_of_last_step(model, work):
    """How many tokens pass the FFN at the last step of each pass."""
    rows = []
    for module in {id(block.ffn): block.ffn for block in model.base_model.blocks}.values():
        module.register_forward_hook(lambda _module, _inputs, out: rows.append(out.shape[-2]))
    work()
    return rows[model.config.num_steps - 1 :: model.config.num_steps]


def test_filling_computes_the_last_step_at_masks(model):
    texts = ["the fox of avon wore amber hats . it has old [MASK] boots .", "[MASK] [MASK]", "the [MASK] of avon"]
    tokenizer = of_synthetic_language(64)
    for by_step in (False, True):
        rows = rows_of_last_step(model, lambda by_step=by_step: list(fill(model, tokenizer, texts, by_step=by_step)))
        assert rows[0] == 4


def test_evaluating_computes_the_last_step_at_targets(model, prepared):
    found = {}

    def work():
        found.update(evaluate_masked(model, prepared.validation, prepared.validation_sequences, batch_tokens=400))

    assert sum(rows_of_last_step(model, work)) == found["targets"]


def test_evaluating_computes_live_tokens_alone(model, prepared):
    def rows(**halt):
        counted = []
        hook = model.base_model.refiners[0].ffn.register_forward_hook(lambda _m, _i, out: counted.append(out.shape[-2]))
        found = evaluate_masked(model, prepared.validation, prepared.validation_sequences, batch_tokens=400, **halt)
        hook.remove()
        return sum(counted), found

    every, plain = rows()
    some, halted = rows(halt={"criterion": "change", "threshold": 0.5})
    assert some < 0.9 * every
    assert halted["loss"] != plain["loss"]
    assert halted["targets"] == plain["targets"]
    same, unchanged = rows(halt={"criterion": "change", "threshold": 1e-30})
    assert unchanged.pop("halt")["threshold"] == 1e-30  # it says how it was measured
    assert (same, unchanged) == (every, plain)


@pytest.mark.parametrize("every_step", [False, True])
def test_predictions_of_an_analysis_are_those_of_its_traces(model, prepared, every_step):
    text = Text(prepared.validation, prepared.validation_sequences, special_tokens(prepared.tokenizer), batch_tokens=500)
    for batch in text.batches():
        trace, found = trace_batch(model, batch), predict(model.train(), batch, every_step)
        assert model.training
        assert torch.equal(found.labels, trace.labels)
        assert torch.equal(found.sequence, trace.target_sequence)
        assert len(found.readings) == (4 if every_step else 1)
        for ours, theirs in zip(reversed(found.readings), reversed(trace.readings), strict=False):
            assert torch.equal(ours.prediction, theirs.prediction)
            assert torch.allclose(ours.loss, theirs.loss, atol=1e-5)
    assert rows_of_last_step(model, lambda: predict(model, batch)) == [len(batch.masked.labels)]


@pytest.mark.parametrize("choices", [0, 2])
def test_dev_sets_are_read_packed_and_give_what_the_model_gives_padded(choices):
    torch.manual_seed(0)
    kind = pnn.PNNForMultipleChoice if choices else pnn.PNNForSequenceClassification
    model = shake(kind(pnn.PNNConfig(**SMALL, num_steps=3, num_labels=3)))
    ids = [row.tolist() for row in batch_of((5, 12, 4, 7, 12, 9, 3, 8)).input_ids.split((5, 12, 4, 7, 12, 9, 3, 8))]
    lengths = np.array([len(row) for row in ids]).reshape(-1, choices or 1).max(axis=1)
    encoded = Encoded(ids, None, choices, np.zeros(len(lengths)), lengths, 0, 0, 0)
    plan = SimpleNamespace(batch_size=3, pad=0, max_length=12, device=torch.device("cpu"), precision=torch.float32)
    with torch.no_grad():
        expected = model(**collate(encoded, np.arange(len(lengths)), 0, 12, plan.device)).logits
    assert torch.allclose(torch.from_numpy(outputs(model, plan, encoded)[-1]), expected, atol=1e-5)
    by_step = outputs(model, plan, encoded, by_step=True)
    assert by_step.shape == (4, *expected.shape)
    assert torch.allclose(torch.from_numpy(by_step[-1]), expected, atol=1e-5)
    assert sum(rows_of_last_step(model, lambda: outputs(model, plan, encoded))) == len(ids)


@both_decoders
def test_requests_get_lm_evals_answers_with_logits_where_they_are_asked_for(of, tmp_path):
    lm_eval = pytest.importorskip("lm_eval.models.huggingface")
    model = of(max_position_embeddings=24)
    lm = lm_eval.HFLM(
        pretrained=model, tokenizer=of_synthetic_language(64), backend="causal", batch_size=3, max_length=24, device="cpu"
    )
    draw = np.random.default_rng(0)
    texts = [draw.integers(5, 60, length).tolist() for length in (3, 9, 9, 1, 20, 23, 30)]  # the last two are cut
    requests = [(("q", str(i)), text, draw.integers(5, 60, 1 + i % 4).tolist()) for i, text in enumerate(texts)]
    with torch.no_grad():  # one that the model would give, and other choices for the same text
        best = int(model(torch.tensor([texts[1]])).logits[0, -1].argmax())
    requests += [
        (("q", "best"), texts[1], [best]),
        (("q", "shared"), texts[1], [7]),
        (("q", "split"), texts[1][:-1], texts[1][-1:]),
    ]
    rows = []
    model.head.register_forward_hook(lambda _module, _inputs, out: rows.append(out[..., 0].numel()))
    ours = log_likelihoods(lm, requests)
    assert sum(rows) == sum(len(continuation) for _, _, continuation in requests)
    theirs = lm._loglikelihood_tokens(requests)
    assert [right for _, right in ours] == [right for _, right in theirs]
    assert any(right for _, right in ours)
    assert [p for p, _ in ours] == pytest.approx([p for p, _ in theirs], abs=1e-4)
    with pytest.raises(UserError, match="a choice has 25 tokens, but the model takes 24"):
        log_likelihoods(lm, [(None, texts[0], draw.integers(5, 60, 25).tolist())])
