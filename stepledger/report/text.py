"""The report as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..codes import CATALOGUE
from ..pairs import counted, taps_of
from .visible import visible

if TYPE_CHECKING:
    from ..result import Comparison, Difference, Finding, Hop
    from .context import Recorded

__all__ = ["firsts", "line", "perhaps", "report", "unexplained", "verdict", "warnings", "what", "where"]

#: Lines of one hop's differences; the first of each environment come first.
LINES = 20
#: Steps before and after a difference in a long report.
STEPS = 2


def report(comparison: Comparison, recorded: Recorded | None = None, width: int = 120) -> str:
    """The report: the first difference of each environment, then what each hop amounts to, then warnings, then the verdict.

    Args:
        comparison: The result.
        recorded: The ledgers that were compared, for a long report: all differences that were kept, with the steps around each.
        width: Characters in a line of these steps.
    """
    lines: list[str] = []
    for hop in comparison.hops:
        differences = [one for one in comparison.differences if one.hop == hop.name]
        lines += _differences(hop, differences) if recorded is None else _all_differences(differences, recorded, width)
    for hop in comparison.hops:
        lines += _summary(hop)
    lines += warnings(comparison.warnings)
    lines += _explanations(comparison)
    lines.append(verdict(comparison))
    return "\n".join(map(visible, lines))


def _all_differences(differences: list[Difference], recorded: Recorded, width: int) -> Iterator[str]:
    from .beside import beside  # needs numpy's part of the package, which a result alone does not

    for difference in differences:
        yield line(difference)
        yield from (f"    fits too: {one.text} [{one.code}]" for one in difference.explanations[1:])
        yield from (f"  {text}" for text in beside(recorded.around(difference, STEPS), width - 2))


def _differences(hop: Hop, differences: list[Difference]) -> Iterator[str]:
    found = firsts(differences)
    counts = {(one.runner, one.env, one.agent): one.differences for one in hop.different_streams}
    for difference in found[:LINES]:
        more = counts[difference.runner, difference.env, difference.agent] - 1
        yield line(difference) + (f", and {more:,} more {'in this env' if difference.env >= 0 else 'of unknown envs'}" if more else "")
    if len(found) > LINES:
        yield f"... and {len(found) - LINES:,} more envs that differ"


def firsts(differences: list[Difference]) -> list[Difference]:
    """The first difference of each environment, of those of one hop."""
    found: dict[tuple[int, int, str], Difference] = {}
    for difference in differences:
        found.setdefault((difference.runner, difference.env, difference.agent), difference)
    return list(found.values())


def line(difference: Difference) -> str:
    """One difference in one line."""
    why = [f"{one.text} [{one.code}]" for one in difference.explanations[:1]]
    if why and "event" in difference.second:  # which says it already
        return f"{where(difference)}: {what(difference)} [{difference.explanations[0].code}]"
    if not why and difference.kind == "changed" and _has_values(difference):
        why = [unexplained(difference)]
    return "; ".join([f"{where(difference)}: {what(difference)}", *why])


def unexplained(difference: Difference) -> str:
    """What is said of a difference that no explanation fits; which can't be known of those that take values, where none were kept."""
    if difference.kind != "changed" or _has_values(difference):
        return "no known explanation fits"
    return "no explanation fits that is found without values; keep_values=True lets the others be looked for"


def _has_values(difference: Difference) -> bool:
    return any(name in difference.first for name in ("obs", "action", "reward"))


def where(difference: Difference, between: str = ", ") -> str:
    """The place of a difference."""
    if difference.env < 0:
        return "a learned transition (env unknown)"
    runner = f"runner {difference.runner}{between}" if difference.runner else ""
    agent = f"{between}agent {difference.agent}" if difference.agent else ""
    return f"{runner}env {difference.env}{agent}{between}episode {difference.episode}{between}step {difference.step}"


