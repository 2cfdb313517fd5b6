"""The life of one ledger: opened at its first event, written block by block, sealed at the end, abandoned in a fork."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .errors import LedgerError
from .format import JOURNAL, SAID, Meta
from .journal import FewDescriptorsError, Journal, NameTakenError, free_name
from .scan import Block, scan
from .sealed import mark_sealed
from .window import Window

__all__ = ["OnError", "Recording", "check_on_error", "expect", "warn"]

logger = logging.getLogger("stepledger")

OnError = Literal["warn", "raise"]

#: Events that are kept in memory while nobody has said where to write.
_WAITING_EVENTS = 1 << 20
#: Errors of calls that a ledger tells of, and calls that raised whose places it holds.
_NOTES, _RAISED = 20, 10_000


def check_on_error(on_error: str) -> None:
    """Refuse what is neither ``"warn"`` nor ``"raise"``.

    Raises:
        LedgerError: It is neither.
    """
    if on_error not in ("warn", "raise"):
        raise LedgerError(f"on_error={on_error!r} is unknown: use 'warn' or 'raise'.")


class Recording:
    """The life of one ledger: opened at its first event, written block by block, sealed at the end, abandoned in a fork.

    Args:
        path: The sealed ledger's name, ``*.npz``; `None` until `place` is called: events are kept in memory until then.
        meta: From `describe`.
        on_error: What to do when recording fails: ``"warn"`` once and let the run go on without, or ``"raise"``.

    Attributes:
        recording: Cleared when recording has failed or ended; the tap then only passes calls on.
        in_flight: Set while a call is with the environment: if it never returns, the other side may have one event more.
        exiting: Set at interpreter exit: nobody has closed the environment, and a thread may still step it.
        ended: Set by a tap whose environment was closed, so that nothing may come after.
        final: What the sealed ledger's meta has besides: what is only known at the end.
        stop_workers: Ends the recordings in the processes of a vector env, where one is still open at interpreter exit: its workers are
            terminated then, and would lose their open block.
    """

    stop_workers: Callable[[], object] | None = None
    _window: Window | None = None

    def __init__(self, path: Path | None, meta: Meta, *, on_error: OnError = "warn") -> None:
        check_on_error(on_error)
        self.path = None if path is None else path.absolute()
        self.recording = True
        self.in_flight = False
        self._meta = meta
        self._raise = on_error == "raise"
        self._journal: Journal | None = None
        self.ended = self.exiting = False
        self.final: Meta = {}
        self._lock = threading.RLock()
        self._writing = False
        self._pid = self._lock_pid = os.getpid()
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

    def _open_block(self) -> tuple[Block, Callable[[], None]]:
        """The open block as it is now, and what drops its events once they are written; more may have come by then."""
        raise NotImplementedError

    def _discard(self) -> None:
        """Drop the open block."""
        raise NotImplementedError

    def _own_lock(self) -> threading.RLock:
        """The lock; a new one in a forked child, where the thread that held it isn't there."""
        if self._lock_pid != os.getpid():
            self._lock, self._lock_pid, self._writing = threading.RLock(), os.getpid(), False
        return self._lock

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Keeps other threads from writing. False where this thread is writing already, and a signal handler or a finalizer has come."""
        with self._own_lock():
            alone, self._writing = not self._writing, True
            try:
                yield alone
            finally:
                self._writing = not alone

    def _ready(self) -> bool:
        """Open the journal if it isn't; whether this process is the one that may write to it."""
        if self._journal is None:
            if self.path is None:
                if self._pending() > _WAITING_EVENTS:
                    raise LedgerError("nobody said where to write.")
                return False
            self._begin(self.path)
        elif self._pid != os.getpid():
            self.abandon()
            return False
        return True

    def _begin(self, path: Path) -> None:
        self._meta = {**self._meta, **{name: list(self.final[name]) for name in SAID if name in self.final}}
        try:
            self._journal = Journal(path, self._meta)
        except NameTakenError as error:
            if self._raise:
                raise
            warn(f"{error} What is recorded here goes to another file, and comparing the two will be refused.")
            self._meta = {**self._meta, "conflicts_with": _identity(path)}
            while self._journal is None:
                with contextlib.suppress(NameTakenError):  # by a third one, between the two calls
                    self._journal = Journal(free_name(path, "conflict"), self._meta)
            self.path = self._journal.path  # the other one is somebody else's
        self._pid = os.getpid()
        self._written = time.monotonic()
        _alive.add(self)
        if multiprocessing.parent_process() is not None:  # such a process leaves past what atexit holds
            multiprocessing.util.Finalize(None, _close_all, exitpriority=0)

    def _write(self) -> None:
        """Append the open block to the journal."""
        assert self._journal is not None
        if self._pending():
            block, drop = self._open_block()
            self._journal.append(block)
            drop()
        self._written = time.monotonic()

    def write(self) -> None:
        """Append everything so far to the journal, so that others can read it; much cheaper than `flush`."""
        if self.recording and self._pending() and self._pid == os.getpid():
            try:
                with self._alone() as alone:
                    if alone and self._ready():
                        self._write()
            except BaseException as error:
                self.fail(error)

    def raised(self, error: BaseException, call: Literal["step", "reset"], before: int) -> None:
        """A call of the vector env raised: what the environments gave in it is lost, and the report says why.

        Args:
            error: What it raised.
            call: Which one.
            before: How many calls before it came back, as ``raised`` in `stepledger.format` counts them.
        """
        notes = self.final.setdefault("notes", list(self.meta.get("notes", [])))
        what = type(error).__name__
        with contextlib.suppress(Exception):  # it may have no text, and the run is to see this error and no other
            what = " ".join(f"{what}: {error}".split())[:200].rstrip(":. ")
        note = f"a {call} of the vector env raised {what}; what environments gave in that {call} may not have come back"
        if note not in notes and len(notes) < _NOTES:
            notes.append(note)
            self.say("notes", note)
        places = self.final.setdefault("raised", [])
        if len(places) < _RAISED:
            places.append(before)
            self.say("raised", before)

    def say(self, entry: str, one: Any) -> None:
        """Add to a list of the meta in the journal too, for a ledger that never gets its end; `final` has all of it for one that does."""
        try:
            with self._alone() as alone:
                # Where it isn't open yet, it begins with what was said until then.
                if alone and self.recording and self._journal is not None and self._pid == os.getpid():
                    self._journal.say(entry, one)
        except BaseException as error:
            self.fail(error)

    def save_values(self, streams: Mapping[str, Sequence[int]]) -> None:
        """Write the kept values of the last events of streams, where they are in memory only.

        Args:
            streams: For each ledger of the run, by its path, which of its streams, by position; this recording takes its own.
        """
        wanted = streams.get(str(self.path))
        if wanted is None or self._window is None or not self.recording or self._journal is None or self._pid != os.getpid():
            return
        try:
            with self._alone() as alone:
                if alone:
                    self._write()
                    self._save(wanted)
        except BaseException as error:
            self.fail(error)

    def _save(self, streams: Sequence[int] | None = None) -> None:
        """Append what the window holds of streams, or of all, to the journal."""
        if self._window is None or self._journal is None:
            return
        for stream in range(len(self._meta["stream_keys"])) if streams is None else streams:
            if (rows := self._window.of(stream)) is not None:
                self._journal.keep(rows)
                self._window.saved(stream)

    def forget(self, events: Mapping[str, Sequence[int]]) -> None:
        """Drop events from the journal that were compared and are not needed any more.

        Args:
            events: For each ledger of the run, by its path, how many of each stream since its first; this recording takes its own.
        """
        numbers = events.get(str(self.path))
        if numbers is None or not self.recording or self._journal is None or self._pid != os.getpid():
            return
        try:
            with self._alone() as alone:
                if alone:
                    self._journal.forget(numbers)
        except OSError as error:  # no room for the shorter one beside it: it stays as it is
            logger.warning("%s can't be made shorter: %s", self.path, error)
        except BaseException as error:
            self.fail(error)

    def flush(self) -> None:
        """Write a sealed ledger of everything so far, and go on recording."""
        self._finish(close=False)

    def close(self) -> None:
        """Write the sealed ledger and end recording. Nothing happens the second time, or if there was no event."""
        self._finish(close=True)

    def _finish(self, close: bool) -> None:
        try:
            with self._alone() as alone:
                if alone:
                    self._seal(close)
        except BaseException as error:
            self.fail(error)

    def _seal(self, close: bool) -> None:
        if self.recording and self._pending() and self._journal is None:
            self._ready()
        journal, recording = self._journal, self.recording
        if close:  # first: what another thread brings from here on is used after close
            self.recording = False
        if not recording or journal is None or self._pid != os.getpid():
            return
        try:
            self._write()
            self._save()
            journal.seal(closed=close, in_flight=self.in_flight, **({"exited": True} if self.exiting else {}), **self.final)
        except BaseException:
            self.recording = recording
            raise
        if close:
            _alive.discard(self)
            journal.remove()

    def end_workers(self) -> None:
        """At interpreter exit, end the recordings in the processes of the vector env, if they are there and wait for a call."""
        if self.stop_workers is not None and self.recording and not self.in_flight and self._pid == os.getpid():
            with contextlib.suppress(Exception):  # they may be gone
                self.stop_workers()

    def fail(self, error: BaseException) -> None:
        """End recording because of an error: once, with a warning, a mark in the ledger, and the run untouched."""
        with self._own_lock():
            self._fail(error)
        if self._raise or not isinstance(error, Exception):
            raise error

    def _fail(self, error: BaseException) -> None:
        if not self.recording:
            return
        self.recording = False
        _alive.discard(self)
        reason = f"{type(error).__name__}: {error}"
        journal = self._journal
        if journal is not None and self._pid == os.getpid():
            # What made recording fail may be in the open block, or keep it from being written. After an interrupt nobody knows whether
            # it was written, nor whether the step that was interrupted ever came back.
            with contextlib.suppress(Exception):
                if isinstance(error, Exception):
                    self._write()
            with contextlib.suppress(Exception):
                self._save()
            try:
                journal.seal(**{**self.final, "stopped": reason})
                journal.remove()
            except Exception:  # no room for the mark either: the journal itself says that it was not closed
                journal.close()
        self._journal = None
        self._discard()
        where = "" if self.path is None else f" to {self.path}"
        if not isinstance(error, Exception):  # an interrupt, which the run may survive
            warn(f"recording{where} stopped, and lost what was not written yet: {reason.rstrip(': ')} came while it was under way")
        elif not self._raise and not self._told(error):
            warn(f"recording{where} stopped, training goes on: {reason}")

    def _told(self, error: Exception) -> bool:
        """Whether it was told of the other environments in this process that files can't be opened for them."""
        if not isinstance(error, FewDescriptorsError) or self.path is None:
            return False
        told = self.path.parent in _few_descriptors
        _few_descriptors.add(self.path.parent)
        return told

    def used_after_close(self) -> None:
        """If the environment was closed and goes on: once, say so, and mark the ledger as one that has no end."""
        if self.ended:
            self.ended = False
            if self.path is not None and self._pid == os.getpid():
                with self._own_lock(), contextlib.suppress(Exception):
                    mark_sealed(self.path, stopped="the environment was used after it was closed")
            warn(f"{self.path} was closed, and what comes now is not recorded: close the environment after its last step.")

    def abandon(self) -> None:
        """This is a forked copy: the ledger belongs to the process that opened it."""
        self.recording = False
        _alive.discard(self)
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._discard()

    def __del__(self) -> None:
        if getattr(self, "_journal", None) is not None:
            self.end_workers()
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        # A copy made before the first event records like the original. A later one is no part of the run.
        state = {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_journal", "stop_workers")}
        if self._journal is not None or not self.recording:
            state["recording"] = False
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock(), _journal=None, _pid=os.getpid(), _lock_pid=os.getpid())


