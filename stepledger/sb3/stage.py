"""Recording rows of events, one of each environment, which become arrays many at once."""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..flush import Flush
from ..format import Meta
from ..recorder import BatchRecorder, reward_bits
from ..recording import OnError
from ..scan import Block
from .digests import Digests

__all__ = ["Row", "RowStage", "bits_of", "float32_of"]

#: Rows that are collected, at most, before they become events of the open block.
_ROWS = 128


def bits_of(rewards: Any) -> npt.NDArray[np.uint32]:
    """The bits of rewards cast to float32, ``(n,)``; `stepledger.recorder.reward_bits` with a short way for the usual case."""
    if type(rewards) is np.ndarray and rewards.dtype == np.float32 and (rewards == rewards).all():
        return rewards.view(np.uint32)
    return reward_bits(np.asarray(rewards, np.float64), "<f4")


def float32_of(rewards: Any, n: int) -> npt.NDArray[np.float32]:
    """A copy of rewards, cast to float32, ``(n,)``."""
    if type(rewards) is np.ndarray and rewards.dtype == np.float32 and rewards.shape == (n,):
        return rewards.copy()
    cast = np.empty(n, np.float32)
    cast[:] = bits_of(rewards).view(np.float32)
    return cast


@dataclass(slots=True)
class Row:
    """One event of each stream, or of some: what all ledgers have. Columns are ``(n,)``, contiguous, or `None`: as the stage says.

    Attributes:
        present: bool: which streams have an event here; `None` for all.
        h_obs: Digests of observations.
        h_act: Of actions.
        h_rew: Rewards, float32.
        terminated: bool.
        truncated: bool.
    """

    present: npt.NDArray[np.bool_] | None = None
    h_obs: Digests | None = None
    h_act: Digests | None = None
    h_rew: npt.NDArray[np.float32] | None = None
    terminated: npt.NDArray[np.bool_] | None = None
    truncated: npt.NDArray[np.bool_] | None = None


class RowStage(BatchRecorder):
    """Records rows of events.

    Args:
        path: The ledger.
        meta: From `stepledger.recorder.describe`.
        row: The class of the rows, whose fields are named like the columns.
        on_error: As for every recording.
        flush: When a block is written.
        otherwise: What columns hold where a row says nothing, instead of 0.

    Attributes:
        held: While set, rows stay here and can be changed.
    """

    def __init__(
        self, path: Path, meta: Meta, row: type[Row], *, on_error: OnError = "warn", flush: Flush | None = None, **otherwise: Any
    ) -> None:
        super().__init__(path, meta, on_error=on_error, flush=flush)
        self._n = len(meta["stream_keys"])
        self._names = [field.name for field in dataclasses.fields(row)]
        self._columns: Callable[[Row], tuple[Any, ...]] = operator.attrgetter(*self._names)
        self._template = np.zeros(self._n, self.dtype)
        for name, value in {"stream": np.arange(self._n), **otherwise}.items():
            self._template[name] = value
        self.held = False
        self._rows: list[Row] = []
        # Those that are collected are no part of the open block yet, and both together are what a killed process loses. A step that ends
        # an episode comes with the row of the reset.
        self._most = max(1, min(_ROWS, self._block // (2 * self._n) - 2))
        self._block = max(1, self._block - (self._most + 1) * self._n)
        self._limit, self._collected_at = 1, self._written

    def add(self, *rows: Row) -> None:
        """Append rows, which can be changed until others come."""
        if len(self._rows) >= self._limit and not self.held:
            self._collect()
        self._rows += rows

    def _collect(self) -> None:
        """Make the rows so far events of the open block, and look at the clock about eight times before that is old."""
        now, rows = time.monotonic(), len(self._rows)
        per_row, self._collected_at = (now - self._collected_at) / rows, now
        self._limit = max(1, min(2 * self._limit, int(min(self._most, self._seconds / 8 / max(per_row, 1e-9)))))
        self.append(self._collected())

    def _collected(self) -> npt.NDArray[Any]:
        """The rows so far as events."""
        rows = list(self._rows)
        events = self._events(rows)
        del self._rows[: len(rows)]
        return events

    def _events(self, rows: list[Row]) -> npt.NDArray[Any]:
        events = np.tile(self._template, (len(rows), 1))
        present = np.ones(events.shape, bool)
        for name, column in zip(self._names, zip(*map(self._columns, rows))):
            at = [index for index, value in enumerate(column) if value is not None]
            if not at:
                continue
            said: Any = column if len(at) == len(rows) else [column[index] for index in at]
            said = said if isinstance(said[0], np.ndarray) else [one.values for one in said]
            values = np.frombuffer(b"".join(said), said[0].dtype).reshape(-1, self._n)
            target = present if name == "present" else events[name]
            target[at if len(at) < len(rows) else slice(None)] = bits_of(values) if values.dtype == np.float32 else values
        # As bytes, whose fields numpy doesn't copy one by one.
        return events.view(f"V{self.dtype.itemsize}")[present].view(self.dtype)

    def _pending(self) -> int:
        return super()._pending() + len(self._rows) * self._n

    def _open_block(self) -> tuple[Block, Callable[[], None]]:
        if self._rows:
            self._batches.append(self._collected())
        return super()._open_block()

    def _discard(self) -> None:
        super()._discard()
        self._rows.clear()
