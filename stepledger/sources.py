"""Ledgers that are read a few events at a time, in memory that does not grow with them.

Of a sealed ledger each stream's part of each column is read slice by slice and checksummed in the same pass; a journal is read block by
block. Each has the checks that `stepledger.archive` and `stepledger.journal` make, but the checksums of a sealed ledger's columns hold
once its last event was read: what was found before `Source.finish` is no verdict.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .archive import Archive, falls, header_of
from .checksum import crc32_joined
from .errors import LedgerError
from .format import JOURNAL, SEALED, Meta, StreamKey, begins_of, event_dtype
from .ledger import Ledger, ledger_of, read, reading
from .scan import Scan, scan
from .stream import Stream, Streams
from .version1 import is_first

__all__ = ["COUNTED", "Checksums", "JournalSource", "SealedSource", "Source", "WholeSource", "source_of"]

#: The columns of a sealed ledger that are derived from the others, and so checked and not used.
COUNTED = ("episode", "step")

#: Of each column, the number of each stream and the checksum of its part.
Checksums = dict[str, dict[int, int]]


class Source(ABC):
    """A ledger that is being read.

    Attributes:
        path: As of `Ledger`, like the next ones.
        meta: See `stepledger.format`.
        open_end: As of `Ledger`.
        keys: Of the streams that are read.
        begins: How many events of each stream came before the first that is here.
        taken: How many of each were read.
        events: Number of events in all of these streams.
        in_order: Whether events come in the order in which they were recorded, so that streams can't be read one apart from the others.
    """

    in_order = False

    def __init__(self, path: Path, meta: Meta, open_end: bool, keys: Sequence[StreamKey], begins: Sequence[int], events: int) -> None:
        self.path = path
        self.meta = meta
        self.open_end = open_end
        self.keys = list(keys)
        self.begins = list(begins)
        self.taken = [0] * len(keys)
        self.events = events

    @abstractmethod
    def ended(self, stream: int) -> bool:
        """Whether a stream was read to its end."""

    @abstractmethod
    def kinds(self, stream: int, number: int) -> npt.NDArray[np.uint8]:
        """The kinds of a stream's next events, of so many or as many as there are. Not of a source whose events come in order."""

    @abstractmethod
    def take(self, counts: Sequence[int]) -> Ledger:
        """The next events.

        Args:
            counts: How many of each stream; a source whose events come in order may give more of some.

        Raises:
            LedgerError: They are damaged, or the file can't be read.
        """

    def finish(self) -> None:  # noqa: B027 - there may be nothing to check
        """Check what can be checked at the end only.

        Raises:
            LedgerError: The file is damaged: nothing that was read of it counts.
        """

    def _part(self, streams: list[Stream]) -> Ledger:
        for number, stream in enumerate(streams):
            self.taken[number] += len(stream)
        return Ledger(self.path, self.meta, Streams(streams), self.open_end)


class WholeSource(Source):
    """A ledger that was read as a whole, because there is no other way: it holds values, or is compressed, or of the first version."""

    def __init__(self, ledger: Ledger, keys: Collection[StreamKey] | None = None) -> None:
        self._streams = [stream for key, stream in ledger.streams.items() if keys is None or key in keys]
        begins = [stream.begin for stream in self._streams]
        events = sum(map(len, self._streams))
        super().__init__(ledger.path, ledger.meta, ledger.open_end, [stream.key for stream in self._streams], begins, events)

    def ended(self, stream: int) -> bool:
        """See `Source`."""
        return self.taken[stream] == len(self._streams[stream])

    def kinds(self, stream: int, number: int) -> npt.NDArray[np.uint8]:
        """See `Source`."""
        begin = self.taken[stream]
        kinds: npt.NDArray[np.uint8] = self._streams[stream].data["kind"][begin : begin + number]
        return kinds

    def take(self, counts: Sequence[int]) -> Ledger:
        """See `Source`."""
        return self._part([stream.until(begin + count).after(begin) for stream, begin, count in zip(self._streams, self.taken, counts)])


class JournalSource(Source):
    """A journal without values, block by block."""

    in_order = True

    def __init__(self, path: Path, journal: Scan) -> None:
        meta = journal.meta
        keys, begins = [StreamKey(*key) for key in meta["stream_keys"]], [begin for begin, _ in begins_of(meta)]
        super().__init__(path, meta, True, keys, begins, sum(len(block.events) for block in journal.blocks))
        self._journal = journal
        self._next = 0
        journal.give_back()  # of many journals what each keeps in memory adds up

    def ended(self, stream: int) -> bool:
        """See `Source`."""
        return self._next == len(self._journal.blocks)

    def kinds(self, stream: int, number: int) -> npt.NDArray[np.uint8]:
        """See `Source`."""
        raise NotImplementedError("its streams can't be read one apart from the others")

    def take(self, counts: Sequence[int]) -> Ledger:
        """See `Source`."""
        wanted, blocks = np.array(counts, np.int64), self._journal.blocks
        # Not more than was asked for in all: if a stream has fewer events than the others, those of the others must not pile up.
        room, begin = int(wanted.sum()), self._next
        while self._next < len(blocks) and room > 0 and (wanted > 0).any():
            events = blocks[self._next].events
            wanted -= np.bincount(events["stream"], minlength=len(wanted))
            room -= len(events)
            self._next += 1
        taken = [first + number for first, number in zip(self.begins, self.taken)]
        part = self._part(list(ledger_of(self.path, self._journal.part(begin, self._next), taken).streams.values()))
        self._journal.give_back()
        return part


