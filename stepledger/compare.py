"""Comparing ledgers, hop by hop.

A hop is two neighbouring taps. Each stream of the one is aligned with its stream of the other (`stepledger.align`), and where events
disagree the fields that differ are named. The result is data (`stepledger.result`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from .directory import find, is_directory
from .errors import LedgerError
from .events import EventHop
from .format import JOURNAL, SEALED, StreamKey
from .ledger import Ledger, read, read_all
from .lints import Linter
from .lockstep import SMALL, compare_sources, piece_of, whole_of
from .pairs import TAPS, counted
from .remote import fetched
from .result import Comparison, Counter, Difference, Hop, Progress, Tally
from .sources import Source, WholeSource, source_of
from .transitions import TransitionHop

__all__ = ["TAPS", "Comparer", "checked", "compare", "compare_in_pieces", "compare_loaded", "load", "selected"]

#: A ledger, read or not.
L = TypeVar("L", Ledger, Source)


#: Bytes of an event without values, about.
_WIDTH = 26
#: Events without an agreement that are waited for where events come bit by bit while a run goes on: somebody wants to know.
_UNDECIDED = 64


def compare(
    env_side: str | os.PathLike[str],
    trainer_side: str | os.PathLike[str] | None = None,
    *,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Comparison:
    """Compare what the environments gave with what the trainer received.

    Args:
        env_side: The directory with the ledgers of `LedgerEnv`, or one such file; or, alone, a run directory that holds both sides. It may
            be the URI of one, such as ``s3://bucket/run``, which takes pyarrow; likewise the other side.
        trainer_side: The file that `LedgerVectorEnv` or `stepledger.sb3.LedgerVecEnv` wrote.
        jobs: In how many processes large ledgers are compared. They are started by `multiprocessing`, so that a script that passes more
            than one needs its ``if __name__ == "__main__":``.
        progress: Called with the number of events done and the number of all.

    Returns:
        The result. It is never equal because there was nothing to compare: that is an error.

    Raises:
        LedgerError: There is nothing to compare, a ledger can't be read, or the two sides were recorded with different settings.
    """
    if not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1:
        raise LedgerError(f"jobs={jobs!r} is no number of processes: use 1, 2, ...")
    with fetched(env_side) as first, nullcontext() if trainer_side is None else fetched(trainer_side) as second:
        if _bytes(first, second) <= SMALL:
            return compare_loaded(load(first, second), progress)
        found, empty = _load(first, second and _named(second), source_of)
        sources, left_out = selected(found)
        if jobs > 1:
            from .jobs import compare_in_processes

            return compare_in_processes(sources, empty, left_out, jobs, progress)
        return checked(compare_in_pieces(sources, progress=progress), empty, left_out)


def compare_loaded(loaded: tuple[list[Ledger], list[str], str], progress: Progress | None = None) -> Comparison:
    """As `compare`, of what `load` gave, for whoever goes on to look at the same ledgers.

    Raises:
        LedgerError: Nothing was compared, or the two sides were recorded with different settings.
    """
    ledgers, empty, left_out = loaded
    comparer = Comparer()
    comparer.add(ledgers)
    return checked(comparer.compare(end=True, progress=progress), empty, left_out)


def compare_in_pieces(
    sources: Sequence[Source],
    taps: Sequence[str] = TAPS,
    present: Mapping[str, set[str]] | None = None,
    expected: Mapping[str, set[str]] | None = None,
    progress: Progress | None = None,
    linter: Linter | None = None,
    until_different: bool = False,
) -> Comparison:
    """Compare ledgers of which none was read yet: piece by piece, where that can be done.

    Args:
        sources: The ledgers.
        taps: As of `Comparer`, like the next two.
        present: As there.
        expected: As there.
        progress: Called with the number of events done and the number of all.
        linter: What looks for what is suspicious in the ledgers; a new one if `None`.
        until_different: Where something is different, stop there.

    Raises:
        LedgerError: A ledger is damaged, or the two sides were recorded with different settings.
    """
    comparer = Comparer(taps, present, expected)
    comparer.linter = linter or comparer.linter
    whole = all(isinstance(source, WholeSource) for source in sources) or sum(source.events for source in sources) * _WIDTH <= SMALL
    # What was learned from may have been sampled any time before, so that all of that is kept.
    if whole or any(source.meta["tap"] == "learner" for source in sources):
        comparer.add([whole_of(source) for source in sources])
        return comparer.compare(end=True, progress=progress)
    piece = piece_of(max(sum(len(source.keys) for source in sources if source.meta["tap"] == tap) for tap in TAPS))
    comparer.undecided = piece - 1  # where all of a piece differs, it is not looked at once more with the next one
    return compare_sources(comparer, sources, piece, progress, until_different)


def _bytes(env_side: Path, trainer_side: Path | None) -> int:
    """How large all files are that hold ledgers of these sides."""
    names = find(env_side) if is_directory(env_side) else [env_side]
    names += [trainer_side] if trainer_side is not None and trainer_side.name else []
    files = {file for name in names for file in (name, name.with_suffix(SEALED), name.with_suffix(JOURNAL))}
    return sum(file.stat().st_size for file in files if file.is_file())


def load(env_side: Path, trainer_side: Path | None = None) -> tuple[list[Ledger], list[str], str]:
    """The ledgers that `compare` compares.

    Args:
        env_side: As there, but a local path.
        trainer_side: Likewise.

    Returns:
        The ledgers; a sentence for each that was stopped before it held anything; what to say of those that are left out.

    Raises:
        LedgerError: There is nothing to compare, or a ledger can't be read.
    """
    ledgers, empty = _load(env_side, trainer_side and _named(trainer_side), read)
    kept, left_out = selected(ledgers)
    return kept, empty, left_out


def _named(path: Path) -> Path:
    """The trainer's file as it was named when it was recorded: the suffix may be left out."""
    return path if path.suffix in (SEALED, JOURNAL) or path.exists() else path.with_name(f"{path.name}{SEALED}")


