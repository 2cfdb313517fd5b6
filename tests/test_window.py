"""``keep_values=K``: the values of the last events of each stream, and nothing else in memory."""

from __future__ import annotations

import contextlib
import io
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import xxhash
from common import MODES, Walk, assert_refused, compare_in_parts, drive, drive_one, rewrite, run_python, stepledger, vector_of, walk, walks
from faults import Dose, FaultyEnv
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

import stepledger.checks as checks
import stepledger.journal as journal_module
import stepledger.recorder as recorder_module
import stepledger.window as window_module
from stepledger import LedgerEnv, LedgerError, LedgerVectorEnv, compare, read
from stepledger.cli import main
from stepledger.follow import Watcher
from stepledger.format import KEPT, WINDOWED
from stepledger.ledger import Stream
from stepledger.lints import Linter
from stepledger.recover import recover
from stepledger.scan import Block, scan
from stepledger.window import Window

SPACE = spaces.Dict({"a": spaces.Box(-10, 10, (2,)), "t": spaces.Text(5)})


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "FLUSH_EVENTS", 16)
    monkeypatch.setattr(window_module, "_SMALL", 8)


def events_of(stream: Stream) -> list[int]:
    """The events whose values are there, counted from the stream's first of all."""
    assert stream.kept is not None
    assert all(len(column) == len(stream.kept) for column in stream.values.values())
    return (stream.kept + stream.begin).tolist()


def assert_values_of(stream: Stream, whole: Stream) -> None:
    """The kept values are those that the same events have in a ledger with all values."""
    for event in events_of(stream):
        row = stream.row(event - stream.begin)
        for name, column in whole.values.items():
            np.testing.assert_array_equal(stream.values[name][row], column[event])


def record(directory: Path, keep_values: Any, steps: int = 60, mode: str = "NextStep") -> list[Stream]:
    """The streams of three environments whose observations have a part without a fixed shape, on both sides."""

    def made(index: int) -> LedgerEnv:
        return LedgerEnv(Walk((3 + index, 5, 1), index, observation_space=SPACE), directory, index, keep_values=keep_values)

    makers = [lambda index=index: made(index) for index in range(3)]
    envs = LedgerVectorEnv(vector_of(makers, "sync", mode), directory / "trainer.npz", keep_values=keep_values)
    drive(envs, steps)
    envs.close()
    assert compare(directory).exit_status == 0
    return [stream for name in ("env-0", "env-1", "env-2", "trainer") for stream in read(directory / f"{name}.npz").streams.values()]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [2, 20, 10_000])
def test_the_last_events_of_each_stream_have_the_values_that_all_events_would_have(tmp_path: Path, number: int, mode: str) -> None:
    whole, last = (record(tmp_path / str(keep), keep, mode=mode) for keep in (True, number))
    for one, other in zip(last, whole, strict=True):
        assert {name: column.tolist() for name, column in one.data.items()} == {
            name: column.tolist() for name, column in other.data.items()
        }
        assert events_of(one) == list(range(max(0, len(one) - number), len(one)))
        assert_values_of(one, other)
        assert [one.row(event) is not None for event in range(len(one))] == [event >= len(one) - number for event in range(len(one))]


@pytest.mark.parametrize("value", [True, False, 0, np.True_])
def test_what_is_no_number_of_events_is_all_or_none(tmp_path: Path, value: Any) -> None:
    drive_one(env := walk(tmp_path, 0, keep_values=value), 10)
    env.close()
    ledger = read(tmp_path / "env-0.npz")
    assert ledger.meta["keep_values"] is bool(value)
    assert ledger.meta["format"] == 2  # which earlier versions read
    assert ledger.streams[0].kept is None


@pytest.mark.parametrize("value", [1, -3, 2.5, "all", None, 1 << 70])
def test_a_setting_that_there_is_not_is_refused(tmp_path: Path, value: Any) -> None:
    for make in (lambda: walk(tmp_path, 0, keep_values=value), lambda: walks(tmp_path, keep_values=value)):
        with pytest.raises(LedgerError, match="is no setting"):
            make()


