"""Continue texts with a decoder. Ours ask only every few tokens which texts have ended, and go on with the next prompt there
(`models/continuous`). Others, and ours where generation_config.json asks for more, take prompts in batches, padded on the left,
through transformers' own `generate`, which waits for the device at every token."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pnn.data.tokenizers import end_of_text, unknown_token
from pnn.errors import UserError, first_line
from pnn.evaluation.fill import is_unicode
from pnn.models.continuous import continue_all, most_probable, sampled
from pnn.models.loading import Loaded, longest_input
from pnn.models.precision import predicting
from pnn.models.registry import kind_of


class Continued(TypedDict):
    """One text. `unknown`: pieces of the prompt that the tokenizer has no token for, if there are any."""

    prompt: str
    continuation: str
    unknown: NotRequired[int]


def continue_texts(
    loaded: Loaded[PreTrainedModel],
    prompts: list[str],
    *,
    max_new_tokens: int = 50,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    batch_size: int = 16,
) -> list[Continued]:
    """For each prompt, what follows it. Temperature 0 takes the most probable token every time."""
    model, tokenizer = loaded.model, loaded.tokenizer
    for number, prompt in enumerate(prompts, 1):
        if not is_unicode(prompt):
            raise UserError(f"prompt {number} is not valid UTF-8")
    ids = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(prompts, add_special_tokens=False)]
    _check(ids, max_new_tokens, temperature, top_k, longest_input(model))
    filler = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end_of_text(tokenizer)
    settings: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        settings |= {"temperature": temperature, "top_k": top_k or 0}
    torch.manual_seed(seed)
    if kind_of(model).ours and not _told_more(model):
        choose = sampled(temperature, top_k) if temperature > 0 else most_probable
        with predicting(model, loaded.precision):
            added = continue_all(model, ids, max_new_tokens, {end_of_text(tokenizer)}, choose, batch_size)
        return [_in_words(tokenizer, prompt, *both) for prompt, *both in zip(prompts, ids, added, strict=True)]
    out: list[Continued] = []
    for at in range(0, len(ids), batch_size):
        part = ids[at : at + batch_size]
        longest = max(map(len, part))
        padded = torch.tensor([[filler] * (longest - len(row)) + row for row in part], device=model.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in part], device=model.device)
        with predicting(model, loaded.precision):
            try:
                made: Any = model.generate(
                    padded,
                    attention_mask=mask,
                    max_new_tokens=max_new_tokens,
                    eos_token_id=end_of_text(tokenizer),
                    pad_token_id=filler,
                    **settings,
                )
            except (TypeError, ValueError, AttributeError) as error:
                # what else it is told stands in a file of the model's folder
                told = f"cannot generate with its generation_config.json ({first_line(error)})"
                raise UserError(f"{loaded.checkpoint}: {told}") from error
        for prompt, before, added in zip(prompts[at : at + batch_size], part, made[:, longest:].tolist(), strict=True):
            out.append(_in_words(tokenizer, prompt, before, added))
    return out


def _told_more(model: PreTrainedModel) -> bool:
    """Whether its generation_config.json says more than which token is special: `generate` follows or refuses that."""
    known = {"transformers_version", "_from_model_config", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"}
    told: dict[str, Any] = model.generation_config.to_diff_dict()
    said = {key: value for key, value in told.items() if value is not None and value is not False}
    return any(key not in known or isinstance(value, list) for key, value in said.items())


def _in_words(tokenizer: PreTrainedTokenizerFast, prompt: str, before: list[int], added: list[int]) -> Continued:
    made: Continued = {"prompt": prompt, "continuation": _continuation(tokenizer, prompt, before, added)}
    if unknown := before.count(unknown_token(tokenizer)):  # type: ignore[arg-type]  # None is in no list of ids
        made["unknown"] = unknown
    return made


def _continuation(tokenizer: PreTrainedTokenizerFast, prompt: str, before: list[int], added: list[int]) -> str:
    """What the new tokens add to the text. Read by themselves they would lose the space that parts them from the prompt."""
    text, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (before, before + added))
    continuation = whole[len(text) :]
    return continuation.removeprefix(" ") if prompt.endswith(" ") else continuation


def _check(ids: list[list[int]], max_new_tokens: int, temperature: float, top_k: int | None, context: int) -> None:
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens}: expected at least 1")
    if temperature < 0:
        raise UserError(f"--temperature {temperature}: expected 0 or more")
    if top_k is not None and top_k < 1:
        raise UserError(f"--top-k {top_k}: expected at least 1")
    for number, row in enumerate(ids, 1):
        if not row:
            raise UserError(f"prompt {number} is empty: give at least one word to continue")
        if len(row) > context:
            raise UserError(f"prompt {number} has {len(row):,} tokens, but the model takes {context:,}")
        if len(row) + max_new_tokens > context:
            raise UserError(
                f"prompt {number} has {len(row):,} tokens and leaves room for {context - len(row):,} of the model's "
                f"{context:,}, not for --max-new-tokens {max_new_tokens:,}"
            )
