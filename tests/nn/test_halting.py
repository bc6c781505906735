"""Tokens that halt: what they keep is what a plain loop keeps, what is not computed is not computed, and a learned unit learns.

The plain loop computes every token at every step and leaves halted ones where they were."""

import re

import pytest
import torch
from halting_models import AT, FORMS, halting
from huggingface_hub.errors import StrictDataclassError
from small_models import LENGTHS, SMALL, build, every_pnn, shake, some_batch

import pnn
from pnn.models.base import arrange
from pnn.nn import live
from pnn.nn.halting import CRITERIA, Criterion, Halt
from pnn.nn.packing import only_at
from pnn.plasticity import prune
from pnn.schedule import period

NEVER = {"criterion": "change", "threshold": 1e-30}
every_form = pytest.mark.parametrize("form", FORMS)


class Drawn(Criterion):
    """A pattern without order: at every step about a third of the live tokens halt."""

    def measure(self, before, after, read):
        return (20 * after.double() @ torch.linspace(-1, 1, after.shape[-1], dtype=torch.float64)) % 1


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setitem(CRITERIA, "drawn", Drawn)


def plain_loop(model, ids, mask, draw=None):
    """States h⁰ … hᵀ of a padded batch, and how many steps each token took."""
    encoder, config = model.encoder, model.config
    halt, schedule = config.halt, config.schedule
    tokens = encoder.embeddings.token(ids)
    positions, layout = arrange(tokens, mask, None, None, config)
    h = encoder.embeddings(tokens, positions)
    going, taken, states = mask.bool(), torch.zeros_like(ids), [h]
    size = period(schedule)
    for step in range(1, len(schedule) + 1):
        refiner = encoder.refiners[schedule[step - 1]]
        new = torch.where(going[..., None], h + refiner.refine(h, layout).delta, h)
        taken = taken + going
        if step % size == 0 and step >= halt.get("min_steps", 1):
            measured = encoder.criterion.measure(h, new, model.read_out)
            low = encoder.criterion.when_below
            going = going & ~(measured <= halt["threshold"] if low else measured >= halt["threshold"])
        h = new
        states.append(h)
    return states, taken


# Values and gradients -------------------------------------------------------------------------------------------------


@every_pnn
def test_where_nothing_halts_nothing_changes_to_the_bit(name):
    model = build(name, halt=NEVER)
    ids, mask, packed, borders = some_batch()
    with torch.no_grad():
        for call in (
            {"input_ids": ids, "attention_mask": mask},
            {"input_ids": packed, "cu_seqlens": borders},
            {"input_ids": packed, "cu_seqlens": borders, "last_at": AT},
        ):
            ours = model.encoder(**call, output_states=True)
            plain = model.encoder(**call, output_states=True, halt=False)
            assert plain.halted_at is None
            assert all(torch.equal(one, two) for one, two in zip(ours.states, plain.states, strict=True))
            assert torch.equal(ours.last_hidden_state, plain.last_hidden_state)
    expected = torch.full_like(packed, 3)
    expected[0, AT] = 4  # of the last step nothing else is computed
    assert torch.equal(ours.halted_at, expected)


@every_form
@pytest.mark.parametrize("criterion", ["drawn", "change", "confidence"])
def test_what_halts_is_what_a_plain_loop_leaves(form, criterion):
    model = halting(form, criterion)
    ids, mask, packed, borders = some_batch()
    real = mask.bool()
    states, taken = plain_loop(model, ids, mask)
    assert len(taken[real].unique()) >= (3 if criterion == "drawn" else 2), "the pattern is not worth a test"
    with torch.no_grad():
        padded = model(ids, attention_mask=mask, output_states=True)
        assert torch.equal(padded.halted_at, taken)
        flat = model(packed, cu_seqlens=borders, output_states=True)
        assert torch.equal(flat.halted_at[0], taken[real])
        for ours, theirs, expected in zip(padded.states, flat.states, states, strict=True):
            assert torch.allclose(ours[real], expected[real], atol=1e-5)
            assert torch.allclose(theirs[0], expected[real], atol=1e-5)
        alone = model(ids[1:2], output_states=True)  # one row, no mask
        assert torch.allclose(alone.states[-1][0], states[-1][1], atol=1e-5)


