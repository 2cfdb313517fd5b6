"""Comparing ledgers piece by piece finds what comparing them as a whole finds, in memory that does not grow with them."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import MODES, compare_by_piece, drive, rewrite, run_python, walks

import stepledger.lockstep as lockstep
from stepledger import LedgerError, compare, read
from stepledger.checksum import crc32_joined
from stepledger.sources import JournalSource, SealedSource, WholeSource, source_of

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from scale import write_apart

#: The package has a function of this name too.
compare_module = sys.modules["stepledger.compare"]

PIECES = [1, 20]


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ledgers of any size are compared as large ones are."""
    monkeypatch.setattr(compare_module, "SMALL", 0)
    monkeypatch.setattr(lockstep, "_ROUND", 2048)


@pytest.mark.parametrize("lengths", [(0, 0), (0, 9), (9, 0), (1, 1), (100, 1 << 16), (7, 3), (1 << 10, 65_537)])
def test_checksums_of_parts_are_put_together_to_that_of_the_whole(lengths: tuple[int, int]) -> None:
    first, second = (np.random.default_rng(length).bytes(length) for length in lengths)
    assert crc32_joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def recorded(directory: Path, *, n: int = 3, steps: int = 120, closed: bool = True, **options: Any) -> Any:
    """Both sides of a run; where it is not closed, their journals as a killed process leaves them."""
    envs = walks(directory, n, **options)
    drive(envs, steps)
    if closed:
        envs.close()
        return None
    envs.call("write_journal")
    envs.write_journal()
    return envs


def change(name: str, column: str, row: int) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        with np.load(directory / name) as archive:
            values = archive[column].copy()
        values[row] ^= 1
        stored(directory / name, {column: values})

    return apply


def cut(name: str, begin: int, end: int) -> Callable[[Path], None]:
    """Lose events of the first stream."""

    def apply(directory: Path) -> None:
        with np.load(directory / name) as archive:
            n = len(archive["kind"])
            changes = {one: np.delete(archive[one], slice(begin, end)) for one in archive.files if archive[one].shape == (n,)}
            changes["stream_offsets"] = archive["stream_offsets"] - (np.arange(len(archive["stream_offsets"])) > 0) * (end - begin)
        stored(directory / name, changes)

    return apply


def stored(path: Path, changes: dict[str, Any], **meta: Any) -> None:
    """As `rewrite`, in the order in which the members were; `np.savez` stores them all."""
    rewrite(path, changes, **meta)


FAULTS: dict[str, list[Callable[[Path], None]]] = {
    "none": [],
    "one observation": [change("trainer.npz", "h_obs", 17)],
    "the last event": [change("trainer.npz", "h_rew", -1)],
    "an end and a reward": [change("env-1.npz", "truncated", 30), change("trainer.npz", "h_rew", 200)],
    "a step lost": [cut("trainer.npz", 40, 41)],
    "many steps lost": [cut("trainer.npz", 40, 90)],
    "steps that came twice": [cut("env-0.npz", 90, 93)],
    "the end lost": [cut("trainer.npz", 80, 121)],
    "the beginning lost": [cut("env-0.npz", 0, 70)],
}


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", FAULTS)
def test_pieces_of_any_size_find_what_the_whole_finds(tmp_path: Path, fault: str, mode: str, piece: int) -> None:
    recorded(tmp_path, mode=mode)
    for apply in FAULTS[fault]:
        apply(tmp_path)
    whole = compare(tmp_path)
    assert whole.equal == (fault == "none")
    assert compare_by_piece(tmp_path, piece, undecided=1000) == whole


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("mode", MODES)
def test_journals_are_compared_block_by_block(tmp_path: Path, mode: str, piece: int) -> None:
    envs = recorded(tmp_path, mode=mode, steps=20, closed=False)
    for _ in range(5):
        drive(envs, 20)
        envs.call("write_journal")
        envs.write_journal()
    assert all(isinstance(source_of(path), JournalSource) for path in tmp_path.iterdir())
    whole = compare(tmp_path)
    assert whole.exit_status == 3
    assert compare_by_piece(tmp_path, piece) == whole
    envs.envs[1].close()  # one is sealed, the others are not
    assert compare_by_piece(tmp_path, piece) == compare(tmp_path)
    envs.close()
    assert compare(tmp_path).exit_status == 0


@pytest.mark.parametrize("keep_values", [True, 10])
def test_ledgers_with_values_are_read_as_a_whole(tmp_path: Path, keep_values: Any) -> None:
    recorded(tmp_path, keep_values=keep_values)
    change("trainer.npz", "h_obs", 118)(tmp_path)
    assert all(isinstance(source_of(path), WholeSource) for path in tmp_path.iterdir())
    whole = compare(tmp_path)
    assert whole.differences
    for piece in PIECES:
        assert compare_by_piece(tmp_path, piece) == whole


def test_compressed_ledgers_are_read_as_a_whole(tmp_path: Path) -> None:
    recorded(tmp_path)
    path = tmp_path / "trainer.npz"
    with np.load(path) as archive:
        np.savez_compressed(path, **{name: archive[name] for name in archive.files})
    assert isinstance(source_of(path), WholeSource)
    assert isinstance(source_of(tmp_path / "env-0.npz"), SealedSource)
    assert compare_by_piece(tmp_path, 7) == compare(tmp_path)