class _Place(NamedTuple):
    """Where a column lies in a file.

    Attributes:
        begin: Of its first event.
        dtype: Of each.
        checksum: Of the whole member, as the file says.
        header: Bytes of the member before its first event.
    """

    begin: int
    dtype: np.dtype[Any]
    checksum: int
    header: bytes


class _NotInPiecesError(LedgerError):
    """A ledger that can't be read a few events at a time."""


class _PlacedArchive(Archive):
    """A sealed ledger whose columns are to be read slice by slice."""

    def offsets(self, meta: Meta) -> npt.NDArray[np.int64]:
        """Where each stream begins, and the last one ends."""
        keys = [StreamKey(*key) for key in meta["stream_keys"]]
        offsets = self._array("stream_offsets", np.dtype(np.int64), (len(keys) + 1,))
        if offsets[0] != 0 or falls(offsets) or len(set(keys)) != len(keys):
            raise LedgerError("its streams are damaged: record again.")
        self._array("stream_index", np.dtype(np.int64), (len(keys),))
        return offsets

    def places(self, meta: Meta, n: int) -> dict[str, _Place]:
        """Where the columns of n events are.

        Raises:
            _NotInPiecesError: Somebody has compressed the file.
        """
        dtype = event_dtype(meta["reward_dtype"], meta["columns"])
        return {name: self._place(name, dtype[name], n) for name in dtype.names or () if name != "stream"}

    def _place(self, name: str, dtype: np.dtype[Any], n: int) -> _Place:
        info = self._archive.getinfo(f"{name}.npy")
        with self._open(name) as member:
            found, before = header_of(member), member.tell()
        if found != ((n,), dtype):
            raise LedgerError(f"its column {name} is damaged: record again.")
        if info.compress_type != zipfile.ZIP_STORED:
            raise _NotInPiecesError(f"its column {name} is compressed.")
        nbytes = n * dtype.itemsize
        if nbytes > info.file_size - before or info.file_size != info.compress_size:
            raise LedgerError(f"its column {name} is shorter than it says: record again.")
        if nbytes != info.file_size - before:
            raise LedgerError(f"its column {name} is not as long as it says: record again.")
        file = self._file
        file.seek(info.header_offset + 26)  # the lengths of the name and the extra field, which may be others than in the directory
        lengths = file.read(4)
        begin = info.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        file.seek(begin)
        return _Place(begin + before, dtype, info.CRC, file.read(before))

    def check_counted(self, name: str, n: int) -> None:
        """Check a column that is derived from the others, and so not used."""
        self._check(name, n)


