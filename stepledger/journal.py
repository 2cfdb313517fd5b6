"""The file a recorder writes to, and how it becomes a ledger.

Events are appended to ``NAME.journal`` block by block, so that a recorder's memory is bounded and a killed process loses at most its
open block. `Journal.seal` turns the journal into ``NAME.npz`` by a temporary name and a rename. The format is in `stepledger.format`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash

from .errors import LedgerError
from .format import JOURNAL, SEALED, EpisodeCounter, Meta, begins_of, event_dtype, with_said
from .scan import Block, scan
from .sealed import write_sealed

try:
    import fcntl
except ImportError:  # Windows: two recorders of one name are told apart by the file alone
    fcntl = None  # type: ignore[assignment]
try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

__all__ = ["FewDescriptorsError", "Journal", "NameTakenError", "free_name", "is_locked"]

#: Bytes of a journal from which on events are dropped.
_WORTH_IT = 1 << 16


class NameTakenError(LedgerError):
    """Somebody else records under this name at this moment."""


class FewDescriptorsError(LedgerError):
    """A journal would take what the run itself may need to open files."""


#: The files of open journals: in a cycle that is garbage, the collector may close a file before it asks the recorder there to write its
#: last block, unless somebody else holds the file.
_held: dict[int, IO[bytes]] = {}


class Journal:
    """An open journal. Every method may raise `OSError`; what was appended before stays readable.

    Args:
        path: The sealed ledger's name, ``*.npz``; the journal lies beside it.
        meta: See `stepledger.format`; written at once.

    Raises:
        NameTakenError: The same name is being recorded by somebody else at this moment.
        FewDescriptorsError: The process has few file descriptors left.
        OSError: The journal can't be made.
    """

    def __init__(self, path: Path, meta: Meta) -> None:
        self.path = path
        self.meta = meta
        self.dtype = event_dtype(meta["reward_dtype"], meta["columns"], len(meta["stream_keys"]))
        self._journal = path.with_suffix(JOURNAL)
        # The trainer's one ledger is worth more than those of the last of many environments.
        _leave_descriptors(share=4 if meta["tap"] == "env" else 8)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _held[id(self)] = self._open()
        self._end = self._checksum = 0
        try:
            self._append(np.frombuffer(json.dumps(meta).encode(), np.uint8))
        except BaseException:
            self.remove()  # it holds nothing
            raise

    def _open(self) -> IO[bytes]:
        while True:
            file = open(self._journal, "ab", buffering=0)
            try:
                _lock_soon(file)
            except BlockingIOError:
                file.close()
                raise NameTakenError(
                    f"{self.path} is being recorded by another process or environment at this moment: give each environment an "
                    "index, and each vector env a path, of its own."
                ) from None
            try:
                ours = os.path.samestat(os.fstat(file.fileno()), os.stat(self._journal))
            except FileNotFoundError:
                ours = False
            if ours and os.fstat(file.fileno()).st_size == 0:
                if self.path.exists():
                    _set_aside(self.path)
                return file
            if ours:  # whoever wrote it is dead, or the lock would be held
                _set_aside(self._journal)
            file.close()

    def _append(self, array: npt.NDArray[Any]) -> None:
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        checksum = xxhash.xxh3_64_intdigest(buffer.getbuffer(), self._checksum)
        buffer.write(checksum.to_bytes(8, "little"))
        view = buffer.getbuffer()
        size = len(view)
        while view:  # a raw file may write less than asked for
            view = view[self._file.write(view) :]
        self._checksum = checksum
        self._end += size

    def append(self, block: Block) -> None:
        """Write one block to the file; it survives this process's death from then on."""
        parts = (part for values in block.values for part in (values if isinstance(values, tuple) else (values,)))
        self._append_all([block.events, *parts])

    def say(self, entry: str, one: Any) -> None:
        """Add one to a list that the meta holds, see `stepledger.format`."""
        self._append_all([np.frombuffer(json.dumps({entry: [one]}).encode(), np.uint8)])
        self.meta = with_said(self.meta, {entry: [one]})

    def _append_all(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        before = self._end, self._checksum
        try:
            for array in arrays:
                self._append(array)
        except BaseException:  # nothing can be read behind a part of a block
            self._end, self._checksum = before
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._end)
            raise

    def keep(self, rows: Block) -> None:
        """Write kept values of events that were written before; without those of events that were dropped since."""
        begins = np.array([begin for begin, _ in begins_of(self.meta)], np.int64)
        rows = rows.only(rows.events["event"] >= begins[rows.events["stream"]])
        if len(rows.events):
            self.append(rows)

    def forget(self, events: Sequence[int]) -> None:
        """Drop the first events of each stream, as many as these since its first of all, where that makes the file much smaller."""
        if self._end < _WORTH_IT:
            return
        written = scan(self._journal)
        begins = begins_of(self.meta)
        counters = [EpisodeCounter(last) for _, last in begins]
        to_drop = [max(0, number - begin) for number, (begin, _) in zip(events, begins)]
        if 3 * sum(to_drop) < sum(len(block.events) for block in written.blocks):
            return
        dropped = np.zeros(len(to_drop), np.int64)
        blocks = []
        for block in written.blocks:
            keep = np.ones(len(block.events), bool)
            cuts = np.searchsorted(block.events["stream"], np.arange(len(to_drop) + 1))
            for stream, (begin, end) in enumerate(itertools.pairwise(cuts.tolist())):
                drop = min(end - begin, int(to_drop[stream] - dropped[stream]))
                counters[stream].count(block.events["kind"][begin : begin + drop])
                keep[begin : begin + drop] = False
                dropped[stream] += drop
            if keep.any():
                blocks.append(block.only(keep))
        marks = [[begin + int(number), *(counter.last or (0, -1))] for (begin, _), number, counter in zip(begins, dropped, counters)]
        begins_now = np.array([mark[0] for mark in marks], np.int64)
        kept = [rows.only(rows.events["event"] >= begins_now[rows.events["stream"]]) for rows in written.kept]
        self._rewrite({**self.meta, "begins": marks}, [*blocks, *(rows for rows in kept if len(rows.events))])

    def _rewrite(self, meta: Meta, blocks: Sequence[Block]) -> None:
        """Put another journal in the place of this one."""
        before = self._file, self._end, self._checksum
        temporary = self._journal.with_name(f"{self._journal.name}.{os.getpid()}.tmp")
        self._file = open(temporary, "ab", buffering=0)
        try:
            _lock(self._file)
            self._end = self._checksum = 0
            self._append(np.frombuffer(json.dumps(meta).encode(), np.uint8))
            for block in blocks:
                self.append(block)
            os.replace(temporary, self._journal)
        except BaseException:
            self._file.close()
            self._file, self._end, self._checksum = before
            temporary.unlink(missing_ok=True)
            raise
        self.meta = meta
        _held[id(self)] = self._file
        before[0].close()

    def seal(self, **changes: Any) -> None:
        """Write all events so far as a sealed ledger, with these changes to the meta. The journal stays, and can be appended to."""
        write_sealed(self.path, {**self.meta, "ended": time.time(), **changes}, scan(self._journal))

    def close(self) -> None:
        """Close the file and leave it where it is."""
        self._file.close()
        _held.pop(id(self), None)

    def remove(self) -> None:
        """Remove the journal, which a sealed ledger has replaced."""
        self._journal.unlink(missing_ok=True)
        self.close()


