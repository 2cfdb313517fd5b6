"""Reading ledgers. Trusts nothing: no pickles, sizes checked before allocation, checksums of everything that is used."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from .digest import Layout
from .errors import LedgerError
from .format import JOURNAL, SEALED, EpisodeCounter, Meta, StreamKey, begins_of, checked_meta, event_dtype, layouts_of
from .journal import EmptyFileError, Scan, is_locked, scan

__all__ = ["Ledger", "Stream", "Streams", "read"]


class ForeignFileError(LedgerError):
    """An ``.npz`` file of somebody else's."""


@dataclass(frozen=True)
class Stream:
    """The events of one environment, in order.

    Attributes:
        key: Whose they are.
        data: The recorded columns, each of length n.
        values: With ``keep_values``, for each ``values_obs_{j}`` and ``values_act_{j}`` one row per event, or a list of JSON texts.
        begin: Number of events that came before these, and are not here.
        last: Episode and step of the last one of them.
    """

    key: StreamKey
    data: Mapping[str, npt.NDArray[Any]] = field(repr=False)
    values: Mapping[str, Any] = field(default_factory=dict, repr=False)
    begin: int = 0
    last: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.data.get("kind", ()))

    def after(self, events: int) -> Stream:
        """The stream without its first events."""
        if not events:
            return self
        counter = EpisodeCounter(self.last)
        counter.count(self.data["kind"][:events])
        # Copies: what is left must not keep all of it in memory.
        data = {name: column[events:].copy() for name, column in self.data.items()}
        values = {name: column[events:] if isinstance(column, list) else column[events:].copy() for name, column in self.values.items()}
        return Stream(self.key, data, values, self.begin + events, counter.last)

    def until(self, events: int) -> Stream:
        """The first events of the stream."""
        return replace(
            self,
            data={name: column[:events] for name, column in self.data.items()},
            values={name: column[:events] for name, column in self.values.items()},
        )

    def __add__(self, later: Stream) -> Stream:
        """The stream with what came behind it."""
        if not len(self):
            return replace(later, begin=self.begin, last=self.last)
        if not len(later):
            return self
        return replace(
            self,
            data={name: np.concatenate([column, later.data[name]]) for name, column in self.data.items()},
            values={
                name: [*column, *later.values[name]] if isinstance(column, list) else np.concatenate([column, later.values[name]])
                for name, column in self.values.items()
            },
        )

    @cached_property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """All columns of the format: ``kind h_obs h_act h_rew terminated truncated episode step`` and further ones of this ledger.

        ``h_rew`` is uint64 here whatever the reward dtype.
        """
        episode, step = EpisodeCounter(self.last).count(self.data["kind"])
        return {**self.data, "h_rew": self.data["h_rew"].astype(np.uint64), "episode": episode, "step": step}


