"""`pnn shrink` beside its peers: the same model, text, calibration rows and parameters left, then the same learning.

python results/shrink/peers/run.py MODEL TEXT OUTPUT [--shares 0.2] [--seeds 0 1 2] [--updates 60] [--batch 4] [--rate 3e-4] …

Every pruning (recipes.py) learns the same rows in the same order at the same rate, once from the text alone and once with the
unpruned model as the teacher, so that pruning and teaching are told apart; LLM-Pruner's also as published, from the text by
LoRA, and the unpruned model from the text. Every result is a file of its own in OUTPUT; what is there is not done again.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))
from recipes import CLOSE, RECIPES, count

from pnn.errors import UserError
from pnn.files import write_json
from pnn.models.plastic import CHANGES
from pnn.plasticity.architectures import architecture_of
from pnn.plasticity.lora import low_rank
from pnn.plasticity.measure import flops_per_token, held_out_nats, speeds, writing_speeds
from pnn.plasticity.models import Plastic
from pnn.plasticity.phases import calibration, learn_round
from pnn.plasticity.run import open_model
from pnn.plasticity.settings import CycleSettings
from pnn.plasticity.text import Text, read_text
from pnn.progress import track
from pnn.runs import read_json
from pnn.training.tracking import environment

UNPRUNED = "unpruned"
RANK = 8  # of LLM-Pruner's LoRA, as published
SAME_SHAPE = ("ours_unrepaired", "ours_surgeon")  # as ours: neither timed nor loaded again
LESSONS = {"teacher": "logits", "text": "none", "lora": "none"}  # what each learns of the unpruned model


def lessons_of(arm: str) -> tuple[str, ...]:
    """The unpruned model has nothing to learn of itself, and LoRA is part of LLM-Pruner's recipe."""
    if arm == UNPRUNED:
        return ("text",)
    return ("teacher", "text", "lora") if arm == "llm_pruner" else ("teacher", "text")


def loss_of(model: PreTrainedModel, text: Text) -> dict[str, Any]:
    nats, targets = held_out_nats(model, text)
    return {"nats": [round(float(one), 4) for one in nats], "targets": [int(one) for one in targets]}


def learnt(small: PreTrainedModel, original: PreTrainedModel, text: Text, plan: CycleSettings, lesson: str) -> dict[str, Any]:
    """Held-out losses behind; the model has learnt in place."""
    started = time.perf_counter()
    with low_rank(small, RANK, plan.seed) if lesson == "lora" else nullcontext():
        losses = [loss for _, loss, _ in learn_round(small, [], text, plan, 1, original)]
    return {"seconds": round(time.perf_counter() - started, 1), "training_loss": losses[-1], **loss_of(small, text)}


def reloading(models: dict[str, PreTrainedModel]) -> dict[str, Any]:
    """Whether AutoModelForCausalLM loads what `save_pretrained` wrote, in another process, with transformers alone and after
    `import pnn`. LLM-Pruner's choice was cut out by our surgery; "as plain" is what it is without our class around it."""
    with tempfile.TemporaryDirectory() as place:
        folders, refused = [], {}
        for name, model in models.items():
            ids = torch.arange(3, 11)[None]
            with torch.no_grad():
                logits = model.float()(ids.to(model.device)).logits[:, -1].cpu()
            folder = Path(place) / name
            try:
                model.save_pretrained(folder)
            except Exception as error:  # a config that transformers does not accept, for one
                refused[name] = f"it cannot be saved: {' '.join(str(error).split())[-200:]}"
                continue
            write_json(folder / "tokens.json", {"ids": ids.tolist(), "logits": logits.tolist()})
            folders.append(folder)
        found = {}
        for key, option in (("transformers alone", []), ("after import pnn", ["--with-pnn"])):
            command = [sys.executable, str(Path(__file__).with_name("reload.py")), *option, *map(str, folders)]
            answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found[key] = json.loads(answer.strip().splitlines()[-1]) | refused
    return {arm: {key: of[arm] for key, of in found.items()} for arm in models}