@every_form
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("buckets", [False, True])
def test_context_stops_after_so_many_steps(form, steps, buckets, monkeypatch):
    """What nobody asks for keeps its state; what is asked for goes on, and reads it. Also in the sizes that a GPU takes."""
    monkeypatch.setattr(live, "exact_sizes", lambda device: not buckets)
    model = build("pnn_equations", **{"num_steps": None if "schedule" in FORMS[form] else 5, **FORMS[form]})
    size = period(model.config.schedule)
    halt = {"criterion": "context", "min_steps": size * steps if size * steps < model.config.num_steps else size}
    ids, mask, packed, borders = some_batch()
    asked = torch.zeros(packed.shape[1], dtype=torch.bool).index_fill(0, AT, True)
    with torch.no_grad():
        ours = model.encoder(packed, cu_seqlens=borders, last_at=AT, halt=halt)
        everything = model.encoder(packed, cu_seqlens=borders, halt=halt)  # all are asked for: nobody halts
        assert torch.equal(everything.last_hidden_state, model.encoder(packed, cu_seqlens=borders).last_hidden_state)
        goes_on = torch.zeros_like(mask, dtype=torch.bool).masked_scatter(mask.bool(), asked)
        tokens = model.encoder.embeddings.token(ids)
        positions, layout = arrange(tokens, mask, None, None, model.config)
        h = model.encoder.embeddings(tokens, positions)
        for step, number in enumerate(model.config.schedule, 1):
            new = h + model.encoder.refiners[number].refine(h, layout).delta
            h = new if step <= halt["min_steps"] else torch.where(goes_on[..., None], new, h)
    assert torch.allclose(ours.last_hidden_state[0], h[goes_on], atol=1e-5)
    assert ours.halted_at[0, asked].unique().tolist() == [model.config.num_steps]
    assert ours.halted_at[0, ~asked].unique().tolist() == [halt["min_steps"]]


