"""What a run is: typed dataclasses ⇄ YAML. An unknown key or a wrong type is an error that names the key.

A run has four sections, and a fifth if its model is to change its shape while it trains. `model` is the architecture
(`type: pnn`, `bert` or `ddl`; or `type: transformers` with one of its decoders as `architecture`) with any field of its Hugging
Face config; `data`, `training`, `evaluation` and `plasticity` are the dataclasses below. Published rows live in
`pnn/configs/*.yaml`. A file that extends one with a model of another kind takes nothing from that model.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import shlex
import types
import typing
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, Union

import yaml

from pnn.errors import UserError, closest, did_you_mean, first_line
from pnn.kinds import Kind, of_section
from pnn.progress import say

T = TypeVar("T")


@dataclass
class DataConfig:
    train: str = (
        "synthetic"  # "synthetic", "synthetic_hard", files (a path or glob), token shards, or a hub name: c4, owner/name …
    )
    validation: str = "tail"  # another source, or "tail": the last sequences of the training source, held out
    validation_sequences: int = 2000  # how many sequences "tail" holds out; of another source, at most so many are used
    tokenizer: str = "corpus"  # a name, a folder, tokenizer.json, vocab.txt, or "corpus": made from the training text
    vocab_size: int = 8192  # of a tokenizer trained on the corpus
    filter: str = "paper"  # "paper": lines of more than 20 characters and at least 5 words; "none": lines with text
    layout: str | None = None  # "lines": a sequence is a line; "rows": running text, cut to length; null: as the model reads
    undo_wikitext_marks: bool = False  # turn " @-@ " into "-" and so on before tokenising
    max_length: int = 128  # tokens of a sequence, special ones among them; the rest of a line is cut off, a row is that long
    max_sequences: int | None = None  # train on a random sample of so many sequences
    synthetic_paragraphs: int = 20000  # size of the embedded corpus
    text_column: str = "text"  # of .jsonl, .parquet and hub datasets
    mask_probability: float = 0.15
    train_mask_probability: float | None = None  # in training; null: as in evaluation
    masking: str = "mask"  # "mask": every selected token becomes [MASK]; "bert": 80 % [MASK], 10 % random, 10 % kept
    prepared: str = "prepared"  # folder for token shards, shared by runs

    @property
    def masked_in_training(self) -> float:
        return self.mask_probability if self.train_mask_probability is None else self.train_mask_probability


@dataclass
class TrainingConfig:
    seed: int = 0
    epochs: float = 15.0
    max_steps: int | None = None  # updates; overrides epochs
    batch_size: int = 384  # sequences of a micro-batch; its size in tokens is this times the corpus's mean length
    effective_batch_size: int = 1152  # sequences of an update, over all micro-batches and processes
    optimizer: str = "adamw"  # or "muon": the matrices of blocks move by orthogonal steps, the rest by AdamW
    learning_rate: float = 3e-4
    base_width: int | None = (
        None  # the width at which learning_rate was found; each matrix's rate is carried over to the model's
    )
    schedule: str = "cosine"  # or "flat": the peak is held, and falls in a straight line over the last fifth
    min_learning_rate: float = 1e-5  # where the schedule ends
    warmup_steps: int = 500
    weight_decay: float = 0.01  # on matrices; never on norms, biases and the gate's temperature
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    gradient_clip: float = 1.0
    average_decay: float | None = None  # keep a running average of the weights, evaluated beside the last ones: 0.999
    precision: str = "auto"  # "fp32", "fp16", "bf16"; auto: bf16 on a GPU that has it, fp16 on an older one, fp32 on CPU
    compile: bool | None = None  # torch.compile and recorded passes; null: on a GPU
    device: str = "auto"  # "cpu", "cuda"
    log_every: int = 10  # updates between lines of metrics.jsonl
    evaluate_every: int = 500
    save_every: int = 500
    keep_checkpoints: int = 2  # newest step-… folders kept, besides best and last
    tensorboard: bool = True
    trackers: list[str] | None = None  # beside it: wandb, mlflow, trackio; each is installed and set up by yourself


@dataclass
class EvaluationSet:
    source: str  # as data.train
    undo_wikitext_marks: bool = False


@dataclass
class EvaluationConfig:
    mask_seed: int = 0  # evaluation masks are a function of the text and this number
    mask_draws: int = 1  # so many draws of masks, with this number and those after it; numbers are over all of them
    batch_tokens: int = 16384
    stride: int | None = None  # a decoder's perplexity: tokens scored per window; null: the whole row, windows do not overlap
    sets: dict[str, EvaluationSet] = field(default_factory=dict)  # further sets to evaluate on at the end, by name


@dataclass
class PlasticityConfig:
    """Heads and neurons that go and come while a model trains (`plasticity/in_training`). `start` and `end` are shares of those
    that the `model` section has."""

    kinds: list[str] = field(default_factory=lambda: ["head", "neuron"])  # what goes and comes
    start: float = 0.5  # the share of its heads and neurons that the model begins with
    end: float = 1.0  # the share that it ends with; its size moves there in even steps
    changes: int = 10  # how often it changes, at even distances
    until: float = 0.7  # the share of the run by which it has its last shape
    turnover: float = 0.0  # of those that are there, the share that each change takes out and grows anew
    prune_by: str = "fisher"  # who goes: the lowest "fisher", "gradient", "magnitude", or "random"
    grow_by: str = "random"  # where new ones grow: "random", or in proportion to the "gradient" that layers get


@dataclass
class RunConfig:
    name: str = "run"
    model: dict[str, Any] = field(default_factory=lambda: {"type": "pnn"})
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    plasticity: PlasticityConfig | None = None

    @property
    def kind(self) -> Kind:
        """What its model is trained to do."""
        return of_section(self.model)

    def to_dict(self) -> dict[str, Any]:
        given = dataclasses.asdict(self)
        if self.plasticity is None:  # most runs keep their shape, and say nothing of it
            del given["plasticity"]
        return given

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


CHOICES = {
    "data.filter": ("paper", "none"),
    "data.masking": ("mask", "bert"),
    "data.layout": ("lines", "rows"),
    "training.optimizer": ("adamw", "muon"),
    "training.schedule": ("cosine", "flat"),
    "training.precision": ("auto", "fp32", "fp16", "bf16"),
    "training.device": ("auto", "cpu", "cuda"),
}
PLASTIC_KINDS = ("head", "neuron")
PRUNE_BY = ("fisher", "gradient", "magnitude", "random")
GROW_BY = ("random", "gradient")
TRACKERS = ("wandb", "mlflow", "trackio")
POSITIVE = (
    *("data." + k for k in ("vocab_size", "max_length", "max_sequences", "validation_sequences", "synthetic_paragraphs")),
    *("training." + k for k in ("epochs", "max_steps", "batch_size", "effective_batch_size", "learning_rate", "base_width")),
    *("training." + k for k in ("gradient_clip", "log_every", "evaluate_every", "save_every", "keep_checkpoints")),
    "evaluation.batch_tokens",
    "evaluation.mask_draws",
    "evaluation.stride",
)
REMOVED = {"training.fp8": "computing logits in 8 bits gained 3 %"}  # keys of older configs, and why they went


def typed(value: Any, expected: Any, key: str) -> Any:
    """`value` as the annotated type, or an error that names the key. YAML reads 3e-4 as text, so numbers may be text."""
    origin = typing.get_origin(expected)
    if origin in (Union, types.UnionType):
        options = typing.get_args(expected)
        if value is None and type(None) in options:
            return None
        for option in options:
            if dataclasses.is_dataclass(option):  # what is wrong inside is told of its own key
                return typed(value, option, key)
            if option is not type(None):
                try:
                    return typed(value, option, key)
                except UserError:
                    continue
        raise UserError(f"{key}: expected {_name(expected)}, got {value!r}")
    if dataclasses.is_dataclass(expected):
        return from_dict(typing.cast(type, expected), value, key)
    if expected is Any:
        return value
    if origin in (dict, list):
        if not isinstance(value, origin):
            raise UserError(f"{key}: expected {_name(expected)}, got {value!r}")
        if origin is list:
            (item,) = typing.get_args(expected)
            return [typed(v, item, f"{key}[{i}]") for i, v in enumerate(value)]
        return {k: typed(v, typing.get_args(expected)[1], f"{key}.{k}") for k, v in value.items()}
    if expected is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    elif isinstance(value, expected) and not (expected is int and isinstance(value, bool)):
        return value
    raise UserError(f"{key}: expected {_name(expected)}, got {value!r}")


def _name(annotation: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_name(a) for a in typing.get_args(annotation))
    if typing.get_origin(annotation) is list:
        return "a list"
    return names.get(annotation, "a section of keys")


def check_keys(given: Any, known: typing.Iterable[str], where: str) -> None:
    known = list(known)
    if not isinstance(given, dict):
        raise UserError(f"{where or 'the config'}: expected a section of keys, got {given!r}")
    for key in given:
        if key not in known:
            path = f"{where}.{key}" if where else str(key)
            raise UserError(f'unknown key "{path}"{did_you_mean(str(key), known)}')


def _check_places(given: dict[Any, Any], known: typing.Iterable[str]) -> None:
    """Whether a key that belongs into a section stands outside all of them."""
    sections = {"data": DataConfig, "training": TrainingConfig, "evaluation": EvaluationConfig, "plasticity": PlasticityConfig}
    places = {one.name: section for section, cls in sections.items() for one in dataclasses.fields(cls)}
    if isinstance(given.get("model"), dict):
        places |= dict.fromkeys(map(str, given["model"]), "model")
    for key in map(str, given):
        if key in places or closest(key, known) is None:
            meant = closest(key, places)
            if key not in known and meant is not None:
                raise UserError(f'unknown key "{key}" (did you mean "{places[meant]}.{meant}"?)')


def from_dict(cls: type[T], given: Any, where: str = "") -> T:
    hints = typing.get_type_hints(cls)
    if not where and cls is RunConfig and isinstance(given, dict):
        _check_places(given, hints)
    check_keys(given, hints, where)
    prefix = f"{where}." if where else ""
    for one in dataclasses.fields(typing.cast(Any, cls)):
        if one.name not in given and one.default is one.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}: the key {one.name} is missing")
    return cls(**{key: typed(value, hints[key], prefix + key) for key, value in given.items()})


def validate(config: RunConfig) -> RunConfig:
    def get(key: str) -> Any:
        section, name = key.split(".")
        return getattr(getattr(config, section), name)

    kind = config.kind
    if config.data.layout is None:
        config.data.layout = kind.layout
    for key, choices in CHOICES.items():
        if get(key) not in choices:
            raise UserError(f"{key}: {get(key)!r} is none of {', '.join(choices)}")
    for tracker in config.training.trackers or ():
        if tracker not in TRACKERS:
            raise UserError(f"training.trackers: {tracker!r} is none of {', '.join(TRACKERS)}")
    for key in POSITIVE:
        if get(key) is not None and not get(key) > 0:
            raise UserError(f"{key}: must be above zero, got {get(key)}")
    if config.data.layout != kind.layout:
        raise UserError(f"data.layout: {config.data.layout}, but a model of type {kind.type} reads {kind.layout}")
    if not 0 <= config.training.seed < 2**31:
        raise UserError(f"training.seed: must lie between 0 and 2147483647, got {config.training.seed}")
    for key in ("data.mask_probability", "data.train_mask_probability"):
        if get(key) is not None and not 0 < get(key) < 1:
            raise UserError(f"{key}: must lie between 0 and 1, got {get(key)}")
    if not 3 <= config.data.max_length <= 65535:
        raise UserError(f"data.max_length: must lie between 3 and 65535, got {config.data.max_length}")
    for key in ("training.adam_beta1", "training.adam_beta2", "training.average_decay"):
        if get(key) is not None and not 0 <= get(key) < 1:
            raise UserError(f"{key}: must be at least 0 and below 1, got {get(key)}")
    for key in ("training.warmup_steps", "training.weight_decay", "training.min_learning_rate"):
        if get(key) < 0:
            raise UserError(f"{key}: must not be below zero, got {get(key)}")
    if not math.isfinite(config.training.epochs):
        raise UserError(f"training.epochs: must be finite, got {config.training.epochs}")
    if config.training.effective_batch_size % config.training.batch_size:
        raise UserError(
            f"training.batch_size: {config.training.batch_size} does not divide "
            f"training.effective_batch_size {config.training.effective_batch_size}"
        )
    if config.plasticity is not None:
        _validate_plasticity(config.plasticity, config.training)
    return config


def _validate_plasticity(asked: PlasticityConfig, training: TrainingConfig) -> None:
    for key in ("start", "end", "until"):
        if not 0 < getattr(asked, key) <= 1:
            raise UserError(f"plasticity.{key}: must lie above 0 and up to 1, got {getattr(asked, key)}")
    if not 0 <= asked.turnover < 1:
        raise UserError(f"plasticity.turnover: must be at least 0 and below 1, got {asked.turnover}")
    if asked.changes < 1:
        raise UserError(f"plasticity.changes: must be above zero, got {asked.changes}")
    for key, choices in {"prune_by": PRUNE_BY, "grow_by": GROW_BY}.items():
        if getattr(asked, key) not in choices:
            raise UserError(f"plasticity.{key}: {getattr(asked, key)!r} is none of {', '.join(choices)}")
    if not asked.kinds or len({*asked.kinds}) < len(asked.kinds) or not {*asked.kinds} <= {*PLASTIC_KINDS}:
        raise UserError(f"plasticity.kinds: expected a list of {' and '.join(PLASTIC_KINDS)}, got {asked.kinds}")
    if training.compile:
        raise UserError("training.compile: true, but a model that changes its shape is not compiled: leave it at null")


def without_removed(raw: dict[str, Any]) -> dict[str, Any]:
    """A config that an older version wrote, less the keys that mean nothing any more."""
    for key in REMOVED:
        section, _, name = key.rpartition(".")
        if isinstance(raw.get(section), dict) and raw[section].pop(name, None) is not None:
            _note_removed(key)
    return raw


@functools.cache  # once, however many configs of old runs a command reads
def _note_removed(key: str) -> None:
    say(f"note: the key {key} was removed ({REMOVED[key]}) and is ignored")


def with_overrides(raw: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Apply `a.b=c` settings (values are YAML) to the raw mapping of a config file."""
    for setting in overrides:
        path, sign, text = setting.partition("=")
        if not sign or not path:
            raise UserError(f'"{setting}" is not a setting of the form section.key=value')
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        *sections, last = path.split(".")
        target = raw
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise UserError(f'"{path}": {section} is not a section')
        target[last] = value
    return raw