def _leave_descriptors(share: int) -> None:
    """Refuse to take one of the last file descriptors, of which each open journal takes one, so that the run can still open files.

    Raises:
        FewDescriptorsError: Less than one of so many is free.
    """
    if resource is None:
        return
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    lowest = os.open(os.devnull, os.O_RDONLY)  # those below it are taken
    os.close(lowest)
    if limit != resource.RLIM_INFINITY and lowest >= limit - limit // share:
        raise FewDescriptorsError(
            f"{lowest} of the {limit} files that this process may open are open, and the rest is left to the run: raise the limit "
            "(ulimit -n), or put fewer environments into one process."
        )


#: What a file system without locks answers: two writers of one name are not noticed there.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}


def _lock(file: IO[bytes], shared: bool = False) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _lock_soon(file: IO[bytes]) -> None:
    """Lock the file; somebody who asks whether it is locked holds the lock for a moment."""
    for _ in range(5):
        try:
            _lock(file)
        except BlockingIOError:
            time.sleep(0.02)
        else:
            return
    _lock(file)


def is_locked(journal: Path) -> bool:
    """Whether a living recorder holds this journal."""
    try:
        with open(journal, "rb") as file:
            _lock(file, shared=True)  # two who ask at the same time don't take each other for the recorder
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _set_aside(path: Path) -> None:
    """Rename an earlier recording's file: ``env-0.npz`` becomes ``env-0.old1.npz``."""
    path.rename(free_name(path, "old"))


def free_name(path: Path, why: str) -> Path:
    """The first of ``env-0.old1.npz``, ``env-0.old2.npz``, ... that is not taken, for ``env-0.npz``; likewise for a journal."""
    number = 1
    while any(path.with_suffix(f".{why}{number}{suffix}").exists() for suffix in (SEALED, JOURNAL)):
        number += 1
    return path.with_suffix(f".{why}{number}{path.suffix}")
