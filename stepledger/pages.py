"""The catalogue of explanations as a person reads it: one code, the list of all, and the page of the docs."""

from __future__ import annotations

import textwrap

from .codes import CATALOGUE, Code
from .errors import LedgerError

__all__ = ["listing", "markdown", "page"]

_GROUPS = {
    "SL1": "Values",
    "SL2": "End flags",
    "SL3": "Sequence of events",
    "SL5": "What is learned from",
    "SL6": "Warnings about one ledger",
}
_WIDTH = 100


def page(code: str) -> str:
    """What a code means and what to check, as text.

    Raises:
        LedgerError: There is no such code.
    """
    found = CATALOGUE.get(code.upper())
    if found is None:
        raise LedgerError(f"there is no code {code!r}: stepledger explain lists all.")
    parts = [f"{code.upper()}  {found.title}", found.meaning, f"Check: {found.check}"]
    if found.faults:
        parts.append(f"Faults: {', '.join(found.faults)}")
    return "\n\n".join(textwrap.fill(part.replace("``", ""), _WIDTH) for part in parts)


def listing() -> str:
    """All codes with their titles, as text."""
    lines: list[str] = []
    for prefix, group in _GROUPS.items():
        if codes := _of(prefix):
            lines += [group, *(f"  {code}  {CATALOGUE[code].title}" for code in codes)]
    return "\n".join(lines)


def markdown() -> str:
    """The whole catalogue, as the page of the docs."""
    lines = [
        "# Explanations",
        "",
        "Where two sides of a hop differ, the report says what may be behind it: a code, and a sentence about this difference. Several",
        "that fit are all given, best first; those that fit most differences of an environment come before others. This page is made from",
        "`stepledger/codes.py` by `pytest tests/test_codes.py --write`; `stepledger explain CODE` prints one entry of it.",
    ]
    for prefix, group in _GROUPS.items():
        if codes := _of(prefix):
            lines += ["", f"## {group}"]
            for code in codes:
                lines += ["", f"### {code}: {CATALOGUE[code].title}", "", *_paragraphs(CATALOGUE[code])]
    return "\n".join(lines) + "\n"


def _paragraphs(code: Code) -> list[str]:
    lines = [*_wrapped(code.meaning), "", *_wrapped(f"**Check:** {code.check}")]
    if code.faults:
        lines += ["", *_wrapped(f"Faults: {', '.join(f'`{name}`' for name in code.faults)}")]
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text.replace("``", "`"), 140, break_long_words=False, break_on_hyphens=False)


def _of(prefix: str) -> list[str]:
    return sorted(code for code in CATALOGUE if code.startswith(prefix))
