"""What a journal holds, as far as it is whole: its blocks of events, read without copying them. The format is in `stepledger.format`."""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from .digest import Layout
from .errors import LedgerError
from .format import KEPT, SAID, TRANSITION, Meta, begins_of, event_dtype, layouts_of, window_of, with_said
from .meta import checked_meta

__all__ = ["Block", "EmptyFileError", "Scan", "Values", "scan"]

#: Bytes of a mapped journal that may stay in memory.
_KEEP_MAPPED = 1 << 24
#: Bytes that the system maps at least, around each that is touched.
_MAPPED_AROUND = 1 << 16

#: Kept values of one leaf for a block's events: rows, or (bytes of all, length of each).
Values = npt.NDArray[Any] | tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


class Block:
    """Events that were written at once, ordered by stream, with their kept values, one entry per leaf of ``meta.values``.

    Of a recorder that keeps the values of the last events only, either the events alone, or in their place whose the values are
    (`stepledger.format.KEPT`).
    """

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
            self.give_back()

    def give_back(self) -> None:
        """Give all pages back to the system."""
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
        kept: Likewise the values of the last events of streams, where those alone were kept; each ordered by stream and event.
        whole: Whether the file ends where the last block does.
        position: Where the last block ends: `scan` can go on from there.
        goes_on: Whether these are the blocks behind the position that was given.
        said: What these parts of the file add to lists of the meta, which has it.
    """

    def __init__(
        self,
        meta: Meta,
        blocks: list[Block],
        kept: list[Block],
        whole: bool,
        position: tuple[int, int],
        goes_on: bool,
        mapped: _Mapped,
        said: dict[str, list[Any]],
    ) -> None:
        self.meta = meta
        self.blocks = blocks
        self.kept = kept
        self.whole = whole
        self.position = position
        self.goes_on = goes_on
        self.said = said
        self._mapped = mapped

    def touched(self, part: npt.NDArray[Any]) -> None:
        """Say that a part of a block was used and is not needed any more."""
        self._mapped.touched(len(part) * part.strides[0])

    def part(self, begin: int, end: int) -> Scan:
        """The blocks with these numbers, without their values."""
        return Scan(self.meta, self.blocks[begin:end], [], self.whole, self.position, True, self._mapped, self.said)

    def give_back(self) -> None:
        """Give the memory of what was used back to the system; it is read again where it is needed again."""
        self._mapped.give_back()


def scan(path: Path, position: tuple[int, int] | None = None, begins: Any = None) -> Scan:
    """Read a journal.

    Args:
        path: The file.
        position: Of an earlier scan: only the blocks behind it are read, if this is still the same file.
        begins: What its meta said then, which has changed if it isn't.

    Raises:
        LedgerError: The file doesn't begin as a journal does, or was altered.
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
    # Journals had four bytes for the number of a stream at first.
    dtypes = [event_dtype(meta["reward_dtype"], meta["columns"], streams) for streams in (len(meta["stream_keys"]), None)]
    layouts = [layout for _, layout in layouts_of(meta)]
    blocks: list[Block] = []
    kept: list[Block] = []
    windowed = window_of(meta) > 0
    said: dict[str, list[Any]] = {}
    whole = True
    goes_on = position is not None and meta.get("begins") == begins
    if position is not None and goes_on:
        records.position = position
    end = records.position
    while whole:
        whole = records.exhausted
        events = next((found for dtype in dtypes if (found := records.next(dtype)) is not None), None)
        of_values = events is None and windowed
        if of_values:
            events = records.next(KEPT)
        if events is None and (more := _next_said(records)):
            for name, some in more.items():
                said.setdefault(name, []).extend(some)
            whole, end = True, records.position
            continue
        if events is None or events.ndim != 1:
            break
        stream = events["stream"]
        if len(events) and ((stream[1:] < stream[:-1]).any() or int(stream[-1]) >= len(meta["stream_keys"])):
            break
        if len(events) and not of_values and int(events["kind"].max()) > TRANSITION:
            break
        values = _next_values(records, layouts, len(events)) if of_values or not windowed else []
        if values is None:
            break
        whole = True
        end = records.position
        if len(events):
            (kept if of_values else blocks).append(Block(events, values))
    if not whole and records.resumes([*dtypes, KEPT, np.dtype(np.uint8), np.dtype(np.int64), *(layout[0] for layout in layouts if layout)]):
        raise LedgerError(f"{path} is altered behind its first {sum(len(block.events) for block in blocks):,} events: record again.")
    if not _are_whose(meta, kept, None if goes_on else blocks):
        raise LedgerError(f"{path} holds values of events that it has not: record again.")
    return Scan(with_said(meta, said), blocks, kept, whole, end, goes_on, mapped, said)


def _next_said(records: _Records) -> dict[str, list[Any]]:
    """What the next record adds to lists of the meta; nothing where it is no such record."""
    record = records.next(np.dtype(np.uint8))
    try:
        said = json.loads(record.tobytes()) if record is not None else {}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(said, dict):
        return {}
    kinds = {
        name: isinstance(some, list) and all(isinstance(one, SAID[name]) for one in some) for name, some in said.items() if name in SAID
    }
    return said if len(kinds) == len(said) and all(kinds.values()) else {}


def _are_whose(meta: Meta, kept: Sequence[Block], blocks: Sequence[Block] | None) -> bool:
    """Whether rows of kept values are in order, each of another event; and of one that is here, where these are all blocks."""
    begins = np.array([begin for begin, _ in begins_of(meta)], np.int64)
    streams = len(meta["stream_keys"])
    ends = np.full(streams, np.iinfo(np.int64).max)
    if kept and blocks is not None:
        ends = begins.copy()
        for block in blocks:
            present, numbers = np.unique(block.events["stream"], return_counts=True)
            ends[present] += numbers
    following = begins.copy()
    for rows in kept:
        stream, event = rows.events["stream"], rows.events["event"]
        same = stream[1:] == stream[:-1]
        first = np.flatnonzero(np.concatenate([[True], ~same])[: len(stream)])
        if (stream[1:] < stream[:-1]).any() or (same & (event[1:] <= event[:-1])).any():
            return False
        if (event[first] < following[stream[first]]).any() or (event >= ends[stream]).any():
            return False
        following[stream] = event + 1  # of the rows of a stream the last one stays
    return True


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
