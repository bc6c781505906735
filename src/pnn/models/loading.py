"""From the name of a RUN, a checkpoint folder or a hub name to a model: of any kind, with any head, reorganised or not.

Every command loads here, so a folder that is damaged or holds something else gives the same sentence everywhere. Files are
compared with their checksums, weights are read from safetensors only, no code of others is run, and every weight must be
there and finite: a missing one would silently stay random. Only `load_with_new_head` takes a model without its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file, logging

from pnn import runs
from pnn.data.tokenizers import check_masks, load_tokenizer, to_continue
from pnn.errors import UserError, first_line
from pnn.memory import MOST, check_counts, check_fits
from pnn.models.base import MaskedLMBase
from pnn.models.plastic import PlasticConfig
from pnn.models.precision import predicts_in
from pnn.models.registry import AUTO_CLASSES, class_named, kind_of, language_class, steps_read
from pnn.progress import say

LONGEST = 2048  # where a model does not say how much it can take; lm-eval's own choice
M = TypeVar("M", bound=PreTrainedModel)


@dataclass(frozen=True)
class Loaded(Generic[M]):
    """`precision` is what the device computes in best: bf16 on a GPU that has it."""

    checkpoint: Path | str
    model: M
    tokenizer: PreTrainedTokenizerFast
    precision: torch.dtype


LoadedRun = Loaded[MaskedLMBase]


# RUNs: a model with its tokenizer, on its device --------------------------------------------------------------------


def load_run(
    run: str | Path, *, num_steps: int | None = None, device: str | None = None, of_decoders: str | None = None
) -> LoadedRun:
    """RUN's masked model. `num_steps` is only checked: whether the model can take so many. `of_decoders`: what to do with a
    decoder instead, for the message."""
    loaded = load_any(run, device=device)
    check_masked(loaded, of_decoders)
    check_num_steps(loaded.model, num_steps)
    return loaded


def check_masked(loaded: Loaded[Any], of_decoders: str | None = None) -> None:
    kind, name = kind_of(loaded.model), type(loaded.model).__name__
    if not (kind.ours and kind.masked):
        said = of_decoders if of_decoders and kind.causal else "it has no refinement steps to read"
        raise UserError(f"{loaded.checkpoint}: a {name} is not one of our masked models: {said}")
    check_masks(loaded.tokenizer, str(loaded.checkpoint))


def check_num_steps(model: PreTrainedModel, num_steps: int | None) -> None:
    if num_steps is None:
        return
    has_steps = kind_of(model).has_steps
    fewest = 1 if kind_of(model).causal else 0  # a decoder that reads nothing of the text before has no keys to keep
    most = MOST if has_steps else model.config.num_hidden_layers
    if not fewest <= num_steps <= most:
        raise UserError(f"--num-steps {num_steps}: this model takes {fewest} to {most:,}")
    if has_steps:
        note_untrained_steps(num_steps, model.config)
    elif num_steps < most:
        say(f"note: --num-steps {num_steps}, but the model was trained to be read after all its {most} layers")


def note_untrained_steps(asked: int, config: Any) -> None:
    """Refuse what the schedule does not take. Fewer steps than trained are fine where the loss is taken after each, as it is
    unless `step_weights` says otherwise."""
    if asked == 0:
        say("note: --num-steps 0 reads the embeddings alone, before any step")
        return
    try:
        config.order(asked)
    except ValueError as error:
        raise UserError(f"--num-steps: {error}") from None
    steps = config.trained_steps or config.num_steps
    fewest, most = config.random_steps or (1, steps)
    if not fewest <= asked <= most:
        trained = f"trained with {steps} steps: it has not learnt to use more"
        if config.random_steps:
            trained = f"trained with {fewest} to {most} steps"
        say(f"note: --num-steps {asked:,}, but the model was {trained}")
    elif not config.random_steps and asked not in steps_read(config):
        read = ", ".join(map(str, steps_read(config)))
        say(f"note: --num-steps {asked}, but the model was trained to be read after steps {read}")


def load_decoder(run: str | Path, *, device: str | None = None) -> Loaded[PreTrainedModel]:
    """RUN's model if it predicts the next token: one of ours, or any that transformers knows."""
    loaded = load_any(run, device=device)
    if kind_of(loaded.model).masked:
        raise UserError(f"{loaded.checkpoint}: a {type(loaded.model).__name__} fills in masks, it does not continue a text")
    return loaded


