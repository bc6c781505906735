"""The plan for more GPUs: its arithmetic by hand, the order of gradients that it rests on, and the page that shows it."""

import json
from pathlib import Path

import pytest
import torch

import pnn
from pnn.bench import plan

ROOT = Path(__file__).parents[2]
H200 = ROOT / "benchmarks" / "results" / "train-nvidia-h200.json"


def test_bytes_by_hand():
    embeddings, head = 30522 * 768 + 128 * 768 + 2 * 768, 30522 * 768 + 30522
    gradients = plan.Gradients.of("pnn")
    assert gradients.early == 4 * head
    assert gradients.late == 4 * (53_704_251 - head)
    bert = plan.Gradients.of("bert")
    assert bert.early + bert.late == 4 * 132_066_618
    layer = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    assert bert.late == 4 * (embeddings + layer)
    assert plan.ring(800e6, 8, 450e9) == pytest.approx(1000 * 1.75 * 0.8 / 450)


def test_tiles_by_hand():
    # 768 columns are 3 tiles; 89 rows of tiles make 267, which take 3 waves of 132
    assert plan.filled(89 * 128, [(768, 768)]) == pytest.approx(267 / (3 * 132))
    assert plan.filled(44 * 128, [(768, 768)]) == 1.0


def test_an_estimate_by_hand():
    one = plan.Measured("pnn", 55.0, 91_000)
    weak = plan.estimate(one, 8, 9216)
    assert weak.compute == pytest.approx(55.0)  # the same work on every GPU
    exposed = 1000 * 1.75 * plan.Gradients.of("pnn").late / 450e9
    assert weak.exposed == pytest.approx(exposed)
    assert weak.speedup == pytest.approx(8 * 55 / (55 + exposed))
    strong = plan.estimate(one, 8, 1152)
    assert strong.update == pytest.approx(25 + exposed)  # the host's time, not the GPU's
    recorded = plan.estimate(one, 8, 1152, recorded=True)
    assert 55 / 8 < recorded.compute < 1.5 * 55 / 8
    assert recorded.exposed == pytest.approx(1000 * 1.75 * 4 * 53_704_251 / 450e9)
    assert strong.speedup < recorded.speedup < 8


@pytest.mark.parametrize("shape", [{"num_steps": 4}, {"num_steps": 2}])
def test_a_shared_refiners_gradient_is_complete_only_at_the_end(shape):
    """What DDP waits for: the head first, the refiner not before the backward pass has come to step 1, the embeddings last."""
    size = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    model = pnn.PNNForMaskedLM(pnn.PNNConfig(**size, **shape, zero_init=False))
    events = []
    for part in ("head", "encoder.refiners", "encoder.embeddings"):
        for p in model.get_submodule(part).parameters():
            p.register_post_accumulate_grad_hook(lambda _, part=part: events.append(part))
    model.encoder.refiners[0].register_full_backward_pre_hook(lambda *_: events.append("step"))
    ids = torch.randint(5, 50, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    refiner, embeddings = (len(list(model.get_submodule(f"encoder.{p}").parameters())) for p in ("refiners", "embeddings"))
    order = ["head"] * 2 + ["step"] * shape["num_steps"]
    order += ["encoder.refiners"] * refiner + ["encoder.embeddings"] * embeddings
    assert events == order


def test_rows_come_from_the_benchmarks_file(tmp_path):
    def row(name, what="train", sequences=1152, **more):
        shapes = {"batch_tokens": 45_000, "micro_batches": 2, "effective_batch_size": sequences}
        return {"name": name, "what": what, "shapes": shapes, "milliseconds_per_update": 50.0, **more}

    rows = [row("pnn"), row("naive pnn"), row("pnn", "inference"), row("bert", error="out of memory"), row("pnn", sequences=16)]
    path = tmp_path / "train.json"
    path.write_text(json.dumps({"rows": rows}))
    assert plan.read(path) == [plan.Measured("pnn", 50.0, 90_000)]


def test_the_page_shows_what_the_measurement_gives():
    """To mend: put the output of `python -m pnn.bench.plan benchmarks/results/train-nvidia-h200.json` into docs/scaling.md."""
    measured = plan.read(H200) if H200.exists() else plan.STAND_IN
    assert plan.table(measured) in (ROOT / "docs" / "scaling.md").read_text()
