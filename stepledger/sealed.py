"""A journal's events as one ``.npz``: stream after stream, in memory that does not grow with them."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .digest import Layout
from .format import EpisodeCounter, Meta, begins_of, event_dtype, layouts_of, window_of

if TYPE_CHECKING:
    from .scan import Block, Scan

__all__ = ["mark_sealed", "write_sealed"]

#: Bytes of memory in which events are put into the order of their streams.
_PIECE_BYTES = 1 << 22


def write_sealed(path: Path, meta: Meta, journal: Scan) -> None:
    """Write the journal's events as a sealed ledger with this meta, in memory that does not grow with them."""
    with _replacing(path) as archive:
        _write_members(archive, meta, journal)


def mark_sealed(path: Path, **changes: Any) -> None:
    """Change entries of a sealed ledger's meta."""
    with _replacing(path) as new, zipfile.ZipFile(path) as old:
        for info in old.infolist():
            with old.open(info) as member:
                if info.filename == "meta.npy":
                    meta = json.loads(str(np.lib.format.read_array(member, allow_pickle=False)))
                    _write(new, "meta", np.array(json.dumps({**meta, **changes})))
                    continue
                with new.open(info, "w", force_zip64=True) as copy:
                    shutil.copyfileobj(member, copy, 1 << 20)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[zipfile.ZipFile]:
    """An archive that takes the place of a file once it is whole."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w", allowZip64=True) as archive:
            yield archive
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_members(archive: zipfile.ZipFile, meta: Meta, journal: Scan) -> None:
    rows = _Rows(journal.blocks, len(meta["stream_keys"]), journal)
    _write(archive, "meta", np.array(json.dumps(meta)))
    _write(archive, "stream_index", np.array([key[1] for key in meta["stream_keys"]], np.int64))
    _write(archive, "stream_offsets", np.cumsum([0, *rows.lengths], dtype=np.int64))
    dtype = event_dtype(meta["reward_dtype"], meta["columns"])
    for name in dtype.names or ():
        if name != "stream":
            parts = (part for _, part in rows.column(lambda block, name=name: block.events[name], dtype[name].itemsize))  # type: ignore[misc]
            _stream(archive, name, dtype[name], (rows.total,), parts)
    for which, name in enumerate(("episode", "step")):
        _stream(archive, name, np.dtype(np.int64), (rows.total,), _counted(rows, which, meta), zipfile.ZIP_DEFLATED)
    if window_of(meta):
        kept = _Rows(journal.kept, len(meta["stream_keys"]), journal)
        _stream(archive, "values_index", np.dtype(np.int64), (kept.total,), _whose(kept, rows, meta))
        rows = kept
    for index, (name, layout) in enumerate(layouts_of(meta)):
        _write_values(archive, name, layout, index, rows)


def _whose(kept: _Rows, rows: _Rows, meta: Meta) -> Iterator[npt.NDArray[np.int64]]:
    """The events, among all of the ledger, to which kept values belong."""
    begins = np.array([begin for begin, _ in begins_of(meta)], np.int64)
    before = np.cumsum([0, *rows.lengths], dtype=np.int64)[:-1]
    for streams, events in kept.column(lambda block: block.events["event"], 8):
        yield events - begins[streams] + before[streams]


def _counted(rows: _Rows, which: int, meta: Meta) -> Iterator[npt.NDArray[np.int64]]:
    """The numbers of episodes, or of steps."""
    begins = begins_of(meta)
    counter, current = EpisodeCounter(), -1
    for streams, kinds in rows.column(lambda block: block.events["kind"], 1):
        cuts = [0, *(np.flatnonzero(np.diff(streams)) + 1), len(streams)]
        for begin, end in itertools.pairwise(cuts):
            if end > begin:
                if streams[begin] != current:
                    counter, current = EpisodeCounter(begins[streams[begin]][1]), streams[begin]
                yield counter.count(kinds[begin:end])[which]


class _Rows:
    """What blocks of a journal hold, in the order of their streams, in pieces of bounded size."""

    def __init__(self, blocks: Sequence[Block], n_streams: int, journal: Scan) -> None:
        self._blocks = blocks
        self._journal = journal
        # For each block, which is ordered by stream, the streams that it has and where each begins, and the last one ends.
        self._cuts: list[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]] = []
        self.lengths = np.zeros(n_streams, np.int64)
        for block in blocks:
            stream = block.events["stream"]
            begins = np.flatnonzero(np.concatenate([[True], stream[1:] != stream[:-1]])[: len(stream)])
            present = stream[begins]
            self._cuts.append((present, np.append(begins, len(stream))))
            self.lengths[present] += np.diff(self._cuts[-1][1])
            journal.touched(block.events)
        self.total = int(self.lengths.sum())

    def column(
        self, select: Callable[[Block], npt.NDArray[Any]], row_bytes: int
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
        """The streams and the values of a column."""
        limit = max(1, _PIECE_BYTES // (row_bytes + 24))  # the streams and their order take as much as three columns
        for first, last in self._groups(limit):
            parts: list[npt.NDArray[Any]] = []
            owners: list[npt.NDArray[Any]] = []
            size = 0
            for block, (present, begins) in zip(self._blocks, self._cuts):
                start, stop = begins[np.searchsorted(present, [first, last])].tolist()
                for begin in range(start, stop, limit):
                    where = slice(begin, min(begin + limit, stop))
                    parts.append(np.array(select(block)[where]))
                    owners.append(np.array(block.events["stream"][where], np.int64))
                    self._journal.touched(block.events[where])
                    size += len(parts[-1])
                    if last - first == 1 and size >= limit:  # one stream is in order already
                        yield np.concatenate(owners), np.concatenate(parts)
                        parts, owners, size = [], [], 0
            if parts:
                streams = np.concatenate(owners)
                order = np.argsort(streams, kind="stable")
                yield streams[order], np.concatenate(parts)[order]

    def _groups(self, limit: int) -> Iterator[tuple[int, int]]:
        """Neighbouring streams that hold so many events together; one stream may hold more."""
        first = size = 0
        for stream, length in enumerate(self.lengths.tolist()):
            if size and size + length > limit:
                yield first, stream
                first, size = stream, 0
            size += length
        yield first, len(self.lengths)

    def slices(self) -> Iterator[tuple[Block, slice]]:
        """Stream by stream, the slices of the blocks."""
        parts = [
            (stream, number, begin, end)
            for number, (present, begins) in enumerate(self._cuts)
            for stream, begin, end in zip(present.tolist(), begins.tolist(), begins[1:].tolist())
        ]
        for _, number, begin, end in sorted(parts):
            yield self._blocks[number], slice(begin, end)


def _write_values(archive: zipfile.ZipFile, name: str, layout: Layout, index: int, rows: _Rows) -> None:
    if layout is not None:
        row_bytes = layout[0].itemsize * math.prod(layout[1])
        parts = (part for _, part in rows.column(lambda block: block.values[index], row_bytes))  # type: ignore[arg-type,return-value]
        _stream(archive, name, layout[0], (rows.total, *layout[1]), parts, zipfile.ZIP_DEFLATED)
        return
    texts = [(*block.values[index], where) for block, where in rows.slices()]
    offsets = np.cumsum([0, *np.concatenate([lengths[where] for _, lengths, where in texts] or [[]])], dtype=np.int64)
    data = (text[int(lengths[: where.start].sum()) : int(lengths[: where.stop].sum())] for text, lengths, where in texts)
    _stream(archive, name, np.dtype(np.uint8), (int(offsets[-1]),), data, zipfile.ZIP_DEFLATED)
    _write(archive, f"{name}_offsets", offsets)


def _write(archive: zipfile.ZipFile, name: str, array: npt.NDArray[Any]) -> None:
    _stream(archive, name, array.dtype, array.shape, iter([array]))


def _stream(
    archive: zipfile.ZipFile,
    name: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    pieces: Iterator[npt.NDArray[Any]],
    compression: int = zipfile.ZIP_STORED,
) -> None:
    """Write one member of the ``.npz`` piece by piece."""
    info = zipfile.ZipInfo(f"{name}.npy")
    info.compress_type = compression
    with archive.open(info, "w", force_zip64=True) as member:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(member, header)
        for piece in pieces:
            member.write(np.ascontiguousarray(piece).tobytes())