def _load(env_side: Path, trainer_side: Path | None, reader: Callable[[Path], L]) -> tuple[list[L], list[str]]:
    is_run, empty = is_directory(env_side), list[str]()
    if trainer_side is not None and is_directory(trainer_side):
        raise LedgerError(f"{trainer_side} is a directory: name the file that was given to LedgerVectorEnv or LedgerVecEnv.")
    if is_run:
        trainer = None if trainer_side is None else trainer_side.with_suffix("").resolve()
        found, empty = read_all(env_side, reader)
        ledgers = [ledger for ledger in found if ledger.path.with_suffix("").resolve() != trainer]
    elif trainer_side is None:
        if not env_side.exists():
            raise LedgerError(f"{env_side} is not there: name the directory that the ledgers were written to.")
        raise LedgerError(f"{env_side} is one file, and comparing takes two sides: name the directory, or the other side's file too.")
    else:
        ledgers = [reader(env_side)]
    if not ledgers and trainer_side is None:
        raise LedgerError(f"{env_side} holds no ledgers: name the directory that they were written to.")
    if trainer_side is not None:
        # With the trainer's side named, other vector envs' ledgers in the directory are not meant.
        ledgers = [ledger for ledger in ledgers if ledger.meta["tap"] == "env"]
        if not ledgers:
            raise LedgerError(f"{env_side} holds no ledger of an environment: name the directory that was given to LedgerEnv.")
        trainer_ledger = reader(trainer_side)
        if trainer_ledger.meta["tap"] != "vector":
            raise LedgerError(
                f"{trainer_side} is a ledger of the tap {trainer_ledger.meta['tap']!r}: name the file that was given to LedgerVectorEnv "
                "or LedgerVecEnv."
            )
        ledgers.append(trainer_ledger)
    return ledgers, empty


def selected(ledgers: Sequence[L]) -> tuple[list[L], str]:
    """The ledgers that are compared with each other, and what to say of those that are left out.

    Raises:
        LedgerError: They are of one tap only, or two were recorded under one name.
    """
    kept, left_out = _of_one_run(_without_conflicts(ledgers))
    groups: dict[str, set[str]] = {}
    for ledger in kept:
        groups.setdefault(ledger.meta.get("group", ""), set()).update({ledger.meta["tap"]} & {*TAPS})
    for present in groups.values():
        if len(present) < 2:
            what = f"only ledgers of the tap {min(present)!r}" if present else "no ledgers of a known tap"
            raise LedgerError(f"there are {what}, and comparing takes two sides: record the other side too, or name its file.")
    return kept, left_out


