"""Export a RUN: a folder with model, tokenizer, checksums and card; bf16, remote code, ONNX and publishing on request.

The card has no checksum: people add to it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from pnn.errors import UserError
from pnn.export import hub, onnx
from pnn.export.card import model_card
from pnn.export.loading import open_for_export
from pnn.export.remote_code import check_ours, has_code, write_remote_code
from pnn.export.sentences import write_pooling
from pnn.files import new_folder, write_checksums, write_text
from pnn.models.loading import note_untrained_steps, save_tokenizer
from pnn.models.registry import kind_of

FILE_SIZE = "48MB"  # of weights in bf16: git hosts warn from 50 MB on


def export_run(
    run: str,
    output: Path,
    *,
    bf16: bool = False,
    remote_code: bool | None = None,
    with_onnx: bool = False,
    int8: bool = False,
    num_steps: int | None = None,
    licence: str | None = None,
    push_to: str | None = None,
) -> dict[str, Any]:
    """The folder appears whole or not at all. Remote code goes along where there is some, unless told otherwise."""
    if output.exists():
        raise UserError(f"{output} exists already: choose another --output")
    if push_to is not None:
        hub.check_target(push_to)
    if with_onnx:
        onnx.check_installed()
    elif num_steps is not None:
        raise UserError(f"--num-steps {num_steps} needs --onnx, whose graph has a fixed number of steps")
    elif int8:
        raise UserError("--int8 needs --onnx, whose graph it makes smaller and faster")
    exported = open_for_export(run)
    if num_steps is not None:
        if not kind_of(exported.model).has_steps:
            raise UserError(f"--num-steps {num_steps}: a {exported.model.config.model_type} model has no refinement steps")
        if num_steps < 1:
            raise UserError(f"--num-steps {num_steps}: expected at least 1")
        note_untrained_steps(num_steps, exported.model.config)
    if remote_code is None:
        remote_code = has_code(exported.model)
    elif remote_code:
        check_ours(exported.model)
    result: dict[str, Any] = {"output": str(output), "model": exported.name, "auto_class": exported.auto.__name__}
    graph_steps = getattr(exported.model.config, "num_steps", 0) if num_steps is None else num_steps
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with new_folder(output) as partial:
            if bf16:
                _save_in_bf16(exported.model, partial)
            else:
                exported.model.save_pretrained(partial)
            save_tokenizer(exported.tokenizer, exported.model, partial)
            if remote_code:
                write_remote_code(partial, exported.model)
            if with_onnx:
                result["onnx_difference"] = onnx.write_onnx(partial / "model.onnx", exported.model, num_steps)
                result["onnx_steps"] = graph_steps
                if getattr(exported.model.config, "halt", None):
                    result["onnx_halts"] = False  # tokens of the model do
            if int8:
                result["int8_off"] = onnx.write_int8(partial / "model_int8.onnx", partial / "model.onnx", exported.model)
            write_pooling(partial, exported)
            for licence_text in Path(exported.checkpoint).glob("LICEN[CS]E*"):
                shutil.copy(licence_text, partial)
            write_checksums(partial)
            card = model_card(
                exported,
                bf16=bf16,
                remote_code=remote_code,
                onnx_steps=graph_steps if with_onnx else None,
                int8=int8,
                licence=licence,
            )
            write_text(partial / "README.md", card)
    finally:
        logging.set_verbosity(verbosity)
    if push_to is not None:
        result["pushed_to"] = hub.push(output, push_to)
    return result


def _save_in_bf16(model: PreTrainedModel, folder: Path) -> None:
    """Half the size. config.json says fp32, so whoever loads the weights computes in it, as a CPU does best. The model keeps
    the rounded weights: what else is made of it agrees with the folder."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.save_pretrained(folder, max_shard_size=FILE_SIZE)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    model.config.dtype = torch.float32
    model.config.save_pretrained(folder)
