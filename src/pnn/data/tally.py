"""What becomes of a text on its way to token shards: counted while it is read, kept in the shards' manifest, told to people."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass
class Tally:
    lines: int = 0  # with text in them
    lines_filtered: int = 0  # of these, taken away by data.filter
    lines_cut: int = 0  # longer than data.max_length
    tokens: int = 0  # of all lines that passed, whole, without [CLS] and [SEP]
    tokens_cut: int = 0  # of these, beyond data.max_length; of rows, what fills no last row

    @classmethod
    def can_be(cls, found: Any) -> bool:
        """Whether these are the counts of a text, as they are read back."""
        if not isinstance(found, dict) or not found.keys() <= {one.name for one in fields(cls)}:
            return False
        if not all(isinstance(count, int) and count >= 0 for count in found.values()):
            return False
        one = cls(**found)
        return one.lines_cut <= one._passed and one.tokens_cut <= one.tokens and not (one.lines_cut and not one.tokens)

    def sentence(self, max_length: int) -> str | None:
        """What was left out, if anything."""
        parts = []
        if self.lines_filtered:
            parts.append(f"the filter took away {self.lines_filtered:,} of {self.lines:,} lines")
        if self.lines_cut:
            parts.append(
                f"data.max_length={max_length} cut off {_per_cent(self.tokens_cut / self.tokens)} of the text "
                f"({self.lines_cut:,} of {self._passed:,} lines are longer)"
            )
        elif self.tokens_cut:
            parts.append(f"the last {self.tokens_cut:,} tokens fill no row of {max_length}")
        return "; ".join(parts) or None

    def advice(self, max_length: int) -> str | None:
        """What to change where most lines are cut."""
        if 2 * self.lines_cut <= self._passed:
            return None
        mean = self.tokens / self._passed
        enough = 1 << int(max(mean, max_length)).bit_length()  # the next power of two
        return (
            f"most lines are longer than data.max_length={max_length} (on average {mean:.0f} tokens): "
            f"--set data.max_length={enough} keeps more of each and takes more time and memory"
        )

    @property
    def _passed(self) -> int:
        return self.lines - self.lines_filtered


def _per_cent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.2g} %"
