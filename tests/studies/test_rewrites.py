"""The audit of Deep Delta decoders: numbers against slow direct ones, interventions against models built that way, and models
with planted behaviour whose verdicts come out either way."""

import copy
import json
import math

import numpy as np
import pytest
import rewriting
import torch
import torch.nn.functional as F
from torch import nn

import pnn
from pnn.analysis.rewrite_interventions import Intervention, intervening, shut
from pnn.analysis.rewrite_trace import REGIMES, Rewrites, residuals_of, singular_values, token_losses
from pnn.analysis.subject import Decoder
from pnn.analysis.token_kinds import TOKEN_KINDS, kinds_by_id, kinds_of
from pnn.errors import UserError
from pnn.studies.analyses.rewrites import evenness
from pnn.studies.run import perform

TEXT = rewriting.text(24, seed=2)
TOKENIZER = rewriting.tokenizer()


def analysed(model, rows=TEXT, batch_rows=8):
    return perform("rewrites", Decoder(model, rows, TOKENIZER, batch_rows))


def verdicts(result):
    return {name: found.get("verdict", "not done") for name, found in result["findings"].items()}


@pytest.fixture(scope="session")
def model():
    return rewriting.trained()


@pytest.fixture(scope="session")
def result(model):
    return analysed(model)


@pytest.fixture
def own(model):
    """A copy of the trained model, to be changed."""
    return copy.deepcopy(model)


def loss_of(model, rows=TEXT):
    return model(input_ids=rows, labels=rows).loss.item()


@torch.no_grad()
def fix_gates(model, beta, layers=None):
    """Every token's β, in all layers or in these."""
    p = min(max(beta / 2, 1e-30), 1 - 1e-7)
    for place, residual in enumerate(residuals_of(model)):
        if layers is None or place // 2 in layers:
            residual.gate.weight.zero_()
            residual.gate.bias.fill_(math.log(p / (1 - p)))
    return model


def close(found, wanted, tolerance=1e-4):
    assert found == pytest.approx(wanted, rel=tolerance, abs=1e-6)


# Numbers ---------------------------------------------------------------------------------------------------------------


def slowly(model, rows):
    """By sublayer, a dictionary a token: the same quantities from matrices written out."""
    found = [[] for _ in residuals_of(model)]

    def look(at):
        def hook(residual, inputs, out):
            k, v, beta = residual.write(*inputs[1:])
            for i in range(len(rows)):
                for t in range(rows.shape[1]):
                    one = (x[i, t].detach().double().numpy() for x in (inputs[0], out, k, v, beta))
                    found[at].append(_token(*one))

        return hook

    handles = [residual.register_forward_hook(look(at)) for at, residual in enumerate(residuals_of(model))]
    model(input_ids=rows)
    for handle in handles:
        handle.remove()
    return found


def _token(state, after, k, v, beta):
    before, after, beta = state.T, after.T, float(beta[0])  # X is (d, c), as in the equations
    erased, written = beta * np.outer(k, k) @ before, beta * np.outer(k, v)
    return {
        "k": k,
        "beta": beta,
        "before": np.linalg.norm(k @ before - v),
        "after": np.linalg.norm(k @ after - v),
        "along": np.linalg.norm(np.outer(k, k) @ before) ** 2 / np.linalg.norm(before) ** 2,
        "along after": np.linalg.norm(np.outer(k, k) @ after) ** 2 / np.linalg.norm(after) ** 2,
        "erased": np.linalg.norm(erased),
        "written": np.linalg.norm(written),
        "factor": np.eye(len(k)) - beta * np.outer(k, k),
        "next": np.abs(before - erased + written - after).max(),
    }


@pytest.fixture(scope="session")
def direct(model):
    return slowly(model, TEXT)


