"""The archive that a sealed ledger is: each member is checked against what the ones before it promise before it is read."""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import zipfile
from functools import cached_property
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from .digest import Layout
from .errors import LedgerError
from .format import Meta, StreamKey, begins_of, event_dtype, layouts_of, window_of
from .meta import checked_meta
from .stream import Stream

__all__ = ["Archive", "ForeignFileError", "falls", "header_of", "texts_of"]

#: Bytes that a meta may take, and how often as many as it takes in the file: JSON in UTF-32 does shrink, and is parsed into much more.
_LONGEST_META, _SHRUNK_META = 1 << 26, 100
#: The last record of an archive: its signature, and the length of the comment that may come behind it.
_END = struct.Struct("<4s16xH")


class ForeignFileError(LedgerError):
    """An ``.npz`` file of somebody else's."""


class Archive:
    """The members of a sealed ledger.

    Args:
        archive: Open for reading.
    """

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        assert archive.fp is not None
        # Of the file that is open: another one may have taken its place at its path.
        self._file = archive.fp
        self._size = self._file.seek(0, os.SEEK_END)
        #: The columns that are there.
        self.names = {name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")}

    @cached_property
    def written(self) -> Any:
        """What the ledger says of itself, in whatever version.

        Raises:
            ForeignFileError: It says nothing.
            LedgerError: The file is damaged.
        """
        if "meta" not in self.names:
            raise ForeignFileError("it is no ledger of stepledger: name the files that were recorded.")
        self._check_places()
        return json.loads(self._text("meta"))

    def meta(self) -> Meta:
        """What the ledger says of itself."""
        return checked_meta(self.written)

    def streams(self, meta: Meta) -> list[Stream]:
        """All streams of the ledger of this meta."""
        keys = [StreamKey(*key) for key in meta["stream_keys"]]
        offsets = self._array("stream_offsets", np.dtype(np.int64), (len(keys) + 1,))
        if offsets[0] != 0 or falls(offsets) or len(set(keys)) != len(keys):
            raise LedgerError("its streams are damaged: record again.")
        n = int(offsets[-1])
        dtype = event_dtype(meta["reward_dtype"], meta["columns"])
        columns = {name: self._array(name, dtype[name], (n,)) for name in dtype.names or () if name != "stream"}
        if (columns["kind"] > 2).any():
            raise LedgerError("its kinds of events are damaged: record again.")
        self._array("stream_index", np.dtype(np.int64), (len(keys),))
        for name in ("episode", "step"):  # derived from the others when they are needed, so only checked here
            self._check(name, n)
        whose = self._whose(n) if window_of(meta) else None
        values = {name: self._values(name, layout, n if whose is None else len(whose)) for name, layout in layouts_of(meta)}
        streams = []
        for key, begin, end, before in zip(keys, offsets, offsets[1:], begins_of(meta)):
            rows, kept = slice(begin, end), None
            if whose is not None:
                rows = slice(*np.searchsorted(whose, [begin, end]).tolist())
                kept = whose[rows] - begin
            data = {name: column[begin:end] for name, column in columns.items()}
            streams.append(Stream(key, data, {name: column[rows] for name, column in values.items()}, *before, kept))
        return streams

    def _whose(self, n: int) -> npt.NDArray[np.int64]:
        """Of n events, those of which values were kept."""
        shape, _ = self._header("values_index")
        if len(shape) != 1 or shape[0] > n:
            raise LedgerError("its values are damaged: record again.")
        whose = self._array("values_index", np.dtype(np.int64), shape)
        if (whose[1:] <= whose[:-1]).any() or (len(whose) and (whose[0] < 0 or whose[-1] >= n)):
            raise LedgerError("its values are damaged: record again.")
        return whose

    def _values(self, name: str, layout: Layout, n: int) -> Any:
        if layout is not None:
            return self._array(name, layout[0], (n, *layout[1]))
        offsets = self._array(f"{name}_offsets", np.dtype(np.int64), (n + 1,))
        if offsets[0] != 0 or falls(offsets):
            raise LedgerError("its values are damaged: record again.")
        return texts_of(self._array(name, np.dtype(np.uint8), (int(offsets[-1]),)), offsets)

    def _array(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        info = self._archive.getinfo(f"{name}.npy")
        with self._open(name) as member:
            found = header_of(member)
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

    def _check_places(self) -> None:
        """Refuse members that share a name or bytes: of one of them, others would hold something else than it says."""
        infos = sorted(self._archive.infolist(), key=lambda info: info.header_offset)
        ends = [*(info.header_offset for info in infos[1:]), self._size]
        if len({info.filename for info in infos}) < len(infos) or any(
            info.header_offset + info.compress_size > end for info, end in zip(infos, ends)
        ):
            raise LedgerError("its columns lie on each other, which those of no ledger do: record again.")
        # zipfile reads over what somebody put in front of an archive or behind it: then it is not the file that was written.
        self._file.seek(self._size - _END.size)
        signature, comment = _END.unpack(self._file.read(_END.size))
        if signature != b"PK\5\6" or comment or (infos and infos[0].header_offset != 0):
            raise LedgerError("there are bytes before or behind it that are not its own: take the file as it was recorded.")

    def _text(self, name: str) -> str:
        info = self._archive.getinfo(f"{name}.npy")
        if info.file_size > min(_LONGEST_META, _SHRUNK_META * info.compress_size):
            raise LedgerError("its meta is damaged: record again.")
        with self._open(name) as member:
            shape, dtype = header_of(member)
            if shape != () or dtype.kind != "U":
                raise LedgerError("its meta is damaged: record again.")
            return str(np.frombuffer(member.read(), dtype)[0])

    def _check(self, name: str, n: int) -> None:
        """Read a column of n integers to its end, which checks its checksum."""
        with self._open(name) as member:
            read = 0
            whole = header_of(member) == ((n,), np.dtype(np.int64))
            while whole and (piece := member.read(1 << 20)):
                read += len(piece)
                whole = read <= 8 * n
            if not whole or read < 8 * n:
                raise LedgerError(f"its column {name} is damaged: record again.")

    def _header(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype of a column, as it says."""
        with self._open(name) as member:
            return header_of(member)

    def _open(self, name: str) -> IO[bytes]:
        info = self._archive.getinfo(f"{name}.npy")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others can make anything of a few bytes
            raise LedgerError(f"its column {name} is compressed in a way that no ledger is: record again.")
        return self._archive.open(info)


def falls(offsets: npt.NDArray[np.int64]) -> bool:
    """Whether one is less than the one before it; not by their difference, which may be none that an int64 can have."""
    return bool((offsets[1:] < offsets[:-1]).any())


def header_of(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of a column, read from the beginning of its member.

    Raises:
        LedgerError: It is no column of a ledger.
    """
    if np.lib.format.read_magic(member) != (1, 0):
        raise LedgerError("its columns are in another format: record again.")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
    if fortran or dtype.hasobject:
        raise LedgerError("its columns hold what no ledger holds: record again.")
    return shape, dtype


def texts_of(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> list[str]:
    """The texts whose UTF-8 lies one after the other; offsets say where each begins, and where the last ends."""
    return [data[begin:end].tobytes().decode(errors="replace") for begin, end in itertools.pairwise(offsets)]
