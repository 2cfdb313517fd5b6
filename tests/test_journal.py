"""The journal: what is in it survives, and what is damaged ends it."""

from __future__ import annotations

import ast
import copy
import gc
import io
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from common import drive, drive_one, walk, walks
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from stepledger import LedgerError, StreamKey, read
from stepledger.digest import SpaceDigest
from stepledger.format import event_dtype
from stepledger.journal import Journal, NameTakenError
from stepledger.ledger import peek_all
from stepledger.recorder import BatchRecorder, describe
from stepledger.scan import Block, Scan, scan

SPACE = SpaceDigest(spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "t": spaces.Text(5)}))
ACTION = SpaceDigest(spaces.Discrete(3))


def meta(streams: int = 2, keep_values: bool = False) -> dict[str, Any]:
    keys = [StreamKey(env=env) for env in range(streams)]
    return describe("vector", SPACE, ACTION, keys, reward_dtype=np.float32, digest="xxh3_64", keep_values=keep_values)


def block(rng: np.random.Generator, n: int, streams: int = 2, keep_values: bool = False) -> Block:
    """A block of n random events."""
    events = np.zeros(n, event_dtype("<f4", {}, streams))
    events["stream"] = np.sort(rng.integers(0, streams, n))
    for name in ("kind", "terminated", "truncated"):
        events[name] = rng.integers(0, 2, n)
    for name in ("h_obs", "h_act", "h_rew"):
        events[name] = rng.integers(0, 1 << 32, n)
    if not keep_values:
        return Block(events)
    texts = [b'"%s"' % (b"x" * int(length)) for length in rng.integers(0, 5, n)]
    values = [
        rng.standard_normal((n, 2)).astype(np.float32),
        (np.frombuffer(b"".join(texts), np.uint8), np.array([len(text) for text in texts], np.int64)),
        rng.integers(0, 3, n),
    ]
    return Block(events, values)


def write(path: Path, sizes: list[int], keep_values: bool = False, streams: int = 2) -> tuple[Journal, list[Block], list[int]]:
    """A journal with blocks of these sizes; also the length of the file after its meta and after each block."""
    rng = np.random.default_rng(0)
    journal = Journal(path, meta(streams, keep_values))
    file = path.with_suffix(".journal")
    blocks, lengths = [], [file.stat().st_size]
    for size in sizes:
        blocks.append(block(rng, size, streams, keep_values))
        journal.append(blocks[-1])
        lengths.append(file.stat().st_size)
    return journal, blocks, lengths


def assert_same_blocks(found: list[Block], expected: list[Block]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one.events, other.events)
        for column, original in zip(one.values, other.values, strict=True):
            for part, original_part in zip(*(x if isinstance(x, tuple) else (x,) for x in (column, original)), strict=True):
                np.testing.assert_array_equal(part, original_part)


def places(lengths: list[int], end: int) -> list[int]:
    """Every place near the end of a block, and some of all others."""
    near = {length + offset for length in [0, *lengths] for offset in range(-9, 10)}
    return sorted({place for place in near if 0 <= place < end} | set(range(0, end, 29)))


@pytest.mark.parametrize("keep_values", [False, True])
def test_a_journal_cut_anywhere_holds_the_blocks_before_the_cut(tmp_path: Path, keep_values: bool) -> None:
    journal, blocks, lengths = write(tmp_path / "a.npz", [3, 1, 5], keep_values)
    journal.close()
    data = (tmp_path / "a.journal").read_bytes()
    cut = tmp_path / "cut.journal"
    for length in places(lengths, len(data) + 1):
        cut.write_bytes(data[:length])
        if length < lengths[0]:
            with pytest.raises(LedgerError, match=r"record again\.$"):
                read(cut)
            continue
        whole = sum(length >= end for end in lengths[1:])
        found = scan(cut)
        assert_same_blocks(found.blocks, blocks[:whole])
        assert found.whole == (length in lengths)
        ledger = read(cut)
        assert ledger.events == sum(len(one.events) for one in blocks[:whole])
        assert ledger.open_end


def test_a_byte_changed_anywhere_is_an_error_or_ends_what_is_trusted(tmp_path: Path) -> None:
    journal, blocks, lengths = write(tmp_path / "a.npz", [3, 1, 5], keep_values=True)
    journal.close()
    data = (tmp_path / "a.journal").read_bytes()
    changed = tmp_path / "changed.journal"
    for at in places(lengths, len(data)):
        altered = bytearray(data)
        altered[at] ^= 1 << at % 8
        changed.write_bytes(altered)
        if at < lengths[0]:
            with pytest.raises(LedgerError):
                scan(changed)
            continue
        before = blocks[: sum(at >= end for end in lengths[1:])]
        found = scanned(changed)
        if isinstance(found, str):  # whole records follow: it was not cut
            assert f"altered behind its first {sum(len(block.events) for block in before)} events" in found
            continue
        assert at >= lengths[-2]
        assert_same_blocks(found.blocks, before)
        assert not found.whole


