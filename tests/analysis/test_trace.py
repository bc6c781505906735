"""A trace is the model's own computation, for every variant; edits do what they say; nothing is left behind."""

import numpy as np
import pytest
import torch

import pnn
from pnn.analysis.controls import shuffled, untrained
from pnn.analysis.subject import Subject, measure
from pnn.analysis.trace import KINDS, MASKED, SPECIAL, Edit, Text, trace_batch, trace_text
from pnn.config import DataConfig
from pnn.data.batches import special_tokens
from pnn.data.shards import prepare
from pnn.evaluation.masked import evaluate_masked
from pnn.studies.registry import analyses, experiment_names, experiments, findings
from pnn.studies.run import perform

SIZES = {"vocab_size": 80, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 64}
VARIANTS = {
    "equations": {"zero_init": False},
    "published": {"delta_norm": True, "gate_bias": True, "zero_init": False},
    "one step": {"num_steps": 1, "zero_init": False},
    "schedule": {"schedule": [0, 1, 2, 0, 1, 2], "zero_init": False},
    "no gate": {"gate": "none", "zero_init": False},
    "delta": {"update": "delta", "zero_init": False},
    "rewrite": {"update": "rewrite", "gate_start": 0.2, "positions": "rotary", "ffn": "geglu"},
    "token gate": {"update": "rewrite", "gate": "token"},
    "recall": {"update": "rewrite", "recall": True},
    "learned recall": {"update": "rewrite", "schedule": [0, 1, 0], "recall": "learned"},
    "guess": {"zero_init": False, "guess_after": [1, 3], "mask_token_id": 4},
}


@pytest.fixture(scope="module")
def prepared(prepared_folder):
    data = DataConfig(synthetic_paragraphs=400, validation_sequences=60, max_length=64, prepared=str(prepared_folder))
    return prepare(data, lambda items, _: items)


def text_of(prepared, batch_tokens=500, count=60):
    sequences = prepared.validation_sequences[:count]
    return Text(prepared.validation, sequences, special_tokens(prepared.tokenizer), batch_tokens=batch_tokens)


def build(variant):
    torch.manual_seed(3)
    if variant == "bert":
        config = pnn.BertBaselineConfig(**SIZES, num_hidden_layers=3, initializer_range=0.3)
        return pnn.BertBaselineForMaskedLM(config)
    return pnn.PNNForMaskedLM(pnn.PNNConfig(**SIZES, initializer_range=0.3, **VARIANTS[variant]))


@torch.no_grad()
def begin(model, trace, step):
    """Where a step begins, by the equation."""
    before, embedded, at = trace.states[step], trace.states[0], trace.targets
    if step in (model.config.guess_after or ()):
        embeddings, places = model.encoder.embeddings, trace.batch.packed.position_ids[at]
        average = model.head(before[at]).softmax(-1) @ embeddings.token.weight
        guess = embeddings.norm(average + embeddings.position(places))
        before = before.index_copy(0, at, before[at] + model.encoder.guess.share * (guess - before[at]))
    learned = model.config.recall == "learned"
    share = model.encoder.recalls[model.config.order()[step]].share.detach() if learned else 0.5 * model.config.recall
    return before + share * (embedded - before)


@pytest.mark.parametrize("variant", [*VARIANTS, "bert"])
def test_states_gates_and_predictions_are_the_models_own(prepared, variant):
    model, text = build(variant), text_of(prepared)
    model.train()  # a trace is taken in evaluation mode and leaves the model as it was
    evaluated = evaluate_masked(model, text.tokens, text.sequences)
    right, targets = 0, 0
    for trace in trace_text(model, text):
        batch = trace.batch
        model.eval()
        with torch.no_grad():
            whole = model(
                batch.masked.input_ids[None],
                position_ids=batch.packed.position_ids[None],
                cu_seqlens=batch.packed.cu_seqlens,
                output_states=True,
                output_gates=True,
            )
        model.train()
        for ours, theirs in zip(trace.states, whole.states, strict=True):
            torch.testing.assert_close(ours, theirs[0])
        for step, gate in zip(trace.steps, whole.gates, strict=False):
            torch.testing.assert_close(step.gate, gate[0])
        for number, (before, after, step) in enumerate(zip(trace.states[:-1], trace.states[1:], trace.steps, strict=True)):
            begun = before if variant == "bert" else begin(model, trace, number)
            torch.testing.assert_close(after - begun, step.change, atol=1e-5, rtol=1e-4)
        right += int(trace.last.correct.sum())
        targets += len(trace.labels)
    assert model.training
    assert targets == evaluated["targets"]
    assert right / targets == pytest.approx(evaluated["accuracy"])
    assert not any(module._forward_hooks for module in model.modules())


def test_every_token_has_its_kind_and_sequence(prepared):
    text = text_of(prepared)
    seen = []
    for batch in text.batches():
        assert (batch.kinds == MASKED).nonzero().squeeze(1).tolist() == batch.masked.positions.tolist()
        special = torch.isin(batch.packed.input_ids, torch.tensor(text.special.never_masked))
        assert (batch.kinds[special] == SPECIAL).all()
        assert KINDS[int(batch.kinds[0])] == "special"  # [CLS]
        seen += batch.sequence.unique().tolist()
    assert seen == list(range(len(text)))


