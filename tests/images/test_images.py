"""PNNs for images: what they compute, how they are trained, folders of one's own, and what others can load."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    ViTForImageClassification,
    pipeline,
)

import pnn
from pnn.errors import UserError
from pnn.images import Images, Recipe, from_folder, hits_by_step, save, train, vit_of_equal_size
from pnn.images.training import shifted
from pnn.models.image_processor import PNNImageProcessor, scaled
from pnn.nn.patches import patches

SMALL = {
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_steps": 3,
    "initializer_range": 0.1,
}
PROCESSOR = pnn.PNNImageProcessor(image_size=8, num_channels=1)


def small(seed: int = 0, **changes) -> pnn.PNNForImageClassification:
    torch.manual_seed(seed)
    model = pnn.PNNForImageClassification(pnn.PNNImageConfig(**(SMALL | {"zero_init": False, "num_labels": 4} | changes)))
    return model.eval()


@pytest.fixture(scope="module")
def digits() -> Images:
    """scikit-learn's first four digits, 8 × 8 pixels, real handwriting."""
    found = pytest.importorskip("sklearn.datasets", reason="scikit-learn comes with the dev extra").load_digits(n_class=4)
    return Images.of(found.images / 16, found.target, "0123", PROCESSOR)


@pytest.fixture(scope="module")
def trained(digits):
    """A model that has learnt most of them, what it has not seen, and the loss of its epochs."""
    learn, held_out = digits.split(0.25)
    model = small(update="rewrite")
    losses = train(model, learn, Recipe(epochs=4, batch_size=32, learning_rate=4e-3, shift=0))
    return model, held_out, losses


def test_patches_are_read_row_by_row():
    image = torch.arange(32.0).view(1, 2, 4, 4)
    found = patches(image, 2)
    assert found.shape == (1, 4, 8)
    assert found[0, 1].tolist() == [2, 3, 6, 7, 18, 19, 22, 23]
    assert torch.equal(found, F.unfold(image, 2, stride=2).transpose(1, 2))


@pytest.mark.parametrize("update", ["gated", "delta", "rewrite"])
def test_the_loss_is_that_of_every_step_and_gradients_reach_everything(update):
    model, x, labels = small(update=update), torch.rand(3, 1, 8, 8) * 2 - 1, torch.tensor([0, 3, 1])
    out = model(x, labels=labels, output_states=True, output_gates=True)
    assert (len(out.states), out.states[0].shape) == (4, (3, 5, 32))
    by_step = model.read(out.states)
    wanted = [F.cross_entropy(logits, labels) for logits in by_step[1:]]
    assert out.step_losses.tolist() == pytest.approx([one.item() for one in wanted], abs=1e-5)
    assert out.loss.item() == pytest.approx(sum(w * one.item() for w, one in zip((1 / 6, 2 / 6, 3 / 6), wanted, strict=True)))
    lean = model(x, labels=labels)  # of the last step only what is read
    assert lean.states is None
    assert torch.allclose(lean.logits, by_step[-1], atol=1e-5)
    assert lean.loss.item() == pytest.approx(out.loss.item(), abs=1e-5)
    lean.loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()] == []
    assert torch.allclose(model(x, num_steps=1).logits, by_step[1], atol=1e-5)


def test_a_repeated_part_and_random_steps_are_the_encoders():
    model, x = small(schedule=[0, 1, 2], num_steps=3, repeat=[1, 2], random_steps=[3, 5]), torch.rand(2, 1, 8, 8)
    assert len(model(x, num_steps=6, output_states=True).states) == 7
    model.train()
    assert {len(model(x, labels=torch.tensor([0, 1])).step_losses) for _ in range(40)} == {3, 4, 5}


def test_the_refiners_are_the_encoders():
    """Given the patches' embeddings, a PNN for text with these weights has the same states."""
    model = small()
    size = {key: value for key, value in SMALL.items() if key not in ("image_size", "patch_size", "num_channels")}
    text = pnn.PNNModel(pnn.PNNConfig(**size, vocab_size=1, max_position_embeddings=5)).eval()
    weights = {key: value for key, value in model.encoder.state_dict().items() if not key.startswith("patches.")}
    text.load_state_dict(weights)
    x = torch.rand(2, 1, 8, 8)
    tokens = model.encoder.patches(x, model.encoder.embeddings.token.weight)
    assert torch.equal(text(inputs_embeds=tokens).last_hidden_state, model.encoder(x).last_hidden_state)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"patch_size": 3},
            "does not divide image_size=8: patches of 1, 2, 4, 8 pixels would fit, or images of 9",
        ),
        ({"patch_size": 16}, "patch_size=16 does not divide image_size=8: .* or images of 16 pixels"),
        ({"patch_size": 0}, "above zero"),
        ({"num_channels": 2}, "grey"),
        ({"positions": "rotary"}, "learned positions"),
        ({"halt": {"criterion": "change", "threshold": 0.05}}, "take all steps"),
        ({"max_position_embeddings": 9}, "max_position_embeddings=5"),
    ],
)
def test_what_a_config_refuses(changes, says):
    with pytest.raises(StrictDataclassError, match=says):
        pnn.PNNImageConfig(**(SMALL | changes))