def load_any(run: str | Path, *, device: str | None = None) -> Loaded[Any]:
    """RUN's language model, on the GPU if there is one."""
    checkpoint = runs.find_checkpoint(run)
    if isinstance(checkpoint, str):
        say(f"there is no folder {checkpoint} here: asking the hub")
    model = load_model(checkpoint)
    tokenizer = tokenizer_for(checkpoint, model.config, longest_input(model))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    precision = predicts_in(device)
    if precision == torch.float32:
        model = model.float()  # weights may lie in bf16, which a CPU computes slowly
    return Loaded(checkpoint, model.to(device), tokenizer, precision)


def longest_input(subject: PreTrainedModel | PreTrainedConfig) -> int:
    return getattr(getattr(subject, "config", subject), "max_position_embeddings", None) or LONGEST


def tokenizer_for(checkpoint: Path | str, config: PreTrainedConfig, longest: int) -> PreTrainedTokenizerFast:
    tokenizer = load_tokenizer(str(checkpoint), longest)
    vocabulary = config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise UserError(
            f"{checkpoint}: the tokenizer has {len(tokenizer):,} entries, the model {vocabulary:,}: they do not match"
        )
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel, folder: Path) -> None:
    """Beside its model: a decoder's does not close a prompt."""
    (to_continue(tokenizer) if kind_of(model).causal else tokenizer).save_pretrained(folder)


# Checkpoints: a model alone -----------------------------------------------------------------------------------------


def read_config(name: str | Path) -> PreTrainedConfig:
    """config.json of a checkpoint folder or hub name; what lies beside it is compared with its checksums first."""
    if Path(name).is_dir():
        runs.verify_model(Path(name))
    import_module("pnn.plasticity.models")  # stands above this file, and tells the Auto classes of reorganised models
    with _failing_as(name, "model"):
        check_counts(PreTrainedConfig.get_config_dict(str(name))[0], str(name))
        config = _without_code(AutoConfig.from_pretrained(str(name), trust_remote_code=False))
        attention = str(config._attn_implementation)
        if "/" in attention:  # transformers would fetch it from the hub
            raise UserError(f"{name}: its config.json asks for code of others, which is not run ({attention})")
        _check_index(name, config)
    return config


def _without_code(config: PreTrainedConfig) -> PreTrainedConfig:
    """Code that lies beside the weights stays there: a model that is saved elsewhere must not name it."""
    vars(config).pop("auto_map", None)
    return config


def _check_index(name: str | Path, config: PreTrainedConfig) -> None:
    """Weights in several files have an index, by its usual name or by the one in config.json. It may name safetensors files of
    its folder only: others would be unpickled."""
    listing = str(getattr(config, "transformers_weights", None) or SAFE_WEIGHTS_INDEX_NAME)
    found = cached_file(str(name), listing, _raise_exceptions_for_missing_entries=False) if listing.endswith(".json") else None
    if found is None:
        return
    index = Path(found)
    try:
        files = {str(file) for file in runs.read_json(index)["weight_map"].values()}
    except (AttributeError, KeyError, TypeError):
        raise UserError(f"{index} has no weight_map that names the files of the weights") from None
    for file in sorted(files):
        if not file.endswith(".safetensors") or Path(file).name != file:
            raise UserError(f"{index} names {file}: weights are read from safetensors files of the same folder only")
        if Path(name).is_dir() and not (index.parent / file).exists():
            raise UserError(f"{index.parent / file} is missing: the checkpoint is not whole")