def test_sides_that_begin_at_different_events_are_compared_from_the_later_one_on(tmp_path: Path) -> None:
    """As they are where only one side's file was worth being cut."""
    recorded(tmp_path)
    lengths = [len(stream) for stream in read(tmp_path / "trainer.npz").streams.values()]
    cut("trainer.npz", 0, 70)(tmp_path)
    whole_env = read(tmp_path / "env-0.npz").streams[0].columns
    begins = [[70, int(whole_env["episode"][69]), int(whole_env["step"][69])], [0, 0, -1], [0, 0, -1]]
    stored(tmp_path / "trainer.npz", {}, begins=begins)
    whole = compare(tmp_path)
    assert whole.equal
    assert whole.events == sum(lengths) - 70
    for piece in PIECES:
        assert compare_by_piece(tmp_path, piece) == whole


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("fault", ["none", "one observation", "the end lost"])
@pytest.mark.usefixtures("in_pieces")
def test_several_processes_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, jobs: int) -> None:
    recorded(tmp_path)
    for apply in FAULTS[fault]:
        apply(tmp_path)
    found = compare(tmp_path, jobs=jobs)
    monkeypatch.setattr(compare_module, "SMALL", 1 << 26)
    assert found == compare(tmp_path)


COLUMNS = ["kind", "terminated", "truncated", "h_obs", "h_act", "h_rew", "episode", "step"]


@pytest.mark.parametrize(
    ("name", "column", "jobs"),
    [
        *((name, column, 1) for name in ("trainer.npz", "env-2.npz") for column in COLUMNS),
        *(("trainer.npz", column, 2) for column in ("h_obs", "step")),
    ],
)
@pytest.mark.usefixtures("in_pieces")
def test_a_file_that_is_damaged_gives_no_verdict(tmp_path: Path, name: str, column: str, jobs: int) -> None:
    """Also where it is the last byte, which is read when all else was compared."""
    recorded(tmp_path)
    path = tmp_path / name
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{column}.npy")
        end = info.header_offset + 30 + len(info.filename) + info.compress_size
        with open(path, "rb") as file:
            file.seek(info.header_offset + 28)
            end += int.from_bytes(file.read(2), "little")
    data = bytearray(path.read_bytes())
    # The last bits of what is deflated may mean nothing.
    data[end - (1 if info.compress_type == zipfile.ZIP_STORED else info.compress_size // 2)] ^= 1
    path.write_bytes(data)
    with pytest.raises(LedgerError, match=name):
        compare(tmp_path, jobs=jobs)


@pytest.mark.parametrize("changes", [{"offsets": 1}, {"offsets": -1}, {"kind": 3}, {"short": "h_obs"}, {"dtype": "h_obs"}], ids=str)
@pytest.mark.usefixtures("in_pieces")
def test_what_lies_is_refused_in_pieces_too(tmp_path: Path, changes: dict[str, Any]) -> None:
    recorded(tmp_path)
    path = tmp_path / "trainer.npz"
    with np.load(path) as archive:
        members = {name: archive[name].copy() for name in archive.files}
    if "offsets" in changes:
        members["stream_offsets"][-1] += changes["offsets"]
    elif "kind" in changes:
        members["kind"][-1] = changes["kind"]
    elif "short" in changes:
        members[changes["short"]] = members[changes["short"]][:-1]
    else:
        members[changes["dtype"]] = members[changes["dtype"]].astype(np.int64)
    np.savez(path, **members)
    with pytest.raises(LedgerError) as whole:
        read(path)
    with pytest.raises(LedgerError) as pieces:
        compare(tmp_path)
    assert str(pieces.value) == str(whole.value)


@pytest.mark.usefixtures("in_pieces")
def test_a_file_that_is_replaced_while_it_is_read_gives_no_verdict(tmp_path: Path) -> None:
    recorded(tmp_path)
    source = source_of(tmp_path / "trainer.npz")
    source.take([5, 5, 5])
    shutil.copy(tmp_path / "trainer.npz", tmp_path / "other")
    (tmp_path / "other").replace(tmp_path / "trainer.npz")
    with pytest.raises(LedgerError, match=r"trainer\.npz: it was changed while it was read"):
        source.take([5, 5, 5])


@pytest.mark.usefixtures("in_pieces")
def test_progress_ends_with_all_events(tmp_path: Path) -> None:
    recorded(tmp_path)
    for jobs in (1, 2):
        done: list[int] = []
        totals: list[int] = []
        compare(tmp_path, jobs=jobs, progress=lambda one, all_, done=done, totals=totals: (done.append(one), totals.append(all_)))
        assert done == sorted(done)
        assert {done[-1]} == {*totals} != {0}


@pytest.mark.parametrize("jobs", [0, -1, 1.5, True, "2"])
def test_a_number_of_processes_is_one(tmp_path: Path, jobs: Any) -> None:
    with pytest.raises(LedgerError, match="no number of processes"):
        compare(tmp_path, jobs=jobs)


MEASURE = """
import json, sys
from common import peak
from stepledger import compare
from stepledger import lockstep

sys.modules["stepledger.compare"].SMALL = 0
lockstep._ROUND = 1 << 15
before = peak()
found = compare(sys.argv[1])
print(json.dumps([peak() - before, found.exit_status, found.events]))
"""


@pytest.mark.parametrize("fault", ["", "everything"])
@pytest.mark.parametrize("seal", [True, False], ids=["sealed", "journals"])
def test_memory_is_bounded_by_the_piece(tmp_path: Path, seal: bool, fault: str) -> None:
    events = 60_000
    write_apart(tmp_path, 16, events, seal, fault)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    taken, status, compared = json.loads(run_python(MEASURE, tmp_path).stdout)
    assert status == (1 if fault else 0 if seal else 3)
    assert compared >= 16 * events - 1
    assert taken * 1024 < size / 2