def test_a_reader_that_knows_no_numbers_is_told_another_version(tmp_path: Path) -> None:
    record(tmp_path, 5)
    assert read(tmp_path / "env-0.npz").meta["format"] == WINDOWED
    rewrite(tmp_path / "env-0.npz", format=2)  # a meta that says both is damaged
    with pytest.raises(LedgerError, match="its meta is damaged"):
        read(tmp_path / "env-0.npz")


@pytest.mark.usefixtures("small_blocks")
@given(
    blocks=st.lists(st.tuples(st.lists(st.integers(0, 12), min_size=3, max_size=3), st.sets(st.integers(0, 2))), max_size=25),
    number=st.integers(2, 30),
)
@settings(deadline=None, max_examples=60)
def test_a_window_holds_the_last_rows_that_were_not_saved(blocks: list[tuple[list[int], set[int]]], number: int) -> None:
    window = Window(number, 3)
    came: list[list[int]] = [[], [], []]
    saved = [0, 0, 0]
    for sizes, save in blocks:
        streams = np.repeat(np.arange(3, dtype=np.uint32), sizes)
        rows = np.array([100 * len(came[0]) + i for i in range(len(streams))])
        for stream, row in zip(streams.tolist(), rows.tolist()):
            came[stream].append(row)
        last = window.last(streams)
        window.push(streams, last, [rows[last]])
        for stream in save:
            expected = list(range(max(saved[stream], len(came[stream]) - number), len(came[stream])))
            found = window.of(stream)
            assert ([] if found is None else found.events["event"].tolist()) == expected
            if found is not None:
                assert found.values[0].tolist() == [came[stream][event] for event in expected]
            window.saved(stream)
            saved[stream] = len(came[stream])
    assert window.rows <= 2 * 3 * number + 2 * 8