def shipped_configs() -> dict[str, Path]:
    folder = Path(str(resources.files("pnn") / "configs"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_config(name_or_path: str, overrides: list[str] | None = None) -> RunConfig:
    """A config by the name of a shipped one or by path, with `section.key=value` overrides. A file that `extends` another one
    holds only what differs from it."""
    path, raw = _read(name_or_path)
    raw.setdefault("name", path.stem)
    return validate(from_dict(RunConfig, without_removed(with_overrides(raw, overrides or []))))


def _read(name_or_path: str, extended_by: tuple[Path, ...] = ()) -> tuple[Path, dict[str, Any]]:
    shipped = shipped_configs()
    path = Path(name_or_path)
    if name_or_path in shipped:
        path = shipped[name_or_path]
    elif not path.is_file():
        hint = did_you_mean(name_or_path, shipped, otherwise="pnn configs lists them")
        raise UserError(f'no config "{name_or_path}": neither a file nor a shipped name{hint}')
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a YAML file ({first_line(error)})") from None
    if raw in (None, {}):
        raise UserError(f"{path}: no settings in it: begin with `extends: quickstart_pnn`")
    if not isinstance(raw, dict):
        text = f"--set data.train={shlex.quote(str(path))}"
        raise UserError(f"{path}: expected sections of keys, got {type(raw).__name__}; text to train on is {text}")
    base = raw.pop("extends", None)
    if base is None:
        return path, raw
    if not isinstance(base, str):
        raise UserError(f"{path}: extends: expected text, got {base!r}")
    if path.resolve() in extended_by:
        raise UserError(f"{path}: it extends itself")
    beside = path.parent / base
    _, below = _read(str(beside) if base not in shipped and beside.is_file() else base, (*extended_by, path.resolve()))
    if _another_kind(below.get("model"), raw.get("model")):
        below = {**below, "model": {}}  # fields of one architecture mean nothing to another
    return path, _merged({key: value for key, value in below.items() if key != "name"}, raw)


def _another_kind(below: Any, changes: Any) -> bool:
    sections = isinstance(below, dict) and isinstance(changes, dict)
    said = {"type": "pnn", "architecture": None}  # where a section does not say
    return sections and any(key in changes and changes[key] != below.get(key, default) for key, default in said.items())


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        out[key] = _merged(base[key], value) if both else value
    return out
