"""What plasticity.json says of a model that was pruned, grown or shrunk by a command, without a whole cycle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pnn.errors import UserError
from pnn.export.cycles import public
from pnn.numbers import per_cent
from pnn.plasticity.architectures import WIDTH
from pnn.plasticity.models import HISTORY
from pnn.plasticity.vocabulary import TOKEN
from pnn.runs import read_json


class Changes:
    def __init__(self, checkpoint: Path):
        file = checkpoint / HISTORY
        held = read_json(file)
        try:
            self.source, self.done = public(held["source"]), [_said(change) for change in held["changes"]]
            self.shrunk: dict[str, Any] | None = held["changes"][-1].get("shrunk")  # what was measured, if that was last
        except (KeyError, TypeError, AttributeError, IndexError):
            raise UserError(f"{file} does not say what was done to the model: it is damaged") from None

    def what(self) -> str:
        return f"Made from `{self.source}`: {'; then '.join(self.done)}."

    def data(self) -> str:
        unknown = f"On what `{self.source}` was trained, this checkpoint does not say."
        if self.shrunk is None:
            return unknown
        before = self.shrunk["before"]
        return (
            f"`{public(self.shrunk['data'])}` said what goes, and the model learned from it. Measured on {before['rows']:,} "
            f"held-out rows of at most {before['row_tokens']:,} tokens. {unknown}"
        )

    def training(self) -> str:
        if self.shrunk is None:
            return "None after heads were pruned or grown."
        asked = self.shrunk["settings"]
        rank = asked.get("lora")  # models shrunk by earlier versions do not say
        how = "" if rank is None else f" by LoRA of rank {rank}, merged into the weights"
        return (
            f"After pruning {asked['learn_steps']:,} updates of {asked['batch_rows']:,} rows{how}, at a learning rate of "
            f"{asked['learning_rate']:g} at first; seed {asked['seed']}."
        )

    def results(self, causal: bool) -> str:
        if self.shrunk is None:
            return "Not measured since."
        what = "token" if causal else "masked token"
        kinds = list(self.shrunk["before"]["units"])
        columns = ["parameters", *(kind if kind == WIDTH else f"{kind}s" for kind in kinds), "perplexity"]
        lines = [f"Held-out text, perplexity by {what}:", "", f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for stage, name in (("before", "before"), ("pruned", "pruned"), ("after", "learned")):
            found = self.shrunk[stage]
            units = " | ".join(f"{found['units'][kind]:,}" for kind in kinds)
            lines.append(f"| {name} | {found['parameters']:,} | {units} | {found['perplexity']:,.2f} |")
        lines += ["", "| speed where it was shrunk, tokens per second | before | now | times |", "|---|---|---|---|"]
        for what, speed in speeds_of(self.shrunk).items():
            before, after = speed["before"], speed["after"]
            lines.append(f"| {what} | {before:,.0f} | {after:,.0f} | {after / before:.2f} |")
        return "\n".join(lines)

    def limits(self) -> list[str]:
        if self.shrunk is None:
            return ["How well it does since heads were pruned or grown was not measured."]
        said = [
            "Learning on this text improves any model, an unpruned one too: compare with one that learned as long.",
            "One seed, and one text: what was lost on other text was not measured.",
        ]
        before, after = (self.shrunk[stage]["units"].get(TOKEN) for stage in ("before", "after"))
        if before != after:
            rare = self.shrunk.get("rare_tokens", 0)
            whose = f"({rare:,} that this text rarely has, others that it never has)" if rare else "that this text never had"
            which = "this and other text takes" if rare else "other text takes"
            said.append(f"{before - after:,} tokens {whose} are gone: {which} more tokens than before.")
        return said


def speeds_of(summary: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Tokens a second before and after, by what was done."""
    reading = summary["reading"]
    found = {f"reading {reading['batch']} × {reading['length']} tokens": reading["tokens_per_second"]}
    if summary["writing"] is not None:
        found["writing one text"] = summary["writing"]["tokens_per_second"]
    return found


def _said(change: dict[str, Any]) -> str:
    if "shrunk" in change:
        summary = change["shrunk"]
        before, after = summary["before"]["units"], summary["after"]["units"]
        gone = [kind for kind in before if after[kind] < before[kind]]
        lost = [f"{before[kind] - after[kind]:,} of {before[kind]:,} {kind}s" for kind in gone]
        text = f"{per_cent(summary['fewer_parameters'])} of the parameters pruned ({', '.join(lost)})"
        if gone == [TOKEN]:
            seldom = "rarely or never" if summary.get("rare_tokens") else "never"
            return f"{text}, which `{public(change['data'])}` {seldom} has"
    elif "pruned" in change:
        text = f"{len(change['pruned'])} of {change['heads_before']} attention heads pruned"
    else:
        text = f"{len(change['grown'])} attention heads grown beside {change['heads_before']}"
    on = "" if change["data"] is None else f" on `{public(change['data'])}`"
    return f"{text}, chosen by {change['by'].replace('_', ' ')}{on}"