@every_form
@pytest.mark.parametrize("criterion", ["drawn", "change", "confidence"])
def test_asked_tokens_are_the_same_when_what_is_of_no_use_to_them_stops(form, criterion):
    model = halting(form, criterion)
    ids, mask, packed, borders = some_batch()
    call = {"cu_seqlens": borders, "read_out": model.read_out}
    if criterion == "confidence":  # nobody else can halt
        expected = reading_loop(model, ids, mask, AT)
    else:
        expected = [h[mask.bool()][AT] for h in plain_loop(model, ids, mask)[0]]
    with torch.no_grad():
        out = model.encoder(packed, **call, last_at=AT, output_states=True)
        whole = model.encoder(packed, **call)
    for ours, theirs in zip([*(h[0, AT] for h in out.states[:-1]), out.last_hidden_state[0]], expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    if criterion != "confidence":
        assert (out.halted_at <= whole.halted_at).all()
        assert torch.equal(out.halted_at[0, AT], whole.halted_at[0, AT])
        assert int(out.halted_at.sum()) < int(whole.halted_at.sum())
    assert int(out.halted_at[0, 17]) < len(model.config.schedule)  # a sequence that nobody asks about


def reading_loop(model, ids, mask, at):
    """The plain loop, where only tokens `at` can halt."""
    asked = torch.zeros(int(mask.sum()), dtype=torch.bool).index_fill_(0, at, True)
    everywhere = torch.zeros(mask.shape, dtype=torch.bool).masked_scatter_(mask.bool(), asked)
    measure = model.encoder.criterion.measure
    try:
        model.encoder.criterion.measure = lambda *given: measure(*given).masked_fill(~everywhere, 0.0)
        with torch.no_grad():
            return [h[mask.bool()][at] for h in plain_loop(model, ids, mask)[0]]
    finally:
        del model.encoder.criterion.measure


@every_form
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_the_plain_loop(form, packed):
    model = halting(form)
    ids, mask, flat, borders = some_batch()
    real, weights = mask.bool(), torch.randn(sum(LENGTHS), SMALL["hidden_size"], generator=torch.Generator().manual_seed(2))
    if packed:
        ours = model.encoder(flat, cu_seqlens=borders).last_hidden_state[0]
    else:
        ours = model.encoder(ids, attention_mask=mask).last_hidden_state[real]
    theirs = plain_loop(model, ids, mask)[0][-1][real]
    parameters = [p for name, p in model.encoder.named_parameters() if "criterion" not in name]
    for one, two in zip(*(torch.autograd.grad((h * weights).sum(), parameters) for h in (ours, theirs)), strict=True):
        assert two.norm() > 1e-4
        assert (one - two).norm() < 1e-5 * two.norm().clamp(min=0.1)


@pytest.mark.parametrize("form", ["gated", "rounds"])
@pytest.mark.parametrize("asked", [None, AT])
def test_sizes_in_buckets_change_no_state(form, asked, monkeypatch):
    """What a GPU does, on the CPU: rows that are computed in vain, no sequence left out."""
    model = halting(form)
    packed, borders = some_batch()[2:]
    with torch.no_grad():
        expected = model.encoder(packed, cu_seqlens=borders, last_at=asked)
        monkeypatch.setattr(live, "exact_sizes", lambda device: False)
        rows = rows_computed(model)
        found = model.encoder(packed, cu_seqlens=borders, last_at=asked)
    first = period(model.config.schedule)
    assert rows[:first] == [packed.shape[1]] * first
    assert set(rows[first:]) == {64}
    assert torch.equal(found.halted_at, expected.halted_at)
    assert torch.allclose(found.last_hidden_state, expected.last_hidden_state, atol=1e-6)


# Saved work -----------------------------------------------------------------------------------------------------------


def rows_computed(model):
    """How many tokens pass the FFN at each step, from now on."""
    rows = []
    for refiner in model.base_model.refiners:
        refiner.ffn.register_forward_hook(lambda _module, _inputs, out: rows.append(out.shape[-2] * out.shape[0]))
    return rows


@pytest.mark.parametrize("form", ["gated", "rewrite", "rounds"])
def test_live_tokens_alone_are_computed(form):
    model = halting(form)
    _, _, packed, borders = some_batch()
    rows = rows_computed(model)
    keys = []
    for refiner in model.encoder.refiners:
        refiner.attention.qkv.register_forward_hook(lambda _module, _inputs, out: keys.append(out.shape[1]))
    with torch.no_grad():
        taken = model.encoder(packed, cu_seqlens=borders).halted_at[0]
    steps = range(1, len(model.config.schedule) + 1)
    assert rows == [int((taken >= step).sum()) for step in steps if (taken >= step).any()]
    # a token's keys and values are computed once more under each refiner when it has stopped, where somebody still reads them
    size = period(model.config.schedule)
    assert int(taken.sum()) < sum(keys) <= int(taken.sum()) + size * len(taken)


def test_nothing_is_computed_for_sequences_that_are_done():
    """A classifier reads first tokens: when one is sure, its sequence is done, and the batch is smaller."""
    torch.manual_seed(0)
    model = shake(pnn.PNNForSequenceClassification(pnn.PNNConfig(**SMALL, num_steps=5, num_labels=3)))
    ids, mask, _, _ = some_batch()
    with torch.no_grad():
        states = model(ids, attention_mask=mask, output_states=True).states
        sure = torch.stack([model.classifier(h[:, 0]).softmax(-1).amax(-1) for h in states])
        threshold = float(sure[1:].quantile(0.6))
        stops = [next((t for t in range(1, 5) if sure[t, row] >= threshold), 5) for row in range(len(ids))]
        assert len(set(stops)) > 2
        halt = {"criterion": "confidence", "threshold": threshold}
        rows = rows_computed(model)
        out = model(ids, attention_mask=mask, halt=halt)
        expected = torch.stack([model.classifier(states[stop][row, 0]) for row, stop in enumerate(stops)])
        assert torch.allclose(out.logits, expected, atol=1e-5)
        assert out.halted_at[:, 0].tolist() == stops
        lengths = torch.tensor(LENGTHS)
        expected_rows = []
        for step in range(1, 5):  # first tokens are asked first, and then all tokens of those that go on
            live, going = (torch.tensor(stops) >= step), (torch.tensor(stops) > step)
            expected_rows += [int(live.sum())] if live.any() else []
            expected_rows += [int(lengths[going].sum()) if (~going).any() else ids.numel()] if going.any() else []
        assert rows == [*expected_rows, sum(stop == 5 for stop in stops)]  # of the last step, first tokens alone
        model.base_model.set_halt(halt)
        assert torch.equal(model(ids, attention_mask=mask).logits, out.logits)
        assert not torch.equal(model(ids, attention_mask=mask, halt=False).logits, out.logits)


@pytest.mark.parametrize("form", ["gated", "rewrite", "rounds"])
@pytest.mark.parametrize("halts", ["some", "all", "none"])
def test_a_batch_of_fewer_sequences_is_what_keeping_tokens_gives(form, halts, monkeypatch):
    """Sequences that halt as wholes are left out of the batch, packed or padded: the other way keeps their tokens."""
    torch.manual_seed(0)
    config = pnn.PNNConfig(**SMALL, num_labels=3, **{"num_steps": None if "schedule" in FORMS[form] else 5, **FORMS[form]})
    model = shake(pnn.PNNForSequenceClassification(config))
    ids, mask, packed, borders = some_batch()
    with torch.no_grad():
        states = model(ids, attention_mask=mask, output_states=True).states
        sure = torch.stack([model.classifier(h[:, 0]).softmax(-1).amax(-1) for h in states[1:-1]])
        halt = {"criterion": "confidence", "threshold": {"some": float(sure.quantile(0.6)), "all": 1e-6, "none": 1.0}[halts]}
        padded = {"input_ids": ids, "attention_mask": mask, "last_at": torch.arange(len(ids)) * ids.shape[1]}
        for inputs in (padded, {"input_ids": packed, "cu_seqlens": borders, "last_at": borders[:-1].long()}):
            how = {"halt": halt, "read_out": model.read_out, "output_states": True}
            found = model.encoder(**inputs, **how)
            with monkeypatch.context() as patch:
                patch.setattr(live.Places, "read_once", lambda places, at: False)
                expected = model.encoder(**inputs, **how)
            assert torch.allclose(found.last_hidden_state, expected.last_hidden_state, atol=1e-6)
            at = inputs["last_at"]
            stops = found.halted_at.flatten()[at]
            assert torch.equal(stops, expected.halted_at.flatten()[at])
            for one, other in zip(found.states[:-1], expected.states[:-1], strict=True):
                assert torch.allclose(only_at(one, at), only_at(other, at), atol=1e-6)
            if inputs is not padded:  # tokens that are not read are spared the step at which their sequence halts
                early = (stops < len(config.schedule)).long().repeat_interleave(borders.diff()).index_fill(0, at, 0)
                assert torch.equal(expected.halted_at[0] - found.halted_at[0], early)
            assert (len(set(stops.tolist())) > 1) == (halts == "some")
            if halts == "none":
                never = model.encoder(**inputs, **(how | {"halt": False}))
                assert torch.equal(found.last_hidden_state, never.last_hidden_state)


def test_whole_sequences_halt_with_the_gradients_of_those_that_go_on():
    torch.manual_seed(0)
    model = shake(pnn.PNNForSequenceClassification(pnn.PNNConfig(**SMALL, num_steps=4, num_labels=3)))
    packed, borders = some_batch()[2:]
    first = borders[:-1].long()
    with torch.no_grad():
        sure = model.classifier(only_at(model.encoder(packed, cu_seqlens=borders, num_steps=2).last_hidden_state, first)[0])
        halt = {"criterion": "confidence", "threshold": float(sure.softmax(-1).amax(-1).median()), "min_steps": 2}
    how = {"cu_seqlens": borders, "last_at": first, "read_out": model.read_out}
    out = model.encoder(packed, **how, halt=halt)
    stops = out.halted_at[0, first]
    assert set(stops.tolist()) == {2, 4}
    by_steps = {steps: model.encoder(packed, **how, num_steps=steps).last_hidden_state[0] for steps in (2, 4)}
    expected = torch.where((stops == 2)[:, None], by_steps[2], by_steps[4])
    weights = torch.randn(expected.shape)
    parameters = list(model.encoder.parameters())
    ours, theirs = (torch.autograd.grad((h * weights).sum(), parameters) for h in (out.last_hidden_state[0], expected))
    for one, two in zip(ours, theirs, strict=True):
        assert torch.allclose(one, two, atol=1e-5 * max(1.0, float(two.norm())))


def test_a_batch_that_is_done_early_stops_early():
    model = halting("gated", "learned")
    packed, borders = some_batch()[2:]
    with torch.no_grad():
        model.encoder.criterion.bias.add_(100)
        rows = rows_computed(model)
        out = model(packed, cu_seqlens=borders, output_states=True)
        assert len(rows) == 1
        assert len(out.states) == 6
        assert all(torch.equal(h, out.states[1]) for h in out.states[2:])
        assert (out.halted_at == 1).all()
        out = model(packed, cu_seqlens=borders, halt={"criterion": "learned", "threshold": 0.5, "min_steps": 3})
        assert (out.halted_at == 3).all()


@pytest.mark.parametrize("criterion", ["learned", "context"])
def test_a_refiner_may_have_lost_all_its_heads(criterion):
    heads = [(0, head) for head in range(SMALL["num_attention_heads"])]
    model = prune(build("pnn_equations", schedule=[0, 1, 0, 1, 0, 1], num_steps=None), heads, whole_layers=True).eval()
    halt = {"criterion": "change", "threshold": 0.2} if criterion == "learned" else {"criterion": "context", "min_steps": 2}
    ids, mask, packed, borders = some_batch()
    with torch.no_grad():
        found = model.encoder(packed, cu_seqlens=borders, last_at=torch.arange(0, packed.shape[1], 3), halt=halt)
        rows = model.encoder(ids, attention_mask=mask, halt=halt) if criterion == "learned" else found
    assert found.last_hidden_state.isfinite().all()
    assert len(found.halted_at.unique()) > 1
    assert rows.last_hidden_state.isfinite().all()


# Settings -------------------------------------------------------------------------------------------------------------


def test_halting_is_saved_with_the_model(tmp_path):
    model = halting("gated", "learned")
    packed, borders = some_batch()[2:]
    model.save_pretrained(tmp_path)
    again = pnn.PNNForMaskedLM.from_pretrained(tmp_path).eval()
    assert again.config.halt == {"criterion": "learned", "threshold": 0.5, "min_steps": 1}
    with torch.no_grad():
        ours, theirs = (one(packed, cu_seqlens=borders) for one in (model, again))
    assert torch.allclose(ours.logits, theirs.logits, atol=1e-5)
    assert torch.equal(ours.halted_at, theirs.halted_at)
    model.encoder.set_halt(None)
    model.save_pretrained(tmp_path / "without")
    again = pnn.PNNForMaskedLM.from_pretrained(tmp_path / "without")
    assert again.config.halt is None
    assert not [name for name in again.state_dict() if "criterion" in name]


def test_a_fresh_model_has_a_unit_that_is_told_to_go_on():
    model = pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL, halt={"criterion": "learned", "threshold": 0.5}))
    assert torch.sigmoid(model.encoder.criterion.bias).item() == pytest.approx(0.1)
    assert not model.encoder.criterion.weight.any()