class SealedSource(Source):
    """A sealed ledger as it was written, without values.

    Args:
        path: The file.
        keys: Of the streams that are to be read; all of them if `None`. Then `checksums` are for somebody who has those of the others too.
        counted: Those of `COUNTED` that this source checks.

    Raises:
        LedgerError: The file is damaged, or can't be read.
    """

    def __init__(self, path: Path, keys: Collection[StreamKey] | None = None, counted: Sequence[str] = COUNTED) -> None:
        with _reading(path), zipfile.ZipFile(path) as archive:
            sealed = _PlacedArchive(archive)
            if is_first(sealed.written):
                raise _NotInPiecesError("it is of the first version.")
            meta = sealed.meta()
            if meta["keep_values"]:
                raise _NotInPiecesError("it holds values.")
            offsets = sealed.offsets(meta)
            self._total = int(offsets[-1])
            self._places = sealed.places(meta, self._total)
            self._identity = _identity(archive.fp)
        of_ledger = [StreamKey(*key) for key in meta["stream_keys"]]
        self.lengths = [int(length) for length in np.diff(offsets)]
        self._all = keys is None
        self._numbers = [number for number, key in enumerate(of_ledger) if keys is None or key in keys]
        self._offsets = offsets[self._numbers].tolist()
        self._lengths = [self.lengths[number] for number in self._numbers]
        self._counted = tuple(counted)
        begins = [begins_of(meta)[number] for number in self._numbers]
        self._last = [last for _, last in begins]
        super().__init__(
            path, meta, bool(meta.get("stopped")), [of_ledger[number] for number in self._numbers], [begin for begin, _ in begins],
            sum(self._lengths),
        )  # fmt: skip
        # Of each column, the checksum of each stream's part as far as it was read; and kinds that were read ahead.
        self._checksums = {name: [0] * len(self._numbers) for name in self._places}
        self._ahead: list[npt.NDArray[np.uint8]] = [np.zeros(0, np.uint8)] * len(self._numbers)

    def ended(self, stream: int) -> bool:
        """See `Source`."""
        return self.taken[stream] == self._lengths[stream]

    def kinds(self, stream: int, number: int) -> npt.NDArray[np.uint8]:
        """See `Source`."""
        with _reading(self.path), open(self.path, "rb", buffering=0) as file:
            return self._kinds(file, stream, number)

    def take(self, counts: Sequence[int]) -> Ledger:
        """See `Source`."""
        with _reading(self.path), open(self.path, "rb", buffering=0) as file:
            if _identity(file) != self._identity:
                raise LedgerError("it was changed while it was read: compare again.")
            return self._part([self._stream(file, stream, count) for stream, count in enumerate(counts)])

    def _kinds(self, file: IO[bytes], stream: int, number: int) -> npt.NDArray[np.uint8]:
        ahead = self._ahead[stream]
        missing = min(number, self._lengths[stream] - self.taken[stream]) - len(ahead)
        if missing > 0:
            more = self._slice(file, "kind", stream, self.taken[stream] + len(ahead), missing)
            if int(more.max()) > 2:
                raise LedgerError("its kinds of events are damaged: record again.")
            ahead = self._ahead[stream] = np.concatenate([ahead, more]) if len(ahead) else more
        return ahead[:number]

    def _stream(self, file: IO[bytes], stream: int, count: int) -> Stream:
        begin = self.taken[stream]
        kinds = self._kinds(file, stream, count)
        data = {
            name: kinds if name == "kind" else self._slice(file, name, stream, begin, len(kinds)) for name in self._places
        }  # fmt: skip
        self._ahead[stream] = self._ahead[stream][len(kinds) :]
        last = self._last[stream] if begin == 0 else None  # nobody asks a later part for it
        return Stream(self.keys[stream], data, {}, self.begins[stream] + begin, last)

    def _slice(self, file: IO[bytes], name: str, stream: int, begin: int, count: int) -> npt.NDArray[Any]:
        """A part of a column, which is behind those that were read before."""
        place = self._places[name]
        width = place.dtype.itemsize
        file.seek(place.begin + (self._offsets[stream] + begin) * width)
        data = file.read(count * width)
        while len(data) < count * width:  # a raw file may give less than asked for
            more = file.read(count * width - len(data))
            if not more:
                raise LedgerError(f"its column {name} is shorter than it says: record again.")
            data += more
        self._checksums[name][stream] = zlib.crc32(data, self._checksums[name][stream])
        return np.frombuffer(data, place.dtype)

    @property
    def checksums(self) -> Checksums:
        """Those of the streams that were read."""
        return {name: dict(zip(self._numbers, some)) for name, some in self._checksums.items()}

    def check(self, checksums: Checksums) -> None:
        """Compare the checksums of all streams with those in the file.

        Raises:
            LedgerError: The file is damaged.
        """
        with _reading(self.path):
            for name, place in self._places.items():
                found = zlib.crc32(place.header)
                for number, length in enumerate(self.lengths):
                    found = crc32_joined(found, checksums[name][number], length * place.dtype.itemsize)
                if found != place.checksum:
                    raise LedgerError(f"its column {name} is damaged, its checksum does not hold: record again.")

    def finish(self) -> None:
        """See `Source`."""
        if self._counted:
            with _reading(self.path), zipfile.ZipFile(self.path) as archive:
                sealed = _PlacedArchive(archive)
                for name in self._counted:
                    sealed.check_counted(name, self._total)
        if self._all:
            self.check(self.checksums)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """As `stepledger.ledger.reading`, but `OSError` is one too: nothing else can be read in its place."""
    try:
        with reading(path):
            yield
    except OSError as error:
        raise LedgerError(f"{path} can't be read ({error.strerror or error}): check the path and its permissions.") from None


def _identity(file: IO[bytes] | None) -> tuple[int, ...]:
    """What tells an open file from one that was put in its place since."""
    assert file is not None
    stat = os.fstat(file.fileno())
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def source_of(path: Path) -> Source:
    """A ledger, to be read in pieces where that can be done.

    Args:
        path: As of `read`.

    Raises:
        LedgerError: As `read` does.
    """
    sealed, journal = path.with_suffix(SEALED), path.with_suffix(JOURNAL)
    if path.suffix not in (SEALED, JOURNAL) or (sealed.exists() and journal.exists()):
        return WholeSource(read(path))
    try:
        if sealed.is_file():
            return SealedSource(sealed)
        if journal.is_file():
            written = scan(journal)
            if not written.meta["keep_values"]:
                return JournalSource(journal, written)
    except (_NotInPiecesError, OSError):  # which `read` says in words, or deals with
        pass
    return WholeSource(read(path))
