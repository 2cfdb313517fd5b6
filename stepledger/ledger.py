"""A ledger, read from its files. Trusts nothing: no pickles, sizes checked before allocation, checksums of everything that is used."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .archive import Archive, ForeignFileError, texts_of
from .directory import find, is_directory
from .errors import LedgerError
from .format import JOURNAL, KEPT, SEALED, Meta, StreamKey, begins_of, event_dtype, layouts_of, window_of
from .journal import is_locked
from .scan import Block, EmptyFileError, Scan, scan
from .stream import Stream, Streams
from .version1 import FirstArchive, is_first

__all__ = ["Ledger", "Stream", "Streams", "read"]

T = TypeVar("T")


@dataclass(frozen=True)
class Ledger:
    """What one tap recorded.

    Attributes:
        path: The file.
        meta: See `stepledger.format`.
        streams: By `StreamKey`, or by env index.
        open_end: Whether more may have happened than is recorded: this is a journal whose recorder was killed, the part of it that is
            whole, or a ledger whose recording was stopped by an error.
    """

    path: Path
    meta: Meta = field(repr=False)
    streams: Streams
    open_end: bool

    @property
    def events(self) -> int:
        """Number of events in all streams."""
        return sum(len(stream) for stream in self.streams.values())


def read(path: str | os.PathLike[str]) -> Ledger:
    """Read one ledger, sealed or still a journal.

    Args:
        path: ``*.npz`` or ``*.journal``. Where both are there (the ledger was written by ``flush()``), the one that holds more is read.

    Returns:
        The ledger.

    Raises:
        LedgerError: There is no such file, it is no ledger, of another version, or damaged.
    """
    path = Path(path)
    if is_directory(path):
        raise LedgerError(f"{path} is a directory: name one of the files in it.")
    if path.exists() and not path.is_file():
        raise LedgerError(f"{path} is no file: name one that was recorded.")
    sealed, journal = path.with_suffix(SEALED), path.with_suffix(JOURNAL)
    if path.suffix not in (SEALED, JOURNAL):
        sealed = path
    try:
        try:
            return _newest(sealed, journal)
        except FileNotFoundError:  # its recorder has just closed: that removes the journal when the sealed ledger is there
            return _from_sealed(sealed)
    except FileNotFoundError:
        raise LedgerError(f"{path} is not there: name a file that was recorded.") from None
    except OSError as error:
        raise LedgerError(f"{path} can't be read ({error.strerror or error}): check the path and its permissions.") from None


def _newest(sealed: Path, journal: Path) -> Ledger:
    if not journal.exists():
        return _from_sealed(sealed)
    if not sealed.exists():
        return ledger_of(journal, scan(journal))
    flushed = _from_sealed(sealed)
    later = scan(journal)
    if later.meta["id"] != flushed.meta.get("id"):
        if is_locked(journal):  # it has begun just now, and set the other one aside
            return ledger_of(journal, later)
        raise LedgerError(f"{journal} and {sealed} are of two recordings: move one of them elsewhere.")
    written = sum(begin for begin, _ in begins_of(later.meta)) + sum(len(block.events) for block in later.blocks)
    if written > sum(stream.begin + len(stream) for stream in flushed.streams.values()):
        return ledger_of(journal, later)
    # What a recorder that was killed had not written yet is lost; a living one has flushed and goes on.
    # One that has closed may have been killed before it could remove the journal.
    if flushed.meta.get("closed") or is_locked(journal):
        return flushed
    return replace(flushed, open_end=True) if journal.exists() else _from_sealed(sealed)


def ledger_of(path: Path, journal: Scan, taken: Sequence[int] | None = None) -> Ledger:
    """A journal as a ledger.

    Args:
        path: Of the ledger.
        journal: What was read of it.
        taken: Where that begins behind events that were read before: for each stream, their number since its first of all.
    """
    meta = journal.meta
    events = (
        np.concatenate([block.events for block in journal.blocks])
        if journal.blocks
        else np.zeros(0, event_dtype(meta["reward_dtype"], meta["columns"]))
    )
    order = np.argsort(events["stream"], kind="stable")
    events = events[order]
    names = [name for name in events.dtype.names or () if name != "stream"]
    cuts = np.searchsorted(events["stream"], np.arange(len(meta["stream_keys"]) + 1))
    whose = None
    if window_of(meta):
        whose = np.concatenate([np.zeros(0, KEPT), *(rows.events for rows in journal.kept)])
        order = np.argsort(whose["stream"], kind="stable")
        whose = whose[order]
    values = _joined(meta, journal.blocks if whose is None else journal.kept, order)
    streams = []
    for number, (key, (begin, last)) in enumerate(zip(meta["stream_keys"], begins_of(meta))):
        begin = begin if taken is None else taken[number]
        here = slice(int(cuts[number]), int(cuts[number + 1]))
        data = {name: np.ascontiguousarray(events[name][here]) for name in names}
        kept, rows = None, here
        if whose is not None:
            of_stream = slice(*np.searchsorted(whose["stream"], [number, number + 1]).tolist())
            kept = whose["event"][of_stream] - begin
            first, stop = np.searchsorted(kept, [0, here.stop - here.start]).tolist()  # others may be of events that were taken before
            kept, rows = kept[first:stop], slice(of_stream.start + first, of_stream.start + stop)
        streams.append(Stream(StreamKey(*key), data, {name: column[rows] for name, column in values.items()}, begin, last, kept))
    return Ledger(path, meta, Streams(streams), open_end=True)


def _joined(meta: Meta, blocks: Sequence[Block], order: npt.NDArray[np.int64]) -> dict[str, Any]:
    """The kept values of blocks, in this order."""
    values: dict[str, Any] = {}
    for index, (name, layout) in enumerate(layouts_of(meta)):
        parts = [block.values[index] for block in blocks]
        if layout is None:
            texts = [text for data, lengths in parts for text in texts_of(data, np.cumsum([0, *lengths]))]
            values[name] = [texts[at] for at in order]
        else:
            values[name] = (np.concatenate(parts) if parts else np.zeros((0, *layout[1]), layout[0]))[order]
    return values


def _from_sealed(path: Path) -> Ledger:
    with reading(path), zipfile.ZipFile(path) as archive:
        sealed = _opened(archive)
        meta = sealed.meta()
        return Ledger(path, meta, Streams(sealed.streams(meta)), open_end=bool(meta.get("stopped")))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Says of which file an error is, whatever reading it raises but `OSError`.

    Raises:
        LedgerError: The file is damaged, or no ledger.
    """
    try:
        yield
    except (LedgerError, OSError) as error:
        if isinstance(error, LedgerError) and not str(error).startswith(str(path)):
            raise type(error)(f"{path}: {error}") from None
        raise
    except Exception as error:  # a hostile archive can make zipfile, zlib and numpy raise almost anything
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> LedgerError:
    """What zipfile, zlib, json and numpy raise, in one sentence: they quote what is in the file, and numpy tells how to trust it."""
    reason = str(error).partition("\n")[0].rstrip(".")[:200]
    reason = reason if reason and reason.isprintable() else type(error).__name__
    return LedgerError(f"{path} is no ledger, or it is truncated or altered ({reason}): record again.")