def scanned(path: Path) -> Scan | str:
    """The journal, or what is said about it."""
    try:
        return scan(path)
    except LedgerError as error:
        return str(error)


def test_blocks_in_another_order_are_not_trusted(tmp_path: Path) -> None:
    journal, blocks, lengths = write(tmp_path / "a.npz", [4, 4, 4])
    journal.close()
    data = (tmp_path / "a.journal").read_bytes()
    parts = [data[begin:end] for begin, end in itertools.pairwise([0, *lengths])]
    for order, whole in [((0, 1, 3, 2), 1), ((0, 2, 1, 3), 0), ((0, 1, 1, 2), 1), ((0, 2, 3), 0)]:
        (tmp_path / "b.journal").write_bytes(b"".join(parts[index] for index in order))
        found = scanned(tmp_path / "b.journal")
        if isinstance(found, str):
            assert f"altered behind its first {4 * whole} events" in found
        else:
            assert_same_blocks(found.blocks, blocks[:whole])


@pytest.mark.parametrize("tail", [b"\0", b"\0" * 5000, b"\x93NUMPY", b"garbage" * 100])
def test_what_follows_the_last_block_is_left_out(tmp_path: Path, tail: bytes) -> None:
    journal, blocks, _ = write(tmp_path / "a.npz", [4, 4])
    journal.close()
    with open(tmp_path / "a.journal", "ab") as file:
        file.write(tail)
    found = scan(tmp_path / "a.journal")
    assert_same_blocks(found.blocks, blocks)
    assert not found.whole


@pytest.mark.parametrize("shape", [(0, 10**23), (0, 1 << 63), (0,) * 66, (0, 0)])
def test_a_record_of_a_shape_that_no_array_has_ends_the_journal(tmp_path: Path, shape: tuple[int, ...]) -> None:
    journal, blocks, _ = write(tmp_path / "a.npz", [4, 4])
    journal.close()
    record = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(journal.dtype)
    np.lib.format.write_array_header_1_0(record, {"descr": descr, "fortran_order": False, "shape": shape})
    before = int.from_bytes((tmp_path / "a.journal").read_bytes()[-8:], "little")
    record.write(xxhash.xxh3_64_intdigest(record.getbuffer(), before).to_bytes(8, "little"))
    with open(tmp_path / "a.journal", "ab") as file:
        file.write(record.getbuffer())
    assert_same_blocks(scan(tmp_path / "a.journal").blocks, blocks)


@pytest.mark.parametrize("data", [b"", b"\0", b"text", b"\x93NUMPY" + bytes(200), bytes(range(256)) * 100])
def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.journal").write_bytes(data)
    with pytest.raises(LedgerError, match=r"a\.journal is .*record again\.$"):
        read(tmp_path / "a.journal")


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), max_size=5), streams=st.integers(1, 5), keep_values=st.booleans())
def test_a_sealed_ledger_holds_what_its_journal_held(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], streams: int, keep_values: bool
) -> None:
    path = tmp_path_factory.mktemp("seal") / "a.npz"
    journal, *_ = write(path, sizes, keep_values, streams)
    before = read(path.with_suffix(".journal"))
    journal.seal(closed=True)
    journal.remove()
    after = read(path)
    assert after.meta.pop("ended") >= after.meta["created"]
    assert after.meta == {**before.meta, "closed": True}
    assert list(after.streams) == list(before.streams) == [StreamKey(env=env) for env in range(streams)]
    assert not after.open_end
    for key in after.streams:
        one, other = before.streams[key], after.streams[key]
        for name, column in one.columns.items():
            np.testing.assert_array_equal(other.columns[name], column)
            assert other.columns[name].dtype == column.dtype
        for name, values in one.values.items():
            np.testing.assert_array_equal(other.values[name], values)


def test_further_columns_come_back_from_the_journal_and_from_the_sealed_ledger(tmp_path: Path) -> None:
    columns = {"h_next": "<u8", "h_id": "<u8", "t": "<i8"}
    keys = [StreamKey(env=env) for env in range(2)]
    own = describe("learner", SPACE, ACTION, keys, reward_dtype=np.float64, digest="xxh3_64", columns=columns)
    recorder = BatchRecorder(tmp_path / "learner.npz", own)
    rng = np.random.default_rng(0)
    batches = []
    for size in (3, 0, 5):
        batch = np.zeros(size, recorder.dtype)
        batch["kind"] = 2
        batch["stream"] = rng.integers(0, 2, size)
        for name in ("h_obs", "h_act", "h_rew", *columns):
            batch[name] = rng.integers(0, 1 << 40, size)
        batches.append(batch)
        recorder.append(batch)
    recorder.flush()
    flushed = read(tmp_path / "learner.npz")
    recorder.close()
    given = np.concatenate(batches)
    for ledger in (flushed, read(tmp_path / "learner.npz")):
        for index, key in enumerate(keys):
            for name in ("kind", "h_obs", "h_rew", *columns):
                np.testing.assert_array_equal(ledger.streams[key].data[name], given[name][given["stream"] == index])
                assert ledger.streams[key].data[name].dtype == recorder.dtype[name]


