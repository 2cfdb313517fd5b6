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
import math
import mmap
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash

from .digest import Layout
from .errors import LedgerError
from .format import JOURNAL, SEALED, TRANSITION, EpisodeCounter, Meta, begins_of, checked_meta, event_dtype, layouts_of
from .sealed import write_sealed

try:
    import fcntl
except ImportError:  # Windows: two recorders of one name are told apart by the file alone
    fcntl = None  # type: ignore[assignment]
try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

__all__ = ["Block", "Journal", "Scan", "scan"]

#: Bytes of a journal from which on events are dropped.
_WORTH_IT = 1 << 16
#: Bytes of a mapped journal that may stay in memory.
_KEEP_MAPPED = 1 << 24
#: Bytes that the system maps at least, around each that is touched.
_MAPPED_AROUND = 1 << 16

#: Kept values of one leaf for a block's events: rows, or (bytes of all, length of each).
Values = npt.NDArray[Any] | tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


class Block:
    """Events that were written at once, ordered by stream, with their kept values, one entry per leaf of ``meta.values``."""

    __slots__ = ("events", "values")

    def __init__(self, events: npt.NDArray[Any], values: Sequence[Values] = ()) -> None:
        self.events = events
        self.values = values

    def only(self, keep: npt.NDArray[np.bool_]) -> Block:
        """The block with a part of its events."""
        values: list[Values] = []
        for one in self.values:
            if isinstance(one, tuple):
                data, lengths = one
                values.append((data[np.repeat(keep, lengths)], lengths[keep]))
            else:
                values.append(one[keep])
        return Block(self.events[keep], values)


class EmptyFileError(LedgerError):
    """A journal whose recorder was stopped before it wrote anything."""


class NameTakenError(LedgerError):
    """Somebody else records under this name at this moment."""


class FewDescriptorsError(LedgerError):
    """A journal would take what the run itself may need to open files."""


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
        self.dtype = event_dtype(meta["reward_dtype"], meta["columns"])
        self._journal = path.with_suffix(JOURNAL)
        # The trainer's one ledger is worth more than those of the last of many environments.
        _leave_descriptors(share=4 if meta["tap"] == "env" else 8)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()
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
        before = self._end, self._checksum
        try:
            self._append(block.events)
            for values in block.values:
                for part in values if isinstance(values, tuple) else (values,):
                    self._append(part)
        except BaseException:  # nothing can be read behind a part of a block
            self._end, self._checksum = before
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._end)
            raise

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
        self._rewrite({**self.meta, "begins": marks}, blocks)

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
        before[0].close()

    def seal(self, **changes: Any) -> None:
        """Write all events so far as a sealed ledger, with these changes to the meta. The journal stays, and can be appended to."""
        write_sealed(self.path, {**self.meta, "ended": time.time(), **changes}, scan(self._journal))

    def close(self) -> None:
        """Close the file and leave it where it is."""
        self._file.close()

    def remove(self) -> None:
        """Remove the journal, which a sealed ledger has replaced."""
        self._journal.unlink(missing_ok=True)
        self._file.close()


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


