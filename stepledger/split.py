"""The comparison of a run in parts, which can be made in several processes, put together again.

What one EnvRunner recorded is compared up to its episodes without looking at the others; what learners consumed is compared with the
episodes of all. The streams of one EnvRunner, or of one vector env where there are none, may be found to be equal without looking at the
others too; to say how they differ takes all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from .compare import checked, compare_in_pieces, selected
from .errors import LedgerError
from .format import StreamKey
from .ledger import Ledger, peek_all
from .lints import Linter
from .pairs import TAPS, taps_of
from .result import Comparison, FieldResult, Hop
from .sources import COUNTED, Checksums, SealedSource, Source, source_of

__all__ = ["Part", "PartResult", "compare_part", "cut", "join", "split"]


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a run's comparison.

    Attributes:
        paths: The ledgers that it reads.
        taps: The taps that are compared.
        present: For each group of ledgers, the taps that the run has ledgers of.
        expected: Likewise, the taps that it should have.
        size: Bytes of the ledgers.
        keys: The streams that are compared, where it is not all of them.
        shared: The ledgers of which other parts compare other streams, and the columns of each that this part checks and does not use.
        whole: Where it is not all streams: the part that is to be compared in the place of this and the others, where one finds that not
            all is equal.
    """

    paths: tuple[Path, ...]
    taps: tuple[str, ...]
    present: dict[str, set[str]]
    expected: dict[str, set[str]]
    size: int
    keys: frozenset[StreamKey] | None = None
    shared: dict[Path, tuple[str, ...]] = field(default_factory=dict)
    whole: Part | None = None


class PartResult(NamedTuple):
    """What a part has given.

    Attributes:
        comparison: Its comparison; of a part that is no whole one, only as far as all is equal.
        error: Why it could not be made.
        linter: What is suspicious in its ledgers, to be looked at together with those of the other parts.
        checksums: Of each ledger of which other parts have read other streams, those of the streams that this part has read.
    """

    comparison: Comparison
    error: str
    linter: Linter
    checksums: dict[Path, Checksums]

    @property
    def equal(self) -> bool:
        """Whether all is equal that this part has compared."""
        return not self.error and self.comparison.equal


def compare_part(part: Part) -> PartResult:
    """Compare a part, in whatever process; an error of a ledger is returned as text."""
    linter = Linter()
    try:
        sources: list[Source] = [SealedSource(path, part.keys, part.shared[path]) for path in part.shared]
        others = [path for path in part.paths if path not in part.shared]
        stop = part.keys is not None
        sources += [SealedSource(path) for path in others] if stop else [source_of(path) for path in others]
        comparison = compare_in_pieces(sources, part.taps, part.present, part.expected, linter=linter, until_different=stop)
        checksums = {source.path: source.checksums for source in sources if isinstance(source, SealedSource) and source.path in part.shared}
        return PartResult(comparison, "", linter, checksums)
    except LedgerError as error:
        return PartResult(Comparison((), ()), str(error), linter, {})


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
    return cut(ledgers, parts), empty, left_out