def _explanations(comparison: Comparison) -> Iterator[str]:
    """How often each first explanation was found, and since where."""
    groups: dict[tuple[str, str], list[Difference]] = {}
    for difference in comparison.differences:
        for one in difference.explanations[:1]:
            # The values that the code is about; of other codes the title says it all.
            names = [name for name in ("obs", "next_obs", "action", "reward") if name in difference.fields and _names(one.text, name)]
            about = f"{', '.join(names or difference.fields)} " if one.code.startswith("SL1") else ""
            groups.setdefault((one.code, about), []).append(difference)
    for (code, about), found in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        title = CATALOGUE[code].title if code in CATALOGUE else ""
        yield f"{len(found):,} x {code} {about}{perhaps(found)}{title}{_since(found[0])}"
    rest: dict[str, list[Difference]] = {}
    for difference in comparison.differences:
        if groups and not difference.explanations:
            rest.setdefault(unexplained(difference), []).append(difference)
    yield from (f"{len(found):,} x {said}{_since(found[0])}" for said, found in rest.items())
    if groups:
        total = sum(hop.differences for hop in comparison.hops)
        kept = len(comparison.differences)
        counts = f" (counted: the first {kept:,} of {total:,} differences)" if kept < total else ""
        yield f"stepledger explain CODE says what a code means and what to check{counts}"


def _since(first: Difference) -> str:
    return f", since {where(first, ' ')}" if first.env >= 0 else ""


def perhaps(differences: Sequence[Difference]) -> str:
    """A word for the title of the first explanations of some differences, where none of them is sure."""
    return "" if any(one.explanations[0].sure for one in differences) else "perhaps "


def _names(sentence: str, field: str) -> bool:
    """Whether a sentence of an explanation is about a field: another one that differs too may have another cause."""
    nouns = (f"the {field.replace('_', ' ')}", *(["the final obs"] if field == "obs" else []))
    return any(f"{noun}{after}" in sentence for noun in nouns for after in " [")  # a space, or the name of a leaf


#: Hop -> who gave and who received, as a sentence says it.
_SIDES = {
    "env -> vector": ("env gave", "trainer received"),
    "vector -> episode": ("vector env gave", "episode holds"),
    "episode -> learner": ("episode holds", "learner received"),
    "vector -> learner": ("trainer was given", "learner holds"),
}


def what(difference: Difference) -> str:
    """What differs, and what both sides have."""
    gave, received = _SIDES.get(" -> ".join(taps_of(difference.hop)), ("first side has", "second side has"))
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
    compared = f"{counted(hop.events, 'event')} of {counted(hop.streams, 'env')} compared"
    yield f"{hop.name}: " + "; ".join([compared, *(f"{status}: {', '.join(names)}" for status, names in states.items())])


def warnings(findings: Sequence[Finding]) -> Iterator[str]:
    """What is suspicious in the ledgers by themselves: a line for each code and tap, with its first place."""
    by_code: dict[tuple[str, str, str], list[Finding]] = {}
    for one in findings:
        by_code.setdefault((one.code, one.group, one.tap), []).append(one)
    for (code, group, tap), some in by_code.items():
        first, count, envs = some[0], sum(one.count for one in some), sum(one.envs for one in some)
        where = f"{f'{group}: ' if group else ''}{f'runner {first.runner}, ' if first.runner else ''}env {first.env}"
        where += f", agent {first.agent}" if first.agent else ""
        where += f", episode {first.episode}, step {first.step}" if first.episode >= 0 else ""
        counts = [f"{count:,} times"] if count > envs else []
        counts += [f"in {envs:,} envs"] if envs > 1 else []
        yield f"warning: {where}: {first.text} [{code}, tap {tap}{''.join(f', {one}' for one in [' '.join(counts)] if one)}]"


def _how_many(hop: Hop) -> str:
    """The number of differences, and of those among them whose env nobody knows."""
    unknown = sum(one.differences for one in hop.different_streams if one.env < 0)
    return counted(hop.differences, "difference") + (f", {unknown:,} of unknown envs" if unknown else "")


def verdict(comparison: Comparison) -> str:
    """What it all amounts to, in one line."""
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
    if not comparison.events and any(hop.unknown for hop in comparison.hops):
        return "nothing was compared: one side has no events, and a ledger has an open end"
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
