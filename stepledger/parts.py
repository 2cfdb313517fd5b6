"""Digests of the parts of kept values: of a Dict or a Tuple each leaf may come from a place of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from .chance import AROUND
from .digest import MISSING_NUMBER
from .format import Meta
from .ledger import Stream
from .strays import UNSEEN

__all__ = ["Part", "PartDigests"]

#: In the place of a value that was not kept, or is not there.
UNKNOWN = 0

_COLUMNS = {"obs": ("h_obs", "values_obs_"), "action": ("h_act", "values_act_")}
_NOTHING = (MISSING_NUMBER, UNSEEN)

Digests = npt.NDArray[np.uint64]


class Part(NamedTuple):
    """A leaf of an observation or an action.

    Attributes:
        field: ``"obs"`` or ``"action"``.
        number: Of the leaf.
    """

    field: str
    number: int


class PartDigests:
    """The parts of one side of a stream, by index from the first event that was not compared yet; digested when they are asked for.

    Args:
        stream: The window of events.
        meta: Of its ledger.
        past: The last ones before the window.
    """

    def __init__(self, stream: Stream, meta: Meta, past: Mapping[Part, Digests]) -> None:
        self._stream = stream
        self._past = past
        self._found: dict[tuple[Part, int], int] = {}
        self._pieces: dict[tuple[Part, int], Digests] = {}
        # Of a value with one leaf, the recorded digests tell as much.
        paths = {"obs": meta["leaves"]["obs"], "action": meta["leaves"]["act"]} if meta["keep_values"] else {}
        self._parts = [Part(field, number) for field, some in paths.items() if len(some) > 1 for number in range(len(some))]

    def at(self, part: Part, i: int) -> int | None:
        """The digest of a part, or `None` where that is out of reach."""
        if i < 0:
            past = self._past.get(part, ())
            return (int(past[i]) or None) if -i <= len(past) else None
        if i >= len(self._stream):
            return None
        if (part, i) not in self._found:
            self._found[part, i] = self._digested(part, i)
        return self._found[part, i] or None

    def slice(self, part: Part, start: int, stop: int) -> Digests:
        """Those of several events in a row, as many as there are; `UNKNOWN` for one that was not kept."""
        past = self._past.get(part, np.zeros(0, np.uint64))
        start, stop = max(start, -len(past)), min(stop, len(self._stream))
        now = range(max(start, 0) // AROUND, -(-max(stop, 0) // AROUND))
        pieces = [self._piece(part, piece) for piece in now]
        if pieces:
            pieces[-1] = pieces[-1][: stop - AROUND * now[-1]]
            pieces[0] = pieces[0][max(start, 0) - AROUND * now[0] :]
        return np.concatenate([past[len(past) + start :][: max(stop - start, 0)] if start < 0 else past[:0], *pieces])

    def _piece(self, part: Part, piece: int) -> Digests:
        """So many events in a row: places that are looked at lie near each other."""
        if (part, piece) not in self._pieces:
            events = range(AROUND * piece, min(AROUND * (piece + 1), len(self._stream)))
            self._pieces[part, piece] = np.array([self.at(part, i) or UNKNOWN for i in events], np.uint64)
        return self._pieces[part, piece]

    def remembered(self, events: int) -> dict[Part, Digests]:
        """The last ones before the event with this index, to be the past of a later window."""
        return {part: self.slice(part, events - AROUND, events) for part in self._parts}

    def _digested(self, part: Part, i: int) -> int:
        column, values = _COLUMNS[part.field]
        row, kept = self._stream.row(i), self._stream.values.get(f"{values}{part.number}")
        if row is None or kept is None or int(self._stream.data[column][i]) in _NOTHING:
            return UNKNOWN
        value: Any = kept[row]
        raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else np.ascontiguousarray(value).tobytes()
        return xxhash.xxh3_64_intdigest(raw) or 1