def cut(ledgers: Sequence[Ledger] | Sequence[Source], parts: int) -> list[Part]:
    """Cut the comparison of ledgers into about so many parts, and one more for what learners consumed; the largest first.

    Where there are fewer EnvRunners than parts, the streams of one are shared out too, if all of its ledgers are sources that can be read
    stream by stream and end at the vector env: a sampler may leave out what depends on the other streams.
    """
    present: dict[str, set[str]] = {}
    expected: dict[str, set[str]] = {}
    for ledger in ledgers:
        group, tap = ledger.meta.get("group", ""), ledger.meta["tap"]
        present.setdefault(group, set()).add(tap)
        expected.setdefault(group, {tap}).update({tap, *ledger.meta.get("taps", [])})
    by_runner: dict[tuple[str, int], list[Ledger | Source]] = {}
    last = [ledger.path for ledger in ledgers if ledger.meta["tap"] == "learner"]
    for ledger in ledgers:
        group, tap = ledger.meta.get("group", ""), ledger.meta["tap"]
        if tap != "learner":
            by_runner.setdefault((group, ledger.meta["stream_keys"][0][0]), []).append(ledger)
        if tap == "episode" and "learner" in expected[group]:
            last.append(ledger.path)
    of_run = (tuple(TAPS[:-1]), present, expected)
    found: list[Part] = []
    if len(by_runner) < parts:
        for runner, some in list(by_runner.items()):
            if shares := _by_stream(some, parts, of_run):
                found += shares
                del by_runner[runner]
    paths = [[ledger.path for ledger in some] for some in by_runner.values()]
    shares_of_runners: list[list[Path]] = [[] for _ in range(min(parts, len(paths)))]
    for of_runner in sorted(paths, key=_size, reverse=True):
        min(shares_of_runners, key=_size).extend(of_runner)
    found += [Part(tuple(share), *of_run, _size(share)) for share in shares_of_runners]
    if any("learner" in taps for taps in expected.values()):
        found.append(Part(tuple(last), tuple(TAPS[-2:]), present, expected, _size(last)))
    return sorted(found, key=lambda part: -part.size)


def _by_stream(
    ledgers: Sequence[Ledger | Source], parts: int, of_run: tuple[tuple[str, ...], dict[str, set[str]], dict[str, set[str]]]
) -> list[Part]:
    """Share out the streams of one runner; no part where that can't be done."""
    sources = [source for source in ledgers if isinstance(source, SealedSource)]
    if len(sources) < len(ledgers) or any(source.meta["tap"] not in TAPS[:2] for source in sources):
        return []
    keys = sorted({key for source in sources for key in source.keys})
    number = min(parts, len(keys))
    if number < 2:
        return []
    ends = [at * len(keys) // number for at in range(number + 1)]
    shares = [frozenset(keys[begin:end]) for begin, end in itertools.pairwise(ends)]
    of_share = [[source for source in sources if share.intersection(source.keys)] for share in shares]
    whole = Part(tuple(source.path for source in sources), *of_run, _size([source.path for source in sources]))
    parts_of_all = []
    for at, (share, some) in enumerate(zip(shares, of_share)):
        shared: dict[Path, tuple[str, ...]] = {}
        for source in some:
            if not share.issuperset(source.keys):
                with_it = [other for other, others in enumerate(of_share) if source in others]
                shared[source.path] = tuple(name for column, name in enumerate(COUNTED) if with_it[column % len(with_it)] == at)
        paths = tuple(source.path for source in some)
        parts_of_all.append(Part(paths, *of_run, whole.size // number, share, shared, whole))
    return parts_of_all


def _size(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def join(parts: Sequence[PartResult], empty: Sequence[str], left_out: str) -> Comparison:
    """Put the comparisons of all parts together.

    Raises:
        LedgerError: One of them could not be made, or nothing was compared.
    """
    linter = Linter()
    for part in parts:
        if part.error:
            raise LedgerError(part.error)
        linter.merge(part.linter)
    comparisons = [part.comparison for part in parts]
    hops: dict[str, Hop] = {}
    for comparison in comparisons:
        for hop in comparison.hops:
            hops[hop.name] = _sum(hops[hop.name], hop) if hop.name in hops else hop
    ordered = sorted(hops.values(), key=lambda hop: (":" in hop.name, hop.name.partition(":")[0] * (":" in hop.name), _order(hop)))
    differences = sorted(
        (difference for comparison in comparisons for difference in comparison.differences),
        key=lambda one: ([hop.name for hop in ordered].index(one.hop), one.runner),
    )
    return checked(Comparison(tuple(ordered), tuple(differences), linter.findings()), empty, left_out)


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
    return FieldResult(status, compared, differences, one.note or other.note, one.recomputed or other.recomputed)