def test_sublayers_agree_with_a_direct_computation(result, direct):
    kinds = kinds_of(TEXT, kinds_by_id(TOKENIZER, 44)).flatten().numpy()
    assert [(one["layer"], one["part"]) for one in result["sublayers"]] == [
        (1, "attention"), (1, "mlp"), (2, "attention"), (2, "mlp"),
    ]  # fmt: skip
    for found, tokens in zip(result["sublayers"], direct, strict=True):
        mean = {name: np.mean([token[name] for token in tokens]) for name in tokens[0] if name not in ("k", "factor")}
        assert mean["next"] < 1e-5  # the equations are those of the model
        beta = np.array([token["beta"] for token in tokens])
        close(found["beta"]["mean"]["value"], beta.mean())
        close(found["beta"]["deviation"], beta.std())
        close(found["beta"]["distance_from_one"]["value"], np.abs(1 - beta).mean())
        assert found["beta"]["histogram"] == np.histogram(beta, 40, (0, 2))[0].tolist()
        for number, kind in enumerate(TOKEN_KINDS):
            close(found["beta"]["by_kind"][kind], beta[kinds == number].mean())
            assert found["beta"]["histogram_by_kind"][kind] == np.histogram(beta[kinds == number], 40, (0, 2))[0].tolist()
        shares = np.histogram(beta, [0, 0.1, 0.9, 1.1, 1.9, 2.1])[0] / len(beta)
        close(list(found["regimes"].values()), shares.tolist())
        assert list(found["regimes"]) == list(REGIMES)
        for name, wanted in (("before", "before"), ("after", "after")):
            close(found["error"][name]["value"], mean[wanted])
        close(found["along"]["before"]["value"], mean["along"])
        close(found["along"]["after"]["value"], mean["along after"])
        close(found["update"]["erasure"]["value"], mean["erased"])
        close(found["update"]["writing"]["value"], mean["written"])
        close(found["update"]["erased_share"]["value"], mean["erased"] / (mean["erased"] + mean["written"]))


def test_what_is_left_of_an_error_follows_the_rule(result, direct):
    for found, tokens in zip(result["sublayers"], direct, strict=True):
        for token in tokens:
            assert token["after"] == pytest.approx(abs(1 - token["beta"]) * token["before"], rel=1e-3, abs=1e-5)
        assert found["error"]["left"]["value"] == pytest.approx(found["error"]["left_by_the_rule"]["value"], rel=1e-5)
        close(found["error"]["left"]["value"], found["error"]["after"]["value"] / found["error"]["before"]["value"])


def test_the_shortcut_is_the_product_of_matrices(result, direct):
    """Few enough tokens to sample each; the direct way multiplies and decomposes matrices of full width."""
    shortcut = result["shortcut"]
    places = np.linspace(0, TEXT.numel() - 1, 256).round().astype(int)
    products = np.array([np.linalg.multi_dot([sublayer[at]["factor"] for sublayer in direct[::-1]]) for at in places])
    values = np.linalg.svd(products, compute_uv=False)
    levels = shortcut["quantiles"]
    np.testing.assert_allclose(shortcut["kept"], np.quantile((values > 0.9).sum(1), levels))
    np.testing.assert_allclose(shortcut["lost"], np.quantile((values < 0.1).sum(1), levels))
    np.testing.assert_allclose(shortcut["smallest"], np.quantile(values[:, -4:], levels, axis=0), rtol=1e-4, atol=1e-6)
    sign, log = np.linalg.slogdet(products)
    np.testing.assert_allclose(shortcut["log_determinant_quantiles"], np.quantile(log, levels), rtol=1e-3, atol=1e-3)
    factors = 1 - np.array([[token["beta"] for token in sublayer] for sublayer in direct])
    close(shortcut["log_determinant"]["value"], np.log(np.abs(factors)).sum(0).mean())
    close(shortcut["negative_determinant"]["value"], (np.prod(factors, 0) < 0).mean())
    assert set(sign) <= {-1.0, 1.0}


@pytest.mark.parametrize("sublayers", [3, 8, 12])
def test_singular_values_of_more_factors_than_dimensions(sublayers):
    """Eight dimensions; two directions are equal and one is missing."""
    k = F.normalize(torch.randn(5, sublayers, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), dim=-1)
    k[:, 1] = k[:, 0]
    k[0, 2] = 0
    beta = torch.linspace(0.1, 1.9, sublayers, dtype=torch.float64).expand(5, -1)
    product = torch.eye(8, dtype=torch.float64).repeat(5, 1, 1)
    for s in range(sublayers):
        product = (torch.eye(8, dtype=torch.float64) - beta[:, s, None, None] * k[:, s, :, None] * k[:, s, None]) @ product
    torch.testing.assert_close(singular_values(k, beta), torch.linalg.svdvals(product))


def test_directions_agree_with_a_direct_computation(result, direct):
    k = np.array([[token["k"] for token in sublayer] for sublayer in direct])  # (sublayers, tokens, d)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    others = np.roll(k.reshape(4, *TEXT.shape, -1), TEXT.shape[1] // 2, axis=2).reshape(k.shape)
    for name, other, mean in (("same_token", k, "mean_same_token"), ("other_tokens", others, "mean_other_tokens")):
        wanted = np.abs(np.einsum("std,utd->sut", k, other)).mean(-1)
        np.testing.assert_allclose(result["directions"][name], wanted, rtol=1e-4, atol=1e-6)
        close(result["directions"][mean]["value"], wanted[~np.eye(4, dtype=bool)].mean())
    assert result["directions"]["chance"] == math.sqrt(2 / (math.pi * 32))


