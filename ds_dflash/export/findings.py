"""What is off with a directory, and for whom."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ds_dflash.errors import UserError

Level = Literal["broken", "unservable", "odd"]


@dataclass(frozen=True)
class Finding:
    """One sentence about a drafter's directory.

    level: "broken" is wrong or ambiguous for every reader; "unservable" fails, or is misread in silence, in vLLM or
    SGLang, but training can start from it; "odd" works, but is written otherwise here.
    """

    level: Level
    sentence: str

    @property
    def breaks_contract(self) -> bool:
        return self.level != "odd"


def broken(sentence: str) -> Finding:
    return Finding("broken", _line(sentence))


def unservable(sentence: str) -> Finding:
    return Finding("unservable", _line(sentence))


def odd(sentence: str) -> Finding:
    return Finding("odd", _line(sentence))


def _line(sentence: str) -> str:
    """One line, whatever the names and messages in it hold."""
    return " ".join(sentence.splitlines())


def refuse(findings: Sequence[Finding], directory: Path) -> None:
    """Raise UserError with the first of `findings`, if there is one."""
    if findings:
        first, more = findings[0].sentence, len(findings) - 1
        if more:
            first = f"{first.removesuffix('.')}; `ds-dflash export --check {directory}` shows this and {more} more."
        raise UserError(f"{directory}: {first}")
