"""Streams of events: typed buffers on the hot path, a `Recording` behind them.

A `Recorder` holds one row of events per call of the environment: one event for a single environment, one per environment for a vector
env. Its buffer is public because the wrappers write rows into it without a call in between; everything else happens in `Recorder.tick`,
which they call when there is no room for another row.
"""

from __future__ import annotations

import importlib.metadata
import math
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from .digest import SpaceDigest
from .errors import LedgerError
from .format import FORMAT, RESET, REWARD_BITS, Meta, StreamKey, event_dtype, layouts_of
from .journal import Block, Values
from .recording import OnError, Recording

__all__ = [
    "ABSENT",
    "RESET_FLAG",
    "ROW",
    "ROW_BYTES",
    "STEP_FLAG",
    "TERMINATED_FLAG",
    "TRUNCATED_FLAG",
    "BatchRecorder",
    "Recorder",
    "describe",
]

RESET_FLAG, STEP_FLAG, TERMINATED_FLAG, TRUNCATED_FLAG = 0, 1, 2, 4
#: The slot's env had no event in this row.
ABSENT = 255

#: A row of one stream: digest of the action, digest of the observation, reward.
ROW = struct.Struct("=8s8sd")
ROW_BYTES = ROW.size

#: Events that may be lost when the process is killed: a full block is written.
FLUSH_EVENTS = 8192
#: Seconds after which a block is written even if it isn't full, while events arrive.
FLUSH_SECONDS = 2.0
#: Rows after which the clock is looked at in any case: the environment may have become slower.
_STRIDE = 256
#: Bytes of kept values after which a block is written.
_FLUSH_BYTES = 1 << 25


def describe(
    tap: str,
    observations: SpaceDigest,
    actions: SpaceDigest,
    streams: Sequence[StreamKey],
    *,
    reward_dtype: npt.DTypeLike,
    digest: str,
    keep_values: bool = False,
    **more: Any,
) -> Meta:
    """The meta of a new ledger; see `stepledger.format`.

    Raises:
        LedgerError: The reward dtype can't be recorded.
    """
    try:
        dtype = np.dtype(reward_dtype)
    except TypeError:
        raise LedgerError(f"reward_dtype {reward_dtype!r} is no dtype: use np.float32 or np.float64.") from None
    if dtype.str not in REWARD_BITS:
        raise LedgerError(f"reward_dtype {dtype} can't be recorded: use np.float32 or np.float64.")
    keep = {"obs": observations, "act": actions} if keep_values else {}
    return {
        "format": FORMAT,
        "id": uuid.uuid4().hex,
        "tap": tap,
        "digest": digest,
        "reward_dtype": dtype.str,
        "observation_space": observations.description,
        "action_space": actions.description,
        "stream_keys": [list(key) for key in streams],
        "keep_values": keep_values,
        "values": {which: _layouts(keep.get(which)) for which in ("obs", "act")},
        "leaves": {"obs": [list(path) for path in observations.paths], "act": [list(path) for path in actions.paths]},
        "created": time.time(),
        "closed": False,
        "versions": _versions(),
        "columns": {},
        **more,
    }


def _layouts(space: SpaceDigest | None) -> list[list[Any] | None]:
    return [] if space is None else [None if layout is None else [layout[0].str, list(layout[1])] for layout in space.layouts]


def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("stepledger-ray")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        own = "unknown"
    return {"stepledger": own, "gymnasium": gymnasium.__version__, "numpy": np.__version__}