def checked(comparison: Comparison, empty: Sequence[str] = (), left_out: str = "") -> Comparison:
    """The comparison of a run, with what was found before the ledgers were compared.

    Raises:
        LedgerError: Nothing was compared.
    """
    if not any(hop.streams for hop in comparison.hops):
        alone = [sentence for hop in comparison.hops for sentence in (*hop.unpaired, *hop.unknown)]
        raise LedgerError(f"{alone[0] if alone else 'no environment is on both sides'}; nothing was compared.")
    first, *others = comparison.hops
    first = replace(first, unknown=(*first.unknown, *empty), notes=(*first.notes, *([left_out] if left_out else [])))
    return replace(comparison, hops=(first, *others))


class Comparer:
    """Compares the ledgers of one run, whose events may come in parts: what was compared is dropped.

    Args:
        taps: Those that are compared.
        present: For each group of ledgers, the taps that the run has ledgers of, where not all of them are given to this comparer.
        expected: Likewise, the taps that it should have.

    Attributes:
        linter: What is suspicious in each ledger by itself.
        undecided: Events in a row without an agreement between two sides of which more is to come, after which they are taken to differ.
    """

    def __init__(
        self,
        taps: Sequence[str] = TAPS,
        present: Mapping[str, set[str]] | None = None,
        expected: Mapping[str, set[str]] | None = None,
    ) -> None:
        self._use = taps
        self._new: dict[str, dict[str, list[Ledger]]] = {}
        self._present = present
        self._taps: dict[str, set[str]] = {}
        self._expected: dict[str, set[str]] = {group: set(some) for group, some in (expected or {}).items()}
        self._hops: dict[tuple[str, str, str], EventHop | TransitionHop] = {}
        self._ledgers: set[tuple[str, str, Path, tuple[StreamKey, ...]]] = set()
        self.linter = Linter()
        self.undecided = _UNDECIDED

    def add(self, ledgers: Sequence[Ledger]) -> None:
        """Take ledgers, or further events of them: parts of one ledger have the same path."""
        self.linter.add(ledger for ledger in ledgers if ledger.meta["tap"] in self._use)
        for ledger in ledgers:
            group, tap = ledger.meta.get("group", ""), ledger.meta["tap"]
            if tap in TAPS:
                self._new.setdefault(group, {}).setdefault(tap, []).append(ledger)
                self._taps.setdefault(group, set()).add(tap)
            else:
                self._taps.setdefault(group, set())
            self._expected.setdefault(group, set()).update(ledger.meta.get("taps", []))
            self._ledgers.add((group, tap, ledger.path, tuple(ledger.streams)))

    def compare(self, end: bool, progress: Progress | None = None) -> Comparison:
        """Compare what has come.

        Args:
            end: Nothing more will come.
            progress: Called with the number of events done and the number of all.

        Returns:
            What was found so far.

        Raises:
            LedgerError: The two sides were recorded with different settings.
        """
        counter = Counter(self._events(), progress)
        self.go_on(end, counter)
        counter.finish()
        return self.result(end)

    def go_on(self, end: bool, counter: Counter) -> None:
        """As `compare`, for those who ask for the result later.

        Args:
            end: Nothing more will come.
            counter: Counts the events of all first sides.

        Raises:
            LedgerError: The two sides were recorded with different settings.
        """
        for group, hops in self._by_group():
            new = self._new.get(group, {})
            for first, second in hops:
                name = f"{group}: {first} -> {second}" if group else f"{first} -> {second}"
                hop = self._hops.get((group, first, second))
                if hop is None:
                    hop = TransitionHop(name) if second == "learner" else EventHop(name, self.undecided)
                    self._hops[group, first, second] = hop
                hop.add(new.get(first, []), new.get(second, []))
                hop.compare(end, counter)
            for tap in {tap for hop_taps in hops for tap in hop_taps}:
                new.pop(tap, None)

    def result(self, end: bool) -> Comparison:
        """What was found so far.

        Args:
            end: Nothing more will come.
        """
        results: list[tuple[Hop, list[Difference]]] = []
        for group, hops in self._by_group():
            for first, second in hops:
                name = f"{group}: {first} -> {second}" if group else f"{first} -> {second}"
                absent = [tap for tap in (first, second) if tap not in self._present_in(group)]
                if absent and end:
                    missed = f"{name}: there is no ledger of the tap {absent[0]!r}, which this run had"
                    results.append((Tally(name).hop((missed,), {}), []))
                else:
                    results.append(self._hops[group, first, second].result())
        differences = tuple(difference for _, found in results for difference in found)
        return Comparison(tuple(hop for hop, _ in results), differences, self.linter.findings())

    def _by_group(self) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """The groups of ledgers, and the pairs of taps that are compared in each."""
        for group in sorted({*self._taps, *(self._present or {})}):
            there = self._present_in(group) | self._expected.get(group, set())
            yield group, list(itertools.pairwise(tap for tap in self._use if tap in there))

    def _present_in(self, group: str) -> set[str]:
        return self._taps.get(group, set()) if self._present is None else self._present[group]

    def waiting(self, group: str, taps: tuple[str, str], key: StreamKey) -> tuple[int, int]:
        """How many events of both sides of a stream wait for their counterparts, at the hop between these taps."""
        hop = self._hops.get((group, *taps))
        return hop.waiting(key) if isinstance(hop, EventHop) else (0, 0)

    def done_with(self) -> dict[str, list[int]]:
        """For each ledger, how many events of each of its streams, since the first, were compared and may be dropped.

        The same number at each tap of a stream, so that what is left can be compared again; nothing behind a stream's first difference.
        """
        hops = list(self._hops.items())
        may: dict[tuple[str, StreamKey], int] = {}
        for (group, _, _), hop in hops:
            equal = hop.compared_equal()
            for key in self._keys(group):
                at = (group, key)
                may[at] = min(may.get(at, equal.get(key, 0)), equal.get(key, 0))
        drop = {str(path): [may.get((group, key), 0) for key in keys] for group, tap, path, keys in self._ledgers if tap != "learner"}
        for _, hop in hops:
            if isinstance(hop, TransitionHop):
                drop.update({str(path): [number] for path, number in hop.learned_equal().items()})
        return {path: numbers for path, numbers in drop.items() if any(numbers)}

    def positions(self, streams: Set[tuple[str, StreamKey]]) -> dict[str, list[int]]:
        """For each ledger that has any of these streams, each given with its group, their positions in it."""
        found = {
            str(path): [position for position, key in enumerate(keys) if (group, key) in streams]
            for group, tap, path, keys in self._ledgers
            if tap != "learner"  # whose keys are its own
        }
        return {path: positions for path, positions in found.items() if positions}

    def _keys(self, group: str) -> set[StreamKey]:
        return {key for one, tap, _, keys in self._ledgers if one == group and tap != "learner" for key in keys}

    def _events(self) -> int:
        """Number of events that have come, of all first sides."""
        return sum(ledger.events for by_tap in self._new.values() for tap in sorted(by_tap, key=TAPS.index)[:-1] for ledger in by_tap[tap])


