"""A halting unit is fitted on a model that stays as it is."""

import pytest
import torch
from small_models import SMALL, build

import pnn
from pnn.config import DataConfig
from pnn.data.shards import prepare
from pnn.errors import UserError
from pnn.training.halting import fit_halting, masked_batches


@pytest.fixture(scope="module")
def prepared(prepared_folder):
    data = DataConfig(synthetic_paragraphs=400, validation_sequences=60, max_length=64, prepared=str(prepared_folder))
    return prepare(data, lambda items, _: items)


@pytest.fixture
def model():
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "initializer_range": 0.3}
    return pnn.PNNForMaskedLM(pnn.PNNConfig(vocab_size=80, max_position_embeddings=64, zero_init=False, **sizes))


def batches(prepared, updates=12, seed=0):
    return masked_batches(prepared.train, prepared.train_sequences, updates=updates, batch_tokens=400, seed=seed)


def test_a_cost_makes_tokens_halt_and_leaves_the_model_alone(model, prepared):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit = fit_halting(model, batches(prepared), cost=10.0, learning_rate=0.3)
    assert model.training
    assert all(p.requires_grad and p.grad is None for name, p in model.named_parameters() if "criterion" not in name)
    assert sum(fit.steps[-3:]) < 0.6 * sum(fit.steps[:3])
    assert len(fit.losses) == len(fit.steps) == 12
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert set(after) - set(before) == {"encoder.criterion.weight", "encoder.criterion.bias"}
    assert model.config.halt["criterion"] == "learned"
    with torch.no_grad():
        inputs = next(batches(prepared))
        taken = model.eval()(**inputs).halted_at.float().mean()
        assert taken < 2.5 < model(**inputs, halt={"criterion": "change", "threshold": 1e-30}).halted_at.float().mean()


def test_seeds_give_units_of_their_own_and_the_same_one_again(model, prepared):
    def unit(seed):
        state = torch.random.get_rng_state()
        fit_halting(model, batches(prepared, 3, seed), cost=0.1, seed=seed)
        assert torch.equal(state, torch.random.get_rng_state())
        return model.encoder.criterion.weight.detach().clone()

    first = unit(0)
    assert torch.equal(first, unit(0))
    assert not torch.equal(first, unit(1))


def test_a_classifier_has_a_unit_too():
    torch.manual_seed(0)
    model = pnn.PNNForSequenceClassification(pnn.PNNConfig(**SMALL, zero_init=False, num_labels=3))
    rows = {"input_ids": torch.randint(5, 60, (6, 9)), "labels": torch.arange(6) % 3}
    fit = fit_halting(model, [rows] * 15, cost=5.0, learning_rate=0.3)
    assert fit.steps[-1] < fit.steps[0]
    assert (model.eval()(rows["input_ids"]).halted_at[:, 0] < 4).any()


def test_what_cannot_be_fitted_is_told(model, prepared):
    with pytest.raises(UserError, match="cost=0: expected more than 0"):
        fit_halting(model, batches(prepared), cost=0.0)
    with pytest.raises(UserError, match="no refinement steps to halt after"):
        fit_halting(build("bert"), [], cost=1.0)
    with pytest.raises(UserError, match="needs two steps or more"):
        fit_halting(build("pnn_equations", num_steps=1), [], cost=1.0)
    first = fit_halting(model, batches(prepared, 1), cost=1.0) and model.encoder.criterion
    with pytest.raises(UserError, match="no token would ever halt"):
        fit_halting(model, batches(prepared), cost=1.0, min_steps=4)
    assert model.encoder.criterion is first  # what cannot be fitted does not cost the unit that is there
    with pytest.raises(UserError, match="no text to fit"):
        fit_halting(model, [], cost=1.0)


def test_a_run_trains_its_unit_beside_the_model(tmp_path, write_config):
    from pnn.config import load_config
    from pnn.training.run import train_run

    halt = {"criterion": "learned", "threshold": 0.5, "cost": 5.0}
    changes = {
        "model": {"halt": halt, "zero_init": False},
        "training": {"max_steps": 15, "learning_rate": 0.1, "warmup_steps": 1},
    }
    config = write_config(tmp_path / "halting.yaml", **changes)
    train_run(load_config(str(config)), tmp_path / "run", quiet=True)
    model = pnn.PNNForMaskedLM.from_pretrained(tmp_path / "run" / "checkpoints" / "last")
    assert model.config.halt == halt
    assert torch.sigmoid(model.encoder.criterion.bias) > 0.11  # it started at 0.1, and steps are dear