class Recorder(Recording):
    """Records the events of one tap as they happen, in rows: one event of each of its streams.

    Nothing is opened before the first event, so a recorder that saw none leaves no file, and a wrapper can be pickled or forked
    until then.

    Args:
        path: As for every recording.
        meta: From `describe`.
        autoreset: Rows come from a vector env in next-step mode: the row after an episode's end is a reset.
        on_error: As for every recording.

    Attributes:
        window: The room for rows. A row has 8 bytes per stream for its actions' digests, then 8 per stream for its observations', then a
            double per stream for its rewards, whose cast to the reward dtype happens later. One call writes it where there is just one
            stream, see `ROW`.
        at: Where the next row begins.
        marks: The rows that are not a plain step of every stream, each as its number in the block and one byte per stream, see
            `STEP_FLAG` and the others.
        digest_action: With `digest_observation`, of the environment, where there is just one. They are here because the env tap looks
            everything up on this one object: an attribute of a Gymnasium wrapper, which has a ``__getattr__``, costs several times more.
    """

    digest_action: Callable[[Any], bytes]
    digest_observation: Callable[[Any], bytes]

    def __init__(self, path: Path | None, meta: Meta, *, autoreset: bool = False, on_error: OnError = "warn") -> None:
        super().__init__(path, meta, on_error=on_error)
        self.at = 0
        self.marks: list[tuple[int, bytes]] = []
        self.values: list[list[Any]] = [[] for which in ("obs", "act") for _ in meta["values"][which]]
        self._n = len(meta["stream_keys"])
        self._autoreset = autoreset
        self._ended = np.zeros(self._n, bool)
        self._ticked = self._written  # when tick was called last
        self._seen = 0  # rows at that call
        self._stride = 1
        row_bytes = sum(_bytes_of(layout) for which in ("obs", "act") for layout in meta["values"][which])
        events = min(FLUSH_EVENTS, _FLUSH_BYTES // row_bytes if row_bytes else FLUSH_EVENTS)
        self._block = max(1, events // self._n)
        # Not lists of digests: those would keep an object per event alive, and what the cache holds of the environment would go.
        self._row_bytes = ROW_BYTES * self._n
        self._buffer = bytearray(self._block * self._row_bytes)
        self.window = memoryview(self._buffer)[:0]

    @property
    def streams(self) -> int:
        """Number of streams, and of events in a row."""
        return self._n

    @property
    def rows(self) -> int:
        """Number of rows in the open block."""
        return self.at // self._row_bytes

    def append(self, row: bytes, mark: bytes | None = None) -> None:
        """Write a row, and its mark if it isn't a plain step of every stream."""
        if self.at + self._row_bytes > len(self.window):
            self.tick()
        end = self.at + self._row_bytes
        self.window[self.at : end] = row
        if mark is not None:
            self.marks.append((self.rows, mark))
        self.at = end  # last: an interrupt before this leaves no half of a row

    def keep_rows(self, observations: Sequence[list[Any]], actions: Sequence[list[Any]]) -> None:
        """Append the kept values of a row, leaf by leaf; no actions at a reset."""
        for column, values in zip(self.values, observations):
            column.extend(values)
        for index, column in enumerate(self.values[len(observations) :]):
            column.extend(actions[index] if actions else [None] * self._n)

    def keep(self, observation: Sequence[Any], action: Sequence[Any] | None) -> None:
        """Append the kept values of a row of one event, leaf by leaf; no action at a reset."""
        for column, value in zip(self.values, observation):
            column.append(value if isinstance(value, bytes) else value.copy())
        for index, column in enumerate(self.values[len(observation) :]):
            column.append(None if action is None else action[index])

    def tick(self) -> None:
        """Make room for a row: open the journal at the first one; write the block when it is full or old."""
        try:
            now, rows = time.monotonic(), self.rows
            if not self._ready():
                if rows >= self._block and self.recording:  # nobody has said where to write
                    self._grow()
            else:
                # Look at the clock about eight times before the block is old, however fast the environment is.
                per_row = (now - self._ticked) / max(1, rows - self._seen)
                self._stride = max(1, min(2 * self._stride, int(FLUSH_SECONDS / 8 / max(per_row, 1e-9)), _STRIDE))
                if rows >= self._block or now - self._written >= FLUSH_SECONDS:
                    self._write()
            self._ticked, self._seen = now, self.rows
            self.window = memoryview(self._buffer)[: self._row_bytes * min(self._seen + self._stride, self._block)]
        except BaseException as error:
            self.fail(error)

    def _grow(self) -> None:
        self._block *= 2
        self._buffer = self._buffer + bytes(len(self._buffer))

    def _pending(self) -> int:
        return self.rows * self._n

    def _clear(self) -> None:
        self.window = self.window[:0]
        self.marks.clear()
        for column in self.values:
            del column[: self.rows * self._n]  # the values of the row that waits for room stay
        self.at = 0
        self._seen = 0

    def _open_block(self) -> Block:
        """The buffers as a block."""
        n = self._n
        # Whole rows: an error may have come in the middle of one.
        rows = min([self.rows, *(len(column) // n for column in self.values)])
        flags = np.full((rows, n), STEP_FLAG, np.uint8)
        marks = [mark for mark in self.marks if mark[0] < rows]
        if marks:
            flags[[row for row, _ in marks]] = np.frombuffer(b"".join(given for _, given in marks), np.uint8).reshape(-1, n)
        if self._autoreset:
            flags = self._mark_autoresets(flags)
        # From rows to streams; within a stream the order of the rows stays.
        order = np.flatnonzero(flags.T != ABSENT)
        flags = flags.T.ravel()[order]
        events = np.zeros(len(order), event_dtype(self._meta["reward_dtype"], self._meta["columns"]))
        events["stream"] = order // max(1, rows)
        events["kind"] = flags & 1
        events["terminated"] = flags & TERMINATED_FLAG
        events["truncated"] = flags & TRUNCATED_FLAG
        digests, doubles = (np.frombuffer(self._buffer, dtype, 3 * rows * n).reshape(rows, 3, n) for dtype in (">u8", "=f8"))
        for name, column in (("h_act", digests[:, 0]), ("h_obs", digests[:, 1])):
            events[name] = column.T.ravel()[order]
        rewards = doubles[:, 2].T.ravel()[order]
        events["h_rew"] = reward_bits(rewards, self._meta["reward_dtype"])
        # The action sent for a reset step is ignored by the vector env, its reward is no event; its flags would be a fault.
        reset = events["kind"] == RESET
        events["h_act"][reset] = 0
        events["h_rew"][reset] = 0
        # order counts streams by rows; the values lie in rows by streams.
        return Block(events, _stack(self._meta, self.values, (order % max(1, rows)) * n + order // max(1, rows), reset))

    def _mark_autoresets(self, flags: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Make a step that follows the end of its env's episode the reset that the vector env made in its place.

        A reset step itself ends no episode, whatever flags came with it.
        """
        flags = flags.copy()
        step = (flags & 1) == STEP_FLAG
        step &= flags != ABSENT
        ended = step & (flags > STEP_FLAG)
        before = np.concatenate([self._ended[None], ended[:-1]])
        if not (before & ended).any() and not (flags == ABSENT).any():
            flags[before & step] &= ~np.uint8(STEP_FLAG)
            self._ended = ended[-1]
            return flags
        for row in range(len(flags)):
            autoreset = self._ended & step[row]
            flags[row, autoreset] &= ~np.uint8(STEP_FLAG)
            self._ended = np.where(flags[row] == ABSENT, self._ended, ended[row] & ~autoreset)
        return flags


class BatchRecorder(Recording):
    """Records events that come in batches, as arrays of `stepledger.format.event_dtype`."""

    def __init__(self, path: Path | None, meta: Meta, *, on_error: OnError = "warn") -> None:
        super().__init__(path, meta, on_error=on_error)
        self.dtype = event_dtype(meta["reward_dtype"], meta["columns"])
        self._batches: list[npt.NDArray[Any]] = []
        self._size = 0

    def begin(self) -> None:
        """Open the journal before the first event, so that there is a ledger even if none comes."""
        try:
            self._ready()
        except BaseException as error:
            self.fail(error)

    def append(self, events: npt.NDArray[Any]) -> None:
        """Append events; those of one stream in their order."""
        if not self.recording or not len(events):
            return
        try:
            self._batches.append(events)
            self._size += len(events)
            if self._ready() and (self._size >= FLUSH_EVENTS or time.monotonic() - self._written >= FLUSH_SECONDS):
                self._write()
        except BaseException as error:
            self.fail(error)

    def _pending(self) -> int:
        return self._size

    def _open_block(self) -> Block:
        events = np.concatenate(self._batches)
        return Block(events[np.argsort(events["stream"], kind="stable")])

    def _clear(self) -> None:
        self._batches.clear()
        self._size = 0


def reward_bits(rewards: npt.NDArray[np.float64], reward_dtype: str) -> npt.NDArray[Any]:
    """Rewards cast to their dtype, as unsigned integers. Every NaN becomes the same one: its payload is no property of a reward."""
    with np.errstate(all="ignore"):
        cast = rewards.astype(reward_dtype)
    cast[np.isnan(cast)] = np.nan
    bits: npt.NDArray[Any] = cast.view(REWARD_BITS[reward_dtype])
    return bits


def _stack(meta: Meta, columns: Sequence[list[Any]], order: npt.NDArray[np.int64], reset: npt.NDArray[np.bool_]) -> list[Values]:
    """The kept values of slots, in this order, as a block holds them; a reset has no action."""
    stacked: list[Values] = []
    for (name, layout), column in zip(layouts_of(meta), columns):
        if name.startswith("values_act"):
            column = list(column)
            for slot in order[reset]:
                column[slot] = None
        if layout is None:
            texts = [column[slot] or b"" for slot in order]
            lengths = np.array([len(text) for text in texts], np.int64)
            stacked.append((np.frombuffer(b"".join(texts), np.uint8), lengths))
        else:
            rows = np.zeros((len(order), *layout[1]), layout[0])
            for row, slot in enumerate(order):
                if column[slot] is not None:
                    rows[row] = column[slot]
            stacked.append(rows)
    return stacked


def _bytes_of(layout: list[Any] | None) -> int:
    return 64 if layout is None else np.dtype(layout[0]).itemsize * math.prod(layout[1])