def _of_one_run(ledgers: Sequence[L]) -> tuple[list[L], str]:
    """The ledgers without those of earlier runs that lie in the same directory, and what to say of those.

    Taps that can reach each other agree on the identity of a run. What ended before the newest run began is an earlier one.
    """
    runs: dict[str, list[L]] = {}
    for ledger in ledgers:
        runs.setdefault(ledger.meta.get("run", ""), []).append(ledger)
    newest = max(runs, key=lambda run: max(ledger.meta["created"] for ledger in runs[run]), default="")
    if not newest or len(runs) == 1:
        return list(ledgers), ""
    began = min(ledger.meta["created"] for ledger in runs[newest])
    others = [ledger for run, some in runs.items() if run != newest for ledger in some]
    earlier = [one for one in others if one.meta.get("ended", one.path.stat().st_mtime) <= began]
    kept = [ledger for ledger in ledgers if ledger not in earlier]
    if len({ledger.meta["tap"] for ledger in kept}) < 2:  # then the two sides are of different runs
        return list(ledgers), ""
    names = ", ".join(ledger.path.name for ledger in earlier[:3]) + (", ..." if len(earlier) > 3 else "")
    return kept, f"left out: {counted(len(earlier), 'ledger')} of earlier runs ({names})" if earlier else ""


def _without_conflicts(ledgers: Sequence[L]) -> list[L]:
    """Refuse ledgers of two environments with one index; leave out what an earlier run left of such a mistake."""
    ids = {ledger.meta["id"]: ledger for ledger in ledgers if "conflicts_with" not in ledger.meta}
    kept = []
    for ledger in ledgers:
        other = ledger.meta.get("conflicts_with")
        if other is None:
            kept.append(ledger)
        elif other == "" or other in ids:
            what = "another ledger" if other == "" else str(ids[other].path)
            raise LedgerError(
                f"{ledger.path} and {what} were recorded at the same time under one name: give each environment an index, and each vector "
                "env a path, of its own, and record again."
            )
    return kept
