"""Streams of events: typed buffers on the hot path, a `Recording` behind them.

A `Recorder` holds one row of events per call of the environment: one event for a single environment, one per environment for a vector
env. Its buffer is public because the wrappers append rows without a call in between; everything else happens in `Recorder.tick`, which
they call when the buffer is as long as `Recorder.limit`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
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
from .flush import Flush
from .format import FORMAT, REWARD_BITS, STEP, WINDOWED, Meta, StreamKey, event_dtype, layouts_of, window_of
from .recording import OnError, Recording
from .scan import Block, Values
from .window import Window, keeping

__all__ = [
    "ABSENT",
    "RESET_FLAG",
    "ROW",
    "BatchRecorder",
    "Recorder",
    "describe",
]

STEP_FLAG, TERMINATED_FLAG, TRUNCATED_FLAG = 1, 2, 4
#: In the place of an env's terminated: this was a reset.
RESET_FLAG = 0x80
#: Likewise: the env had no event in this row.
ABSENT = 0xFF

#: A row of one stream: digests of action and observation, reward, terminated, truncated.
ROW = struct.Struct("=8s8sd??")
#: Where the parts of a row begin and end, for each of its streams.
_CUTS = (0, 8, 16, 24, 25, 26)

#: Events that may be lost when the process is killed, unless the user says how many: a full block is written.
FLUSH_EVENTS = 8192
#: Seconds after which a block is written even if it isn't full, while events arrive; likewise.
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
    keep_values: bool | int = False,
    **more: Any,
) -> Meta:
    """The meta of a new ledger; see `stepledger.format`.

    Raises:
        LedgerError: The reward dtype can't be recorded, or ``keep_values`` is no setting.
    """
    try:
        dtype = np.dtype(reward_dtype)
    except TypeError:
        raise LedgerError(f"reward_dtype {reward_dtype!r} is no dtype: use np.float32 or np.float64.") from None
    if dtype.str not in REWARD_BITS:
        raise LedgerError(f"reward_dtype {dtype} can't be recorded: use np.float32 or np.float64.")
    keep_values = keeping(keep_values)
    keep = {"obs": observations, "act": actions} if keep_values else {}
    return {
        "format": FORMAT if isinstance(keep_values, bool) else WINDOWED,
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
        "versions": versions(),
        "columns": {},
        **more,
    }


def _layouts(space: SpaceDigest | None) -> list[list[Any] | None]:
    return [] if space is None else [None if layout is None else [layout[0].str, list(layout[1])] for layout in space.layouts]


def versions() -> dict[str, str]:
    """Of the packages that decide what is recorded."""
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
        flush: When a block is written.

    Attributes:
        buffer: The rows of the open block. A row has 8 bytes per stream for the digests of its actions, then 8 for those of its
            observations, then a double for its rewards, whose cast to the reward dtype happens later, then a byte each for terminated and
            truncated; see `ROW`. It is appended in one operation, and dropped from the front in another, so that a flush by a signal
            handler or another thread finds whole rows.
        limit: Length of the buffer at which `tick` is to be called.
        digest_action: With `digest_observation`, of the environment, where there is just one. They are here, beside the buffer, so that the
            env tap looks all of it up on one object, and so that those that keep values can take their place.
    """

    digest_action: Callable[[Any], bytes]
    digest_observation: Callable[[Any], bytes]

    def __init__(
        self, path: Path | None, meta: Meta, *, autoreset: bool = False, on_error: OnError = "warn", flush: Flush | None = None
    ) -> None:
        super().__init__(path, meta, on_error=on_error)
        # Not lists of digests: those would keep an object per event alive, and what the cache holds of the environment would go.
        self.buffer = bytearray()
        self.limit = 1
        self.values: list[list[Any]] = [[] for which in ("obs", "act") for _ in meta["values"][which]]
        self._n = len(meta["stream_keys"])
        self._window = Window(events, self._n) if (events := window_of(meta)) else None
        self.autoreset = autoreset
        self._dropped = 0  # rows of blocks that were written
        self._ended = np.zeros(self._n, bool)
        self._ticked = self._written  # when tick was called last
        self._seen = 0  # rows at that call
        self._stride = 1
        row_bytes = sum(_bytes_of(layout) for which in ("obs", "act") for layout in meta["values"][which])
        every, self._seconds = _bounds(flush)
        block = min(every, _FLUSH_BYTES // row_bytes if row_bytes else every)
        self._block = max(1, block // self._n)
        self._row_bytes = ROW.size * self._n

    @property
    def streams(self) -> int:
        """Number of streams, and of events in a row."""
        return self._n

    @property
    def rows(self) -> int:
        """Number of rows in the open block."""
        return len(self.buffer) // self._row_bytes

    @property
    def appended(self) -> int:
        """Number of rows since the first."""
        return self._dropped + self.rows

    def append(self, row: bytes) -> None:
        """Append a row."""
        self.buffer += row
        if len(self.buffer) >= self.limit:
            self.tick()

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
        """Open the journal at the first row; write the block when it is full or old; set `limit`."""
        try:
            with self._alone() as alone:
                if alone:
                    self._tick()
        except BaseException as error:
            self.fail(error)

    def _tick(self) -> None:
        if not self._ready():
            self.limit = 2 * len(self.buffer)  # nobody has said where to write
            return
        now, rows = time.monotonic(), self.rows
        # Look at the clock about eight times before the block is old, however fast the environment is.
        per_row = (now - self._ticked) / max(1, rows - self._seen)
        self._stride = max(1, min(2 * self._stride, int(min(_STRIDE, self._seconds / 8 / max(per_row, 1e-9)))))
        if rows >= self._block or now - self._written >= self._seconds:
            self._write()
        self._ticked, self._seen = now, self.rows
        self.limit = self._row_bytes * max(1, min(self._seen + self._stride, self._block))

    def _pending(self) -> int:
        return self.rows * self._n

    def _open_block(self) -> tuple[Block, Callable[[], None]]:
        n, size = self._n, self._row_bytes
        # An error, or a flush, may have come between a row and its values.
        rows = min([self.rows, *(len(column) // n for column in self.values)])
        data = np.frombuffer(bytes(self.buffer[: rows * size]), np.uint8).reshape(rows, size)
        columns = [np.ascontiguousarray(data[:, begin * n : end * n]) for begin, end in itertools.pairwise(_CUTS)]
        h_act, h_obs, reward = (column.view(dtype) for column, dtype in zip(columns, (">u8", ">u8", "=f8")))
        terminated, truncated = columns[3:]
        flags = np.where(terminated > 1, terminated, STEP_FLAG | terminated << 1 | truncated << 2)
        ended = self._ended
        if self.autoreset:
            flags, ended = self._mark_autoresets(flags)
        # From rows to streams; within a stream the order of the rows stays.
        order = np.flatnonzero(flags.T != ABSENT)
        flags = flags.T.ravel()[order]
        events = np.zeros(len(order), event_dtype(self._meta["reward_dtype"], self._meta["columns"], n))
        events["stream"] = order // max(1, rows)
        events["kind"] = flags & STEP_FLAG
        step = events["kind"] == STEP
        events["terminated"] = flags & TERMINATED_FLAG
        events["truncated"] = flags & TRUNCATED_FLAG
        events["h_obs"] = h_obs.T.ravel()[order]
        # The action sent for a reset step is ignored by the vector env, its reward is no event; its flags would be a fault.
        events["h_act"] = np.where(step, h_act.T.ravel()[order], 0)
        events["h_rew"] = np.where(step, reward_bits(reward.T.ravel()[order], self._meta["reward_dtype"]), 0)
        # order counts streams by rows; the values lie in rows by streams.
        slots = (order % max(1, rows)) * n + order // max(1, rows)
        if self._window is None:
            return Block(events, _stack(self._meta, self.values, slots, ~step)), functools.partial(self._drop, rows, ended)
        last = self._window.last(events["stream"])
        values = _stack(self._meta, self.values, slots[last], ~step[last])
        return Block(events), functools.partial(self._drop, rows, ended, (events["stream"], last, values))

    def _drop(self, rows: int, ended: npt.NDArray[np.bool_], of_window: tuple[Any, Any, list[Values]] | None = None) -> None:
        if self._window is not None and of_window is not None:
            self._window.push(*of_window)
        del self.buffer[: rows * self._row_bytes]
        for column in self.values:
            del column[: rows * self._n]
        self._ended, self._seen = ended, 0
        self._dropped += rows
        self.limit = len(self.buffer) + self._row_bytes

    def _discard(self) -> None:
        for buffer in (self.buffer, *self.values):
            del buffer[:]
        if self._window is not None:
            self._window.clear()

    def _mark_autoresets(self, flags: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
        """Make a step that follows the end of its env's episode the reset that the vector env made in its place.

        A reset step itself ends no episode, whatever flags came with it.
        """
        flags, last = flags.copy(), self._ended
        step = ((flags & STEP_FLAG) == STEP_FLAG) & (flags != ABSENT)
        ended = step & (flags > STEP_FLAG)
        before = np.concatenate([last[None], ended])[:-1]
        if not (before & ended).any() and not (flags == ABSENT).any():
            flags[before & step] &= ~np.uint8(STEP_FLAG)
            return flags, ended[-1] if len(ended) else last
        for row in range(len(flags)):
            autoreset = last & step[row]
            flags[row, autoreset] &= ~np.uint8(STEP_FLAG)
            last = np.where(flags[row] == ABSENT, last, ended[row] & ~autoreset)
        return flags, last


class BatchRecorder(Recording):
    """Records events that come in batches, as arrays of `stepledger.format.event_dtype`."""

    def __init__(self, path: Path | None, meta: Meta, *, on_error: OnError = "warn", flush: Flush | None = None) -> None:
        super().__init__(path, meta, on_error=on_error)
        self._block, self._seconds = _bounds(flush)
        self.dtype = event_dtype(meta["reward_dtype"], meta["columns"], len(meta["stream_keys"]))
        self._batches: list[npt.NDArray[Any]] = []

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
        self._batches.append(events)
        try:
            with self._alone() as alone:
                if alone and self._ready() and (self._pending() >= self._block or time.monotonic() - self._written >= self._seconds):
                    self._write()
        except BaseException as error:
            self.fail(error)

    def _pending(self) -> int:
        return sum(map(len, self._batches))

    def _open_block(self) -> tuple[Block, Callable[[], None]]:
        batches = list(self._batches)
        events = np.concatenate(batches)
        return Block(events[np.argsort(events["stream"], kind="stable")]), functools.partial(self._drop, len(batches))

    def _drop(self, batches: int) -> None:
        del self._batches[:batches]

    def _discard(self) -> None:
        self._batches.clear()


def _bounds(flush: Flush | None) -> tuple[int, float]:
    """Events and seconds that a block may have."""
    every, seconds = flush or Flush()
    return FLUSH_EVENTS if every is None else every, FLUSH_SECONDS if seconds is None else seconds


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
