"""The cycle: prune, measure, grow, learn, for one or many rounds, resumable at every phase.

Where a cycle keeps what it does, and how it goes on after a kill, is in `journal`. Batches and dropout follow from (seed,
update): the same model, text and settings give the same bits on a CPU.

Records have the source's names, one a line, by `phase`: initial, pruning, measurement, growth, training, evaluation, final.
Fields whose names say so, and `perplexity_recovery`, are in per cent there; everything else is a fraction.

    perplexity_recovery = 100 · (pruned − final) / (pruned − initial);   recovery: the same of losses, as a fraction
    both are 0 where pruning did no harm

Departures: a round prunes a share of the heads that are there (the published code takes it of the original number, and more in
every round), and grows a share of the original number. Held-out text is measured by token. Learning on the text improves any
model, an unpruned one too: a recovery of 100 % is no proof that nothing was lost, a control with `prune=0` is.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pnn.data.tokenizers import end_of_text
from pnn.errors import UserError, did_you_mean
from pnn.files import write_json
from pnn.plasticity.architectures import architecture_of
from pnn.plasticity.growth import STARTS, STRATEGIES, candidates, grow, propose
from pnn.plasticity.heads import Head, head_map, heads, original_counts
from pnn.plasticity.journal import Journal, Record
from pnn.plasticity.learning import learn
from pnn.plasticity.measure import held_out_loss, missing_capacity, size, speeds
from pnn.plasticity.scores import METHODS, Scores, choose, score, share_of, undisturbed
from pnn.plasticity.surgery import prune
from pnn.plasticity.text import Text
from pnn.progress import Bars, say

PHASES = ("pruning", "measurement", "growth", "learning")
SAMPLE_TOKENS = 32  # of the text that a decoder writes at each evaluation


@dataclass(frozen=True)
class CycleSettings:
    rounds: int = 1
    prune: float = 0.3  # share of the heads that are there
    grow: float = 0.1  # share of the original number; 0 grows none
    prune_by: str = "gradient"
    grow_by: str = "gradient"
    per_layer: bool = False  # prune the same share of every layer
    whole_layers: bool = False  # a layer may lose all its heads
    beyond: int = 0  # heads that a layer may grow beyond its original number
    init: str = "zero"
    learn_steps: int = 100
    learning_rate: float = 5e-5
    multiplier: float = 3.0  # of new heads' updates
    batch_rows: int = 4
    evaluate_every: int = 25
    score_rows: int = 32  # rows of training text that heads are scored on
    seed: int = 0

    def __post_init__(self) -> None:
        for purpose, value, known in (
            ("prune by", self.prune_by, METHODS),
            ("grow by", self.grow_by, STRATEGIES),
            ("start new heads as", self.init, STARTS),
        ):
            if value not in known:
                raise UserError(f"there is no {value!r} to {purpose}{did_you_mean(value, known)}")
        at_least_one = ("rounds", "batch_rows", "evaluate_every", "score_rows")
        for name in (*at_least_one, "learn_steps", "beyond", "seed"):
            least = int(name in at_least_one)
            if getattr(self, name) < least:
                raise UserError(f"{name}: {getattr(self, name)}, but it is at least {least}")
        for name in ("learning_rate", "multiplier"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name}: {getattr(self, name)}, but it is above 0")
        for name in ("prune", "grow"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"cannot {name} {getattr(self, name):g} of the heads: a share lies between 0 and 1")

    @property
    def floor(self) -> int:
        return 0 if self.whole_layers else 1

    def rows_needed(self) -> int:
        """More training text than this is never read."""
        return max(self.score_rows, self.rounds * self.learn_steps * self.batch_rows)


def cycle(
    model: PreTrainedModel,
    text: Text,
    output: str | Path,
    settings: CycleSettings | None = None,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    name: str | None = None,
    resume: bool = False,
    quiet: bool = True,
) -> PreTrainedModel:
    """Reorganise a model in a new run folder and return the result; the model given stays as it is. `resume` goes on with a
    cycle that was stopped: it takes the same model, text and settings. `tokenizer` is kept with the models, and a decoder that
    has one writes a sample at every evaluation."""
    run = _Cycle(model, text, Path(output), settings or CycleSettings(), tokenizer, name or model.config.model_type, quiet)
    run.start(resume)
    run.go_on()
    return run.model


def check(model: PreTrainedModel, settings: CycleSettings) -> None:
    """What is sure to fail is said before anything is done."""
    present, total = heads(model), sum(original_counts(model))
    count, layers = len(present), len({layer for layer, _ in present})
    room = len(candidates(model, settings.beyond))
    wanted = max(1, share_of(total, settings.grow))
    for round_ in range(1, settings.rounds + 1):
        when = "" if round_ == 1 else f"round {round_}: "
        pruned = share_of(count, settings.prune)
        if pruned == count:
            raise UserError(f"{when}pruning {settings.prune:g} of the heads would leave none of {count}: prune fewer")
        if round_ == 1:
            choose(dict.fromkeys(present, 0.0), settings.prune, per_layer=settings.per_layer, floor=settings.floor)
        elif count - pruned < settings.floor * layers:
            raise UserError(
                f"{when}pruning {settings.prune:g} of {count} heads would leave {count - pruned} in {layers} layers that keep "
                "one each: prune fewer, or in fewer rounds"
            )
        count, room = count - pruned, room + pruned
        if settings.grow == 0:
            continue
        if wanted > room:
            after = "after pruning " if pruned else ""
            instead = "grow fewer" if room else "prune first"
            raise UserError(
                f"{when}growing {settings.grow:g} of {total} heads adds {wanted}, but {after}there is room for {room}: "
                f"{instead}, or let layers grow beyond their original number with --beyond"
            )
        # places beyond the original number are there again in every round
        count, room = count + wanted, room if settings.beyond else room - wanted


class _Cycle:
    def __init__(
        self,
        model: PreTrainedModel,
        text: Text,
        output: Path,
        settings: CycleSettings,
        tokenizer: PreTrainedTokenizerFast | None,
        name: str,
        quiet: bool,
    ):
        architecture_of(model)
        if model.get_output_embeddings() is None:  # no head, or a classifier's
            raise UserError(
                f"a {type(model).__name__} predicts no tokens, and a cycle is measured by that: give a language model"
            )
        # 16-bit weights would swallow small updates
        self.original = copy.deepcopy(model).float().eval()
        self.model = self.original
        self.text, self.journal, self.settings = text, Journal(output), settings
        self.tokenizer, self.name, self.quiet = tokenizer, name, quiet

    def start(self, resume: bool) -> None:
        check(self.model, self.settings)
        asked = {
            "model": self.name,
            "weights": fingerprint(self.original),
            "text": self.text.fingerprint(),
            "source": self.text.source,
            **asdict(self.settings),
        }
        self.journal.start(asked, resume)
        if self.journal.kept is not None:
            self.model = self.journal.read_model().to(self.original.device)
        if self.journal.done:
            self._say(f"going on after {self.journal.done} of {1 + len(PHASES) * self.settings.rounds} phases")

    # Phases -----------------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        journal = self.journal
        if journal.done == 0:
            found = self._measured()
            counts = {"total_heads": found["original_heads"], "active_heads": found["heads"]}
            journal.record("initial", model_name=self.name, **counts, **found)
            self._say(f"{found['heads']} heads, perplexity {found['perplexity']:.3f}")
            journal.finish_phase(ends_round=False)
        perform: dict[str, Callable[[int], None]] = {
            "pruning": self._prune,
            "measurement": self._measure,
            "growth": self._grow,
            "learning": self._learn,
        }
        while journal.done < 1 + len(PHASES) * self.settings.rounds:
            round_, at = divmod(journal.done - 1, len(PHASES))
            perform[PHASES[at]](round_ + 1)
            journal.finish_phase(ends_round=PHASES[at] == PHASES[-1])
        summary = journal.folder / "summary.json"
        if not summary.exists():
            write_json(summary, self._summary())

    def _keep(self, name: str, model: PreTrainedModel) -> None:
        self.model = self.journal.keep(name, model, self.tokenizer)

    def _prune(self, round_: int) -> None:
        plan = self.settings
        scores = score(self.model, self._calibration(round_), plan.prune_by, seed=plan.seed + round_)
        gone = choose(scores, plan.prune, per_layer=plan.per_layer, floor=plan.floor)
        smaller = prune(self.model, gone, whole_layers=plan.whole_layers)
        self._keep(f"round-{round_}-pruned", smaller)
        self.journal.record(
            "pruning",
            cycle=round_,
            pruning_level=plan.prune,
            pruning_strategy=plan.prune_by,
            heads_pruned=len(gone),
            active_heads_after_pruning=len(heads(smaller)),
            pruned_heads=_named(gone),
            scores=[{"layer": layer, "head": index, "score": value} for (layer, index), value in scores.items()],
            highest_go=scores.highest_go,
            head_map=head_map(smaller),
        )
        self._say(f"round {round_}: pruned {len(gone)} heads by {plan.prune_by}, {len(heads(smaller))} left")

    def _measure(self, round_: int) -> None:
        found, initial = self._measured(), self._initial()
        change = found["perplexity"] - initial["perplexity"]
        self.journal.record(
            "measurement",
            cycle=round_,
            pruned_perplexity=found["perplexity"],
            perplexity_change=change,
            perplexity_change_percent=100 * change / initial["perplexity"],
            missing_capacity=missing_capacity(self.model, self._calibration(round_), self.settings.seed),
            **found,
        )
        self._say(f"round {round_}: perplexity {found['perplexity']:.3f} without them")

    def _grow(self, round_: int) -> None:
        plan = self.settings
        new: list[Head] = []
        larger = self.model
        if plan.grow > 0:
            new = propose(
                self.model,
                plan.grow,
                plan.grow_by,
                self._calibration(round_),
                lost=self._lost(),
                beyond=plan.beyond,
                seed=plan.seed + round_,
            )
            larger = grow(self.model, new, plan.init, seed=plan.seed + round_)
        self._keep(f"round-{round_}-grown", larger)
        found = self._measured()
        self.journal.record(
            "growth",
            cycle=round_,
            growth_strategy=plan.grow_by,
            growth_percentage=100 * plan.grow,
            initialisation=plan.init,
            heads_added=len(new),
            active_heads_after_growth=len(heads(larger)),
            added_heads=_named(new),
            **found,
        )
        self._say(f"round {round_}: grew {len(new)} heads by {plan.grow_by}, perplexity {found['perplexity']:.3f}")

    def _learn(self, round_: int) -> None:
        plan, first = self.settings, (round_ - 1) * self.settings.learn_steps
        grown = self.journal.newest("growth")
        new = [(one["layer"], one["head"]) for one in grown["added_heads"]]
        updates = learn(
            self.model,
            new,
            lambda step: self.text.for_update(step, plan.batch_rows, plan.seed),
            steps=plan.learn_steps,
            peak_rate=plan.learning_rate,
            multiplier=plan.multiplier,
            seed=plan.seed,
            first=first,
        )
        label = f"round {round_}: learning"
        with Bars({label: plan.learn_steps}, quiet=self.quiet) as bars:
            for step, loss in updates:
                self.journal.record("training", cycle=round_, step=step, train_loss=loss)
                bars.update(label, step, f"loss {loss:.3f}")
                if step % plan.evaluate_every == 0 or step == plan.learn_steps:
                    held = held_out_loss(self.model, self.text)
                    self.journal.record("evaluation", cycle=round_, step=step, sample=self._sample(), **held)
        self._keep(f"round-{round_}-learned", self.model)
        found, initial = self._measured(), self._initial()
        pruned = self.journal.newest("measurement")
        change = found["perplexity"] - initial["perplexity"]
        self.journal.record(
            "final",
            cycle=round_,
            final_perplexity=found["perplexity"],
            active_heads=found["heads"],
            active_heads_percentage=100 * found["heads"] / found["original_heads"],
            perplexity_change_from_initial=change,
            perplexity_change_from_initial_percent=100 * change / initial["perplexity"],
            perplexity_recovery=100 * recovery(initial["perplexity"], pruned["perplexity"], found["perplexity"]),
            recovery=recovery(initial["loss"], pruned["loss"], found["loss"]),
            **found,
        )
        self._say(f"round {round_}: perplexity {found['perplexity']:.3f} with {found['heads']} heads")

    # What phases share ------------------------------------------------------------------------------------------------

    def _calibration(self, round_: int) -> list[dict[str, torch.Tensor]]:
        plan = self.settings
        return list(self.text.batches(self.text.sample(plan.score_rows, plan.seed, round_), plan.batch_rows))

    def _measured(self) -> Record:
        return held_out_loss(self.model, self.text) | size(self.model, self.text.held_out.shape[1])

    def _initial(self) -> Record:
        return self.journal.records[0]

    def _lost(self) -> Scores:
        """The newest score of every head that was ever pruned."""
        found: dict[Head, float] = {}
        highest_go = False
        for record in self.journal.records:
            if record["phase"] == "pruning":
                found |= {(one["layer"], one["head"]): one["score"] for one in record["scores"]}
                highest_go = record["highest_go"]
        return Scores(found, highest_go=highest_go)

    @torch.no_grad()
    def _sample(self) -> str | None:
        """How the model goes on from the beginning of the held-out text, always by the most probable token."""
        if self.tokenizer is None or self.text.special is not None:
            return None
        share = max(1, min(SAMPLE_TOKENS, self.text.held_out.shape[1] // 4))
        start = self.text.held_out[:1, :share].to(self.model.device)
        with undisturbed(self.model):
            made = self.model.generate(
                start,
                attention_mask=torch.ones_like(start),
                max_new_tokens=share,
                do_sample=False,
                pad_token_id=end_of_text(self.tokenizer),
            )
        return self.tokenizer.decode(made[0], skip_special_tokens=True)

    def _say(self, line: str) -> None:
        if not self.quiet:
            say(line)

    def _summary(self) -> Record:
        plan, initial, final = self.settings, self._initial(), self.journal.records[-1]
        sizes = ("parameters", "attention_parameters", "flops_per_token", "heads", "perplexity", "loss")
        before, after = ({key: record[key] for key in sizes} for record in (initial, final))
        measured = speeds({"initial": self.original, "final": self.model}, self.text.held_out.shape[1])
        return {
            "experiment_name": self.journal.folder.name,
            "model_name": self.name,
            "dataset": self.text.source,
            "held_out": self.text.held_out_source,
            "cycles": plan.rounds,
            "final_perplexity": final["perplexity"],
            "final_active_heads": final["heads"],
            "total_heads": initial["original_heads"],
            "strategies": {"pruning": plan.prune_by, "growth": plan.grow_by},
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": asdict(plan),
            "initial": before,
            "final": after,
            "fewer_heads": 1 - after["heads"] / before["heads"],
            "fewer_attention_parameters": 1 - after["attention_parameters"] / before["attention_parameters"],
            "fewer_parameters": 1 - after["parameters"] / before["parameters"],
            "rounds": [
                {
                    "round": record["cycle"],
                    "heads": record["heads"],
                    "perplexity": record["perplexity"],
                    "recovery": record["recovery"],
                }
                for record in self.journal.records
                if record["phase"] == "final"
            ],
            "speed": measured,
            "checkpoint": f"checkpoints/{self.journal.kept}",
        }


def recovery(initial: float, pruned: float, final: float) -> float:
    """How much of what pruning cost has come back: 1 is all of it, more is better than before. 0 where it cost nothing."""
    return (pruned - final) / (pruned - initial) if pruned > initial else 0.0


def _named(chosen: list[Head]) -> list[dict[str, int]]:
    return [{"layer": layer, "head": index} for layer, index in chosen]


def fingerprint(model: PreTrainedModel) -> str:
    digest = hashlib.sha256(repr(head_map(model)).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else b"")
    return digest.hexdigest()[:16]
