"""Streams of events: typed buffers on the hot path, a journal behind them.

A `Recorder` holds one row of events per call of the environment: one slot for a single environment, one per environment for a vector
env. Its buffers are public because the wrappers append to them without a call in between; everything else happens in `Recorder.tick`,
which they call at the first event and then after as many slots as it said the last time.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import math
import multiprocessing.util
import os
import time
import uuid
import warnings
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt

from .digest import SpaceDigest
from .errors import LedgerError
from .format import FORMAT, JOURNAL, RESET, REWARD_BITS, Meta, StreamKey, event_dtype
from .journal import Block, Journal, NameTakenError, Values, free_name, layouts_of, scan

__all__ = [
    "ABSENT",
    "RESET_FLAG",
    "STEP_FLAG",
    "TERMINATED_FLAG",
    "TRUNCATED_FLAG",
    "BatchRecorder",
    "OnError",
    "Recorder",
    "check_on_error",
    "describe",
]

OnError = Literal["warn", "raise"]

RESET_FLAG, STEP_FLAG, TERMINATED_FLAG, TRUNCATED_FLAG = 0, 1, 2, 4
#: The slot's env had no event in this row.
ABSENT = 255

#: Events that may be lost when the process is killed: a full block is written.
FLUSH_EVENTS = 8192
#: Seconds after which a block is written even if it isn't full, while events arrive.
FLUSH_SECONDS = 1.0
#: Events that are kept in memory while nobody has said where to write.
_WAITING_EVENTS = 1 << 20
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


def check_on_error(on_error: str) -> None:
    """Refuse what is neither ``"warn"`` nor ``"raise"``.

    Raises:
        LedgerError: It is neither.
    """
    if on_error not in ("warn", "raise"):
        raise LedgerError(f"on_error={on_error!r} is unknown: use 'warn' or 'raise'.")


class _Recording:
    """The life of one ledger: opened at its first event, written block by block, sealed at the end, abandoned in a fork.

    Args:
        path: The sealed ledger's name, ``*.npz``; `None` until `place` is called: events are kept in memory until then.
        meta: From `describe`.
        on_error: What to do when recording fails: ``"warn"`` once and let the run go on without, or ``"raise"``.

    Attributes:
        recording: Cleared when recording has failed or ended; the tap then only passes calls on.
        in_flight: Set while a call is with the environment: if it never returns, the other side may have one event more.
    """

    def __init__(self, path: Path | None, meta: Meta, *, on_error: OnError = "warn") -> None:
        check_on_error(on_error)
        self.path = None if path is None else path.absolute()
        self.recording = True
        self.in_flight = False
        self._meta = meta
        self._raise = on_error == "raise"
        self._journal: Journal | None = None
        self._pid = os.getpid()
        self._written = time.monotonic()

    @property
    def meta(self) -> Meta:
        """The ledger's meta so far."""
        return self._meta

    def place(self, path: Path, **meta: Any) -> None:
        """Say where to write, and complete the meta; only before the journal is open."""
        if self._journal is None:
            self.path = path.absolute()
            self._meta = {**self._meta, **meta}

    def _pending(self) -> int:
        """Number of events, or slots, in the open block."""
        raise NotImplementedError

    def _open_block(self) -> Block:
        """The open block."""
        raise NotImplementedError

    def _clear(self) -> None:
        """Begin a new block."""
        raise NotImplementedError

    def _ready(self) -> bool:
        """Open the journal if it isn't; whether this process is the one that may write to it."""
        if self._journal is None:
            if self.path is None:
                if self._pending() > _WAITING_EVENTS:
                    raise LedgerError("nobody said where to write.")
                return False
            self._begin(self.path)
        elif self._pid != os.getpid():
            self._abandon()
            return False
        return True

    def _begin(self, path: Path) -> None:
        try:
            self._journal = Journal(path, self._meta)
        except NameTakenError as error:
            if self._raise:
                raise
            _warn(f"{error} What is recorded here goes to another file, and comparing the two will be refused.")
            self._meta = {**self._meta, "conflicts_with": _identity(path)}
            while self._journal is None:
                with contextlib.suppress(NameTakenError):  # by a third one, between the two calls
                    self._journal = Journal(free_name(path, "conflict"), self._meta)
        self._pid = os.getpid()
        self._written = time.monotonic()
        _alive.add(self)
        if multiprocessing.parent_process() is not None:  # such a process leaves past what atexit holds
            multiprocessing.util.Finalize(None, _close_all, exitpriority=0)

    def _write(self) -> None:
        """Append the open block to the journal."""
        assert self._journal is not None
        block = self._open_block() if self._pending() else None
        self._clear()  # first: an interrupt while it is being written must not make it be written again
        if block is not None:
            self._journal.append(block)
        self._written = time.monotonic()

    def flush(self) -> None:
        """Write a sealed ledger of everything so far, and go on recording."""
        self._finish(close=False)

    def close(self) -> None:
        """Write the sealed ledger and end recording. Nothing happens the second time, or if there was no event."""
        self._finish(close=True)

    def _finish(self, close: bool) -> None:
        if self.recording and self._pending() and self._journal is None:
            try:
                self._ready()
            except BaseException as error:
                self.fail(error)
        journal = self._journal
        if not self.recording or journal is None or self._pid != os.getpid():
            if close:
                self.recording = False
            return
        try:
            self._write()
            journal.seal(closed=close, in_flight=self.in_flight)
            if close:
                self.recording = False
                _alive.discard(self)
                journal.remove()
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End recording because of an error: once, with a warning, a mark in the ledger, and the run untouched."""
        if self.recording:
            self.recording = False
            _alive.discard(self)
            reason = f"{type(error).__name__}: {error}"
            journal = self._journal
            if journal is not None and self._pid == os.getpid():
                with contextlib.suppress(Exception):  # what made recording fail may be in the open block, or keep it from being written
                    self._write()
                try:
                    journal.seal(stopped=reason)
                    journal.remove()
                except Exception:  # no room for the mark either: the journal itself says that it was not closed
                    journal.close()
            self._journal = None
            self._clear()
            if not self._raise and isinstance(error, Exception):
                _warn(f"recording to {self.path} stopped, training goes on: {reason}")
        if self._raise or not isinstance(error, Exception):
            raise error

    def _abandon(self) -> None:
        """This is a forked copy: the ledger belongs to the process that opened it."""
        self.recording = False
        self._journal = None
        self._clear()

    def __del__(self) -> None:
        if getattr(self, "_journal", None) is not None:
            self.close()


class Recorder(_Recording):
    """Records the events of one tap as they happen.

    Nothing is opened before the first event, so a recorder that saw none leaves no file, and a wrapper can be pickled or forked
    until then.

    Args:
        path: As for every recording.
        meta: From `describe`.
        autoreset: Rows come from a vector env in next-step mode: the row after an episode's end is a reset.
        on_error: As for every recording.

    Attributes:
        flags: One byte per slot, see `STEP_FLAG` and the others.
        h_obs, h_act: Eight bytes per slot, its digests.
        reward: One double per slot. The cast to the reward dtype happens later.
    """

    def __init__(self, path: Path | None, meta: Meta, *, autoreset: bool = False, on_error: OnError = "warn") -> None:
        super().__init__(path, meta, on_error=on_error)
        self.flags = bytearray()
        # Not lists of digests: those would keep an object per event alive, and what the cache holds of the environment would go.
        self.h_obs = bytearray()
        self.h_act = bytearray()
        self.reward = array("d")
        self.values: list[list[Any]] = [[] for which in ("obs", "act") for _ in meta["values"][which]]
        self._n = len(meta["stream_keys"])
        self._autoreset = autoreset
        self._ended = np.zeros(self._n, bool)
        self._ticked = self._written  # when tick was called last
        self._seen = 0  # slots at that call
        self._stride = 1
        row_bytes = sum(_bytes_of(layout) for which in ("obs", "act") for layout in meta["values"][which])
        self._block = max(self._n, min(FLUSH_EVENTS, _FLUSH_BYTES // row_bytes if row_bytes else FLUSH_EVENTS))

    @property
    def streams(self) -> int:
        """Number of streams, and of slots in a row."""
        return self._n

    def keep_rows(self, observations: Sequence[list[Any]], actions: Sequence[list[Any]]) -> None:
        """Append the kept values of a row, leaf by leaf; no actions at a reset."""
        for column, values in zip(self.values, observations):
            column.extend(values)
        for index, column in enumerate(self.values[len(observations) :]):
            column.extend(actions[index] if actions else [None] * self._n)

    def keep(self, observation: Sequence[Any], action: Sequence[Any] | None) -> None:
        """Append the kept values of one slot, leaf by leaf; no action at a reset."""
        for column, value in zip(self.values, observation):
            column.append(value if isinstance(value, bytes) else value.copy())
        for index, column in enumerate(self.values[len(observation) :]):
            column.append(None if action is None else action[index])

    def tick(self) -> int:
        """Open the journal at the first event; write the block when it is full or old.

        Returns:
            After how many more slots to call again.
        """
        try:
            if not self._ready():
                return FLUSH_EVENTS
            now = time.monotonic()
            # Look at the clock about eight times before the block is old, however fast the environment is.
            per_slot = (now - self._ticked) / max(1, len(self.flags) - self._seen)
            self._stride = max(self._n, min(2 * self._stride, int(FLUSH_SECONDS / 8 / max(per_slot, 1e-9))))
            if len(self.flags) >= self._block or now - self._written >= FLUSH_SECONDS:
                self._write()
            self._ticked, self._seen = now, len(self.flags)
            return max(self._n, min(self._stride, self._block - self._seen))
        except BaseException as error:
            self.fail(error)
            return FLUSH_EVENTS

    def _pending(self) -> int:
        return len(self.flags)

    def _clear(self) -> None:
        for buffer in (self.flags, self.h_obs, self.h_act, self.reward, *self.values):
            del buffer[:]  # type: ignore[attr-defined]
        self._seen = 0

    def _open_block(self) -> Block:
        """The buffers as a block."""
        n = self._n
        # Whole rows: an error may have come in the middle of one.
        rows = min(len(self.flags), len(self.h_obs) // 8, len(self.h_act) // 8, len(self.reward), *map(len, self.values)) // n
        flags = np.frombuffer(bytes(self.flags[: rows * n]), np.uint8).reshape(rows, n)
        if self._autoreset:
            flags = self._mark_autoresets(flags)
        # From rows to streams; within a stream the order of the rows stays.
        order = np.flatnonzero(flags.T != ABSENT)
        flags = flags.T.ravel()[order]
        events = np.zeros(len(order), event_dtype(self._meta["reward_dtype"], self._meta["columns"]))
        events["stream"] = order // rows
        events["kind"] = flags & 1
        events["terminated"] = flags & TERMINATED_FLAG
        events["truncated"] = flags & TRUNCATED_FLAG
        for name, digests in (("h_obs", self.h_obs), ("h_act", self.h_act)):
            events[name] = np.frombuffer(bytes(digests[: 8 * rows * n]), ">u8").reshape(rows, n).T.ravel()[order]
        rewards = np.array(self.reward[: rows * n]).reshape(rows, n).T.ravel()[order]
        events["h_rew"] = reward_bits(rewards, self._meta["reward_dtype"])
        # The action sent for a reset step is ignored by the vector env, its reward is no event; its flags would be a fault.
        reset = events["kind"] == RESET
        events["h_act"][reset] = 0
        events["h_rew"][reset] = 0
        # order counts streams by rows; the values lie in rows by streams.
        return Block(events, _stack(self._meta, self.values, (order % rows) * n + order // rows, reset))

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


class BatchRecorder(_Recording):
    """Records events that come in batches, as arrays of `stepledger.format.event_dtype`."""

    def __init__(self, path: Path | None, meta: Meta, *, on_error: OnError = "warn") -> None:
        super().__init__(path, meta, on_error=on_error)
        self.dtype = event_dtype(meta["reward_dtype"], meta["columns"])
        self._batches: list[npt.NDArray[Any]] = []
        self._size = 0

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


def _identity(path: Path) -> str:
    """The id of the ledger that is being recorded under this name; empty if it has ended."""
    for _ in range(100):
        try:
            return str(scan(path.with_suffix(JOURNAL)).meta["id"])
        except FileNotFoundError:
            break
        except (LedgerError, OSError):  # it was opened, but not written to yet
            time.sleep(0.01)
    return ""


def _warn(message: str) -> None:
    warnings.warn(f"stepledger: {message}", RuntimeWarning, stacklevel=2)


#: Recorders with an open journal, for those whose environment is never closed.
_alive: weakref.WeakSet[_Recording] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for recorder in list(_alive):
        recorder.close()
