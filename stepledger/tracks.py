"""What is known around a place of a stream: the digests of one side, also a few of those that were compared and dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .format import RESET, StreamKey
from .ledger import Stream
from .parts import Part, PartDigests

__all__ = ["PAST", "REACH", "Neighbours", "Row", "Track"]

#: Steps within which an earlier or a later value is looked for.
REACH = 16
#: Events before the window that are remembered: other streams may be as far behind.
PAST = 256
#: Events of other streams that are looked at in one round of a comparison: a bound, where there are very many environments.
_LOOKS = 500_000

Columns = Mapping[str, npt.NDArray[Any]]


class Track:
    """The events of one side of a stream, by index from the first that was not compared yet; those before have negative ones.

    Args:
        stream: The window of events.
        data: Its columns as they are compared, by field name, each of its length.
        past: The last events before the window, likewise.
        by_event: Whether a call of the vector env is one event of each stream, as with next-step autoreset; else it is one step.
        parts: Of the kept values of this side, where there are any.
    """

    def __init__(self, stream: Stream, data: Columns, past: Columns, by_event: bool, parts: PartDigests | None = None) -> None:
        self.stream = stream
        self.parts = parts
        self.data = data
        self.past = past
        self.by_event = by_event

    def __len__(self) -> int:
        return len(self.stream)

    @property
    def begin(self) -> int:
        """Index of the first event that is known."""
        return -len(self.past["kind"]) if self.past else 0

    def at(self, field: str | Part, i: int) -> int | None:
        """A field of an event, or the digest of a part of it, or `None` where that is out of reach."""
        if isinstance(field, Part):
            return None if self.parts is None else self.parts.at(field, i)
        if 0 <= i < len(self.stream):
            return int(self.data[field][i])
        if self.begin <= i < 0:
            return int(self.past[field][i])
        return None

    def slice(self, field: str | Part, start: int, stop: int) -> npt.NDArray[Any]:
        """A field, or a part of it, of several events in a row, of as many as are known."""
        if isinstance(field, Part):
            return np.zeros(0, np.uint64) if self.parts is None else self.parts.slice(field, start, stop)
        start = max(start, self.begin)
        now = self.data[field][max(start, 0) : max(stop, 0)]
        return now if start >= 0 else np.concatenate([self.past[field][len(self.past["kind"]) + start :][: max(stop - start, 0)], now])

    def call(self, i: int) -> int:
        """In which call of the vector env an event was made, counted since the beginning."""
        if self.by_event:
            return self.stream.begin + i
        return int(self._calls[i - self.begin]) if self.begin <= i < len(self) else -1

    def calls(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """In which calls events in a row were made that are known."""
        if self.by_event:
            return np.arange(start, stop) + self.stream.begin
        return self._calls[start - self.begin : stop - self.begin]

    def in_calls(self, calls: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The first and the last event of each of these calls, and of which calls any is known."""
        if self.by_event:
            events = calls - self.stream.begin
            return events, events, (events >= self.begin) & (events < len(self))
        first, stop = (np.searchsorted(self._calls, calls, side) for side in ("left", "right"))
        return first + self.begin, stop - 1 + self.begin, first < stop

    def events_of(self, call: int) -> range:
        """The events that were made in a call, as far as they are known."""
        if self.by_event:
            i = call - self.stream.begin
            return range(i, i + 1) if self.begin <= i < len(self) else range(0)
        first, stop = np.searchsorted(self._calls, [call, call + 1]).tolist()
        return range(first + self.begin, stop + self.begin)

    @cached_property
    def _calls(self) -> npt.NDArray[np.int64]:
        """The number of steps up to each known event: all events but for one reset for each episode."""
        kinds = self.slice("kind", self.begin, len(self))
        # Counted back from what the window says of the event before it.
        episode = -1 if self.stream.last is None else self.stream.last[0]
        before = self.stream.begin - (episode + 1)
        steps = np.cumsum(kinds != RESET)
        result: npt.NDArray[np.int64] = steps - (steps[-self.begin - 1] if self.begin else 0) + before
        return result

    def remembered(self, events: int) -> dict[str, npt.NDArray[Any]]:
        """The last events before the one with this index, to be the past of a later window."""
        return {name: self.slice(name, events - PAST, events).copy() for name in self.data}


class Row(NamedTuple):
    """An event of a stream: the environment's index and its fields."""

    env: int
    kind: int | None
    action: int | None
    obs: int | None
    reward: int | None
    terminated: int | None
    truncated: int | None


class Neighbours:
    """What the streams of one vector env have in the same call.

    Args:
        streams: Both sides of each.
    """

    def __init__(self, streams: Sequence[tuple[StreamKey, tuple[Track, Track]]]) -> None:
        self.streams = streams
        self._rows: dict[tuple[int, int], list[tuple[Row, Track, int]]] = {}
        self._index: dict[tuple[int, int, str | Part], dict[int | None, list[Row]]] = {}
        self._left = _LOOKS

    def having(self, side: int, call: int, field: str | Part, value: int | None) -> list[Row] | None:
        """The events of all streams in a call that have a value, or a part of this digest, on the first side (0) or the second (1).

        Returns:
            `None` where that was asked too often.
        """
        at = side, call, field
        if at not in self._index:
            if (rows := self._rows_of(side, call)) is None:
                return None
            if isinstance(field, Part):  # each takes as long as a row
                if self._left <= 0:
                    return None
                self._left -= len(rows)
            self._index[at] = {}
            for row, track, i in rows:
                self._index[at].setdefault(track.at(field, i) if isinstance(field, Part) else getattr(row, field), []).append(row)
        return self._index[at].get(value, [])

    def _rows_of(self, side: int, call: int) -> list[tuple[Row, Track, int]] | None:
        rows = self._rows.get((side, call))
        if rows is None and self._left > 0:
            self._left -= len(self.streams)
            places = [(key.env, tracks[side], i) for key, tracks in self.streams for i in tracks[side].events_of(call)]
            rows = [(Row(env, *(track.at(name, i) for name in Row._fields[1:])), track, i) for env, track, i in places]
            self._rows[side, call] = rows
        return rows
