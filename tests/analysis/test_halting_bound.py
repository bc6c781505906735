"""The plain loop of tokens that halt, and the oracle: on a model whose answer is known, and on real refiners."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from planted import Lines
from small_models import SMALL, build, shake
from torch import nn

import pnn
from pnn.analysis.halting_bound import Groups, PlainTrials, Rows, Trials, Wanted, at_random, dial, halts_after, oracle
from pnn.analysis.trace import Text
from pnn.data.masking import SpecialTokens
from pnn.models.base import arrange
from pnn.nn import live

SOURCE, MASK, OTHER = 7, 4, 9
COUNT, IS_SOURCE, IS_MASK, ANSWER = range(4)


class Counting(nn.Module):
    """A token counts its steps. A masked one turns its answer as soon as a source of its row has counted two."""

    def forward(self, h, layout, at=None):
        told = ((h[..., IS_SOURCE] > 0) & (h[..., COUNT] > 1.5)).any(1, keepdim=True)
        h = h.clone()
        h[..., ANSWER] = torch.where(told & (h[..., IS_MASK] > 0), 1.0, h[..., ANSWER])
        h[..., COUNT] += 1
        return h


class Head(nn.Module):
    def forward(self, h):
        return torch.stack((0.5 - h[..., ANSWER], h[..., ANSWER] - 0.5), -1)


def counting_rows(rows, right=1):
    """`rows`: token ids, OTHER at padding. `right`: the answer that is right."""
    model = pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL, num_steps=4)).eval()
    model.encoder.refiners[0], model.head = Counting(), Head()
    ids = torch.tensor(rows)
    keep = ids != 0
    found = Rows(model, ids, keep, ids == MASK, torch.full_like(ids, right), np.arange(len(rows)))
    start = torch.zeros(*ids.shape, 4)
    start[..., IS_SOURCE], start[..., IS_MASK] = ids == SOURCE, ids == MASK
    found.__dict__["start"] = start
    return found


ROWS = [[OTHER, SOURCE, MASK, OTHER, OTHER], [OTHER, MASK, OTHER, 0, 0]]


@pytest.mark.parametrize("earliest", [0, 1])
def test_the_oracle_finds_how_many_steps_each_token_needs(earliest):
    """The source has to count two; the mask turns at step 3, where it reads that; nobody else is read."""
    e = earliest
    assert oracle(counting_rows(ROWS), earliest).tolist() == [[e, 2, 3, e, e], [e, e, e, 0, 0]]


def test_a_wrong_answer_need_not_stay_the_same_wrong_answer():
    rows = counting_rows([ROWS[0]], right=0)
    assert oracle(rows).tolist() == [[1, 2, 3, 1, 1]]
    assert oracle(rows, right_only=True).tolist() == [[1, 1, 1, 1, 1]]


@pytest.fixture(scope="module", params=["pnn_equations", "pnn_published", "pnn_schedule", "pnn_schedule as in models/pnn-base"])
def some_rows(request):
    name, *in_the_box = request.param.split(" as in ")
    config = build(name).config
    more = (
        {"update": "rewrite", "positions": "rotary", "tie_word_embeddings": True, "head_transform": True} if in_the_box else {}
    )
    model = shake(pnn.PNNForMaskedLM(type(config).from_dict(config.to_dict() | {"max_position_embeddings": 32} | more)))
    text = Text(Lines(12), np.arange(12), SpecialTokens(MASK, 40, (0, 1, 2, 3, 4)), 0.3, 0, 150)
    return [Rows.of(model, batch) for batch in text.batches()]


@torch.no_grad()
def test_all_steps_are_the_models_own(some_rows):
    for rows in some_rows:
        out = rows.model.encoder(rows.ids, attention_mask=rows.keep, output_states=True)
        for ours, theirs in zip(rows.states(torch.full_like(rows.ids, 4)), out.states, strict=True):
            assert torch.allclose(ours[rows.keep], theirs[rows.keep], atol=1e-5)
        # nobody reads the last step of a token that is not masked
        assert torch.allclose(rows.states(rows.all_steps)[-1][rows.targets], out.states[-1][rows.targets], atol=1e-5)


@torch.no_grad()
def test_a_loop_over_single_tokens_gives_the_same_states(some_rows):
    rows = some_rows[0]
    taken = torch.randint(0, 5, rows.ids.shape, generator=torch.Generator().manual_seed(2)) * rows.keep
    found = rows.states(taken)[-1]
    encoder = rows.model.encoder
    for row, length in enumerate(rows.keep.sum(1).tolist()):
        h = rows.start[row : row + 1, :length]
        _, layout = arrange(h, None, None, None, encoder.config)
        for step in range(4):
            refined = encoder.refiners[encoder.config.schedule[step]].refine(h, layout).delta
            h = torch.stack([h[0, i] + refined[0, i] * (step < taken[row, i]) for i in range(length)])[None]
        assert torch.allclose(found[row, :length], h[0], atol=1e-5)


@torch.no_grad()
def test_no_prediction_changes_and_something_is_saved(some_rows):
    for rows in some_rows:
        taken = oracle(rows)
        final = rows.predictions(rows.states(rows.all_steps)[-1])
        assert torch.equal(rows.predictions(rows.states(taken)[-1]), final)
        assert int(taken.sum()) < int(rows.all_steps.sum())
        allowed = {*halts_after(rows.model, 1), 3, 4}
        assert set(taken[rows.keep].tolist()) <= allowed
        assert not taken[~rows.keep].any()


def test_a_token_halts_where_the_schedule_begins_again():
    assert halts_after(build("pnn_equations"), 0) == [0, 1, 2, 3]
    assert halts_after(build("pnn_schedule"), 1) == [2]
    twice_in_a_round = pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL | {"num_steps": 6, "schedule": [0, 0, 1, 0, 0, 1]}))
    assert halts_after(twice_in_a_round, 1) == [3]


def test_chance_deals_out_what_the_oracle_took():
    rows = counting_rows(ROWS)
    pools = {"targets": torch.tensor([3]), "context": torch.tensor([1, 2])}
    drawn = at_random(rows, pools)
    assert drawn[rows.targets].tolist() == [3, 3]
    assert set(drawn[rows.keep & ~rows.targets].tolist()) <= {1, 2}
    assert torch.equal(drawn, at_random(rows, pools))
    assert not drawn[~rows.keep].any()


def test_a_dial_counts_what_is_read():
    rows = counting_rows(ROWS)
    assert dial(rows, 2).tolist() == [[1, 1, 2, 1, 1], [1, 2, 1, 0, 0]]
    assert dial(rows, 4, 0).tolist() == [[0, 0, 4, 0, 0], [0, 4, 0, 0, 0]]


# The fast form of a trial, against everything written out ---------------------------------------------------------------


def written_out(rows, row, earliest, right_only):
    """The oracle for one sequence: every trial is a whole pass over all tokens, and every group is tried."""
    steps, keep, targets = len(rows.model.config.schedule), rows.keep[row], rows.targets[row]
    right = rows.words[row][targets]

    def states(taken):
        h, found = rows.start[row : row + 1], [rows.start[row]]
        for step, number in enumerate(rows.model.config.schedule):
            refined = rows.model.encoder.refiners[number].refine(h, arrange(h, keep[None], None, None, rows.model.config)[1])
            h = h + refined.delta * (taken > step)[None, :, None]
            found.append(h[0])
        return found

    def predicted(h):
        return rows.model.head(h[targets]).argmax(-1)

    taken = torch.where(targets, steps, steps - 1) * keep
    unhalted = states(taken)
    final = predicted(unhalted[-1])
    stays = final == right if right_only else torch.ones_like(final, dtype=torch.bool)
    settled = [max([0] + [t + 1 for t in range(steps) if predicted(unhalted[t])[i] != final[i]]) for i in range(len(final))]
    may_halt = torch.zeros_like(taken)
    may_halt[targets] = torch.tensor(settled) * stays

    def halt(taken, group, step):
        tried = taken.clone()
        tried[group] = step
        if (predicted(states(tried)[-1]) == final)[stays].all():
            return tried
        if len(group) == 1:
            return taken
        return halt(halt(taken, group[: len(group) // 2], step), group[len(group) // 2 :], step)

    for step in halts_after(rows.model, earliest):
        moves = (unhalted[-1] - states(taken)[step]).norm(dim=-1)
        candidates = (keep & (taken > step) & (may_halt <= step)).nonzero()[:, 0]
        if len(candidates):
            taken = halt(taken, candidates[moves[candidates].argsort()], step)
    return taken


def in_64_bits(rows):
    """So that no prediction hangs on how a sum is rounded."""
    return Rows(copy.deepcopy(rows.model).double(), rows.ids, rows.keep, rows.targets, rows.words, rows.sequence)


@pytest.mark.parametrize("how", [{}, {"earliest": 0}, {"right_only": True}, {"earliest": 0, "right_only": True}], ids=str)
@torch.no_grad()
def test_the_oracle_is_what_it_is_written_out(some_rows, how):
    for rows in map(in_64_bits, some_rows[:2]):
        decided = []
        found = oracle(rows, **how, decided=decided.append)
        for row in range(len(found)):
            assert found[row].tolist() == written_out(rows, row, how.get("earliest", 1), how.get("right_only", False)).tolist()
        # of every token it is said once at every place where it may halt
        assert sum(decided) == int(rows.keep.sum()) * len(halts_after(rows.model, how.get("earliest", 1)))


def some_trials(rows, step, right_only=False, seed=0):
    """A trial of either kind after this step, some of the rows, and which of their tokens halt there; in the first row all that
    are masked."""
    random = torch.Generator().manual_seed(seed)
    before = torch.where(torch.rand(rows.ids.shape, generator=random) < 0.2, 0, rows.all_steps) * rows.keep
    h = rows.states(before)[step]
    final = rows.predictions(rows.states(rows.all_steps)[-1])
    stays = torch.rand(final.shape, generator=random) < 0.5 if right_only else torch.ones_like(final, dtype=torch.bool)
    chosen = torch.arange(0, len(rows.ids), 2)
    halts = torch.rand(rows.ids.shape, generator=random) < torch.rand(len(rows.ids), 1, generator=random)
    halts[0] = rows.targets[0]
    taken = torch.where(halts & (before > step), step, before)[chosen]
    return [kind(rows, Wanted(final, stays), h, step) for kind in (Trials, PlainTrials)], taken, chosen


@pytest.mark.parametrize("exact", [True, False], ids=["exact sizes", "sizes of a GPU"])
@pytest.mark.parametrize("step", [0, 2])
@torch.no_grad()
def test_a_trial_gives_the_states_of_a_whole_pass(some_rows, step, exact, monkeypatch):
    monkeypatch.setattr(live, "exact_sizes", lambda device: exact)
    for rows in some_rows:
        (fast, plain), taken, chosen = some_trials(rows, step)
        assert (taken == step).any()
        targets = rows.targets[chosen]
        for _ in range(2):  # what is kept for later trials stays as it is
            assert torch.allclose(fast.after(taken, chosen)[targets], plain.after(taken, chosen)[targets], atol=1e-5)
            assert torch.equal(fast.predictions(taken, chosen), plain.predictions(taken, chosen))


@torch.no_grad()
def test_who_may_change_is_not_asked_and_changes_nothing(some_rows):
    rows = some_rows[0]
    for seed in range(10):
        (fast, plain), taken, chosen = some_trials(rows, 2, right_only=True, seed=seed)
        assert torch.equal(fast.unchanged(taken, chosen), plain.unchanged(taken, chosen))


@torch.no_grad()
def test_a_trial_computes_live_tokens_alone(some_rows):
    rows = some_rows[0]
    (fast, _), taken, chosen = some_trials(rows, 2)
    computed = []
    for refiner in rows.model.encoder.refiners:
        refiner.ffn.register_forward_hook(lambda _module, given, _out: computed.append(given[0].shape[:-1].numel()))
    fast.after(taken, chosen)
    for refiner in rows.model.encoder.refiners:
        refiner.ffn._forward_hooks.clear()
    assert computed == [int((taken > 3).sum())]  # what step 2 gives was there before


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_of_tokens_is_tried_twice(seed):
    """Whatever is good (here chance decides): what halts is what trying every group would let halt."""
    random = np.random.default_rng(seed)
    everyone = np.arange(13)
    verdict = cache(lambda halted: random.random() < 0.4)
    groups, halted, tried, decided = Groups(everyone), frozenset(), [], 0
    while groups.stack:
        trial = halted | frozenset(groups.next.tolist())
        tried.append(trial)
        good = verdict(trial)
        halted = trial if good else halted
        decided += groups.tell(good)

    def plainly(halted, group):
        if verdict(halted | frozenset(group.tolist())):
            return halted | frozenset(group.tolist())
        if len(group) == 1:
            return halted
        return plainly(plainly(halted, group[: len(group) // 2]), group[len(group) // 2 :])

    assert halted == plainly(frozenset(), everyone)
    assert len(set(tried)) == len(tried)
    assert decided == len(everyone)
