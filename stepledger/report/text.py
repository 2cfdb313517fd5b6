"""The report as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..pairs import counted

if TYPE_CHECKING:
    from ..result import Comparison, Difference, Hop

__all__ = ["report"]

#: Lines of one hop's differences; the first of each environment come first.
LINES = 20


def report(comparison: Comparison) -> str:
    """The report: the first difference of each environment, then what each hop amounts to, then the verdict."""
    lines: list[str] = []
    for hop in comparison.hops:
        lines += _differences(hop, [one for one in comparison.differences if one.hop == hop.name])
    for hop in comparison.hops:
        lines += _summary(hop)
    lines.append(_verdict(comparison))
    return "\n".join(lines)


def _differences(hop: Hop, differences: list[Difference]) -> Iterator[str]:
    firsts: dict[tuple[int, int, str], Difference] = {}
    for difference in differences:
        firsts.setdefault((difference.runner, difference.env, difference.agent), difference)
    counts = {(one.runner, one.env, one.agent): one.differences for one in hop.different_streams}
    for key, difference in list(firsts.items())[:LINES]:
        more = counts[key] - 1
        yield line(difference) + (f", and {more:,} more {'in this env' if difference.env >= 0 else 'of unknown envs'}" if more else "")
    if len(firsts) > LINES:
        yield f"... and {len(firsts) - LINES:,} more envs that differ"


def line(difference: Difference) -> str:
    """One difference in one line."""
    runner = f"runner {difference.runner}, " if difference.runner else ""
    agent = f", agent {difference.agent}" if difference.agent else ""
    where = f"{runner}env {difference.env}{agent}, episode {difference.episode}, step {difference.step}"
    if difference.env < 0:
        where = "a learned transition (env unknown)"
    why = difference.explanations[:1]
    return "; ".join([f"{where}: {_what(difference)}", *why])


#: Hop -> who gave and who received, as a sentence says it.
_SIDES = {
    "env -> vector": ("env gave", "trainer received"),
    "vector -> episode": ("vector env gave", "episode holds"),
    "episode -> learner": ("episode holds", "learner received"),
    "vector -> learner": ("trainer was given", "learner holds"),
}


def _what(difference: Difference) -> str:
    gave, received = _SIDES.get(difference.hop.rpartition(": ")[2], ("first side has", "second side has"))
    events = "the event was" if difference.events == 1 else f"{difference.events:,} events were"
    if note := difference.second.get("event"):
        return f"{events.removesuffix(' was').removesuffix(' were')} should not be there: {note}"
    if difference.kind == "lost":
        return f"{events} lost ({gave} {'it' if difference.events == 1 else 'them'}, the other side has no such event)"
    if difference.kind == "extra":
        return f"{events} added ({received} {'it' if difference.events == 1 else 'them'}, the other side has no such event)"
    verb = "differs" if len(difference.fields) == 1 else "differ"
    details = []
    for name in difference.fields:
        if name in difference.first and name in difference.second:
            label = f"{name}: " if len(difference.fields) > 1 else ""
            details.append(f"{label}{gave} {difference.first[name]}, {received} {difference.second[name]}")
    return f"{', '.join(difference.fields)} {verb}" + (f" ({'; '.join(details)})" if details else "")


def _summary(hop: Hop) -> Iterator[str]:
    for sentence in hop.unpaired:
        yield f"not compared: {sentence}"
    for sentence in hop.unknown:
        yield f"unknown: {sentence}"
    for sentence in hop.notes:
        yield f"note: {sentence}"
    if hop.dropped:
        was = "was" if hop.dropped == 1 else "were"
        yield f"note: {counted(hop.dropped, 'earlier event')} {was} compared while it ran, and dropped"
    states: dict[str, list[str]] = {}
    for name, result in hop.fields.items():
        text = name
        if result.differences:
            text += f" ({result.differences:,})"
        if result.note:
            text += f" [{result.note}]"
        states.setdefault(result.status, []).append(text)
    if hop.coverage:
        why = "; ".join(f"{count:,} {reason}" for reason, count in hop.never_learned.items())
        counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in hop.coverage.items())
        yield f"{hop.name}: {counts}" + (f" ({why})" if why else "")
    for name, count in (("lost", hop.lost), ("added", hop.extra)):
        if count:
            states[f"events {name}"] = [f"{count:,}"]
    what = f"{counted(hop.events, 'event')} of {counted(hop.streams, 'env')} compared"
    yield f"{hop.name}: " + "; ".join([what, *(f"{status}: {', '.join(names)}" for status, names in states.items())])


def _how_many(hop: Hop) -> str:
    """The number of differences, and of those among them whose env nobody knows."""
    unknown = sum(one.differences for one in hop.different_streams if one.env < 0)
    return counted(hop.differences, "difference") + (f", {unknown:,} of unknown envs" if unknown else "")


def _verdict(comparison: Comparison) -> str:
    if not comparison.equal:
        parts = [
            f"{hop.streams_different:,} of {counted(hop.streams, 'env')} differ{'s' if hop.streams == 1 else ''} between {hop.name} "
            f"({_how_many(hop)})"
            for hop in comparison.hops
            if hop.differences
        ]
        return "; ".join(parts)
    if not comparison.events and any(hop.dropped for hop in comparison.hops):
        return "nothing is left to be compared: report.json has the result of what was compared while it ran"
    if not comparison.events:
        return "nothing was compared: the ledgers hold no events yet (call close() or flush() first)"
    if comparison.exit_status == 2:
        return "no difference in what was compared, but not all of it could be"
    if not comparison.complete:
        return "no difference as far as recorded; a ledger has an open end, and what came after it is unknown"
    if empty := [hop.name for hop in comparison.hops if not hop.events and not hop.dropped]:
        return f"no difference in what was compared, {counted(comparison.events, 'event')}; nothing was compared of {', '.join(empty)}"
    skipped = [f"{name} ({hop.name})" for hop in comparison.hops for name, one in hop.fields.items() if one.status == "not compared"]
    if skipped:
        return f"no difference in what was compared, {counted(comparison.events, 'event')}; not compared: {', '.join(skipped)}"
    return f"no difference: {counted(comparison.events, 'event')} compared"