def test_an_edit_changes_its_part_at_its_steps_only(prepared):
    model, text = build("published"), text_of(prepared)
    batch = next(iter(text.batches()))
    plain = trace_batch(model, batch)
    shut = trace_batch(model, batch, [Edit("gate", lambda g, place: torch.zeros_like(g), frozenset({2}))])
    torch.testing.assert_close(shut.states[1], plain.states[1])
    torch.testing.assert_close(shut.states[2], shut.states[1])  # step 2 does nothing
    assert not torch.allclose(shut.states[3], plain.states[3])
    torch.testing.assert_close(trace_batch(model, batch).states[-1], plain.states[-1])


def test_shutting_all_gates_leaves_the_embeddings(prepared):
    model, text = build("equations"), text_of(prepared)
    closed = measure(model, text, [Edit("gate", lambda g, place: torch.zeros_like(g))])
    evaluated = evaluate_masked(model, text.tokens, text.sequences, num_steps=0)
    assert closed[:, 1].sum() / closed[:, 0].sum() == pytest.approx(evaluated["accuracy"])


def test_batches_of_another_size_give_the_same_result(prepared):
    model = build("equations")
    one, other = (perform("convergence", Subject(model, text_of(prepared, size))) for size in (400, 5000))
    assert one["classes"] == other["classes"]
    assert one["settled_counts"] == other["settled_counts"]


def test_twice_is_the_same(prepared):
    model, text = build("published"), text_of(prepared, count=8)
    names = ("convergence", "gates", "optimisation", *experiment_names())
    one, other = ({name: perform(name, Subject(model, text)) for name in names} for _ in range(2))
    assert one == other


def test_every_finding_is_of_a_declared_hypothesis(prepared):
    subject = Subject(build("equations"), text_of(prepared, count=12))
    masked = {name: about for name, about in (analyses() | experiments()).items() if about.kind == "masked"}
    for name, about in masked.items():
        found = findings(name, about, perform(name, subject))
        assert set(found) == set(about.hypotheses), name
        for one, said in about.hypotheses.items():
            assert found[one]["hypothesis"] == said.format(parts="attention, gate, ffn")


@pytest.mark.parametrize("variant", [*VARIANTS, "bert"])
def test_every_experiment_is_done_or_says_why_not(prepared, variant):
    subject = Subject(build(variant), text_of(prepared, count=12))
    for name in experiment_names():
        result = perform(name, subject)
        gateless = name in ("gate_specificity", "gate_entropy") and variant in ("no gate", "delta", "bert")
        gateless = gateless or (name == "gate_specificity" and variant == "token gate")
        short = name in ("meg", "modeling", "dimensionwise") and variant == "one step"
        assert ("not_done" in result) == (gateless or short), name
        if "not_done" not in result:
            assert result["verdict"] in ("supported", "not supported", "undecided")
            assert result["published"]


def test_what_has_no_gates_or_no_path_says_so(prepared):
    assert perform("gates", Subject(build("no gate"), text_of(prepared))) == {"not_done": "the model has no gates"}
    one_each = perform("gates", Subject(build("token gate"), text_of(prepared)))
    assert one_each == {"not_done": "the model has one gate for each token, not for each dimension"}
    assert "not steps of one refiner" in perform("optimisation", Subject(build("bert"), text_of(prepared)))["not_done"]


@pytest.mark.filterwarnings("error")
def test_gate_numbers_equal_a_plain_computation(prepared):
    model, text = build("published"), text_of(prepared)
    found = perform("gates", Subject(model, text))
    all_gates = [[step.gate for step in trace.steps] for trace in trace_text(model, text)]
    for t in range(4):
        g = torch.cat([batch[t] for batch in all_gates])
        assert found["mean_by_step"][t]["value"] == pytest.approx(g.mean().item(), rel=1e-5)
        assert found["deviation_by_step"][t] == pytest.approx(g.std(correction=0).item(), rel=1e-4)
        assert found["open_by_step"][t]["value"] == pytest.approx((g > 0.5).float().mean().item(), rel=1e-5)
        assert found["dimension_means"][t] == pytest.approx(g.mean(0).tolist(), rel=1e-4)
        histogram = sum(np.array(rows[t]) for rows in found["token_mean_histogram"].values())
        assert histogram.sum() == len(g) == found["tokens"]


def test_an_untrained_twin_is_drawn_anew_and_moves(prepared):
    model = build("equations")
    twin, again = untrained(model), untrained(model)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), again.parameters(), strict=True))
    assert twin.encoder.refiners[0].ffn.down.weight.abs().sum() > 0
    assert not torch.equal(twin.head.decoder.weight, model.head.decoder.weight)


def test_shuffling_keeps_what_is_shuffled():
    x = torch.arange(50)
    assert shuffled(x).tolist() != x.tolist()
    assert sorted(shuffled(x).tolist()) == x.tolist()
    assert torch.equal(shuffled(x), shuffled(x))