def expect(ledger: str, taps: Sequence[str]) -> None:
    """Have a ledger that is being recorded in this process say which taps its run has, so that one that is missing is missed.

    Args:
        ledger: Its id.
        taps: What the run has.
    """
    for recording in list(_alive):
        if recording.meta["id"] == ledger:
            recording.final["taps"] = list(taps)


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


#: Packages whose lines tell a user nothing.
_BETWEEN = {"stepledger", "stepledger_ray", "gymnasium", "stable_baselines3"}


def warn(message: str) -> None:
    """Warn at the line that called what lies between it and here; where warnings are errors, log."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    try:
        warnings.warn(f"stepledger: {message}", RuntimeWarning, stacklevel=level)
    except RuntimeWarning:  # warnings are errors here, and recording must not end the run
        logger.warning("%s", message)


#: Directories of which it was said that not all ledgers can be opened.
_few_descriptors: set[Path] = set()

#: Recorders with an open journal, for those whose environment is never closed.
_alive: weakref.WeakSet[Recording] = weakref.WeakSet()


@atexit.register  # runs before multiprocessing, which was imported earlier, terminates its daemons
def _close_all() -> None:
    recorders = list(_alive)
    for recorder in recorders:
        recorder.ended = recorder.exiting = True  # a daemon thread may go on
    for recorder in recorders:
        recorder.end_workers()
    for recorder in recorders:
        recorder.close()


def _abandon_all() -> None:
    """In a forked child, whose copies of open files would hold the locks of recorders that are killed."""
    for recorder in list(_alive):
        recorder.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