class Streams(Mapping[StreamKey, Stream]):
    """A ledger's streams by key, in order.

    An environment's index is enough as a key where only one stream has it: ``ledger.streams[3]``.
    """

    def __init__(self, streams: list[Stream]) -> None:
        self._streams = {stream.key: stream for stream in streams}

    def __getitem__(self, key: StreamKey | int) -> Stream:
        if isinstance(key, (int, np.integer)):
            found = [stream for stream in self._streams.values() if stream.key.env == key]
            if len(found) == 1:
                return found[0]
            raise KeyError(f"env {key} has {len(found)} streams: use one of the keys {list(self._streams)}")
        return self._streams[key]

    def __iter__(self) -> Iterator[StreamKey]:
        return iter(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    def __repr__(self) -> str:
        return f"Streams({list(self._streams)})"


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
    written = sum(begin for begin, _ in begins_of(later.meta)) + sum(len(block.events) for block in later.blocks)
    if written > sum(stream.begin + len(stream) for stream in flushed.streams.values()):
        return ledger_of(journal, later)
    # What a recorder that was killed had not written yet is lost; a living one has flushed and goes on.
    # One that has closed may have been killed before it could remove the journal.
    if flushed.meta.get("closed") or is_locked(journal):
        return flushed
    return replace(flushed, open_end=True) if journal.exists() else _from_sealed(sealed)


def ledger_of(path: Path, journal: Scan) -> Ledger:
    """A journal as a ledger."""
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
    values: dict[str, Any] = {}
    for index, (name, layout) in enumerate(layouts_of(meta)):
        parts = [block.values[index] for block in journal.blocks]
        if layout is None:
            texts = [text for data, lengths in parts for text in _texts(data, np.cumsum([0, *lengths]))]
            values[name] = [texts[at] for at in order]
        else:
            values[name] = (np.concatenate(parts) if parts else np.zeros((0, *layout[1]), layout[0]))[order]
    streams = [
        Stream(
            StreamKey(*key),
            {name: np.ascontiguousarray(events[name][begin:end]) for name in names},
            {name: column[begin:end] for name, column in values.items()},
            *before,
        )
        for key, begin, end, before in zip(meta["stream_keys"], cuts, cuts[1:], begins_of(meta))
    ]
    return Ledger(path, meta, Streams(streams), open_end=True)


def _texts(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> list[str]:
    return [data[begin:end].tobytes().decode(errors="replace") for begin, end in itertools.pairwise(offsets)]


def _from_sealed(path: Path) -> Ledger:
    try:
        with zipfile.ZipFile(path) as archive:
            return _Sealed(path, archive).ledger()
    except (LedgerError, OSError) as error:
        if isinstance(error, LedgerError) and not str(error).startswith(str(path)):
            raise type(error)(f"{path}: {error}") from None
        raise
    except Exception as error:  # a hostile archive can make zipfile, zlib and numpy raise almost anything
        raise LedgerError(f"{path} is no ledger, or it is truncated or altered ({error or type(error).__name__}): record again.") from None


class _Sealed:
    """The members of a sealed ledger; each is checked against what the ones before it promise before it is read."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path = path
        self._archive = archive
        self._size = path.stat().st_size

    def meta(self) -> Meta:
        if "meta.npy" not in self._archive.namelist():
            raise ForeignFileError("it is no ledger of stepledger: name the files that were recorded.")
        return checked_meta(json.loads(str(self._text("meta"))))

    def ledger(self) -> Ledger:
        meta = self.meta()
        keys = [StreamKey(*key) for key in meta["stream_keys"]]
        offsets = self._array("stream_offsets", np.dtype(np.int64), (len(keys) + 1,))
        if offsets[0] != 0 or (np.diff(offsets) < 0).any() or len(set(keys)) != len(keys):
            raise LedgerError("its streams are damaged: record again.")
        n = int(offsets[-1])
        dtype = event_dtype(meta["reward_dtype"], meta["columns"])
        columns = {name: self._array(name, dtype[name], (n,)) for name in dtype.names or () if name != "stream"}
        if (columns["kind"] > 2).any():
            raise LedgerError("its kinds of events are damaged: record again.")
        self._array("stream_index", np.dtype(np.int64), (len(keys),))
        for name in ("episode", "step"):  # derived from the others when they are needed, so only checked here
            self._check(name, n)
        values = {name: self._values(name, layout, n) for name, layout in layouts_of(meta)}
        streams = [
            Stream(
                key,
                {name: column[begin:end] for name, column in columns.items()},
                {name: column[begin:end] for name, column in values.items()},
                *before,
            )
            for key, begin, end, before in zip(keys, offsets, offsets[1:], begins_of(meta))
        ]
        return Ledger(self._path, meta, Streams(streams), open_end=bool(meta.get("stopped")))

    def _values(self, name: str, layout: Layout, n: int) -> Any:
        if layout is not None:
            return self._array(name, layout[0], (n, *layout[1]))
        offsets = self._array(f"{name}_offsets", np.dtype(np.int64), (n + 1,))
        if offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise LedgerError("its values are damaged: record again.")
        return _texts(self._array(name, np.dtype(np.uint8), (int(offsets[-1]),)), offsets)

    def _array(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        info = self._archive.getinfo(f"{name}.npy")
        with self._open(name) as member:
            found = _header(member)
            if found != (shape, dtype):
                raise LedgerError(f"its column {name} is damaged: record again.")
            nbytes = math.prod(shape) * dtype.itemsize
            # Deflate shrinks by at most about 1,030 to 1: more is a lie, found before memory is taken.
            if nbytes > info.file_size or nbytes > 1032 * self._size:
                raise LedgerError(f"its column {name} is shorter than it says: record again.")
            data = member.read(nbytes)
            if len(data) != nbytes or member.read(1):
                raise LedgerError(f"its column {name} is not as long as it says: record again.")
        return np.frombuffer(data, dtype).reshape(shape)

    def _text(self, name: str) -> str:
        info = self._archive.getinfo(f"{name}.npy")
        if info.file_size > min(1 << 26, 1032 * self._size):
            raise LedgerError("its meta is damaged: record again.")
        with self._open(name) as member:
            shape, dtype = _header(member)
            if shape != () or dtype.kind != "U":
                raise LedgerError("its meta is damaged: record again.")
            return str(np.frombuffer(member.read(), dtype)[0])

    def _check(self, name: str, n: int) -> None:
        """Read a column of n integers to its end, which checks its checksum."""
        with self._open(name) as member:
            read = 0
            whole = _header(member) == ((n,), np.dtype(np.int64))
            while whole and (piece := member.read(1 << 20)):
                read += len(piece)
                whole = read <= 8 * n
            if not whole or read < 8 * n:
                raise LedgerError(f"its column {name} is damaged: record again.")

    def _open(self, name: str) -> IO[bytes]:
        info = self._archive.getinfo(f"{name}.npy")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others can make anything of a few bytes
            raise LedgerError(f"its column {name} is compressed in a way that no ledger is: record again.")
        return self._archive.open(info)


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if np.lib.format.read_magic(member) != (1, 0):
        raise LedgerError("its columns are in another format: record again.")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
    if fortran or dtype.hasobject:
        raise LedgerError("its columns hold what no ledger holds: record again.")
    return shape, dtype


def is_directory(path: Path) -> bool:
    """Whether this is a directory.

    Raises:
        LedgerError: Nobody can tell.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise LedgerError(f"{path} can't be read ({error.strerror or error}): check the path and its permissions.") from None


def read_all(directory: Path) -> tuple[list[Ledger], list[str]]:
    """The ledgers in a directory and below it, without files of somebody else.

    Returns:
        The ledgers; a sentence for each whose recorder was stopped before it could write anything.

    Raises:
        LedgerError: The directory can't be read, or a ledger in it is damaged.
    """
    ledgers, empty = [], []
    for path in find(directory):
        try:
            ledgers.append(read(path))
        except EmptyFileError as error:
            empty.append(str(error))
        except ForeignFileError:
            continue
    return ledgers, empty


def peek_all(directory: Path) -> tuple[list[Ledger], list[str]]:
    """As `read_all`, but without the events: what a ledger says of itself."""
    ledgers, empty = [], []
    for path in find(directory):
        try:
            ledgers.append(_peek(path))
        except EmptyFileError as error:
            empty.append(str(error))
        except ForeignFileError:
            continue
    return ledgers, empty


def _peek(path: Path) -> Ledger:
    if not path.exists():
        journal = path.with_suffix(JOURNAL)
        with contextlib.suppress(FileNotFoundError):  # its recorder has just closed
            return Ledger(journal, scan(journal, (1 << 62, 0)).meta, Streams([]), open_end=False)
    try:
        with zipfile.ZipFile(path) as archive:
            return Ledger(path, _Sealed(path, archive).meta(), Streams([]), open_end=False)
    except LedgerError as error:
        raise type(error)(f"{path}: {error}") from None
    except Exception as error:
        raise LedgerError(f"{path} is no ledger, or it is truncated or altered ({error or type(error).__name__}): record again.") from None


def find(directory: Path) -> list[Path]:
    """The names (``*.npz``) of the ledgers in a directory and below it.

    Left out: recordings that were set aside (``env-0.old1.npz``, and what lies in a directory ``old1``) and hidden directories, such
    as the ``.venv`` of a project that is compared from its root.

    Raises:
        LedgerError: The directory can't be read.
    """

    def refuse(error: OSError) -> None:
        raise LedgerError(f"{error.filename} can't be read ({error.strerror or error}): check the path and its permissions.")

    names = set()
    for parent, directories, files in os.walk(directory, onerror=refuse):
        directories[:] = [name for name in directories if not name.startswith(".") and not _ASIDE.fullmatch(name)]
        paths = [Path(parent, name) for name in files if name.endswith((SEALED, JOURNAL))]
        names |= {
            path.with_suffix(SEALED)
            for path in paths
            # A journal that was listed may have become a sealed ledger since.
            if (path.is_file() or path.with_suffix(SEALED).is_file()) and not _SET_ASIDE.search(path.stem)
        }
    return sorted(names, key=_natural)


#: `Path.stem` of ``env-0.old1.npz``, and the name of a directory of such: a file ``old1.npz`` is somebody's own name.
_SET_ASIDE, _ASIDE = re.compile(r"\.old\d+$"), re.compile(r"old\d+")


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts ``env-10`` behind ``env-9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]