class _Mapped:
    """A file that is mapped, not read: memory stays flat however long it is."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.data = memoryview(self._map)
        self._touched = 0

    def find(self, what: bytes, start: int) -> int:
        """Where these bytes are next, or -1."""
        return self._map.find(what, start)

    def touched(self, size: int) -> None:
        """Count bytes that were used, and give their pages back to the system from time to time."""
        self._touched += max(size, _MAPPED_AROUND)
        if self._touched > _KEEP_MAPPED:
            self._touched = 0
            if hasattr(self._map, "madvise"):
                self._map.madvise(mmap.MADV_DONTNEED)


#: What ``np.save`` writes before an array: magic and version 1.0, two bytes of length, and this.
_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(rb"\{'descr': (.{1,10000}), 'fortran_order': False, 'shape': \(([0-9, ]{0,200})\), \} *\n")


class _Records:
    """The records of a journal, one after the other, up to the first that is not whole."""

    def __init__(self, mapped: _Mapped) -> None:
        self._mapped = mapped
        self._data = mapped.data
        self.position = (0, 0)  # where the next record begins, and the checksum of the one before

    def next(self, dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
        """The next record, or `None` if it is not whole or not of this dtype."""
        start, seed = self.position
        header = start + 10
        begin = header + int.from_bytes(self._data[start + 8 : header], "little")
        # Not by numpy's own reader, which parses headers as Python: sealing may happen in a garbage collection within somebody's
        # ast.parse(), which then fails (https://github.com/python/cpython/issues/106905).
        found = _HEADER.fullmatch(self._data[header:begin]) if self._data[start : start + 8] == _MAGIC else None
        if found is None or found[1] != repr(np.lib.format.dtype_to_descr(dtype)).encode():
            return None
        shape = tuple(int(n) for n in found[2].replace(b",", b" ").split())
        end = begin + math.prod(shape) * dtype.itemsize
        if end + 8 > len(self._data):
            return None
        checksum = xxhash.xxh3_64_intdigest(self._data[start:end], seed)
        self._mapped.touched(end - start)
        if checksum != int.from_bytes(self._data[end : end + 8], "little"):
            return None
        try:
            record = np.frombuffer(self._data[begin:end], dtype).reshape(shape)
        except (ValueError, OverflowError):  # a shape that takes no bytes may still be none that an array can have
            return None
        self.position = end + 8, checksum
        return record

    @property
    def exhausted(self) -> bool:
        return self.position[0] == len(self._data)

    def resumes(self, dtypes: Sequence[np.dtype[Any]]) -> bool:
        """Whether whole records come after one that is not: the file was altered, and not cut. Ends the reading."""
        found = self._mapped.find(_MAGIC, self.position[0] + 1)
        while found >= 0:
            for dtype in dtypes:
                # A record's checksum is seeded with the one before it, which ends the record that is not whole.
                self.position = found, int.from_bytes(self._data[found - 8 : found], "little")
                if self.next(dtype) is not None:
                    return True
            found = self._mapped.find(_MAGIC, found + 1)
        return False


class Scan:
    """A journal as far as its checksums hold.

    Attributes:
        meta: See `stepledger.format`.
        blocks: All blocks; their arrays lie in the file, which is mapped, not read.
        whole: Whether the file ends where the last block does.
        position: Where the last block ends: `scan` can go on from there.
        goes_on: Whether these are the blocks behind the position that was given.
    """

    def __init__(self, meta: Meta, blocks: list[Block], whole: bool, position: tuple[int, int], goes_on: bool, mapped: _Mapped) -> None:
        self.meta = meta
        self.blocks = blocks
        self.whole = whole
        self.position = position
        self.goes_on = goes_on
        self._mapped = mapped

    def touched(self, part: npt.NDArray[Any]) -> None:
        """Say that a part of a block was used and is not needed any more."""
        self._mapped.touched(len(part) * part.strides[0])


def scan(path: Path, position: tuple[int, int] | None = None, begins: Any = None) -> Scan:
    """Read a journal.

    Args:
        path: The file.
        position: Of an earlier scan: only the blocks behind it are read, if this is still the same file.
        begins: What its meta said then, which has changed if it isn't.

    Raises:
        LedgerError: The file doesn't begin as a journal does.
        OSError: It can't be read.
    """
    if path.stat().st_size == 0:
        raise EmptyFileError(f"{path} is empty, its recorder was stopped before it could write: delete it, or record again.")
    mapped = _Mapped(path)
    records = _Records(mapped)
    try:
        first = records.next(np.dtype(np.uint8))
        meta = checked_meta(json.loads(first.tobytes()))  # type: ignore[union-attr]
    except (AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, LedgerError):
            raise LedgerError(f"{path}: {error}") from None
        raise LedgerError(f"{path} is not a journal of stepledger, or its beginning is damaged: record again.") from None
    dtype = event_dtype(meta["reward_dtype"], meta["columns"])
    layouts = [layout for _, layout in layouts_of(meta)]
    blocks: list[Block] = []
    whole = True
    goes_on = position is not None and meta.get("begins") == begins
    if position is not None and goes_on:
        records.position = position
    end = records.position
    while whole:
        whole = records.exhausted
        events = records.next(dtype)
        if events is None or events.ndim != 1:
            break
        if len(events) and (int(events["stream"].max()) >= len(meta["stream_keys"]) or int(events["kind"].max()) > TRANSITION):
            break
        values = _next_values(records, layouts, len(events))
        if values is None:
            break
        whole = True
        end = records.position
        blocks.append(Block(events, values))
    if not whole and records.resumes([dtype, np.dtype(np.uint8), np.dtype(np.int64), *(layout[0] for layout in layouts if layout)]):
        raise LedgerError(f"{path} is altered behind its first {sum(len(block.events) for block in blocks):,} events: record again.")
    return Scan(meta, blocks, whole, end, goes_on, mapped)


def _next_values(records: _Records, layouts: Sequence[Layout], n: int) -> list[Values] | None:
    """The kept values of a block of n events, or `None` if they are not all there."""
    found: list[Values] = []
    for layout in layouts:
        part = records.next(np.dtype(np.uint8) if layout is None else layout[0])
        if layout is not None:
            if part is None or part.shape != (n, *layout[1]):
                return None
            found.append(part)
            continue
        lengths = records.next(np.dtype(np.int64))
        if part is None or lengths is None or lengths.shape != (n,):
            return None
        if part.ndim != 1 or (lengths < 0).any() or int(lengths.sum()) != len(part):
            return None
        found.append((part, lengths))
    return found
