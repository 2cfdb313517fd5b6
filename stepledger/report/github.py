"""The report as GitHub workflow commands, which a workflow's log shows as annotations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .text import firsts, line, verdict, where
from .visible import visible

if TYPE_CHECKING:
    from ..result import Comparison

__all__ = ["refusal", "report"]

#: Errors that GitHub shows of one step; further ones are only in the log.
_SHOWN = 10


def report(comparison: Comparison) -> str:
    """The commands: the verdict, the first difference of each environment, and what could not be told."""
    return "\n".join(_commands(comparison))


def refusal(sentence: str) -> str:
    """Why there is nothing to report."""
    return _command("error", "stepledger: can't be compared", sentence)


def _commands(comparison: Comparison) -> Iterator[str]:
    status = comparison.exit_status
    kind = {0: "notice", 3: "warning"}.get(status, "error")
    yield _command(kind, "stepledger", verdict(comparison))
    by_hop = ([one for one in comparison.differences if one.hop == hop.name] for hop in comparison.hops)
    found = [one for differences in by_hop for one in firsts(differences)]
    for difference in found[: _SHOWN - 1]:
        yield _command("error", f"{difference.hop}: {where(difference)}", line(difference))
    for hop in comparison.hops:
        for sentence in hop.unpaired:
            yield _command("error", f"{hop.name}: not compared", sentence)
        for sentence in hop.unknown:
            yield _command("warning", f"{hop.name}: unknown", sentence)
    for finding in comparison.warnings[:_SHOWN]:
        yield _command("warning", f"{finding.tap} {finding.code}", finding.text)


def _command(kind: str, title: str, message: str) -> str:
    title, message = (visible(text).replace("%", "%25") for text in (title, message))
    return f"::{kind} title={title.replace(':', '%3A').replace(',', '%2C')}::{message}"