@pytest.mark.parametrize(("streams", "width"), [(1, 1), (256, 1), (257, 2)])
def test_the_number_of_a_stream_takes_no_more_bytes_than_it_needs(tmp_path: Path, streams: int, width: int) -> None:
    recorder = BatchRecorder(tmp_path / "a.npz", meta(streams))
    assert recorder.dtype.itemsize == 23 + width
    events = np.zeros(2 * streams, recorder.dtype)
    events["stream"] = np.repeat(np.arange(streams), 2)
    events["h_obs"] = np.arange(2 * streams)
    recorder.append(events)
    recorder.write()
    for path in (tmp_path / "a.journal", tmp_path / "a.npz"):
        ledger = read(path)
        assert [stream.data["h_obs"].tolist() for stream in ledger.streams.values()] == events["h_obs"].reshape(streams, 2).tolist()
        recorder.close()


def test_episodes_are_numbered_across_blocks(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.npz", meta(streams=2))
    kinds = [[0, 1, 1], [1, 0], [0, 1, 1, 1], [1], [0]]
    for kind in kinds:  # each block holds the same events of both streams
        events = np.zeros(2 * len(kind), event_dtype("<f4", {}))
        events["stream"] = np.repeat([0, 1], len(kind))
        events["kind"] = kind + kind
        journal.append(Block(events))
    journal.seal()
    journal.close()
    with np.load(tmp_path / "a.npz") as archive:
        assert archive["episode"].tolist() == 2 * [0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 3]
        assert archive["step"].tolist() == 2 * [0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 0]


def test_an_environment_collected_while_python_code_is_being_parsed_does_not_disturb_that(tmp_path: Path) -> None:
    # Its ledger is sealed then, and before 3.11.8 Python's parser can't be entered twice (https://github.com/python/cpython/issues/106905).
    source = "\n".join(f"def f{index}(a):\n    return [a + {index}, (a, {index}, [a, a])]" for index in range(2000))
    threshold = gc.get_threshold()
    for index in range(5):
        env = walk(tmp_path, index)
        env.reset()
        env.itself = env
        del env
        gc.set_threshold(50)
        try:
            ast.parse(source)
        finally:
            gc.set_threshold(*threshold)
        assert read(tmp_path / f"env-{index}.npz").meta["closed"]


def test_a_name_is_one_recorders_while_it_records(tmp_path: Path) -> None:
    journal, *_ = write(tmp_path / "a.npz", [1])
    with pytest.raises(NameTakenError, match="another process or environment at this moment"):
        Journal(tmp_path / "a.npz", meta())
    journal.close()
    Journal(tmp_path / "a.npz", meta()).close()
    assert (tmp_path / "a.old1.journal").exists()


def test_earlier_recordings_of_a_name_are_set_aside_in_order(tmp_path: Path) -> None:
    ids = []
    for _ in range(3):
        journal = Journal(tmp_path / "a.npz", meta())
        ids.append(journal.meta["id"])
        journal.append(block(np.random.default_rng(0), 3))
        journal.seal()
        journal.remove()
    killed = Journal(tmp_path / "a.npz", meta())  # flushed, then killed: leaves both files
    killed.append(block(np.random.default_rng(0), 3))
    killed.seal()
    killed.close()
    last = Journal(tmp_path / "a.npz", meta())
    last.append(block(np.random.default_rng(0), 3))
    last.seal()
    last.remove()
    found = {path.name: read(path).meta["id"] for path in tmp_path.iterdir()}
    assert [found[f"a.old{k}.npz"] for k in (1, 2, 3)] == ids
    assert found["a.old4.journal"] == found["a.old5.npz"] == killed.meta["id"]
    assert found["a.npz"] == last.meta["id"]


def test_a_seal_that_fails_leaves_the_last_one_that_worked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, *_ = write(tmp_path / "a.npz", [3])
    journal.seal()
    journal.append(block(np.random.default_rng(1), 4))

    def broken(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stepledger.sealed._write_values", broken)
    monkeypatch.setattr("stepledger.sealed._stream", broken)
    with pytest.raises(OSError, match="No space"):
        journal.seal()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.journal", "a.npz"]
    journal.close()
    assert read(tmp_path / "a.npz").events == 7  # from the journal, which holds more


def test_a_write_that_is_cut_short_goes_on(tmp_path: Path) -> None:
    class Short:
        """A raw file that takes at most seven bytes at a time."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: Any) -> int:
            return self._file.write(bytes(data[:7]))

        def close(self) -> None:
            self._file.close()

    journal = Journal(tmp_path / "a.npz", meta())
    journal._file = Short(journal._file)  # type: ignore[assignment]
    blocks = [block(np.random.default_rng(0), 5) for _ in range(2)]
    for one in blocks:
        journal.append(one)
    journal.close()
    found = scan(tmp_path / "a.journal")
    assert_same_blocks(found.blocks, blocks)
    assert found.whole


def test_a_write_that_failed_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    journal, blocks, _ = write(tmp_path / "a.npz", [5, 5])
    file = journal._file

    class Full:
        def write(self, data: Any) -> int:
            file.write(bytes(data[:100]))
            raise OSError(28, "No space left on device")

        def fileno(self) -> int:
            return file.fileno()

    journal._file = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space"):
        journal.append(copy.copy(blocks[0]))
    journal._file = file
    journal.append(blocks[1])  # there is space again
    journal.seal()
    journal.close()
    assert_same_blocks(scan(tmp_path / "a.journal").blocks, [*blocks, blocks[1]])
    assert read(tmp_path / "a.npz").events == 15


def test_a_ledger_that_was_closed_but_could_not_remove_its_journal_is_whole(tmp_path: Path) -> None:
    journal, *_ = write(tmp_path / "a.npz", [5])
    journal.seal(closed=True)
    journal.close()  # killed before the journal was removed
    ledger = read(tmp_path / "a.npz")
    assert not ledger.open_end
    assert ledger.meta["closed"]


def test_a_ledger_that_was_flushed_by_a_recorder_now_dead_has_an_open_end(tmp_path: Path) -> None:
    journal, *_ = write(tmp_path / "a.npz", [5])
    journal.seal()
    assert not read(tmp_path / "a.npz").open_end  # it lives, and flushed
    journal.close()
    assert read(tmp_path / "a.npz").open_end


@pytest.mark.parametrize("flushes", [False, True])
def test_a_ledger_can_be_read_while_its_recorder_closes(tmp_path: Path, flushes: bool) -> None:
    def record(recorder: BatchRecorder, begun: threading.Event) -> None:
        batch = np.zeros(3, recorder.dtype)
        recorder.append(batch)
        if flushes:
            recorder.flush()
        begun.set()
        recorder.append(batch)
        recorder.close()

    for number in range(100):
        recorder, begun = BatchRecorder(tmp_path / f"{number}.npz", meta(streams=1)), threading.Event()
        recorder.begin()
        recording = threading.Thread(target=record, args=(recorder, begun))
        recording.start()
        begun.wait()
        reads = [read(recorder.path)]
        while recording.is_alive():
            reads.append(read(recorder.path))
            assert [ledger.meta["id"] for ledger in peek_all(tmp_path)[0]].count(recorder.meta["id"]) == 1
        recording.join()
        assert read(recorder.path).events == 6
        assert {ledger.events for ledger in reads} <= {0, 3, 6}
        (tmp_path / f"{number}.npz").unlink()


def test_reading_does_not_keep_the_name_from_a_recorder(tmp_path: Path) -> None:
    envs = walks(tmp_path, n=1)
    drive(envs, 10)
    envs.call("flush")
    envs.flush()
    read(tmp_path / "trainer.npz")
    envs.close()
    env = walk(tmp_path, 0)
    drive_one(env, 10)
    env.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["env-0.npz", "env-0.old1.npz", "trainer.npz"]


@pytest.mark.parametrize("layout", [["<f4", [10**30]], ["<f4", [1] * 70], ["<f4", [1 << 40, 1 << 40]]], ids=["huge", "deep", "vast"])
def test_kept_values_of_an_impossible_shape_are_refused(tmp_path: Path, layout: Any) -> None:
    journal, _, _ = write(tmp_path / "a.npz", [5])
    journal.close()
    meta = {**journal.meta, "values": {"obs": [layout], "act": []}}
    (tmp_path / "a.journal").unlink()
    Journal(tmp_path / "a.npz", meta).close()
    with pytest.raises(LedgerError, match="meta is damaged"):
        read(tmp_path / "a.journal")


def test_two_streams_of_one_key_in_a_journal_are_refused(tmp_path: Path) -> None:
    journal, _, _ = write(tmp_path / "a.npz", [5])
    journal.close()
    (tmp_path / "a.journal").unlink()
    Journal(tmp_path / "a.npz", {**journal.meta, "stream_keys": [[0, 0, "", 0], [0, 0, "", 0]]}).close()
    with pytest.raises(LedgerError, match="meta is damaged"):
        read(tmp_path / "a.journal")
