"""The cycle: prune, measure, grow, learn, for one or many rounds, resumable at every phase.

What a phase does is in `phases`; where a cycle keeps it, and how it goes on after a kill, in `journal`. The same model, text
and settings give the same bits on a CPU.

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
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pnn.data.tokenizers import end_of_text
from pnn.errors import UserError
from pnn.files import let_go, write_json
from pnn.models.precision import undisturbed
from pnn.numbers import several
from pnn.plasticity.architectures import architecture_of
from pnn.plasticity.heads import Head, head_map, heads
from pnn.plasticity.journal import Journal, Record
from pnn.plasticity.measure import missing_capacity, speeds
from pnn.plasticity.phases import calibration, grow_heads, learn_round, measure, prune_heads, score_heads
from pnn.plasticity.scores import Scores
from pnn.plasticity.settings import CycleSettings, check
from pnn.plasticity.text import Text
from pnn.progress import Bars, say

PHASES = ("pruning", "measurement", "growth", "learning")
SAMPLE_TOKENS = 32  # of the text that a decoder writes at each evaluation


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
    try:
        run.start(resume)
        run.go_on()
    finally:
        let_go(run.journal.folder)
    return run.model


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
        self.journal.start(asked, resume, asdict(CycleSettings()))
        if self.journal.kept is not None:
            self.model = self.journal.read_model().to(self.original.device)
        if self.journal.done:
            self._say(f"going on after {self.journal.done} of {1 + len(PHASES) * self.settings.rounds} phases")

    # Phases -----------------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        journal = self.journal
        if journal.done == 0:
            found = measure(self.model, self.text)
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
        scores = score_heads(self.model, self.text, plan, round_)
        smaller, gone = prune_heads(self.model, scores, plan)
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
        self._say(f"round {round_}: pruned {several(len(gone), 'head')} by {plan.prune_by}, {len(heads(smaller))} left")

    def _measure(self, round_: int) -> None:
        plan, found, initial = self.settings, measure(self.model, self.text), self._initial()
        change = found["perplexity"] - initial["perplexity"]
        self.journal.record(
            "measurement",
            cycle=round_,
            pruned_perplexity=found["perplexity"],
            perplexity_change=change,
            perplexity_change_percent=100 * change / initial["perplexity"],
            missing_capacity=missing_capacity(self.model, calibration(self.text, plan, round_), plan.seed),
            **found,
        )
        self._say(f"round {round_}: perplexity {found['perplexity']:.3f} without them")

    def _grow(self, round_: int) -> None:
        plan = self.settings
        larger, new = grow_heads(self.model, self.text, plan, round_, self._lost(), self.original)
        self._keep(f"round-{round_}-grown", larger)
        found = measure(self.model, self.text)
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
        self._say(f"round {round_}: grew {several(len(new), 'head')} by {plan.grow_by}, perplexity {found['perplexity']:.3f}")

    def _learn(self, round_: int) -> None:
        plan, grown = self.settings, self.journal.newest("growth")
        new = [(one["layer"], one["head"]) for one in grown["added_heads"]]
        label = f"round {round_}: learning"
        with Bars({label: plan.learn_steps}, quiet=self.quiet) as bars:
            for step, loss, held in learn_round(self.model, new, self.text, plan, round_, self.original):
                self.journal.record("training", cycle=round_, step=step, train_loss=loss)
                bars.update(label, step, f"loss {loss:.3f}")
                if held is not None:
                    self.journal.record("evaluation", cycle=round_, step=step, sample=self._sample(), **held)
        self._keep(f"round-{round_}-learned", self.model)
        found, initial = measure(self.model, self.text), self._initial()
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
    if getattr(model.config, "neuron_map", None) is not None:
        digest.update(repr(model.config.neuron_map).encode())
    if getattr(model.config, "width_map", None) is not None:
        digest.update(repr(model.config.width_map).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else b"")
    return digest.hexdigest()[:16]