def test_the_same_twice_and_by_any_batch(model, result):
    assert json.dumps(analysed(model)) == json.dumps(result)
    assert len(json.dumps(result)) < 60_000

    def same(one, other):
        if isinstance(one, dict):
            assert list(one) == list(other)
            for key in one:
                same(one[key], other[key])
        elif isinstance(one, list):
            for a, b in zip(one, other, strict=True):
                same(a, b)
        elif isinstance(one, float):
            assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
        else:
            assert one == other

    same(analysed(model, batch_rows=1), result)


def test_batches_without_a_sampled_token(model, monkeypatch):
    monkeypatch.setattr("pnn.analysis.rewrite_trace.SAMPLED", 2)
    assert analysed(model, TEXT[:3], batch_rows=1)["shortcut"]["sampled_tokens"] == 2


def test_the_model_is_left_as_it_was(own):
    before = {name: weight.clone() for name, weight in own.state_dict().items()}
    own.train()
    analysed(own, TEXT[:2])
    assert own.training
    assert not any(module._forward_hooks for module in own.modules())
    assert all(torch.equal(weight, before[name]) for name, weight in own.state_dict().items())


def test_what_is_kept_does_not_grow_with_the_text(model, monkeypatch):
    """Beyond a few sums a row, four times as many rows leave as many numbers."""
    monkeypatch.setattr("pnn.analysis.rewrite_trace.SAMPLED", 48)

    @torch.no_grad()
    def held(rows):
        sums = Rewrites(model, *rows.shape)
        for first in range(0, len(rows), 2):
            batch = rows[first : first + 2]
            sums.add(first, batch, kinds_of(batch, kinds_by_id(TOKENIZER, 44)))
        kept = [x for value in vars(sums).values() for x in (value if isinstance(value, list) else [value])]
        a_row = sum(x[0].numel() for x in sums.totals._sums.values())
        return sum(x.numel() for x in kept if isinstance(x, torch.Tensor)), a_row

    few, many = held(TEXT[:4]), held(TEXT[:16])
    assert few == many
    assert few[1] < 100


# Interventions -----------------------------------------------------------------------------------------------------------


def test_with_all_gates_shut_the_model_reads_its_embeddings(model):
    body = model.model
    with torch.no_grad(), intervening(model, Intervention("all", shut, range(4)), torch.zeros_like(TEXT)):
        found = model(input_ids=TEXT).logits
    wanted = model.head(body.norm(body.readout(body.expand(body.embeddings(TEXT)))))
    assert torch.equal(found, wanted)


def test_losses_are_those_of_models_built_that_way(model, result):
    done, kinds = result["interventions"], kinds_of(TEXT, kinds_by_id(TOKENIZER, 44))
    close(result["loss"]["value"], loss_of(model))

    def costs(found, changed):
        close(found["loss"]["value"], loss_of(changed))
        assert found["rise"]["value"] == pytest.approx(loss_of(changed) - loss_of(model), abs=1e-5)

    costs(done["shut_all"], fix_gates(copy.deepcopy(model), 0))
    for layer in (0, 1):
        costs(done["shut_by_layer"][layer], fix_gates(copy.deepcopy(model), 0, [layer]))
    costs(done["beta_one"], fix_gates(copy.deepcopy(model), 1))
    writing = pnn.DDLForCausalLM(pnn.DDLConfig(**{**model.config.to_dict(), "residual": "write_only"}))
    writing.load_state_dict(model.state_dict())
    costs(done["no_erasure"], writing.eval())
    constant, by_part = copy.deepcopy(model), [copy.deepcopy(model) for _ in range(2)]
    for place, (residual, one) in enumerate(zip(residuals_of(constant), result["sublayers"], strict=True)):
        p = one["beta"]["mean"]["value"] / 2
        nn.init.zeros_(residual.gate.weight)
        nn.init.constant_(residual.gate.bias, math.log(p / (1 - p)))
        still = residuals_of(by_part[place % 2])[place]
        nn.init.zeros_(still.gate.weight)
        nn.init.constant_(still.gate.bias, -100.0)
    costs(done["mean_beta"], constant)
    for part, changed in zip(("attention", "mlp"), by_part, strict=True):
        costs(done["shut_by_part"][part], changed)
    for number, kind in enumerate(TOKEN_KINDS):
        changed = copy.deepcopy(model)
        for residual in residuals_of(changed):  # adds −1000 to the gate's argument at these tokens
            residual.gate.register_forward_hook(lambda _m, _i, out, n=number: out - 1000.0 * (kinds == n)[..., None])
        costs(done["shut_by_kind"][kind], changed)