def read_original_config(name: str | Path) -> PreTrainedConfig:
    """The config that the model has once it is loaded: of a reorganised one, its original's."""
    config = read_config(name)
    with _failing_as(name, "model"):
        return config.original_config() if isinstance(config, PlasticConfig) else config


def load_model(name: str | Path) -> PreTrainedModel:
    """A masked or causal language model, whichever config.json names."""
    config = read_config(name)
    auto = _class_for(name, config)
    if not AUTO_CLASSES[auto].language:  # its layers would load, and only the missing head be told of
        raise UserError(f"{name}: cannot load a language model (its config.json names a {config.architectures[0]})")
    return _load(name, auto, config)


def load_as_named(name: str | Path) -> PreTrainedModel:
    """A model with the head that config.json names; a language model where that is none we know."""
    config = read_config(name)
    return _load(name, _class_for(name, config), config)


def _class_for(name: str | Path, config: PreTrainedConfig) -> Any:
    with _failing_as(name, "model"):
        return class_named(config) or language_class(config)


def _load(name: str | Path, auto: Any, config: PreTrainedConfig) -> PreTrainedModel:
    with _failing_as(name, AUTO_CLASSES[auto].what):
        check_fits(lambda: auto.from_config(config, trust_remote_code=False), str(name))
        model, info = auto.from_pretrained(str(name), use_safetensors=True, trust_remote_code=False, output_loading_info=True)
    _check_whole(name, info)
    _without_code(model.config)
    check_finite(name, model.named_parameters())
    return model


def load_with_new_head(name: str | Path, config: PreTrainedConfig, auto: Any, seed: int) -> PreTrainedModel:
    """The layers of a checkpoint in fp32 under a head of this Auto class, which is new and follows from the seed."""
    if getattr(config, "head_map", None) is not None:  # heads were removed or grown
        config = PlasticConfig.of(config, config.architectures[0])
    quiet = logging.get_verbosity()
    logging.set_verbosity_error()  # that the head is new is the point, not news
    try:
        with _failing_as(name, AUTO_CLASSES[auto].what), torch.random.fork_rng(devices=[]):
            check_fits(lambda: auto.from_config(config), str(name))
            torch.default_generator.manual_seed(seed)
            fresh = auto.from_config(config)
            model, info = auto.from_pretrained(
                str(name),
                config=config,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # the head of another task
                output_loading_info=True,
                dtype=torch.float32,
            )
    finally:
        logging.set_verbosity(quiet)
    base = model.base_model_prefix + "."
    _check_whole(name, info, lambda key: key.startswith(base) and "pooler" not in key)  # BERT's masked models have no pooler
    check_finite(name, model.named_parameters())
    with torch.no_grad():
        new = dict(fresh.named_parameters())
        for key, parameter in model.named_parameters():  # also where the checkpoint has a head: it is another task's
            if not key.startswith(base):
                parameter.copy_(new[key])
    return model


@contextmanager
def _failing_as(name: str | Path, what: str) -> Iterator[None]:
    """Whatever other libraries raise over files that are not there, damaged, or of something else: a config.json with text for
    a number reaches deep into them before anybody minds."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cannot = f"cannot load a {what}"
        if runs.is_hub_name(name):
            cannot = f"there is no such folder here, and no {what} came from the hub"
        raise UserError(f"{name}: {cannot} ({first_line(error)})") from error


def _check_whole(name: str | Path, info: dict[str, Any], counts: Callable[[str], bool] = lambda key: True) -> None:
    """Every weight that counts was in the file, in the model's shape."""
    for what in ("missing_keys", "mismatched_keys"):
        keys = [key if isinstance(key, str) else key[0] for key in info.get(what) or ()]
        lost = sorted(filter(counts, keys))
        if lost:
            raise UserError(
                f"{name}: the weights are not those of the architecture in config.json ({len(lost)} "
                f"{what.replace('_', ' ')}, first {lost[0]})"
            )


def check_finite(name: str | Path, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for key, value in weights:
        if not bool(torch.isfinite(value).all()):
            raise UserError(f"{name}: {key} holds values that are not finite: the model is damaged, or its training went wrong")
