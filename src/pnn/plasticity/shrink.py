"""From a model to a smaller one: measure, prune units of all kinds within one budget, let what remains take over what went
(`repair`), learn with the model as the teacher (`teaching`), measure again.

Units may go in rounds: what one is worth changes when others go, so after each part of the budget all that is left is scored
anew, on other rows.

Three phases with a journal, as a cycle has: whatever a kill leaves behind a finished phase is thrown away and done again. The
same model, text and settings give the same bits on a CPU, but for what goes where a speed was asked for: that is measured, and
recorded, so that going on after a kill does not measure it again.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pnn.errors import UserError, did_you_mean
from pnn.files import let_go, remove_folder
from pnn.models.plastic import as_ranges, of_ranges
from pnn.models.precision import learns_in, width_of
from pnn.models.registry import kind_of
from pnn.numbers import per_cent, written
from pnn.plasticity.architectures import ALL_KINDS, HEAD, KINDS, NEURON, WIDTH, architecture_of
from pnn.plasticity.budget import as_many, faster, fewer_parameters, most_fewer, named, so_many
from pnn.plasticity.cycle import fingerprint
from pnn.plasticity.journal import Journal, Record
from pnn.plasticity.lora import check_rank, low_rank
from pnn.plasticity.measure import speeds, writing_speeds
from pnn.plasticity.phases import calibration, learn_round, measure
from pnn.plasticity.repair import repair
from pnn.plasticity.settings import CycleSettings
from pnn.plasticity.surgery import prune
from pnn.plasticity.teaching import check_room
from pnn.plasticity.text import Text
from pnn.plasticity.unit_scores import OF_MATRICES, UNIT_METHODS, score_units
from pnn.plasticity.units import Unit, unit_map
from pnn.plasticity.vocabulary import RARE, TOKEN, Trimmed, check_tokens, trim, with_tokens
from pnn.progress import Bars, say
from pnn.training.optim import block_matrices

PHASES = ("initial", "pruning", "learning")
# In folders older than these settings
DEFAULTS: Record = {"repair": False, "teacher": "none", "lora": None, "optimizer": "adamw", "rounds": 1}
SHARING = "fisher"  # what says how many go of each matrix, unless another score that compares all is asked for
MAY_GO = (*ALL_KINDS, TOKEN)
COMPARABLE = tuple(method for method in UNIT_METHODS if method not in OF_MATRICES)


class Shrunk(NamedTuple):
    """The smaller model, what was measured, and what belongs to its vocabulary."""

    model: PreTrainedModel
    summary: Record
    tokenizer: PreTrainedTokenizerFast | None
    text: Text


@dataclass(frozen=True)
class ShrinkSettings:
    fewer: float | None = None  # share of all parameters that goes
    faster: float | None = None  # times as fast at reading, on this machine; one of the two is given
    kinds: tuple[str, ...] = KINDS
    by: str = SHARING
    rounds: int = 1  # of scoring and pruning; one where a speed is asked for, since a round's part of it is too small to time
    repair: bool = True  # in closed form, on the rows that units are scored on
    teacher: str = "logits"  # what is learnt of the unpruned model; none learns the text
    lora: int | None = (
        None  # the rank of adapters that learn alone and are merged in the end (`lora`); by default all weights do
    )
    optimizer: str = "adamw"
    learn_steps: int = 200
    learning_rate: float = 3e-4
    batch_rows: int = 8
    evaluate_every: int = 50
    score_rows: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.fewer is None) == (self.faster is None):
            raise UserError("give either --parameters (how small) or --speed (how fast)")
        if self.fewer is not None and not 0 < self.fewer < 1:
            raise UserError(f"{per_cent(self.fewer, 0)} of the parameters cannot go: expected more than 0 and less than 100 %")
        if self.faster is not None and not self.faster > 1:
            raise UserError(f"--speed {self.faster:g}: expected more than 1, which is the present speed")
        if not self.kinds:
            raise UserError(f"--kinds names none of {', '.join(MAY_GO)}")
        for kind in self.kinds:
            if kind not in MAY_GO:
                raise UserError(f"unknown kind of unit {kind!r}{did_you_mean(kind, MAY_GO)}")
        if self.by not in UNIT_METHODS:
            raise UserError(f"unknown score of units {self.by!r}{did_you_mean(self.by, UNIT_METHODS)}")
        if self.by in OF_MATRICES and self.units and not {HEAD, NEURON} & {*self.units}:
            raise UserError(f"{self.by} compares units of one matrix, not {named(self.units)}: use {', '.join(COMPARABLE)}")
        if self.teacher == "states" and WIDTH in self.kinds:
            raise UserError("--teacher states needs states of one width: use --teacher logits where width may go")
        if self.faster is not None and not self.units:
            raise UserError("--speed: fewer tokens make reading no faster; name more kinds, such as --kinds tokens,neurons")
        if self.rounds < 1:
            raise UserError(f"--rounds {self.rounds}: expected at least 1")
        if self.lora is not None:
            check_rank(self.lora)
        self.as_cycle()  # says what is wrong with the rest

    @property
    def units(self) -> tuple[str, ...]:
        """Kinds that are scored: all but tokens, which cost this text next to nothing where they may go."""
        return tuple(kind for kind in self.kinds if kind != TOKEN)

    def as_json(self) -> Record:
        return asdict(self) | {"kinds": list(self.kinds)}

    def as_cycle(self) -> CycleSettings:
        """What calibration and learning take."""
        shared = ("teacher", "optimizer", "learn_steps", "learning_rate", "batch_rows", "evaluate_every", "score_rows", "seed")
        return CycleSettings(prune=0, grow=0, **{name: getattr(self, name) for name in shared})


def check(model: PreTrainedModel, settings: ShrinkSettings, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
    """What is sure to fail is said before any text is read."""
    architecture = architecture_of(model)
    if WIDTH in settings.kinds:
        architecture.stream(model)
    if model.get_output_embeddings() is None:
        raise UserError(
            f"a {type(model).__name__} predicts no tokens, and shrinking is measured by that: give a language model"
        )
    if settings.teacher != "none":
        check_room(model, smallest=0.0 if settings.fewer is None else 1 - settings.fewer)
    if settings.optimizer == "muon" and not block_matrices(model):
        raise UserError(f"--optimizer muon: the blocks of a {type(model).__name__} have no linear layers; take adamw")
    if TOKEN in settings.kinds:  # how many may go, the text will say
        check_tokens(model, tokenizer)
    elif settings.fewer is not None:
        most_fewer(model, settings.kinds, settings.fewer)


def shrink(
    model: PreTrainedModel,
    text: Text,
    work: str | Path,
    settings: ShrinkSettings,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    name: str | None = None,
    resume: bool = False,
    quiet: bool = True,
) -> Shrunk:
    """The model given stays as it is. `work` is the folder of what is under way."""
    check(model, settings, tokenizer)
    original = copy.deepcopy(model).float().eval()  # 16-bit weights would swallow small updates
    total = original.num_parameters()
    journal = Journal(Path(work), "shrink")
    name = name or model.config.model_type
    plan = settings.as_cycle()
    asked = {
        "model": name,
        "weights": fingerprint(original),
        "text": text.fingerprint(),
        "source": text.source,
        **settings.as_json(),
    }
    try:
        journal.start(asked, resume, DEFAULTS)
        now = original if journal.kept is None else journal.read_model().to(original.device)
        whole = _without_spare_tokens(Trimmed(original, tokenizer, text), settings, total, journal)

        def tell(line: str) -> None:
            if not quiet:
                say(line)

        if journal.done:
            tell(f"going on after {journal.done} of {len(PHASES)} phases")
        while journal.done < len(PHASES):
            phase = PHASES[journal.done]
            if phase == "initial":
                found = measure(original, text)
                journal.record("initial", **found, units=_counts(original, settings))
                tell(f"{found['parameters']:,} parameters, perplexity {found['perplexity']:.3f}")
            elif phase == "pruning":
                try:
                    smaller, gone = _prune(whole, settings, total)
                except UserError:  # no choice is small or fast enough: there is nothing to go on with
                    remove_folder(journal.folder)
                    raise
                if settings.repair and gone:
                    smaller = repair(smaller, whole.model, calibration(whole.text, plan, 1))
                now = journal.keep("round-1-pruned", smaller, whole.tokenizer)
                found = measure(now, whole.text)
                lost = Counter(unit.kind for unit in gone)
                lost[TOKEN] = original.config.vocab_size - now.config.vocab_size
                tokens = {}
                if whole.kept is not None:
                    tokens = {"tokens": as_ranges(whole.kept), "recut_rows": whole.recut, "rare_tokens": whole.rare}
                journal.record("pruning", pruned=dict(+lost), **found, **tokens, units=_counts(now, settings))
                what = ", ".join(so_many(lost[kind], kind) for kind in MAY_GO if lost[kind])
                tell(f"pruned {what}: {found['parameters']:,} parameters, perplexity {found['perplexity']:.3f}")
                if whole.recut:
                    tell(
                        f"{whole.recut:,} of {found['rows']:,} held-out rows have such tokens, measured in pieces: loss per "
                        "token of the whole vocabulary"
                    )
            else:
                if not {*journal.newest("pruning")["pruned"]} - {TOKEN}:  # it is its teacher still
                    plan = replace(plan, teacher="none")
                precision = "bf16" if learns_in(now.device, width_of(now.config)) == torch.bfloat16 else "fp32"
                journal.record("lesson", teacher=plan.teacher, precision=precision)
                adapters = nullcontext() if settings.lora is None else low_rank(now, settings.lora, settings.seed)
                with adapters, Bars({"learning": plan.learn_steps}, quiet=quiet) as bars:
                    for step, loss, held in learn_round(now, [], whole.text, plan, 1, whole.model):
                        journal.record("training", step=step, train_loss=loss)
                        bars.update("learning", step, f"loss {loss:.3f}")
                        if held is not None:
                            journal.record("evaluation", step=step, **held)
                now = journal.keep("round-1-learned", now, whole.tokenizer)
                found = measure(now, whole.text)
                journal.record("final", **found, units=_counts(now, settings))
                tell(f"perplexity {found['perplexity']:.3f} after {plan.learn_steps} updates")
            journal.finish_phase(ends_round=phase == PHASES[-1])
    finally:
        let_go(journal.folder)
    return Shrunk(now, _summary(original, now, journal, text, settings, name), whole.tokenizer, whole.text)


def _without_spare_tokens(given: Trimmed, settings: ShrinkSettings, total: int, journal: Journal) -> Trimmed:
    """What is pruned and what teaches: all but tokens that hardly anybody misses. Which these are hangs on sums of
    probabilities, so whoever goes on after a kill asks the journal. Rare ones stay where a speed is asked for: in pieces there
    is more to read."""
    if TOKEN not in settings.kinds:
        return given
    pruning = next((record for record in journal.records if record.get("phase") == "pruning"), None)
    if pruning is not None:
        assert given.tokenizer is not None
        return with_tokens(given.model, given.tokenizer, given.text, of_ranges(pruning["tokens"]))
    return trim(*given[:3]) if settings.fewer is None else trim(*given[:3], settings.fewer * total, RARE)


def _prune(whole: Trimmed, settings: ShrinkSettings, total: int) -> tuple[PreTrainedModel, list[Unit]]:
    """What is left, and what went. `total`: parameters before tokens went."""
    now, gone = whole.model, list[Unit]()
    if settings.faster is not None:
        length = whole.text.held_out.shape[1]
        gone = _choose(now, whole.text, settings, 1, partial(faster, now, times=settings.faster, length=length))
        return prune(now, gone), gone
    assert settings.fewer is not None
    left = now.num_parameters()
    surplus = left - (1 - settings.fewer) * total
    if surplus < 1:  # tokens were enough
        return now, gone
    _check_enough(whole, settings, total, surplus / left)
    for round_ in range(1, settings.rounds + 1):
        share = 1 - (left - surplus * round_ / settings.rounds) / now.num_parameters()
        if share * now.num_parameters() >= 1:  # or an earlier round took a large unit
            pick = partial(fewer_parameters, now, share=share, whole=whole.model)
            chosen = _choose(now, whole.text, settings, round_, pick)
            now, gone = prune(now, chosen), gone + chosen
    return now, sorted(gone)


def _check_enough(whole: Trimmed, settings: ShrinkSettings, total: int, share: float) -> None:
    """Before anything is scored. `share`: of what is left without spare tokens."""
    if TOKEN not in settings.kinds:
        return most_fewer(whole.model, settings.units, share)
    tokens = (
        f"−{written(100 * (settings.fewer or 0), 1)} % of the parameters cannot go: tokens that the text has rarely or never "
        f"hold {per_cent(1 - whole.model.num_parameters() / total)} of them"
    )
    if not settings.units:
        raise UserError(f"{tokens}; name more kinds, such as --kinds tokens,neurons")
    try:
        most_fewer(whole.model, settings.units, share)
    except UserError as error:
        raise UserError(f"{tokens}; of what is left, {error}") from None
    return None


def _choose(
    model: PreTrainedModel, text: Text, settings: ShrinkSettings, round_: int, pick: Callable[..., list[Unit]]
) -> list[Unit]:
    """What goes next. A score that compares no more than what shares a matrix chooses there; how many go of each matrix is the
    default score's to say."""
    batches = calibration(text, settings.as_cycle(), round_)
    within = settings.by in OF_MATRICES
    gone = pick(score_units(model, batches, SHARING if within else settings.by, settings.units, seed=settings.seed))
    if not within:
        return gone
    kinds = [kind for kind in settings.units if kind in (HEAD, NEURON)]
    return as_many(model, gone, score_units(model, batches, settings.by, kinds))