def test_kinds_that_the_text_lacks_are_left_out(model):
    rows = TEXT[:2, 1:2].expand(2, 4)  # one number, again and again
    found = analysed(model, rows)
    assert found["tokens_by_kind"] == {kind: 8 * (kind == "number") for kind in TOKEN_KINDS}
    assert [kind for kind, cost in found["interventions"]["shut_by_kind"].items() if cost is not None] == ["number"]
    assert list(found["sublayers"][0]["beta"]["by_kind"]) == ["number"]


# Verdicts ----------------------------------------------------------------------------------------------------------------


def test_a_trained_model(result):
    """It learnt the language, its gates tell tokens apart, and it needs them and its erasure."""
    assert result["loss"]["value"] < 1.5 < result["interventions"]["shut_all"]["loss"]["value"]
    found = verdicts(result)
    for name in ("gates_differ_between_tokens", "gates_matter", "erasure_matters", "directions_are_reused"):
        assert found[name] == "supported", name
    assert None not in result["interventions"].values()


def test_gates_that_are_the_same_at_every_token(own):
    found = analysed(fix_gates(own, 1))
    assert verdicts(found)["gates_differ_between_tokens"] == "not supported"
    assert verdicts(found)["gates_matter"] == "not supported"
    moves = found["findings"]["read_out_moves_to_target"]  # all the way, which scattered fresh gates do not reach
    assert moves["verdict"] == "supported"
    assert moves["effect"]["value"] == pytest.approx(1, abs=1e-5)
    assert 0.5 < moves["control"]["value"] < 0.95
    for sublayer in found["sublayers"]:
        assert sublayer["beta"]["deviation"] == 0
        assert sublayer["regimes"]["match"] == 1
        assert sublayer["error"]["left"]["value"] < 1e-5
    assert found["findings"]["gates_differ_between_tokens"]["control"]["value"] > 0.1  # untrained ones differ by themselves
    assert math.isfinite(found["shortcut"]["log_determinant"]["value"])  # of a matrix that forgets four directions
    assert found["shortcut"]["kept"][2] <= 28
    assert found["interventions"]["mean_beta"]["rise"]["value"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", ["gates_differ_between_tokens", "read_out_moves_to_target"])
def test_what_untrained_gates_do_is_nothing_learnt(name):
    fresh = rewriting.tiny(seed=0)  # the very weights of the control
    found = analysed(fresh)["findings"][name]
    assert found["effect"]["value"] == found["control"]["value"] > found["margin"]
    assert found["verdict"] == "not supported"


def test_read_outs_that_move_less_than_before_training(own):
    """β = 1.4 removes 0.6 of every error: most of it, and less than fresh gates do."""
    found = analysed(fix_gates(own, 1.4))["findings"]["read_out_moves_to_target"]
    assert found["effect"]["value"] == pytest.approx(0.6, abs=1e-3)
    assert found["effect_beyond_control"]["interval"][1] < 0
    assert found["verdict"] == "not supported"


def test_gates_that_do_nothing(own):
    """β as good as zero: nothing is read, erased or written, and nothing costs anything."""
    found = analysed(fix_gates(own, 1e-7))
    assert verdicts(found) == {
        "gates_differ_between_tokens": "not supported",
        "gates_matter": "not supported",
        "read_out_moves_to_target": "not supported",
        "erasure_matters": "not supported",
        "rewriting_is_spread_over_layers": "not done",
        "directions_are_reused": verdicts(found)["directions_are_reused"],  # directions are there, whatever the gates
    }
    assert found["sublayers"][0]["regimes"]["skip"] == 1
    assert found["interventions"]["shut_all"]["rise"]["value"] == pytest.approx(0, abs=1e-5)
    assert found["shortcut"]["kept"] == [32] * 5
    assert "the loss does not rise" in found["findings"]["rewriting_is_spread_over_layers"]["not_done"]


def test_gates_that_reflect(own):
    """β near 2: the error stays as large as it was, on the other side."""
    found = analysed(fix_gates(own, 1.999))
    assert verdicts(found)["read_out_moves_to_target"] == "not supported"
    assert {sublayer["regimes"]["reflect"] for sublayer in found["sublayers"]} == {1.0}
    assert found["shortcut"]["kept"] == [32] * 5
    assert found["shortcut"]["negative_determinant"]["value"] == 0  # four reflections


def test_rewriting_in_one_layer_only(own):
    found = analysed(fix_gates(own, 0, [1]))
    assert found["interventions"]["shut_by_layer"][1]["rise"]["value"] == pytest.approx(0, abs=1e-6)
    assert verdicts(found)["rewriting_is_spread_over_layers"] == "not supported"


def test_rewriting_in_both_layers():
    """The next token is this one plus one. Each layer writes half of its embedding, so that both are needed alike."""
    counting = fix_gates(rewriting.tiny(value_channels=1), 1)
    table = nn.init.normal_(counting.model.embeddings.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    first_half = (torch.arange(32) < 16).float()

    def directions(ids, sublayer):
        return table[(ids + 1) % 38].detach() * (first_half if sublayer < 2 else 1 - first_half)

    found = analysed(plan(counting, directions), (torch.arange(24)[:, None] * 5 + torch.arange(12)) % 38)
    assert found["interventions"]["shut_by_layer"][0]["rise"]["value"] > 0.1
    assert verdicts(found)["rewriting_is_spread_over_layers"] == "supported"


def test_evenness():
    np.testing.assert_allclose(evenness(np.array([[1.0, 1, 1], [5, 0, 0], [2, 2, -9]])), [1, 0, 0.5])
    assert np.isnan(evenness(np.zeros(3)))


class Planned(nn.Module):
    """A branch whose output follows from the token."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, c, *_):
        return self.table()


def plan(model, directions):
    """`directions(ids, sublayer)` → (rows, length, d)."""
    seen = {}
    model.model.embeddings.register_forward_hook(lambda _m, inputs, _o: seen.update(ids=inputs[0]))
    for layer, block in enumerate(model.model.blocks):
        block.attention = Planned(lambda s=2 * layer: directions(seen["ids"], s))
        block.mlp = Planned(lambda s=2 * layer + 1: directions(seen["ids"], s))
    return model


@pytest.mark.parametrize(
    ("pick", "expected"),
    [
        (lambda ids, sublayer: ids, "supported"),  # a token's own direction, in every sublayer
        (lambda ids, sublayer: ids + 50 * sublayer, "not supported"),  # another in every sublayer
        (
            lambda ids, sublayer: torch.zeros_like(ids),
            "not supported",
        ),  # one for all: not the token's, so the control has it too
    ],
)
def test_directions_of_tokens_and_of_nobody(pick, expected):
    table = torch.randn(250, 32, generator=torch.Generator().manual_seed(3))
    found = analysed(plan(rewriting.tiny(), lambda ids, sublayer: table[pick(ids, sublayer)]))["findings"][
        "directions_are_reused"
    ]
    assert found["verdict"] == expected


# Other models ------------------------------------------------------------------------------------------------------------


def test_a_model_that_only_writes():
    writing = rewriting.trained("write_only", steps=100)
    found = analysed(writing)
    assert not found["erases"]
    assert found["shortcut"] is None
    assert found["interventions"]["no_erasure"] is None
    close(found["interventions"]["beta_one"]["loss"]["value"], loss_of(fix_gates(copy.deepcopy(writing), 1)))
    assert "no erasure to switch off" in found["findings"]["erasure_matters"]["not_done"]
    assert verdicts(found)["gates_differ_between_tokens"] == "supported"
    for sublayer in found["sublayers"]:
        assert sublayer["error"]["left_by_the_rule"] is None
        assert sublayer["update"]["erasure"]["value"] == sublayer["update"]["erased_share"]["value"] == 0
        assert sublayer["update"]["writing"]["value"] > 0


def test_a_model_that_adds_is_refused():
    with pytest.raises(UserError, match="it has no gates"):
        analysed(rewriting.tiny(residual="additive"))


@pytest.mark.parametrize("rows", [TEXT[:, :1], TEXT[:0], TEXT[0]])
def test_too_little_text_is_refused(model, rows):
    with pytest.raises(UserError, match="no text to analyse"):
        analysed(model, rows)


@pytest.mark.parametrize(
    "changes",
    [{"value_channels": 1}, {"compressor": "token"}, {"reading": "paper"}, {"expand_input": False}, {"num_hidden_layers": 1}],
)
def test_every_variant(changes):
    found = analysed(rewriting.tiny(**changes), TEXT[:4])
    json.dumps(found, allow_nan=False)
    assert len(found["sublayers"]) == 2 * found["layers"]
    assert ("rewriting_is_spread_over_layers" in found["findings"]) == (found["layers"] > 1)
    for sublayer in found["sublayers"]:
        assert sublayer["error"]["left"]["value"] == pytest.approx(sublayer["error"]["left_by_the_rule"]["value"], rel=1e-3)


def test_token_losses_are_the_models_own(model):
    with torch.no_grad():
        assert float(token_losses(model, TEXT).mean()) == pytest.approx(loss_of(model), rel=1e-5)