def test_a_window_takes_no_more_memory_the_longer_it_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of the environments has no more events, and what it had last lies among what the others had."""
    monkeypatch.setattr(recorder_module, "FLUSH_EVENTS", 500)
    env = walk(tmp_path, 0, keep_values=100)
    drive_one(env, 1_000)
    sizes = []
    for _ in range(5):
        drive_one(env, 4_000)
        sizes.append(env._recorder._window.rows + len(env._recorder.values[0]))
    assert max(sizes) <= 2 * 100 + 1024 + 500
    assert (tmp_path / "env-0.journal").stat().st_size < 21_000 * 40
    env.close()
    window = Window(100, 2)
    for _ in range(3_000):
        streams = np.zeros(10, np.uint32) if window.rows else np.repeat(np.arange(2, dtype=np.uint32), 5)
        window.push(streams, window.last(streams), [np.zeros(10)])
    assert window.rows <= 2 * 200 + 1024
    assert window.of(1) is not None


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("forgets", [False, True])
def test_what_is_saved_on_the_way_stays_whatever_comes_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: bool) -> None:
    monkeypatch.setattr(journal_module, "_WORTH_IT", 0)
    whole = record(tmp_path / "whole", True, steps=120)
    for name in ("journal", "sealed"):
        directory = tmp_path / name
        makers = [
            lambda i=i, at=directory: LedgerEnv(Walk((3 + i, 5, 1), i, observation_space=SPACE), at, i, keep_values=7) for i in range(3)
        ]
        envs = LedgerVectorEnv(SyncVectorEnv(makers), directory / "trainer.npz", keep_values=7)
        envs.action_space.seed(0)
        envs.reset(seed=0)
        for step in range(1, 121):
            envs.step(envs.action_space.sample())
            if step in (40, 43, 80):
                wanted = {str(directory / "trainer.npz"): [0, 2], str(directory / "env-1.npz"): [0]}
                envs.call("save_values", wanted)
                envs.save_values(wanted)
            if step == 100 and forgets:
                dropped = {str(directory / "trainer.npz"): [38, 0, 79], **{str(directory / f"env-{env}.npz"): [38] for env in range(3)}}
                envs.call("write_journal")
                envs.call("forget", dropped)
                envs.write_journal()
                envs.forget(dropped)
        if name == "journal":
            for env in envs.envs:
                env.write_journal()
            envs.write_journal()
            ledgers = [read(directory / f"{one}.journal") for one in ("env-0", "env-1", "env-2", "trainer")]
        envs.close()
        if name == "sealed":
            ledgers = [read(directory / f"{one}.npz") for one in ("env-0", "env-1", "env-2", "trainer")]
        streams = [stream for ledger in ledgers for stream in ledger.streams.values()]
        on_the_way = [*range(34, 44), *range(74, 81)]
        last = [] if name == "journal" else list(range(114, 121))
        begins = [38, 38, 38, 38, 0, 79] if forgets else [0] * 6
        for stream, other, saved, begin in zip(streams, whole, (False, True, False, True, False, True), begins, strict=True):
            assert stream.begin == begin
            assert events_of(stream) == [event for event in (on_the_way if saved else []) + last if event >= begin]
            assert_values_of(stream, other)
        if name == "journal":
            continue
        assert compare(directory).equal


def test_environments_in_other_processes_save_theirs(tmp_path: Path) -> None:
    envs = walks(tmp_path, n=2, kind="async", keep_values=10)
    drive(envs, 30)
    wanted = {str(tmp_path / "env-1.npz"): [0]}
    envs.call("save_values", wanted)
    envs.save_values(wanted)
    drive(envs, 30)
    envs.close()
    streams = [stream for name in ("env-0", "env-1", "trainer") for stream in read(tmp_path / f"{name}.npz").streams.values()]
    last = list(range(52, 62))
    assert [events_of(stream) for stream in streams] == [last, [*range(21, 31), *last], last, last]


def test_each_flush_stores_the_last_events_and_none_twice(tmp_path: Path) -> None:
    env = walk(tmp_path, 0, keep_values=10)
    env.reset(seed=0)
    for number in (15, 4, 0, 30):
        for _ in range(number):
            env.step(0)
        env.flush()
    env.close()
    # Events 0 to 49, the reset among them; flushed behind 15, 19 and 49.
    assert events_of(read(tmp_path / "env-0.npz").streams[0]) == [*range(6, 20), *range(40, 50)]


KILLED = """
import os, signal, sys
from pathlib import Path
import stepledger.recorder
from common import drive, walks
stepledger.recorder.FLUSH_EVENTS = 50
envs = walks(Path(sys.argv[1]), n=2, keep_values=20)
drive(envs, 100)
wanted = {str(path.with_suffix(".npz")): [0] for path in Path(sys.argv[1]).glob("*.journal")}
envs.call("save_values", wanted)
envs.save_values(wanted)
drive(envs, 100)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_the_values_that_were_saved(tmp_path: Path) -> None:
    assert run_python(KILLED, tmp_path, check=False).returncode == -signal.SIGKILL

    def kept() -> dict[str, list[list[int]]]:
        return {
            name: [events_of(stream) for stream in read(tmp_path / f"{name}.npz").streams.values()]
            for name in ("env-0", "env-1", "trainer")
        }

    before = kept()
    assert before == {"env-0": [list(range(81, 101))], "env-1": [list(range(81, 101))], "trainer": [list(range(81, 101)), []]}
    assert compare(tmp_path).exit_status == 3
    assert compare(tmp_path).equal
    assert {one.outcome for one in recover(tmp_path)} == {"sealed"}
    assert kept() == before