def _opened(archive: zipfile.ZipFile) -> Archive:
    """The reader of the version that the file is of."""
    sealed = Archive(archive)
    return FirstArchive(archive) if is_first(sealed.written) else sealed


def read_all(directory: Path, reader: Callable[[Path], T]) -> tuple[list[T], list[str]]:
    """The ledgers in a directory and below it, without files of somebody else.

    Args:
        directory: Where they are.
        reader: `read`, or what else makes something of the name of a ledger, and raises what that does.

    Returns:
        The ledgers; a sentence for each whose recorder was stopped before it could write anything.

    Raises:
        LedgerError: The directory can't be read, or a ledger in it is damaged.
    """
    ledgers, empty = [], []
    for path in find(directory):
        try:
            ledgers.append(reader(path))
        except EmptyFileError as error:
            empty.append(str(error))
        except ForeignFileError:
            continue
    return ledgers, empty


def peek_all(directory: Path) -> tuple[list[Ledger], list[str]]:
    """As `read_all`, but without the events: what a ledger says of itself."""
    return read_all(directory, peek)


def peek(path: Path) -> Ledger:
    """As `read`, but without the events: what a ledger says of itself."""
    if not path.exists():
        journal = path.with_suffix(JOURNAL)
        with contextlib.suppress(FileNotFoundError):  # its recorder has just closed
            return Ledger(journal, scan(journal, (1 << 62, 0)).meta, Streams([]), open_end=False)
    try:
        with zipfile.ZipFile(path) as archive:
            return Ledger(path, _opened(archive).meta(), Streams([]), open_end=False)
    except LedgerError as error:
        raise type(error)(f"{path}: {error}") from None
    except Exception as error:
        raise _unreadable(path, error) from None
