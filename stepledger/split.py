"""The comparison of a run in parts, which can be made in several processes, put together again.

What one EnvRunner recorded is compared up to its episodes without looking at the others; what learners consumed is compared with the
episodes of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .compare import TAPS, Comparer, checked, selected
from .errors import LedgerError
from .ledger import peek_all, read
from .pairs import taps_of
from .result import Comparison, FieldResult, Hop

__all__ = ["Part", "compare_part", "join", "split"]


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a run's comparison.

    Attributes:
        paths: The ledgers that it reads.
        taps: The taps that are compared.
        present: For each group of ledgers, the taps that the run has ledgers of.
        expected: Likewise, the taps that it should have.
        size: Bytes of the ledgers.
    """

    paths: tuple[Path, ...]
    taps: tuple[str, ...]
    present: dict[str, set[str]]
    expected: dict[str, set[str]]
    size: int


def compare_part(part: Part) -> tuple[Comparison, str]:
    """Compare a part, in whatever process; an error of a ledger is returned as text."""
    comparer = Comparer(part.taps, part.present, part.expected)
    try:
        comparer.add([read(path) for path in part.paths])
        return comparer.compare(end=True), ""
    except LedgerError as error:
        return Comparison((), ()), str(error)


def split(directory: Path, parts: int) -> tuple[list[Part], list[str], str]:
    """Cut the comparison of a run directory into about so many parts, and one more for what learners consumed.

    Returns:
        The parts; a sentence for each ledger that is empty; what is to be said of ledgers that were left out.

    Raises:
        LedgerError: There is nothing to compare.
    """
    ledgers, empty = peek_all(directory)
    if not ledgers:
        raise LedgerError(f"{directory} holds no ledgers: name the directory that they were written to.")
    ledgers, left_out = selected(ledgers)
    present: dict[str, set[str]] = {}
    expected: dict[str, set[str]] = {}
    for ledger in ledgers:
        group, tap = ledger.meta.get("group", ""), ledger.meta["tap"]
        present.setdefault(group, set()).add(tap)
        expected.setdefault(group, {tap}).update({tap, *ledger.meta.get("taps", [])})
    by_runner: dict[tuple[str, int], list[Path]] = {}
    last = [ledger.path for ledger in ledgers if ledger.meta["tap"] == "learner"]
    for ledger in ledgers:
        group, tap = ledger.meta.get("group", ""), ledger.meta["tap"]
        if tap != "learner":
            by_runner.setdefault((group, ledger.meta["stream_keys"][0][0]), []).append(ledger.path)
        if tap == "episode" and "learner" in expected[group]:
            last.append(ledger.path)
    shares: list[list[Path]] = [[] for _ in range(min(parts, len(by_runner)))]
    for paths in sorted(by_runner.values(), key=_size, reverse=True):
        min(shares, key=_size).extend(paths)
    found = [Part(tuple(share), tuple(TAPS[:-1]), present, expected, _size(share)) for share in shares]
    if any("learner" in taps for taps in expected.values()):
        found.append(Part(tuple(last), tuple(TAPS[-2:]), present, expected, _size(last)))
    return sorted(found, key=lambda part: -part.size), empty, left_out


def _size(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def join(parts: Sequence[tuple[Comparison, str]], empty: Sequence[str], left_out: str) -> Comparison:
    """Put the comparisons of all parts together.

    Raises:
        LedgerError: One of them could not be made, or nothing was compared.
    """
    for _, error in parts:
        if error:
            raise LedgerError(error)
    comparisons = [comparison for comparison, _ in parts]
    hops: dict[str, Hop] = {}
    for comparison in comparisons:
        for hop in comparison.hops:
            hops[hop.name] = _sum(hops[hop.name], hop) if hop.name in hops else hop
    ordered = sorted(hops.values(), key=lambda hop: (":" in hop.name, hop.name.partition(":")[0] * (":" in hop.name), _order(hop)))
    differences = sorted(
        (difference for comparison in comparisons for difference in comparison.differences),
        key=lambda one: ([hop.name for hop in ordered].index(one.hop), one.runner, one.env, one.agent),
    )
    return checked(Comparison(tuple(ordered), tuple(differences)), empty, left_out)


def _order(hop: Hop) -> int:
    return TAPS.index(taps_of(hop.name)[0])


def _sum(one: Hop, other: Hop) -> Hop:
    """The hop of two parts: each has streams of its own."""
    fields = {
        name: _sum_field(one.fields.get(name), other.fields.get(name)) for name in dict.fromkeys((*one.fields, *other.fields))
    }  # fmt: skip
    return replace(
        one,
        events=one.events + other.events,
        streams=one.streams + other.streams,
        streams_different=one.streams_different + other.streams_different,
        differences=one.differences + other.differences,
        fields=fields,
        unknown=(*one.unknown, *other.unknown),
        notes=tuple(dict.fromkeys((*one.notes, *other.notes))),
        unpaired=tuple(dict.fromkeys((*one.unpaired, *other.unpaired))),
        different_streams=tuple(sorted((*one.different_streams, *other.different_streams), key=lambda at: (at.runner, at.env, at.agent))),
        lost=one.lost + other.lost,
        extra=one.extra + other.extra,
        dropped=one.dropped + other.dropped,
    )


def _sum_field(one: FieldResult | None, other: FieldResult | None) -> FieldResult:
    if one is None or other is None:
        return one or other or FieldResult("not compared")
    compared, differences = one.compared + other.compared, one.differences + other.differences
    status = "not compared" if not compared else "different" if differences else "equal"
    return FieldResult(status, compared, differences, one.note or other.note)