def test_a_script_that_ends_by_an_error_has_the_last_values(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from common import drive_one, walk
env = walk(Path(sys.argv[1]), 0, keep_values=20)
drive_one(env, 100)
raise ValueError("NaN in the loss")
"""
    assert run_python(code, tmp_path, check=False).returncode == 1
    stream = read(tmp_path / "env-0.npz").streams[0]
    assert events_of(stream) == list(range(len(stream) - 20, len(stream)))


def test_recording_that_fails_leaves_the_last_values(tmp_path: Path) -> None:
    env = walk(tmp_path, 0, keep_values=5)
    env.reset()
    for _ in range(20):
        env.step(0)
    env._recorder.write()
    with pytest.warns(RuntimeWarning, match="training goes on"):
        env._recorder.fail(LedgerError("something is wrong."))
    assert events_of(read(tmp_path / "env-0.npz").streams[0]) == list(range(16, 21))


def journal_of(directory: Path) -> tuple[Path, bytes]:
    """A journal with two rows of kept values, events 3 and 4 of 5."""
    env = walk(directory, 0, keep_values=2)
    env.reset(seed=0)
    for _ in range(4):
        env.step(0)
    env.save_values({str(directory / "env-0.npz"): [0]})
    data = (directory / "env-0.journal").read_bytes()
    env._recorder.abandon()
    return directory / "env-0.journal", data


def record_of(array: Any, before: bytes) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    checksum = xxhash.xxh3_64_intdigest(buffer.getbuffer(), int.from_bytes(before[-8:], "little"))
    return buffer.getvalue() + checksum.to_bytes(8, "little")


def appended(data: bytes, index: list[tuple[int, int]], *leaves: Any) -> bytes:
    for part in (np.array(index, KEPT), *leaves):
        data += record_of(part, data)
    return data


def test_a_journal_cut_anywhere_in_its_kept_values_is_read_up_to_there(tmp_path: Path) -> None:
    path, data = journal_of(tmp_path)
    first = data.index(b"\x93NUMPY", data.index(b"event"[:5]) - 200)
    numbers = set()
    for length in range(first, len(data) + 1, 7):
        path.write_bytes(data[:length])
        try:
            ledger = read(path)
        except LedgerError:
            continue  # within the meta
        numbers.add((ledger.events, len(events_of(ledger.streams[0]))))
        assert ledger.open_end
    path.write_bytes(data)
    assert events_of(read(path).streams[0]) == [3, 4]
    assert numbers <= {(0, 0), (5, 0), (5, 2)}
    assert (5, 0) in numbers


ROWS = np.zeros((1, 3), np.float32), np.zeros(1, np.int64)
TWO = np.zeros((2, 3), np.float32), np.zeros(2, np.int64)


@pytest.mark.parametrize(
    ("index", "leaves"),
    [
        ([(0, 5)], ROWS),  # an event that is not there
        ([(0, 1 << 62)], ROWS),
        ([(0, -1)], ROWS),
        ([(0, 4)], ROWS),  # one that has a value already
        ([(0, 2)], ROWS),  # one before those that have
        ([(0, 6), (0, 5)], TWO),
    ],
)
def test_a_journal_whose_kept_values_belong_to_no_event_is_refused(tmp_path: Path, capsys: Any, index: Any, leaves: Any) -> None:
    path, data = journal_of(tmp_path)
    path.write_bytes(appended(data, index, *leaves))
    with pytest.raises(LedgerError, match="values of events that it has not"):
        read(path)
    assert_refused(capsys, "info", path)
    (outcome,) = recover(tmp_path)
    assert outcome.outcome == "damaged"


@pytest.mark.parametrize(
    ("index", "leaves"),
    [([(7, 1)], ROWS), ([(0, 1)], TWO), ([(0, 1)], (np.zeros((1, 4), np.float32), np.zeros(1, np.int64))), ([(0, 1)], ())],
)
def test_kept_values_that_are_not_what_was_promised_end_the_journal(tmp_path: Path, index: Any, leaves: Any) -> None:
    """As any record that is not whole does, which may be its recorder's death."""
    path, data = journal_of(tmp_path)
    path.write_bytes(appended(data, index, *leaves))
    found = None
    with contextlib.suppress(LedgerError):  # whole records follow the one that is not
        found = scan(path)
    assert found is None or (not found.whole and [len(rows.events) for rows in found.kept] == [2])


@pytest.mark.parametrize(
    "index",
    [
        np.array([4, 3]),
        np.array([3, 3]),
        np.array([-1, 3]),
        np.array([3, 5]),
        np.array([3, 1 << 62]),
        np.array([(1 << 63) - 1, -1 << 63]),  # whose difference is 1, in an int64
        np.array([3]),
        np.array([2, 3, 4]),
        np.arange(6),
        np.array([[3, 4]]),
        np.array([3, 4], np.int32),
        np.array([3.0, 4.0]),
        np.array(3),
        np.zeros(0, np.int64),
        None,
    ],
)
def test_a_sealed_ledger_whose_index_lies_is_refused(tmp_path: Path, capsys: Any, index: Any) -> None:
    env = walk(tmp_path, 0, keep_values=2)
    env.reset(seed=0)
    for _ in range(4):
        env.step(0)
    env.close()
    path = tmp_path / "env-0.npz"
    assert events_of(read(path).streams[0]) == [3, 4]
    rewrite(path, None if index is None else {"values_index": index}, drop=("values_index",) if index is None else ())
    with pytest.raises(LedgerError):
        read(path)
    assert main(["info", str(path)]) == 2
    capsys.readouterr()


def test_an_index_that_claims_to_be_huge_takes_no_memory(tmp_path: Path) -> None:
    """Its length may be no more than the number of events, which is checked before anything is read."""
    env = walk(tmp_path, 0, keep_values=2)
    env.reset()
    env.close()
    rewrite(tmp_path / "env-0.npz", {"values_index": np.zeros(1 << 16, np.int64)})
    with pytest.raises(LedgerError, match="its values are damaged"):
        read(tmp_path / "env-0.npz")


@pytest.mark.parametrize("value", [1, 0, -2, 2.5, 1 << 62, "5", None, [5], True])
def test_a_meta_with_no_number_of_events_is_refused(tmp_path: Path, value: Any) -> None:
    drive_one(env := walk(tmp_path, 0, keep_values=5), 20)
    env.close()
    rewrite(tmp_path / "env-0.npz", keep_values=value)
    with pytest.raises(LedgerError, match="its meta is damaged"):
        read(tmp_path / "env-0.npz")


def rounded(directory: Path, env_side: Any, trainer_side: Any, at: int, steps: int = 100) -> Any:
    """A comparison in which one observation, counted from 0, was rounded."""

    def made() -> gym.Env:
        env = LedgerEnv(gym.make("Pendulum-v1"), directory, 0, keep_values=env_side)
        return FaultyEnv(env, "obs:f16", Dose(at=at))

    envs = LedgerVectorEnv(SyncVectorEnv([made]), directory / "trainer.npz", keep_values=trainer_side)
    drive(envs, steps)
    envs.close()
    comparison = compare(directory)
    assert [hop.differences for hop in comparison.hops] == [1]
    return comparison.differences[0]


def test_a_difference_among_the_last_events_is_explained_by_its_values(tmp_path: Path) -> None:
    found = rounded(tmp_path, 20, 20, at=95)
    assert [one.code for one in found.explanations] == ["SL104"]
    assert found.first["obs"].startswith("[")
    assert found.second["obs"].startswith("[")
    shown = stepledger("show", tmp_path, "--env", 0, "--episode", found.episode, "--step", found.step).stdout
    assert "obs[0]: " in shown
    assert found.first["obs"][1:8] in shown


@pytest.mark.parametrize(
    ("env_side", "trainer_side", "at"),
    [(20, 20, 50), (20, False, 95), (False, 20, 95), (True, 20, 50), (20, True, 50), (True, False, 50)],
)
def test_nothing_is_said_of_values_that_one_side_has_not_kept(tmp_path: Path, env_side: Any, trainer_side: Any, at: int) -> None:
    found = rounded(tmp_path, env_side, trainer_side, at)
    assert found.explanations == ()
    assert found.first == found.second == {}
    shown = stepledger("show", tmp_path, "--env", 0, "--episode", found.episode, "--step", found.step).stdout
    assert "#" in shown  # digests, by which the sides can be compared
    assert "obs[0]: " not in shown


def test_what_both_sides_have_of_an_event_is_shown_whatever_their_settings(tmp_path: Path) -> None:
    found = rounded(tmp_path, True, 20, at=95)
    assert [one.code for one in found.explanations] == ["SL104"]


def test_a_page_of_windows_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    rounded(tmp_path / "run", 4, 4, at=97)  # the steps before it have none
    assert stepledger("compare", tmp_path / "run", "--html", tmp_path / "a.html", "-v", check=False).returncode == 1
    assert "obs[0]" in (tmp_path / "a.html").read_text()


def test_in_parts_values_are_of_the_same_events(tmp_path: Path) -> None:
    rounded(tmp_path, 60, 60, at=70)
    for seed in range(5):
        assert str(compare_in_parts(tmp_path, seed)) == str(compare(tmp_path))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("retain", ["all", "differences"])
def test_while_it_is_recorded_the_values_around_a_difference_are_saved_when_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retain: str
) -> None:
    monkeypatch.setattr(journal_module, "_WORTH_IT", 0)

    def made(index: int) -> gym.Env:
        env = LedgerEnv(gym.make("Pendulum-v1"), tmp_path, index, keep_values=60)
        return FaultyEnv(env, "obs:f16", Dose(at=170)) if index == 1 else env

    envs = LedgerVectorEnv(SyncVectorEnv([lambda i=i: made(i) for i in range(2)]), tmp_path / "trainer.npz", keep_values=60)
    envs.action_space.seed(0)
    envs.reset(seed=0)
    watcher = Watcher(tmp_path, envs._rows.recorder.meta["run"])
    told = []
    for call in range(1, 1_001):
        envs.step(envs.action_space.sample())
        if call % 25 == 0:
            envs.call("write_journal")
            envs.write_journal()
            _, drop, error = watcher.compare(False)
            assert not error
            if differing := watcher.differing():
                told.append((call, differing))
                envs.call("save_values", differing)
                envs.save_values(differing)
            if retain == "differences":
                envs.call("forget", drop)
                envs.forget(drop)
    envs.close()
    assert told == [(told[0][0], {str(tmp_path / "env-1.npz"): [0], str(tmp_path / "trainer.npz"): [1]})]
    assert told[0][0] in (175, 200)
    comparison = compare(tmp_path)
    (found,) = comparison.differences
    assert [one.code for one in found.explanations] == ["SL104"]
    for name in ("env-1", "trainer"):
        stream = read(tmp_path / f"{name}.npz").streams[1]
        last = list(range(941, 1_001))
        assert events_of(stream) == [event for event in range(told[0][0] - 59, told[0][0] + 1) if event >= stream.begin] + last
    stream = read(tmp_path / "env-0.npz").streams[0]
    assert events_of(stream) == [event for event in last if event >= stream.begin]