def test_an_image_of_another_size_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match=r"images of shape \(batch, 1, 8, 8\), not \(2, 3, 8, 8\): its image processor"):
        small()(torch.zeros(2, 3, 8, 8))


def test_the_processor_takes_what_people_have():
    grey = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    wanted = torch.from_numpy(grey).float()[None] / 127.5 - 1
    forms = [
        Image.fromarray(grey),
        grey,
        grey / 255.0,
        grey[None],
        torch.from_numpy(grey),
        Image.fromarray(grey).convert("RGBA"),
    ]
    for form in forms:
        found = PROCESSOR(form, return_tensors="pt")["pixel_values"]
        assert torch.allclose(found, wanted[None], atol=1e-6)
    assert PROCESSOR(forms[:1] * 3, return_tensors="pt")["pixel_values"].shape == (3, 1, 8, 8)
    large = pnn.PNNImageProcessor(image_size=16)(Image.new("L", (40, 30), 255), return_tensors="pt")["pixel_values"]
    assert large.shape == (1, 3, 16, 16)
    assert large.min() == large.max() == 1
    for wrong, says in ((np.zeros((2, 3, 4, 5)), "shape"), (grey.astype(np.int64), "bytes")):
        with pytest.raises(ValueError, match=says):
            PROCESSOR([wrong])


def test_sixteen_bits_of_grey_become_eight():
    values = np.array([[0, 255], [256, 65535]], np.uint16)
    (seen,) = PNNImageProcessor(image_size=2, num_channels=1).pixels([Image.fromarray(values)])
    assert seen[0].tolist() == [[0, 0], [1, 255]]


def test_a_shift_moves_whole_images():
    images = torch.arange(16.0).view(1, 1, 4, 4).repeat(50, 2, 1, 1)
    moved = shifted(images, 1, torch.Generator().manual_seed(0))
    padded = F.pad(images, (1, 1, 1, 1), mode="replicate")
    places = [padded[0, :, down : down + 4, right : right + 4] for down in range(3) for right in range(3)]
    which = [[bool(torch.equal(one, place)) for place in places] for one in moved]
    assert all(sum(row) == 1 for row in which)
    assert all(any(column) for column in zip(*which, strict=True))
    assert shifted(images, 0, torch.Generator()) is images


def test_it_learns_digits_and_refines_them(trained):
    model, held_out, losses = trained
    hits = hits_by_step(model, held_out)
    assert hits.shape == (4, len(held_out))
    accuracy = hits.mean(axis=1)
    assert accuracy[0] < 0.5 < 0.9 < accuracy[-1]  # nothing is known before the first step
    assert losses[-1] < 0.5 * losses[0]
    more = hits_by_step(model, held_out, num_steps=5, batch_size=7)
    assert np.array_equal(more[:4], hits)
    assert len(more) == 6


def test_training_follows_from_the_seed(digits):
    recipe = Recipe(epochs=1, batch_size=100)
    first, second, other = small(dropout=0.1), small(dropout=0.1), small(dropout=0.1)
    losses = train(first, digits, recipe)
    torch.rand(3)  # what others draw in between
    assert train(second, digits, recipe) == losses
    assert train(other, digits, Recipe(epochs=1, batch_size=100, seed=1)) != losses
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_vit_of_equal_size(digits):
    model = small(intermediate_size=128)
    config = vit_of_equal_size(model.config)
    vit = ViTForImageClassification(config)
    assert config.num_hidden_layers == model.config.num_steps
    assert vit.num_parameters() == pytest.approx(model.num_parameters(), rel=0.1)
    train(vit, digits, Recipe(epochs=1, batch_size=100))
    assert hits_by_step(vit, digits).shape == (1, len(digits))
    with pytest.raises(UserError, match="choose other layers or heads"):
        vit_of_equal_size(model.config, layers=40)


def test_mistakes_of_training(digits):
    with pytest.raises(UserError, match="num_labels=7, but the images have 4 classes"):
        train(small(num_labels=7), digits)
    with pytest.raises(UserError, match="no images"):
        train(small(), digits.at(torch.arange(0)))
    with pytest.raises(UserError, match="lower learning_rate"):
        train(small(), digits, Recipe(epochs=3, batch_size=100, learning_rate=1e30))


def folder_of(path, images: Images):
    for number, (pixels, label) in enumerate(zip(images.pixels, images.labels, strict=True)):
        place = path / images.classes[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[0].numpy()).save(place / f"{number:04}.png")
    return path


