"""What a config of ours is given: values of the right kinds, and names that it knows. `@strict` does not look at the kinds of
values where annotations are text, as in all our files."""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import types
import typing
import warnings
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedConfig

# What may stand for an annotation, and what it is called
KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((numbers.Integral,), "a whole number"),
    float: ((numbers.Real,), "a number"),
    bool: ((bool, numbers.Integral), "true or false"),
    str: ((str,), "text"),
    list: ((list, tuple), "a list"),
    dict: ((dict,), "a mapping"),
    type(None): ((type(None),), "None"),
}
MISSPELT = 0.8  # how close a name must be to a field's


@functools.cache
def own_fields(config_class: Any) -> dict[str, Any]:
    """The architecture's and how they are annotated, not those that every config of transformers has."""
    classes = [one for one in reversed(config_class.__mro__) if issubclass(one, PreTrainedConfig) and one.model_type]
    return {key: hint for one in classes for key, hint in inspect.get_annotations(one, eval_str=True).items()}


def parts(hint: Any) -> tuple[Any, ...]:
    """What a field may be: of `int | None`, both."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def check_kinds(config: Any) -> None:
    for name, hint in own_fields(config.__class__).items():
        value, known = getattr(config, name), [KINDS.get(typing.get_origin(part) or part) for part in parts(hint)]
        fitting = [kind for kind in known if kind is not None]
        if len(fitting) == len(known) and not any(isinstance(value, kinds) for kinds, _ in fitting):
            raise ValueError(f"{name}={value!r}: expected {' or '.join(dict.fromkeys(word for _, word in fitting))}")


def warn_of_misspelt(config: Any, unknown: Iterable[str]) -> None:
    """transformers keeps keys that a config does not know, so that configs of other versions load."""
    for key in unknown:
        meant = difflib.get_close_matches(key, own_fields(config.__class__), n=1, cutoff=MISSPELT)
        if meant and not key.endswith("_token_id"):  # there are many such, alike and each with a meaning
            said = f'{type(config).__name__} does not know "{key}", which has no effect (did you mean "{meant[0]}"?)'
            warnings.warn(said, stacklevel=2)