def as_plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same matrices in the class of transformers that they came from, as who knows nothing of ours would save them."""
    plain = copy.deepcopy(model)
    assert isinstance(plain, Plastic)
    plain.__class__ = plain.original_class
    for name in CHANGES:
        if hasattr(plain.config, name):
            delattr(plain.config, name)
    return plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "text", "output"):
        parser.add_argument(name)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=[*RECIPES, UNPRUNED], choices=[*RECIPES, UNPRUNED])
    parser.add_argument("--lessons", nargs="+", default=list(LESSONS), choices=LESSONS)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--score-rows", type=int, default=32)
    parser.add_argument("--held-out", type=int, default=24)
    run(parser.parse_args())


def run(asked: argparse.Namespace) -> None:
    output = Path(asked.output)
    output.mkdir(parents=True, exist_ok=True)
    loaded = open_model(asked.model)
    original: PreTrainedModel = loaded.model.to("cuda" if torch.cuda.is_available() else "cpu")
    text = read_text(original, loaded.tokenizer, asked.text, length=asked.length, held_out_rows=asked.held_out, progress=track)
    settings = {name: getattr(asked, name) for name in ("updates", "batch", "rate", "length", "score_rows")}
    settings |= {"model": Path(asked.model).name, "text": text.fingerprint(), "parameters": count(original)}
    if (output / "settings.json").exists() and read_json(output / "settings.json") != settings:
        raise UserError(f"{output} holds results of other settings, another model or text: choose another folder")
    write_json(output / "settings.json", settings)
    write_json(output / "environment.json", environment(0, 1))

    def once(name: str, make: Callable[[], dict[str, Any]]) -> None:
        file = output / f"{name}.json"
        if not file.exists():
            found = make()
            write_json(file, found)
            said = f"{sum(found['nats']) / sum(found['targets']):.4f}" if "nats" in found else "measured"
            print(f"{name}: {said}", flush=True)

    once(UNPRUNED, lambda: {"parameters": count(original), **loss_of(original, text)})
    for share in asked.shares:
        for seed in asked.seeds:
            of_seed(original, text, asked, share, seed, once)


def of_seed(original: PreTrainedModel, text: Text, asked: argparse.Namespace, share: float, seed: int, once: Any) -> None:
    """Everything at one share and one seed: it draws the calibration rows and the order of those that are learnt."""
    arms = [arm for arm in asked.arms if arm != UNPRUNED]
    shaped = [arm for arm in arms if arm not in SAME_SHAPE]
    prefix = f"{round(100 * share)}-{seed}"

    def plan(lesson: str) -> CycleSettings:
        return CycleSettings(
            prune=0,
            grow=0,
            teacher=LESSONS[lesson],
            learn_steps=asked.updates,
            learning_rate=asked.rate,
            batch_rows=asked.batch,
            evaluate_every=asked.updates + 1,
            score_rows=asked.score_rows,
            seed=seed,
        )

    @cache
    def pruned(arm: str) -> tuple[PreTrainedModel, float]:
        started = time.perf_counter()
        small = RECIPES[arm](original, calibration(text, plan("text"), 1), share)
        away = count(small) / ((1 - share) * count(original)) - 1
        if abs(away) > CLOSE:
            raise UserError(f"{arm} leaves {count(small):,} parameters, {away:+.1%} of what was asked for")
        return small, time.perf_counter() - started

    def right_after(arm: str) -> dict[str, Any]:
        small, seconds = pruned(arm)
        size = {"parameters": count(small), "flops_per_token": flops_per_token(small, asked.length)}
        return {**size, "seconds": round(seconds, 1), "shape": shape(small), **loss_of(small, text)}

    def afterwards(arm: str, lesson: str) -> dict[str, Any]:
        small = copy.deepcopy(original if arm == UNPRUNED else pruned(arm)[0])
        return learnt(small, original, text, plan(lesson), lesson)

    def speed() -> dict[str, Any]:
        models = {UNPRUNED: original} | {arm: pruned(arm)[0] for arm in shaped}
        return {"reading": speeds(models, asked.length, largest_only=True)[-1], "writing": writing_speeds(models)}

    def reload() -> dict[str, Any]:
        models = {arm: pruned(arm)[0] for arm in shaped}
        if "llm_pruner" in models:
            models["llm_pruner_as_plain"] = as_plain(models["llm_pruner"])
        return reloading(models)

    for arm in arms:
        once(f"{prefix}-{arm}", lambda arm=arm: right_after(arm))
    together = "+".join(shaped)  # those that are timed in one run
    once(f"{prefix}-speed-{together}", speed)
    once(f"{prefix}-reload-{together}", reload)
    for lesson in asked.lessons:
        for arm in asked.arms:
            if lesson in lessons_of(arm):
                once(f"{prefix}-{arm}-{lesson}", lambda arm=arm, lesson=lesson: afterwards(arm, lesson))


def shape(model: PreTrainedModel) -> dict[str, Any]:
    """Width, and of each layer what its attention hands on in heads and how many neurons it has."""
    architecture = architecture_of(model)
    blocks = architecture.blocks(model)
    return {
        "width": int(model.get_output_embeddings().weight.shape[1]),  # type: ignore[union-attr]
        "heads": [architecture.output(architecture.attention(block)).count for block in blocks],
        "neurons": [architecture.neurons(block)[-1].count for block in blocks],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
