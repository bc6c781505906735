"""A model with whatever head its checkpoint has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from pnn import runs
from pnn.data.tokenizers import load_tokenizer
from pnn.errors import UserError, first_line
from pnn.evaluation.reading import longest_input
from pnn.models.sections import LOADING_ERRORS

HEADS: dict[str, Any] = {
    "ForMaskedLM": AutoModelForMaskedLM,
    "ForCausalLM": AutoModelForCausalLM,
    "LMHeadModel": AutoModelForCausalLM,
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForMultipleChoice": AutoModelForMultipleChoice,
    "Model": AutoModel,
}


@dataclass(frozen=True)
class Exported:
    name: str
    checkpoint: Path | str
    run: Path | None  # the folder that knows how the model came about
    model: PreTrainedModel
    auto: str  # the Auto class that loads it
    tokenizer: PreTrainedTokenizerFast


def open_for_export(run: str) -> Exported:
    checkpoint = runs.find_checkpoint(run)
    if isinstance(checkpoint, Path):
        runs.verify_checkpoint(checkpoint)
    try:
        config = AutoConfig.from_pretrained(str(checkpoint), trust_remote_code=False)
        architecture = (config.architectures or [""])[0]
        auto = next((auto for end, auto in HEADS.items() if architecture.endswith(end)), None)
        if auto is None:
            raise UserError(f"{checkpoint}: config.json names no architecture that can be exported ({architecture or 'none'})")
        model, info = auto.from_pretrained(
            str(checkpoint), use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except LOADING_ERRORS as error:
        raise UserError(f"{checkpoint}: cannot load the model ({first_line(error)})") from error
    lost = sorted(info.get("missing_keys") or ())
    if lost:
        raise UserError(f"{checkpoint}: {len(lost)} weights are missing, first {lost[0]}")
    tokenizer = load_tokenizer(str(checkpoint), longest_input(model))
    folder = None
    if isinstance(checkpoint, Path):
        parent = checkpoint.resolve().parent.parent
        folder = parent if any((parent / file).exists() for file in ("config.yaml", "result.json", "cycle.json")) else None
    name = folder.name if folder is not None else Path(run).name
    if folder is not None and (folder / "finetune.json").exists():
        name = f"{runs.read_json(folder / 'finetune.json')['model']}-{folder.name}"
    return Exported(name, checkpoint, folder, model.eval(), auto.__name__, tokenizer)