def _counts(model: PreTrainedModel, settings: ShrinkSettings) -> dict[str, int]:
    """Of every kind; of the width where it may go, which not every model has as units; of tokens where they may go."""
    found = {kind: sum(map(len, unit_map(model, kind))) for kind in (*KINDS, *({WIDTH} & {*settings.kinds}))}
    return found | ({TOKEN: model.config.vocab_size} if TOKEN in settings.kinds else {})


def _summary(
    before: PreTrainedModel, after: PreTrainedModel, journal: Journal, text: Text, settings: ShrinkSettings, name: str
) -> Record:
    kept = ("parameters", "flops_per_token", "units", "loss", "loss_interval", "perplexity", "rows", "row_tokens")
    stages = {"before": "initial", "pruned": "pruning", "after": "final"}
    measured = {stage: {key: journal.newest(phase)[key] for key in kept} for stage, phase in stages.items()}
    lesson = next((one for one in journal.records if one["phase"] == "lesson"), {})  # older journals have none
    models = {"before": before, "after": after}
    reading = speeds(models, text.held_out.shape[1], largest_only=True)[-1]
    return {
        "model": name,
        "data": text.source,
        "held_out": text.held_out_source,
        "settings": settings.as_json(),
        "learnt_from": lesson.get("teacher", settings.teacher),
        "learnt_in": lesson.get("precision"),
        **{key: journal.newest("pruning").get(key, 0) for key in ("recut_rows", "rare_tokens")},
        **measured,
        "fewer_parameters": 1 - measured["after"]["parameters"] / measured["before"]["parameters"],
        "reading": reading,
        "writing": {"tokens_per_second": writing_speeds(models)} if kind_of(before).causal else None,
    }
