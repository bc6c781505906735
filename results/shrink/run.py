"""Is a model with fewer parameters as good as the whole one, if both learn alike?

python results/shrink/run.py MODEL TEXT RUNS [--shares 0.2 --seeds 0 1 2 --teachers logits --updates 1500 --adapt 500 …]

1. `adapted`: the model learns TEXT first, so that what it learns later is not that it reads other text now.
2. `control`: the adapted model learns TEXT for `--updates` more.
3. a share: `pnn shrink` of the adapted model, which learns for as many updates, on the same rows in the same order, with the
   adapted model as its teacher (`--teachers none`: from the text, as the control does).
4. with `--peers`: the same share, cut as others do (peers/recipes.py); then it learns as ours.

The seed draws the rows that units are scored on and the order of the text; held-out rows are the same for all. Each arm is a
JSON file in RUNS/measured with the loss of every held-out row. An arm that is there is not done again, so several processes can
share the work, each with arms of its own.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
from recipes import RECIPES

from pnn.files import write_json
from pnn.plasticity import save
from pnn.plasticity.architectures import KINDS
from pnn.plasticity.measure import held_out_nats, size, speeds, writing_speeds
from pnn.plasticity.phases import calibration, learn_round, measure
from pnn.plasticity.run import open_model
from pnn.plasticity.settings import OPTIMIZERS, CycleSettings
from pnn.plasticity.shrink import MAY_GO, ShrinkSettings, shrink
from pnn.plasticity.text import Text, read_text
from pnn.plasticity.unit_scores import UNIT_METHODS
from pnn.plasticity.vocabulary import TOKEN
from pnn.progress import Bars, track
from pnn.training.tracking import environment


@dataclass(frozen=True)
class Study:
    text: Text
    tokenizer: PreTrainedTokenizerFast
    runs: Path
    asked: argparse.Namespace

    def control(self, adapted: PreTrainedModel, seed: int) -> None:
        if self._begins(f"control-{seed}"):
            self._learns(adapted, self._plan(seed, self.asked.updates), adapted)
            self._keep(f"control-{seed}", adapted, {"arm": "control", "seed": seed})

    def share(self, adapted: PreTrainedModel, share: float, teacher: str, seed: int) -> None:
        tokens_too = "-tokens" if TOKEN in self.asked.kinds else ""
        look = "-".join(["-look", *self.asked.look]) if self.asked.look else ""
        name = f"less-{100 * share:g}{tokens_too}-{teacher}-{seed}{look}"
        if not self._begins(name):
            return
        settings = ShrinkSettings(
            fewer=share,
            kinds=tuple(self.asked.kinds),
            by=self.asked.by,
            rounds=self.asked.rounds,
            score_rows=self.asked.score_rows,
            optimizer=self.asked.optimizer,
            teacher=teacher,
            learn_steps=self.asked.updates,
            learning_rate=self.asked.rate,
            batch_rows=self.asked.batch,
            evaluate_every=max(1, self.asked.updates // 8),
            seed=seed,
        )
        found = shrink(adapted, self.text, self.runs / name, settings, tokenizer=self.tokenizer, resume=True, quiet=False)
        kept = {"share": share, "teacher": teacher, "kinds": self.asked.kinds, "seed": seed, "summary": found.summary}
        self._keep(name, found.model, {"arm": "look" if look else "less", **kept}, found.text)

    def peer(self, adapted: PreTrainedModel, share: float, recipe: str, seed: int) -> None:
        """Cut in the way of others, on the rows that ours would be scored on."""
        name = f"less-{100 * share:g}-{recipe}-{seed}"
        if not self._begins(name):
            return
        plan = self._plan(seed, self.asked.updates, "logits")
        before = self._worth(adapted)
        small = RECIPES[recipe](adapted, calibration(self.text, plan, 1), share)
        pruned = self._worth(small)
        self._learns(small, plan, adapted)
        models = {"before": adapted, "after": small}
        summary = {
            "fewer_parameters": 1 - pruned["parameters"] / before["parameters"],
            "before": before,
            "pruned": pruned,
            "after": self._worth(small),
            "reading": speeds(models, self.asked.length, largest_only=True)[-1],
            "writing": {"tokens_per_second": writing_speeds(models)},
        }
        kept = {"share": share, "teacher": "logits", "peer": recipe, "seed": seed, "summary": summary}
        self._keep(name, small, {"arm": "less", **kept})

    def adapted(self, model: PreTrainedModel) -> None:
        """The model in RUNS/adapted, and what it is worth before and after."""
        folder = self.runs / "adapted"
        if (folder / "model.safetensors").exists():
            return
        self._keep("whole", model, {"arm": "whole"})
        self._learns(model, self._plan(0, self.asked.adapt), model)
        self._keep("adapted", model, {"arm": "adapted"})
        save(model, folder, self.tokenizer)  # last: it says that the model is there

    def _plan(self, seed: int, updates: int, teacher: str = "none") -> CycleSettings:
        return CycleSettings(
            prune=0,
            grow=0,
            teacher=teacher,
            optimizer=self.asked.optimizer,
            learn_steps=updates,
            learning_rate=self.asked.rate,
            batch_rows=self.asked.batch,
            evaluate_every=max(1, updates),
            score_rows=self.asked.score_rows,
            seed=seed,
        )

    def _learns(self, model: PreTrainedModel, plan: CycleSettings, teacher: PreTrainedModel) -> None:
        if not plan.learn_steps:
            return
        with Bars({"learning": plan.learn_steps}) as bars:
            for step, loss, _ in learn_round(model, [], self.text, plan, 1, teacher):
                bars.update("learning", step, f"loss {loss:.3f}")

    def _worth(self, model: PreTrainedModel) -> dict[str, Any]:
        found = measure(model, self.text)
        return {key: found[key] for key in ("parameters", "flops_per_token", "loss", "perplexity")}

    def _begins(self, name: str) -> bool:
        print(f"== {name}", flush=True)
        return not self._file(name).exists()

    def _file(self, name: str) -> Path:
        return self.runs / "measured" / f"{name}.json"

    def _keep(self, name: str, model: PreTrainedModel, labels: dict[str, Any], text: Text | None = None) -> None:
        """`text`: in the model's own tokens, where some of them went."""
        nats, targets = held_out_nats(model, text or self.text)
        found = size(model, self.text.held_out.shape[1])
        asked = {
            key: getattr(self.asked, key) for key in ("updates", "adapt", "rate", "optimizer", "rounds", "batch", "length")
        }
        self._file(name).parent.mkdir(parents=True, exist_ok=True)
        write_json(
            self._file(name),
            {
                **labels,
                **asked,
                **{key: found[key] for key in ("parameters", "heads", "flops_per_token")},
                "vocabulary_flops_per_token": 2 * model.get_output_embeddings().weight.numel(),
                "nats": [round(float(one), 4) for one in nats],
                "targets": [int(one) for one in targets],
            },
        )
        print(f"{name}: {sum(nats) / sum(targets):.4f} nats per token", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "text", "runs"):
        parser.add_argument(name)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.2], help="of all parameters that go; none: the control")
    parser.add_argument("--kinds", nargs="+", choices=MAY_GO, default=KINDS, help="of units that may go")
    parser.add_argument("--teachers", nargs="+", default=["logits"], help="logits, states, none")
    parser.add_argument("--peers", nargs="*", default=[], choices=RECIPES, help="cut as these do, not as pnn shrink does")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="none: the adapted model alone")
    words = ("ROWS", "RATE", "OPTIMIZER", "ROUNDS")
    parser.add_argument("--look", nargs=4, metavar=words, help="arms made so, beside the others and not compared with them")
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--adapt", type=int, default=500)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--by", choices=UNIT_METHODS, default="fisher", help="how units are scored")
    parser.add_argument("--rounds", type=int, default=1, help="of scoring and pruning")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--score-rows", type=int, default=64, help="to score units and to repair on")
    parser.add_argument("--batch", type=int, default=64, help="rows per update")
    parser.add_argument("--length", type=int, default=512, help="tokens per row")
    parser.add_argument("--held-out", type=int, default=256, help="rows to measure on")
    parser.add_argument("--train-rows", type=int, help="rows to learn from, where arms of several calls shall share them")
    asked = parser.parse_args()
    runs = Path(asked.runs)
    loaded = open_model(asked.model)
    rows, rate, optimizer, rounds = asked.look or (asked.batch, asked.rate, asked.optimizer, asked.rounds)
    text = read_text(
        loaded.model,
        loaded.tokenizer,
        asked.text,
        length=asked.length,
        train_rows=asked.train_rows or max(asked.updates * int(rows), asked.adapt * asked.batch),
        held_out_rows=asked.held_out,
        count=TOKEN in asked.kinds,
        progress=track,
    )
    study = Study(text, loaded.tokenizer, runs, asked)
    study.adapted(loaded.model)
    # a look starts from the same model as the arms
    asked.batch, asked.rate, asked.optimizer = int(rows), float(rate), optimizer
    asked.rounds = int(rounds)
    write_json(runs / "measured" / "environment.json", environment(0, 1))
    for seed in asked.seeds:
        for share in asked.shares:
            for recipe in asked.peers:
                study.peer(open_model(str(runs / "adapted")).model, share, recipe, seed)
            for teacher in [] if asked.peers else asked.teachers:
                study.share(open_model(str(runs / "adapted")).model, share, teacher, seed)
        if not asked.shares:
            study.control(open_model(str(runs / "adapted")).model, seed)


if __name__ == "__main__":
    main()