@pytest.mark.parametrize(
    ("halt", "more", "says"),
    [
        ({"criterion": "change", "threshold": 0.0}, {}, "threshold=0.0 must be above zero"),
        ({"criterion": "change", "threshold": -1}, {}, "threshold=-1 must be above zero"),
        ({"criterion": "change", "threshold": float("nan")}, {}, "must be above zero"),
        ({"criterion": "change", "threshold": "high"}, {}, "threshold='high' is no number"),
        ({"criterion": "learned", "threshold": 1.5}, {}, "learned never exceeds 1"),
        (
            {"criterion": "context", "min_steps": 3},
            {"num_steps": None, "schedule": [0, 1, 0, 1]},
            "over after step 2: no token",
        ),
        ({"criterion": "mood", "threshold": 0.5}, {}, "criterion='mood' is none of change, confidence, learned, context"),
        ({"threshold": 0.5}, {}, "halt needs a criterion"),
        ({"criterion": "context", "min_steps": 4}, {}, "no token would ever halt"),
        ({"criterion": "change"}, {}, "halt needs a threshold"),
        ({"criterion": "change", "threshold": 0.1, "patience": 2}, {}, "halt has no key 'patience'"),
        ({"criterion": "change", "threshold": 0.1, "min_steps": 0}, {}, "min_steps=0 must be 1 or more"),
        ({"criterion": "change", "threshold": 0.1, "min_steps": 4}, {}, "no token would ever halt"),
        ({"criterion": "change", "threshold": 0.1, "cost": 0.1}, {}, "is for training the learned unit"),
        ({"criterion": "change", "threshold": 0.1}, {"num_steps": 1}, "halt needs two steps or more"),
        ({"criterion": "change", "threshold": 0.1}, {"schedule": [0, 1, 2, 3]}, r"\[0, 1, 2, 3\] never begins again"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(halt, more, says):
    with pytest.raises((ValueError, StrictDataclassError)) as refused:
        pnn.PNNConfig(**SMALL, **more, halt=halt)
    assert re.search(says, str(refused.value.__cause__ or refused.value))
    if not more:
        with pytest.raises(ValueError, match=says):
            build("pnn_equations")(some_batch()[0], halt=halt)


def test_calls_that_cannot_halt_are_refused_or_left_alone():
    model, ids = build("pnn_equations"), some_batch()[0]
    with pytest.raises(ValueError, match="has no learned unit"):
        model(ids, halt={"criterion": "learned", "threshold": 0.5})
    with pytest.raises(ValueError, match="needs two steps or more"):
        model(ids, halt=NEVER, num_steps=1)
    with pytest.raises(ValueError, match="leave out halt"):
        model(ids, halt=NEVER, output_gates=True)
    with pytest.raises(ValueError, match="needs a head that chooses"):
        model.encoder(ids, halt={"criterion": "confidence", "threshold": 0.5})
    with pytest.raises(ValueError, match="a BertBaselineModel has none"):
        build("bert")(ids, halt=NEVER)
    model.encoder.set_halt({"criterion": "change", "threshold": 1e6})
    with torch.no_grad():
        assert len(model(ids, output_gates=True).gates) == 4  # of every token at every step, as asked
        assert model(ids, num_steps=0).halted_at is None
        assert (model(ids).halted_at == 1).all()
        assert model(ids, num_steps=4).halted_at is None  # whoever names a number wants that many of every token
        assert torch.equal(model(ids, num_steps=4).logits, model(ids, halt=False).logits)
        assert (model(ids, num_steps=4, halt={"criterion": "change", "threshold": 1e6}).halted_at == 1).all()
    model.encoder.set_halt({"criterion": "learned", "threshold": 0.5, "cost": 0.1})
    assert model.train()(ids, num_steps=4).halted_at is not None  # training draws the number, and the unit learns with it


def test_rounds_of_a_schedule():
    assert [period(s) for s in ([0], [0] * 4, [0, 1, 0, 1], [0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 1])] == [1, 1, 2, 3, 4, 3]


def test_settings_come_and_go_as_what_a_config_holds():
    halt = Halt.of({"criterion": "learned", "threshold": 0.7, "cost": 0.1})
    assert Halt.of(halt.as_dict()) == halt
    assert Halt.of(halt) is halt