def test_values_that_are_kept_are_looked_at_where_the_first_calls_were_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CALLS", 20)
    monkeypatch.setattr("stepledger.course.CALLS", 20)
    space = spaces.Box(-1, 1, (2,), np.float32)

    class Strays(Walk):
        def _observation(self) -> Any:
            self._number = getattr(self, "_number", -1) + 1
            return np.full(2, 5 if self._number in (4, 50, 90) else 0, np.float32)

    def looked_at(keep_values: Any) -> tuple[int, int, Any]:
        env = LedgerEnv(Strays((1_000,), observation_space=space), tmp_path / str(keep_values), 0, keep_values=keep_values)
        env.reset()
        for _ in range(99):
            env.step(0)
        env.close()
        linter = Linter()
        linter.add([read(tmp_path / str(keep_values) / "env-0.npz")])
        (found,) = linter.findings()
        return found.count, linter.made["SL602"], (found.code, found.episode, found.step)

    assert looked_at(False) == (1, 20, ("SL602", 0, 4))
    assert looked_at(30) == (2, 50, ("SL602", 0, 4))
    assert looked_at(95) == (3, 100, ("SL602", 0, 4))  # each once, though 15 of the first calls are among the last events
    assert looked_at(True) == (3, 100, ("SL602", 0, 4))


