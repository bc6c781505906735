"""Code that travels with a model: whoever has transformers and torch, but not this package, loads the folder with
`trust_remote_code=True`.

The files are our own sources, as they are, under names without folders (transformers' rule): `pnn/nn/attention.py` becomes
`nn_attention.py`, `pnn/models/pnn.py` `modeling_pnn.py`. Only imports are rewritten. Which files are needed follows from the
imports. Triton kernels stay behind: the plain equations run in their place, on every device.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedModel

import pnn
from pnn.errors import UserError
from pnn.files import write_json, write_text
from pnn.kinds import OURS
from pnn.models.registry import ENTRIES, kind_of
from pnn.runs import read_json

SOURCES = Path(__file__).parents[1]  # src/pnn
WITHOUT_KERNELS = (
    "# Fast kernels come with the package plastic-neural-networks; here the plain equations run.\nHAS_TRITON = False\n"
)

FROM_MODULE = re.compile(r"^from (pnn(?:\.\w+)+) import (?=.)", re.MULTILINE)
FROM_PACKAGE = re.compile(r"^from (pnn(?:\.(?:nn|kernels))?) import (\w+)$", re.MULTILINE)
FROM_KERNELS = re.compile(r"^( +)from pnn\.kernels import (\w+)(?: as (\w+))?(?:  #.*)?$", re.MULTILINE)


def has_code(model: PreTrainedModel) -> bool:
    """A reorganised model is of a class made for it, which no file defines."""
    kind = kind_of(model)
    return kind.ours and type(model) in ENTRIES[kind.type].classes.values()


def check_ours(model: PreTrainedModel) -> None:
    if not has_code(model):
        known = ", ".join(kind.model_type for kind in OURS)
        raise UserError(
            f"--remote-code: a {type(model).__name__} is none of the models that have code to add ({known}, not reorganised)"
        )


def write_remote_code(folder: Path, model: PreTrainedModel) -> None:
    """Put the code beside an exported model and say so in its config.json."""
    entry = ENTRIES[kind_of(model).type]
    write_code(folder, "config.json", {AutoConfig: entry.config, **entry.classes})


def write_code(folder: Path, file: str, classes: dict[Any, type]) -> None:
    """Put the code of these classes into a folder, and name them by their Auto class in this JSON file of it."""
    for module in {one.__module__ for one in classes.values()}:
        for name, text in flattened(module).items():
            write_text(folder / f"{name}.py", text)
    names = {auto.__name__: f"{file_name(one.__module__)}.{one.__name__}" for auto, one in classes.items()}
    values: dict[str, Any] = read_json(folder / file)
    write_json(folder / file, {**values, "auto_map": names})


def flattened(module: str) -> dict[str, str]:
    """The text of a module and of all that it needs, by file name."""
    found: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if file_name(name) not in found:
            found[file_name(name)], needs = _rewritten(name)
            waiting += needs
    return found


def file_name(module: str) -> str:
    parts = module.removeprefix("pnn.").split(".")
    return "_".join(["modeling", *parts[1:]] if parts[0] == "models" else parts)


def _rewritten(module: str) -> tuple[str, list[str]]:
    """Its text with relative imports, and the modules that these name."""
    if module == "pnn.kernels":
        return WITHOUT_KERNELS, []
    path = SOURCES.joinpath(*module.split(".")[1:]).with_suffix(".py")
    needs: list[str] = []

    def whole_module(match: re.Match[str]) -> str:
        needed = f"{match[1]}.{match[2]}"
        needs.append(needed)
        file = file_name(needed)
        # transformers copies files that are imported in the first line's form only
        return f"from .{file} import __doc__ as _{match[2]}  # noqa: F401\nfrom . import {file} as {match[2]}"

    def names(match: re.Match[str]) -> str:
        needs.append(match[1])
        return f"from .{file_name(match[1])} import "

    text = path.read_text(encoding="utf-8")
    text = FROM_KERNELS.sub(lambda match: f"{match[1]}{match[3] or match[2]} = None  # never reached without kernels", text)
    text = FROM_PACKAGE.sub(whole_module, text)
    text = FROM_MODULE.sub(names, text)
    if re.search(r"^\s*(from|import) pnn\b", text, re.MULTILINE):
        raise AssertionError(f"{module} imports something of ours in a form that remote code cannot have")
    source = "/".join(["pnn", *path.relative_to(SOURCES).parts])
    return f"# From plastic-neural-networks {pnn.__version__}, {source}. MIT licence.\n{text}", needs
