"""Comparing ledgers that are larger than memory should hold: all sides are read side by side, a piece of each stream at a time.

What was compared is dropped. The pieces of the streams of one vector env end with the same call of it, since a difference in one may be
explained by what another one had in that call. Where two sides disagree, what is undecided waits for the next pieces, up to a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .format import STEP, StreamKey, begins_of
from .ledger import Ledger
from .pairs import TAPS
from .result import Comparison, Counter, Progress
from .sources import Source

if TYPE_CHECKING:
    from .compare import Comparer

__all__ = ["SMALL", "compare_sources", "piece_of", "whole_of"]

#: Bytes of ledgers up to which they are read as a whole: that takes a few times as much memory.
SMALL = 1 << 26

#: Events of a tap that are read at a time, of all streams together; but of each at least and at most so many.
_ROUND, _LEAST, _MOST = 1 << 21, 512, 1 << 16


def piece_of(streams: int) -> int:
    """How many events of each stream are read at a time."""
    return max(_LEAST, min(_MOST, _ROUND // max(1, streams)))


def compare_sources(
    comparer: Comparer, sources: Sequence[Source], piece: int, progress: Progress | None = None, until_different: bool = False
) -> Comparison:
    """Compare ledgers piece by piece.

    Args:
        comparer: A new one.
        sources: The ledgers, none of which was read yet.
        piece: Events of each stream that are read at a time.
        progress: Called with the number of events done and the number of all.
        until_different: Where something is different, stop there: that is all that is known then, and the files were not checked.

    Raises:
        LedgerError: A ledger is damaged, or the two sides were recorded with different settings.
    """
    pieces = _Pieces(comparer, sources, piece, progress)
    while pieces.go_on():
        if until_different and not (so_far := comparer.result(end=False)).equal:
            return so_far
    return pieces.end()


class _Pieces:
    """A comparison that is under way; arguments as of `compare_sources`."""

    def __init__(self, comparer: Comparer, sources: Sequence[Source], piece: int, progress: Progress | None = None) -> None:
        self._comparer = comparer
        self._sources = sources
        self._piece = piece
        by_group: dict[str, dict[str, int]] = {}
        by_runner: dict[tuple[str, int], list[Source]] = {}
        for source in sources:
            group, tap = source.meta.get("group", ""), source.meta["tap"]
            events = by_group.setdefault(group, {})
            events[tap] = events.get(tap, 0) + source.events
            by_runner.setdefault((group, source.keys[0].runner if source.keys else 0), []).append(source)
        firsts = [tap for events in by_group.values() for tap in sorted(events.keys() & {*TAPS}, key=TAPS.index)[:-1]]
        total = sum(events[tap] for events in by_group.values() for tap in firsts if tap in events)
        self._counter = Counter(total, progress)
        self._runners = [_Runner(group, some, comparer) for (group, _), some in sorted(by_runner.items())]

    def go_on(self) -> bool:
        """Compare a piece of each stream; whether there is more to come."""
        parts = [part for runner in self._runners for part in runner.next(self._piece)]
        self._comparer.add(parts)
        if not any(part.events for part in parts):
            return False
        self._comparer.go_on(False, self._counter)
        return True

    def end(self) -> Comparison:
        """Compare what is left, which is what only one side has, and check the files."""
        rest = [part for runner in self._runners for part in runner.rest()]
        for source in self._sources:
            source.finish()
        self._comparer.add(rest)
        self._comparer.go_on(True, self._counter)
        self._counter.finish()
        return self._comparer.result(end=True)


class _Runner:
    """The ledgers of one vector env, at all of its taps."""

    def __init__(self, group: str, sources: Sequence[Source], comparer: Comparer) -> None:
        self._group = group
        self._comparer = comparer
        # The others follow the one of the vector env; one that must be read in its own order can't follow.
        self._leader = max(
            sources, key=lambda source: (len(source.keys) > 1 and source.in_order, len(source.keys), source.meta["tap"] == "vector")
        )
        self._followers = [source for source in sources if source is not self._leader]
        self._of_key: dict[StreamKey, list[tuple[Source, int]]] = {}
        for source in sources:
            for number, key in enumerate(source.keys):
                self._of_key.setdefault(key, []).append((source, number))
        # Where a side begins behind events that were dropped, the others have those still.
        self._begins = {key: max(source.begins[number] for source, number in some) for key, some in self._of_key.items()}
        self._by_event = any(source.meta.get("autoreset_mode") == "NextStep" for source in sources)
        # Of the events that were read, the last one's call; those that were dropped are all in it but for a reset for each episode.
        of_key = {StreamKey(*key): one for key, one in zip(self._leader.meta["stream_keys"], begins_of(self._leader.meta))}
        before = [of_key[key] for key in self._leader.keys]
        self._calls = [0 if last is None else begin - last[0] - 1 for begin, last in before]
        self._first = True

    def next(self, piece: int) -> list[Ledger]:
        """The next events of all streams."""
        leader = self._leader
        held = [any(source.ended(at) for source, at in self._of_key[key]) and not self._first for key in leader.keys]
        counts = [0 if wait else piece for wait in held]
        if self._first:
            counts = [piece + self._begins[key] - begin for key, begin in zip(leader.keys, leader.begins)]
        if not (leader.in_order or self._by_event or len(counts) == 1):
            counts = self._to_one_call(counts, piece)
        before = list(leader.taken)
        parts = [leader.take(counts)]
        given = {key: now - then for key, now, then in zip(leader.keys, leader.taken, before)}
        parts += [source.take([self._count(source, at, given, piece) for at in range(len(source.keys))]) for source in self._followers]
        self._first = False
        return parts

    def _to_one_call(self, counts: Sequence[int], piece: int) -> list[int]:
        """So many events of each stream of the leader that all end with the same call, and at most as many as these."""
        leader = self._leader
        ahead = [leader.kinds(stream, count) for stream, count in enumerate(counts)]
        calls = [self._calls[stream] + np.cumsum(kinds == STEP) for stream, kinds in enumerate(ahead)]
        exact = self._first and any(count > piece for count in counts)  # else some events would lack their counterparts
        full = [int(one[-1]) for one, count in zip(calls, counts) if len(one) and len(one) == count]
        if full and not exact:
            last = min(full)
            counts = [int(np.searchsorted(one, last, side="right")) for one in calls]
        for stream, one in enumerate(calls):
            if len(one) and counts[stream]:
                self._calls[stream] = int(one[: counts[stream]][-1])
        return list(counts)

    def _count(self, source: Source, stream: int, given: dict[StreamKey, int], piece: int) -> int:
        """How many events of a stream are as many as the leader has given."""
        key, leader = source.keys[stream], self._leader
        if key not in given or source.meta["tap"] not in TAPS:
            return 0  # nothing to compare it with
        if self._first:
            return given[key] + leader.begins[leader.keys.index(key)] - source.begins[stream]
        if not given[key]:
            return 0
        taps = sorted({source.meta["tap"], leader.meta["tap"]}, key=TAPS.index)
        first, second = self._comparer.waiting(self._group, (taps[0], taps[-1]), key)
        mine, other = (first, second) if source.meta["tap"] == taps[0] else (second, first)
        return max(0, min(given[key] + other - mine, 4 * piece))

    def rest(self) -> list[Ledger]:
        """All events that are left."""
        return [_rest(source) for source in (self._leader, *self._followers)]


def whole_of(source: Source) -> Ledger:
    """A ledger that was not read yet, at once.

    Raises:
        LedgerError: It is damaged.
    """
    ledger = _rest(source)
    source.finish()
    return ledger


def _rest(source: Source) -> Ledger:
    return source.take([source.events] * len(source.keys))