def test_a_folder_of_images(digits, tmp_path):
    some = digits.at(torch.cat([(digits.labels == one).nonzero()[:3, 0] for one in range(4)]))
    folder = folder_of(tmp_path / "own", some)
    (folder / ".hidden").mkdir()
    (folder / "2" / ".DS_Store").write_text("no image")
    found = from_folder(folder, PROCESSOR)
    assert found.classes == ["0", "1", "2", "3"]
    assert torch.equal(found.labels, some.labels)
    assert torch.equal(found.pixels, some.pixels)
    ordered = from_folder(folder, PROCESSOR, classes=["3", "2", "1", "0", "more"])
    assert torch.equal(ordered.labels, 3 - some.labels)
    learn, held_out = found.split(0.3)
    assert (learn.labels.bincount().tolist(), held_out.labels.bincount().tolist()) == ([2] * 4, [1] * 4)
    with pytest.raises(UserError, match="class more has 0 images"):
        ordered.split(0.3)

    with pytest.raises(UserError, match="has no class of this name"):
        from_folder(folder, PROCESSOR, classes=["0", "1", "2"])
    (folder / "2" / "notes.txt").write_text("no image")
    with pytest.raises(UserError, match=r"notes\.txt: Pillow cannot read it"):
        from_folder(folder, PROCESSOR)
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty is empty: put the images"):
        from_folder(folder, PROCESSOR)
    with pytest.raises(UserError, match="no subfolders"):
        from_folder(folder / "0", PROCESSOR)
    with pytest.raises(UserError, match="is not a folder"):
        from_folder(folder / "nowhere", PROCESSOR)
    (tmp_path / "one" / "class").mkdir(parents=True)
    with pytest.raises(UserError, match=r"one subfolder \(class\)"):
        from_folder(tmp_path / "one", PROCESSOR)


def test_the_example(digits, tmp_path, capsys):
    path = Path(__file__).parents[2] / "examples" / "images.py"
    spec = importlib.util.spec_from_file_location("images_example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    some = digits.at(torch.cat([(digits.labels == one).nonzero()[:3, 0] for one in range(2)]))
    example.main(str(folder_of(tmp_path / "own", some)), str(tmp_path / "out"), epochs=1)
    assert capsys.readouterr().out.count("of 2 held-out images right") == 5
    assert pipeline("image-classification", str(tmp_path / "out"))(str(tmp_path / "own" / "0" / "0000.png"))[0]["label"] in "01"


def test_a_pipeline_with_the_package(trained, tmp_path):
    model, held_out, _ = trained
    model.config.id2label = dict(enumerate(["zero", "one", "two", "three"]))
    hits = hits_by_step(model, held_out)
    save(model, tmp_path / "digits", hits)
    assert isinstance(AutoModelForImageClassification.from_pretrained(tmp_path / "digits"), pnn.PNNForImageClassification)
    assert isinstance(AutoModel.from_pretrained(tmp_path / "digits"), pnn.PNNImageModel)
    assert isinstance(AutoImageProcessor.from_pretrained(tmp_path / "digits"), pnn.PNNImageProcessor)
    classify = pipeline("image-classification", str(tmp_path / "digits"))
    for row in range(3):
        picture = Image.fromarray(held_out.pixels[row, 0].numpy()).convert("RGB")
        best = classify(picture)[0]
        scores = model(scaled(held_out.pixels[row : row + 1])).logits.softmax(-1)[0]
        assert best["label"] == model.config.id2label[int(scores.argmax())]
        assert best["score"] == pytest.approx(scores.max().item(), abs=1e-5)
    card = (tmp_path / "digits" / "README.md").read_text()
    assert f"| 3 | {100 * hits[-1].mean():.1f} % |" in card
    assert "zero, one, two, three" in card
    with pytest.raises(UserError, match="exists already"):
        save(model, tmp_path / "digits")


def test_the_readme_of_the_results_says_what_was_measured():
    folder = Path(__file__).parents[2] / "results" / "images"
    scripts = runpy.run_path(str(folder / "run.py"))
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert scripts["table"](result) in (folder / "README.md").read_text(encoding="utf-8")
    assert (result["model"], result["recipe"]) == (scripts["CONFIG"], scripts["RECIPE"])
    sizes = {name: make().num_parameters() for name, make in scripts["arms"]().items()}
    assert sizes == {row["name"]: row["parameters"] for row in result["rows"]}
    first, second, third = sizes.values()
    assert second == pytest.approx(first, rel=0.1)
    assert third > 3 * first


STRANGER = """
import json, sys
sys.modules["pnn"] = None
from transformers import pipeline
classify = pipeline("image-classification", sys.argv[1], trust_remote_code=True)
print(json.dumps(classify(sys.argv[2])))
"""


@pytest.mark.slow
def test_a_pipeline_without_the_package(trained, tmp_path):
    model, held_out, _ = trained
    save(model, tmp_path / "digits")
    Image.fromarray(held_out.pixels[0, 0].numpy()).save(tmp_path / "one.png")
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HOME": str(tmp_path / "hf")}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", STRANGER, str(tmp_path / "digits"), str(tmp_path / "one.png")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {one["label"]: one["score"] for one in json.loads(done.stdout.splitlines()[-1])}
    wanted = model(scaled(held_out.pixels[:1])).logits.softmax(-1)[0]
    for number, label in model.config.id2label.items():
        assert found[label] == pytest.approx(wanted[number].item(), abs=1e-5)
