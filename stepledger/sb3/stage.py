"""Recording rows of events, one of each environment, without an array per step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from ..digest import SpaceDigest
from ..format import Meta
from ..journal import Block
from ..recorder import BatchRecorder, reward_bits
from ..recording import OnError

__all__ = ["RowStage", "bits_of", "bytes_of", "digests"]

#: Rows that are collected before they become events of the open block.
_ROWS = 128


def digests(space: SpaceDigest, batch: Any) -> npt.NDArray[np.uint64]:
    """The digests of a batch, ``(n,)``."""
    return np.frombuffer(b"".join(space.rows(batch)), ">u8").astype(np.uint64)


def bytes_of(batch: Any, space: spaces.Space[Any]) -> bytes:
    """The bytes of a batch, if it has the dtype of its space: equal ones have equal digests, and take less time to be told equal.

    Returns:
        Nothing where the dtype is another one.
    """
    if isinstance(batch, dict):
        parts = [(batch[key], space[key].dtype) for key in sorted(batch)]  # type: ignore[index]
        return b"".join(part.tobytes() for part, _ in parts) if all(part.dtype == dtype for part, dtype in parts) else b""
    return bytes(batch.tobytes()) if batch.dtype == space.dtype else b""


def bits_of(rewards: Any) -> npt.NDArray[np.uint32]:
    """The bits of rewards cast to float32, ``(n,)``; `stepledger.recorder.reward_bits` with a short way for the usual case."""
    if type(rewards) is np.ndarray and rewards.dtype == np.float32 and (rewards == rewards).all():
        return rewards.view(np.uint32).copy()  # the trainer adds to rewards in place
    return reward_bits(np.asarray(rewards, np.float64), "<f4")


class RowStage(BatchRecorder):
    """Records rows of events, one event of each stream or of some of them.

    Attributes:
        columns: By name, ``(rows, streams)`` in the ledger's dtypes: a new row, whose index `add` gives, is filled in there.
        present: ``(rows, streams)`` bool: which streams have an event in a row.
        held: While set, rows stay here and can be changed.
    """

    def __init__(self, path: Path, meta: Meta, *, on_error: OnError = "warn") -> None:
        super().__init__(path, meta, on_error=on_error)
        self._n = len(meta["stream_keys"])
        self.held = False
        self._filled = 0
        self._make(np.zeros((_ROWS, self._n), self.dtype), np.zeros((_ROWS, self._n), bool))

    def _make(self, rows: npt.NDArray[Any], present: npt.NDArray[np.bool_]) -> None:
        self._rows, self.present = rows, present
        self.columns: dict[str, npt.NDArray[Any]] = {name: rows[name] for name in rows.dtype.names or () if name != "stream"}

    def template(self, **values: Any) -> npt.NDArray[Any]:
        """A row with these values: what most rows have in common is then filled in at once."""
        row: npt.NDArray[Any] = np.zeros(self._n, self.dtype)
        row["stream"] = np.arange(self._n)
        for name, value in values.items():
            row[name] = value
        return row

    def reserve(self, rows: int) -> None:
        """Make room for so many rows, so that those added next lie in `columns` together."""
        if self._filled + rows > len(self._rows):
            if not self.held:
                self.append(self._drained())
            else:
                self._make(np.concatenate([self._rows, np.zeros_like(self._rows)]), np.concatenate([self.present, self.present]))

    def add(self, template: npt.NDArray[Any], present: Any = True) -> int:
        """Begin a row.

        Args:
            template: What it holds before it is filled in, from `template`.
            present: The streams that have an event in it, ``(n,)`` bool or True.
        """
        row = self._filled
        self._rows[row] = template
        self.present[row] = present
        self._filled += 1
        return row

    def _drained(self) -> npt.NDArray[Any]:
        events: npt.NDArray[Any] = self._rows[: self._filled][self.present[: self._filled]]
        self._filled = 0
        return events

    def _pending(self) -> int:
        return super()._pending() + int(self.present[: self._filled].sum())

    def _open_block(self) -> tuple[Block, Callable[[], None]]:
        self._batches.append(self._drained())
        return super()._open_block()

    def _discard(self) -> None:
        super()._discard()
        self._filled = 0
