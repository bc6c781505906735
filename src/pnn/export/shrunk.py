"""`pnn shrink`: from a MODEL's name to the folder of a smaller one, with its card and what was measured.

The folder appears whole or not at all. What is under way lies beside it, in NAME.unfinished, until then; the model that was
given is only read.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from pnn.data.shards import Progress
from pnn.errors import UserError
from pnn.export.card import model_card
from pnn.export.loading import Exported
from pnn.files import is_taken, new_folder, remove_folder, write_checksums, write_json, write_text
from pnn.memory import out_of_memory_says
from pnn.models.loading import save_tokenizer
from pnn.plasticity.cycle import fingerprint
from pnn.plasticity.journal import check_free, check_same
from pnn.plasticity.models import HISTORY
from pnn.plasticity.run import history_with, open_model, what_needs_less
from pnn.plasticity.shrink import DEFAULTS, ShrinkSettings, check, shrink
from pnn.plasticity.text import read_text
from pnn.plasticity.vocabulary import TOKEN
from pnn.runs import read_json

SUMMARY = "summary.json"
KEPT = ("shrink.json", "environment.json", "metrics.jsonl")  # of the work: what was asked for, where, and every measurement


def run_shrink(
    model: str,
    data: str,
    output: Path,
    settings: ShrinkSettings,
    *,
    validation: str | None = None,
    length: int | None = None,
    held_out_rows: int = 64,
    resume: bool = False,
    progress: Progress,
) -> dict[str, Any]:
    """What was measured, which summary.json in the new folder says too."""
    work = output.with_name(f"{output.name}.unfinished")
    finished = resume and (output / SUMMARY).exists() and (output / "shrink.json").exists()
    if not finished:
        check_free(output)
        if is_taken(work) and not resume:
            raise UserError(f"{work} holds unfinished work on {output}: continue it with --resume, or remove it")
    loaded = open_model(model)
    check(loaded.model, settings, loaded.tokenizer)
    text = read_text(
        loaded.model,
        loaded.tokenizer,
        data,
        validation=validation,
        length=length,
        train_rows=settings.as_cycle().rows_needed(),
        held_out_rows=held_out_rows,
        count=TOKEN in settings.kinds,
        progress=progress,
    )
    if finished:
        asked = settings.as_json() | {"weights": fingerprint(loaded.model), "text": text.fingerprint()}
        check_same(output, DEFAULTS | read_json(output / "shrink.json"), asked, "shrink")
        if work.exists():  # a kill came between the folder and this
            remove_folder(work)
        return read_json(output / SUMMARY)
    name = Path(model).resolve().name if Path(model).exists() else model
    with out_of_memory_says(lambda: what_needs_less(settings.batch_rows, text, settings.teacher)):
        smaller, summary, tokenizer, _ = shrink(
            loaded.model, text, work, settings, tokenizer=loaded.tokenizer, name=name, resume=resume, quiet=False
        )
    with new_folder(output) as partial:
        smaller.save_pretrained(partial)
        save_tokenizer(tokenizer, smaller, partial)
        write_json(partial / HISTORY, history_with(model, loaded, {"shrunk": summary, "by": settings.by, "data": data}))
        write_json(partial / SUMMARY, summary)
        for file in KEPT:
            shutil.copyfile(work / file, partial / file)
        write_checksums(partial)
        exported = Exported(output.name, partial, work, smaller, tokenizer)
        write_text(partial / "README.md", model_card(exported, bf16=False, remote_code=False, onnx_steps=None, licence=None))
    remove_folder(work)
    return summary
