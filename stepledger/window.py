"""Kept values of the last events of each stream, in memory until somebody wants them in the ledger."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import LedgerError
from .format import KEPT
from .scan import Block, Values

__all__ = ["Window", "keeping"]

#: Rows up to which a piece is put together with the one before it: blocks may be small, and there are to be few pieces.
_SMALL = 1024


def keeping(keep_values: Any) -> bool | int:
    """What was passed as ``keep_values``: whether values are kept, or of how many events.

    Raises:
        LedgerError: It is neither.
    """
    if isinstance(keep_values, (bool, np.bool_)):
        return bool(keep_values)
    if isinstance(keep_values, (int, np.integer)) and 0 <= keep_values < 1 << 62 and keep_values != 1:
        return int(keep_values) or False
    raise LedgerError(
        f"keep_values={keep_values!r} is no setting: use True for the values of all events, or a number of events, 2 or more, for those of "
        "the last of each environment."
    )


class Window:
    """The values of the last events of each stream.

    Args:
        events: Of how many, at most.
        streams: Number of streams.
    """

    def __init__(self, events: int, streams: int) -> None:
        self._events = events
        self._counts = np.zeros(streams, np.int64)
        self._saved = np.zeros(streams, np.int64)  # what came before these is in the journal
        # Their `events` say whose each row is. In the order in which they came; a stream's rows are in order within each.
        self._pieces: list[Block] = []

    @property
    def rows(self) -> int:
        """Number of rows that take memory."""
        return sum(len(piece.events) for piece in self._pieces)

    def last(self, streams: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Which events of a block, ordered by stream, are among the last of it."""
        after = np.searchsorted(streams, streams, side="right") - np.arange(len(streams))
        last: npt.NDArray[np.bool_] = after <= self._events
        return last

    def push(self, streams: npt.NDArray[np.uint32], last: npt.NDArray[np.bool_], values: list[Values]) -> None:
        """Take a block that was written, and let go of what is not among the last events any more.

        Args:
            streams: Of its events, ordered.
            last: As `last` said.
            values: Of those.
        """
        index = np.zeros(len(streams), KEPT)
        index["stream"] = streams
        index["event"] = self._counts[streams] + np.arange(len(streams)) - np.searchsorted(streams, streams)
        self._counts += np.bincount(streams, minlength=len(self._counts))
        piece = Block(index[last], values)
        if self._pieces and len(self._pieces[-1].events) < _SMALL:
            piece = _joined([self._pieces.pop(), piece])
        self._pieces.append(piece)
        self._trim()

    def _alive(self, piece: Block) -> npt.NDArray[np.bool_]:
        begins = np.maximum(self._counts - self._events, self._saved)
        alive: npt.NDArray[np.bool_] = piece.events["event"] >= begins[piece.events["stream"]]
        return alive

    def _trim(self) -> None:
        pieces = []
        for piece in self._pieces:
            alive = self._alive(piece)
            number = int(np.count_nonzero(alive))
            # Copied only where that gives back half of it, so that each row is copied a few times at most.
            if number:
                pieces.append(piece if 2 * number > len(alive) else piece.only(alive))
        self._pieces = pieces

    def of(self, stream: int) -> Block | None:
        """What it holds of a stream and was not saved yet; `None` where there is nothing."""
        parts = [piece.only(here) for piece in self._pieces if (here := self._alive(piece) & (piece.events["stream"] == stream)).any()]
        return _joined(parts) if parts else None

    def saved(self, stream: int) -> None:
        """What it holds of a stream is in the journal."""
        self._saved[stream] = self._counts[stream]

    def clear(self) -> None:
        """Let go of everything."""
        self._pieces.clear()


def _joined(parts: list[Block]) -> Block:
    """Several pieces as one."""
    values: list[Values] = []
    for some in zip(*(part.values for part in parts), strict=True):
        if isinstance(some[0], tuple):
            values.append((np.concatenate([data for data, _ in some]), np.concatenate([lengths for _, lengths in some])))
        else:
            values.append(np.concatenate(some))
    return Block(np.concatenate([part.events for part in parts]), values)
