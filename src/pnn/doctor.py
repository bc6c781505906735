"""What `pnn doctor` says about a machine: plain sentences, each a fact, what follows from it, and what to do if it is wrong."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from packaging.requirements import Requirement

from pnn import __version__, kernels
from pnn.config import DataConfig, RunConfig, load_config, shipped_configs
from pnn.errors import first_line
from pnn.models.precision import NARROW
from pnn.nn.fast import kernels_compute
from pnn.numbers import several
from pnn.training.device import compiles, precision_of

DISTRIBUTION = "plastic-neural-networks"
EXTRAS = {  # module → the extra's packages, which pip finds with a checkout and without, and what needs them
    "lm_eval": ("lm-eval", "pnn evaluate --task"),
    "onnxruntime": ("onnx onnxscript onnxruntime", "pnn export --onnx"),
    "gradio": ("gradio", "pnn explore"),
}
LITTLE_DISK = 5 << 30  # bytes; a run of a published size keeps checkpoints of 2 GB


@dataclass(frozen=True)
class Finding:
    text: str
    broken: bool = False  # nothing works before this is mended


def examine() -> Iterator[Finding]:
    yield from versions()
    yield from owners()
    yield from devices()
    yield from speed()
    yield from extras()
    yield from disk(Path.cwd())  # where runs and prepared text will lie


def versions() -> Iterator[Finding]:
    yield Finding(f"pnn {__version__} on Python {platform.python_version()}, {platform.system()} {platform.machine()}.")
    try:
        needed = [Requirement(line) for line in importlib.metadata.requires(DISTRIBUTION) or [] if "extra ==" not in line]
    except importlib.metadata.PackageNotFoundError:
        yield Finding("The package is not installed, only found: pip install -e . makes sure of what it needs.")
        return
    found, wrong = [], []
    for requirement in needed:
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing: pip install '{requirement}' mends it.")
            continue
        found.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, which does not fit: pip install '{requirement}' mends it.")
    yield Finding(f"Packages: {', '.join(found)}.")
    for what in wrong:
        yield Finding(what, broken=True)


def owners() -> Iterator[Finding]:
    """Whose `pnn` this is: on PyPI the name belongs to another project, whose package would lie in the same folder."""
    yield Finding(f"`pnn` is the package of {DISTRIBUTION}, in {Path(__file__).parent}.")
    for other in sorted(set(importlib.metadata.packages_distributions().get("pnn", [])) - {DISTRIBUTION}):
        yield Finding(
            f"The distribution {other} also has a package `pnn`: pip uninstall {other}, then install {DISTRIBUTION} again.",
            broken=True,
        )


def devices() -> Iterator[Finding]:
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        yield Finding(f"GPU {index}: {torch.cuda.get_device_name(index)}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free.")
    if not torch.cuda.is_available():
        yield Finding("No GPU that torch can use: models train on the CPU.")
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    yield Finding(f"CPU: {cores} cores; torch computes with {several(threads, 'thread')}.")
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0
    if busy > cores:
        yield Finding(f"The machine is busy: {busy:.0f} programs want its {cores} cores, so training will be slow.")
    for device in ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))):
        try:
            ones = torch.ones(64, 64, device=device)
            right = bool((ones @ ones == 64).all())
        except RuntimeError as error:
            yield Finding(f"torch cannot compute on {device} ({first_line(error)}): mend its driver or its build.", broken=True)
        else:
            if not right:
                yield Finding(f"torch computes wrong products on {device}: do not trust it.", broken=True)


def speed() -> Iterator[Finding]:
    config = RunConfig()
    mixed, on_gpu = precision_of(config)
    precision = "fp32" if mixed == "no" else mixed
    compiled = "compiled" if compiles(config.training, on_gpu) else "not compiled"
    narrow = f" (in fp32 where states are narrower than {NARROW})" if mixed == "bf16" and not on_gpu else ""
    yield Finding(f"Training computes in {precision}{narrow}, {compiled}.")
    triton = f"Triton {importlib.import_module('triton').__version__}" if kernels.HAS_TRITON else "no Triton"
    if on_gpu and kernels_compute(torch.device("cuda"), torch.bfloat16 if mixed == "bf16" else torch.float16):
        yield Finding(f"Our kernels run here ({triton}): every shipped config trains fast.")
    elif on_gpu:
        yield Finding(f"Our kernels do not run here ({triton}, or an old GPU): the plain equations do, several times slower.")
    else:
        small = [name for name in shipped_configs() if load_config(name).data.train == "synthetic"]
        yield Finding(
            f"Our kernels need a GPU ({triton}). Fast here: {', '.join(small)} (minutes). "
            "Slow here: training every other config (days)."
        )


def extras() -> Iterator[Finding]:
    for module, (packages, command) in EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            yield Finding(f"{command} does not work yet: pip install {packages} adds it.")


def disk(folder: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(folder).free
    advice = ": too little for a run of a published size" if free < LITTLE_DISK else ""
    yield Finding(f"Disk: {free / 1e9:.0f} GB free in {folder}{advice}.")
    if not os.access(folder, os.W_OK):
        yield Finding(f"Nothing can be written in {folder}: go to a folder of your own.", broken=True)
    runs = sorted(path.parent for path in folder.glob("runs/**/config.yaml"))
    yield Finding(f"Runs: {len(runs)} in {folder / 'runs'}." if runs else "Runs: none in this folder yet.")
    prepared = folder / DataConfig().prepared
    shards = list(prepared.glob("*/manifest.json"))
    size = sum(file.stat().st_size for file in prepared.rglob("*") if file.is_file())
    yield Finding(f"Prepared text: {len(shards)} in {prepared}, {size / 1e9:.1f} GB." if shards else "Prepared text: none yet.")
    from huggingface_hub import constants

    offline = ", and the hub is switched off (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else ""
    yield Finding(f"Downloads from the hub lie in {constants.HF_HUB_CACHE}{offline}.")