def test_a_ledger_says_of_how_many_events_it_has_values(tmp_path: Path) -> None:
    record(tmp_path, 1_500)
    assert "kept of the last 1,500 events of each env" in stepledger("info", tmp_path / "trainer.npz").stdout


def test_an_environment_that_fills_its_array_again_is_kept_as_it_was_then(tmp_path: Path) -> None:
    class Reuses(Walk):
        buffer = np.zeros(3, np.float32)

        def _observation(self) -> Any:
            self.buffer[:] = super()._observation()
            return self.buffer

    streams = []
    for keep, kind in ((True, Walk), (4, Reuses)):
        drive_one(env := LedgerEnv(kind(), tmp_path / str(keep), 0, keep_values=keep), 30)
        env.close()
        streams.append(read(tmp_path / str(keep) / "env-0.npz").streams[0])
    assert_values_of(streams[1], streams[0])


def test_blocks_of_kept_values_are_those_of_a_block() -> None:
    """The same class holds both, so that what cuts one cuts the other."""
    rows = Block(np.array([(0, 1), (0, 2)], KEPT), [np.arange(2), (np.frombuffer(b"abc", np.uint8), np.array([1, 2]))])
    cut = rows.only(np.array([False, True]))
    assert cut.events.tolist() == [(0, 2)]
    assert bytes(cut.values[1][0]) == b"bc"
