"""Streams of events: what is recorded, and what becomes of it however a process ends."""

from __future__ import annotations

import errno
import gc
import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from common import COPIES, RESET, Walk, assert_equal, drive, drive_one, environment, member_names, run_python, run_walks, walk, walks
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from stepledger import LedgerEnv, LedgerError, LedgerVectorEnv, compare, read
from stepledger.digest import SpaceDigest
from stepledger.format import StreamKey
from stepledger.recorder import FLUSH_EVENTS, BatchRecorder, describe

recorder_module = importlib.import_module("stepledger.recorder")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def assert_recorded(
    columns: dict[str, np.ndarray], events: list[tuple[Any, ...]], env: gym.Env, reward_dtype: str = "<f4", **options: Any
) -> None:
    """A ledger's columns say exactly what the environment gave."""
    observations, actions = (SpaceDigest(space, **options) for space in (env.observation_space, env.action_space))
    kind, action, observation, reward, terminated, truncated = zip(*events)
    assert columns["kind"].tolist() == list(kind)
    assert columns["h_obs"].tolist() == [int.from_bytes(observations.one(one), "big") for one in observation]
    assert columns["h_act"].tolist() == [0 if one is None else int.from_bytes(actions.one(one), "big") for one in action]
    bits = np.where(np.array(kind) == RESET, 0, np.array(reward, reward_dtype).view("<u4" if reward_dtype == "<f4" else "<u8"))
    assert columns["h_rew"].tolist() == bits.tolist()
    assert columns["terminated"].tolist() == list(terminated)
    assert columns["truncated"].tolist() == list(truncated)
    episode, step = -1, 0
    for row, one in enumerate(kind):
        episode, step = (episode + 1, 0) if one == RESET else (episode, step + 1)
        assert (columns["episode"][row], columns["step"][row]) == (episode, step)


@pytest.mark.parametrize(
    ("reward_dtype", "digest", "keep_values"),
    [(np.float32, "xxh3_64", False), (np.float64, "xxh3_64", True), (np.float32, "blake2b", False)],
)
def test_a_ledger_holds_exactly_what_the_environment_gave(tmp_path: Path, reward_dtype: Any, digest: str, keep_values: bool) -> None:
    env = LedgerEnv(Walk(), tmp_path, 0, reward_dtype=reward_dtype, digest=digest, keep_values=keep_values)
    events = drive_one(env, 100)
    env.close()
    ledger = read(tmp_path / "env-0.npz")
    assert_recorded(ledger.streams[0].columns, events, env, np.dtype(reward_dtype).str, digest=digest)
    assert ledger.events == len(events)
    assert not ledger.open_end
    if keep_values:
        stream = ledger.streams[0]
        np.testing.assert_array_equal(stream.values["values_obs_0"], [event[2] for event in events])
        np.testing.assert_array_equal(stream.values["values_act_0"], [event[1] or 0 for event in events])


def test_a_sealed_file_has_the_columns_of_the_format(tmp_path: Path) -> None:
    space = spaces.Dict({"a": spaces.Box(-1, 1, (2, 3)), "t": spaces.Text(4)})
    env = LedgerEnv(Walk(observation_space=space), tmp_path, 2, keep_values=True)
    events = drive_one(env, 30)
    env.close()
    path = tmp_path / "env-2.npz"
    columns = ["kind", "terminated", "truncated", "h_obs", "h_act", "h_rew", "episode", "step"]
    values = ["values_obs_0", "values_obs_1", "values_obs_1_offsets", "values_act_0"]
    assert member_names(path) == ["meta", "stream_index", "stream_offsets", *columns, *values]
    with np.load(path, allow_pickle=False) as archive:  # numpy alone can read it
        meta = json.loads(str(archive["meta"]))
        assert archive["stream_index"].tolist() == [2]
        assert archive["stream_offsets"].tolist() == [0, len(events)]
        dtypes = ["u1", "?", "?", "<u8", "<u8", "<u4", "<i8", "<i8"]
        assert [archive[name].dtype for name in columns] == [np.dtype(one) for one in dtypes]
        assert all(archive[name].shape == (len(events),) for name in columns)
        stream = read(path).streams[2]
        for name in ("episode", "step"):
            np.testing.assert_array_equal(archive[name], stream.columns[name])
        assert archive["values_obs_0"].shape == (len(events), 2, 3)
        offsets = archive["values_obs_1_offsets"]
        texts = [archive["values_obs_1"][begin:end].tobytes().decode() for begin, end in pairwise(offsets)]
        assert [json.loads(text) for text in texts] == [event[2]["t"] for event in events]
    assert meta["tap"] == "env"
    assert meta["format"] == 2
    assert meta["closed"] is True
    assert meta["stream_keys"] == [[0, 2, "", 0]]
    assert meta["reward_dtype"] == "<f4"
    assert meta["versions"]["gymnasium"] == gym.__version__


def test_streams_of_a_vector_ledger_follow_one_another(tmp_path: Path) -> None:
    envs = walks(tmp_path, n=3)
    drive(envs, 50)
    envs.close()
    trainer = read(tmp_path / "trainer.npz")
    offsets = [0, *np.cumsum([len(read(tmp_path / f"env-{index}.npz").streams[index]) for index in range(3)])]
    with np.load(tmp_path / "trainer.npz") as archive:
        assert archive["stream_index"].tolist() == [0, 1, 2]
        assert archive["stream_offsets"].tolist() == offsets
    for index in range(3):
        given, received = read(tmp_path / f"env-{index}.npz").streams[index].columns, trainer.streams[index].columns
        for name, column in given.items():
            if name != "truncated":
                np.testing.assert_array_equal(received[name], column)


def test_a_recording_that_begins_within_an_episode_counts_it_as_episode_0(tmp_path: Path) -> None:
    env = Walk(lengths=(4,))
    env.reset()
    env.step(0)
    env = LedgerEnv(env, tmp_path, 0)
    for _ in range(3):
        env.step(0)
    env.reset()
    env.step(0)
    env.close()
    columns = read(tmp_path / "env-0.npz").streams[0].columns
    assert columns["episode"].tolist() == [0, 0, 0, 1, 1]
    assert columns["step"].tolist() == [1, 2, 3, 0, 1]


def test_rewards_of_any_number_type_are_recorded_and_every_nan_is_one(tmp_path: Path) -> None:
    class Rewards(Walk):
        rewards = (1, True, np.float32(0.1), np.array(2.5), np.int64(-3), float("nan"), -float("nan"), np.uint8(7), float("inf"), 1e300)

        def step(self, action: Any) -> Any:
            observation, _, terminated, truncated, info = super().step(action)
            self.at = getattr(self, "at", -1) + 1
            return observation, self.rewards[self.at], terminated, truncated, info

    env = LedgerEnv(Rewards(lengths=(100,)), tmp_path, 0)
    env.reset()
    for _ in Rewards.rewards:
        env.step(0)
    env.close()
    rewards = read(tmp_path / "env-0.npz").streams[0].data["h_rew"].view("<f4")[1:]
    np.testing.assert_array_equal(rewards, np.array([1, 1, 0.1, 2.5, -3, np.nan, np.nan, 7, np.inf, np.inf], np.float32))
    assert len(set(rewards[[5, 6]].view(np.uint32).tolist())) == 1


def test_without_an_event_there_is_no_file(tmp_path: Path) -> None:
    envs = walks(tmp_path / "ledger", kind="async")  # it makes and closes a dummy env with the first index, in this process
    envs.close()
    assert not (tmp_path / "ledger").exists()


def test_while_recording_there_is_a_journal_and_afterwards_only_the_ledger(tmp_path: Path) -> None:
    env = walk(tmp_path, 0)
    assert names(tmp_path) == []
    env.reset()
    assert names(tmp_path) == ["env-0.journal"]
    env.flush()
    assert names(tmp_path) == ["env-0.journal", "env-0.npz"]
    env.close()
    assert names(tmp_path) == ["env-0.npz"]


def test_a_relative_directory_is_where_the_process_was_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    envs = LedgerVectorEnv(SyncVectorEnv([lambda: walk(Path("ledger"), 0)]), "ledger/trainer.npz")
    monkeypatch.chdir(tmp_path / "elsewhere")
    drive(envs, 5)
    envs.close()
    assert names(tmp_path / "ledger") == ["env-0.npz", "trainer.npz"]


def test_a_block_is_written_when_it_is_full(tmp_path: Path) -> None:
    env = walk(tmp_path, 0, lengths=(1000,))
    drive_one(env, FLUSH_EVENTS + 100)
    journal = read(tmp_path / "env-0.journal")
    assert journal.events == FLUSH_EVENTS
    assert journal.open_end
    env.close()


def test_a_block_is_written_when_it_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "FLUSH_SECONDS", 0.2)

    class Slow(Walk):
        def step(self, action: Any) -> Any:
            time.sleep(0.01)
            return super().step(action)

    env = LedgerEnv(Slow(lengths=(1000,)), tmp_path, 0)
    drive_one(env, 100)
    assert read(tmp_path / "env-0.journal").events > 50
    env.close()


def test_kept_values_are_written_before_they_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "_FLUSH_BYTES", 1 << 20)
    env = LedgerEnv(Walk(lengths=(1000,), observation_space=spaces.Box(0, 255, (60, 60, 3), np.uint8)), tmp_path, 0, keep_values=True)
    drive_one(env, 200)
    assert read(tmp_path / "env-0.journal").events > 100  # of which each takes 10,800 bytes
    env.close()


def test_flush_writes_all_so_far_and_recording_goes_on(tmp_path: Path) -> None:
    envs = walks(tmp_path)
    drive(envs, 10)
    envs.call("flush")
    envs.flush()
    flushed = compare(tmp_path, tmp_path / "trainer.npz")
    assert_equal(flushed)
    drive(envs, 10)
    envs.close()
    comparison = compare(tmp_path, tmp_path / "trainer.npz")
    assert_equal(comparison)
    assert comparison.events > flushed.events


def test_a_comparison_between_flushes_never_takes_what_is_still_to_come_for_a_difference(tmp_path: Path) -> None:
    envs = walks(tmp_path)
    drive(envs, 10)
    envs.call("flush")  # the environments' ledgers end here; nobody flushes them again
    drive(envs, 10)
    envs.flush()
    comparison = compare(tmp_path, tmp_path / "trainer.npz")
    assert comparison.equal
    assert comparison.exit_status == 3
    envs.call("flush")
    drive(envs, 10)
    envs.call("flush")  # now they are the ones that are ahead
    comparison = compare(tmp_path, tmp_path / "trainer.npz")
    assert comparison.equal
    assert comparison.exit_status == 3
    envs.close()
    assert_equal(compare(tmp_path, tmp_path / "trainer.npz"))


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    envs = walks(tmp_path)
    drive(envs, 10)
    envs.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    envs.close()
    for env in envs.envs:
        env.close()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_environment_that_is_dropped_without_close_leaves_a_whole_ledger(tmp_path: Path) -> None:
    env = walk(tmp_path, 0)
    events = drive_one(env, 20)
    del env
    gc.collect()
    ledger = read(tmp_path / "env-0.npz")
    assert names(tmp_path) == ["env-0.npz"]
    assert ledger.events == len(events)
    assert not ledger.open_end


ENDS = {
    "the end of the script": "",
    "sys.exit": "sys.exit(0)",
    "an error that nobody caught": "raise ValueError('no')",
    "an interrupt": "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(10)",
}


UNCLOSED = """
import sys
from pathlib import Path
from common import drive, walks
envs = walks(Path(sys.argv[1]), kind=sys.argv[2])
drive(envs, 40)
"""


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end)
def test_an_interpreter_that_exits_without_close_leaves_whole_ledgers(tmp_path: Path, end: str, kind: str) -> None:
    # Multiprocessing terminates the workers of an AsyncVectorEnv: they are told before.
    run_python(UNCLOSED + ENDS[end], tmp_path, kind, check=False)
    comparison = compare(tmp_path)
    assert_equal(comparison)
    assert comparison.hops[0].streams == 3


def child(directory: str, keep: list[Any]) -> None:
    env = walk(Path(directory), 0)
    drive_one(env, 20)
    keep.append(env)  # alive until the process is gone


_ALIVE: list[Any] = []


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_process_that_exits_without_close_leaves_a_whole_ledger(tmp_path: Path, method: str) -> None:
    context = multiprocessing.get_context(method)
    process = context.Process(target=child_entry, args=(str(tmp_path),))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert names(tmp_path) == ["env-0.npz"]
    assert not read(tmp_path / "env-0.npz").open_end


def child_entry(directory: str) -> None:
    child(directory, _ALIVE)


KILLED = """
import os, signal, sys
from pathlib import Path
import stepledger.recorder
from common import drive, walks
if len(sys.argv) > 5:
    stepledger.recorder.FLUSH_EVENTS = int(sys.argv[5])
envs = walks(Path(sys.argv[1]), kind=sys.argv[2], mode="NextStep", n=int(sys.argv[3]))
drive(envs, int(sys.argv[4]))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_a_killed_process_leaves_compares_as_far_as_it_goes(tmp_path: Path, kind: str) -> None:
    assert run_python(KILLED, tmp_path, kind, 3, 3000, 500, check=False).returncode == -signal.SIGKILL
    if kind == "async":  # the workers see that their parent is gone, and close
        wait_for(lambda: names(tmp_path) == ["env-0.npz", "env-1.npz", "env-2.npz", "trainer.journal"])
    else:
        assert names(tmp_path) == ["env-0.journal", "env-1.journal", "env-2.journal", "trainer.journal"]
    for comparison in (compare(tmp_path), compare(tmp_path, tmp_path / "trainer.npz")):
        assert comparison.exit_status == 3
        assert comparison.equal
        assert not comparison.complete
        assert comparison.events > 3 * 2000
        assert all("has no end" in sentence for sentence in comparison.hops[0].unknown)


def wait_for(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_two_journals_that_end_at_the_same_event_are_still_incomplete(tmp_path: Path) -> None:
    # One env: both sides write their blocks at the same events, so nothing is left over on either.
    run_python(KILLED, tmp_path, "sync", 1, 1000, 500, check=False)
    comparison = compare(tmp_path)
    assert comparison.equal
    assert comparison.events >= 500
    assert not comparison.complete
    assert comparison.exit_status == 3


def test_a_process_killed_before_its_first_block_leaves_nothing_to_compare(tmp_path: Path) -> None:
    run_python(KILLED, tmp_path, "sync", 2, 20, check=False)
    assert names(tmp_path) == ["env-0.journal", "env-1.journal", "trainer.journal"]
    assert compare(tmp_path).exit_status == 2


def test_a_killed_recording_is_kept_when_the_script_runs_again(tmp_path: Path) -> None:
    run_python(KILLED, tmp_path, "sync", 2, 1000, 500, check=False)
    envs = walks(tmp_path, n=2)
    drive(envs, 10)
    envs.close()
    assert names(tmp_path) == sorted(
        [*(f"{name}.npz" for name in ("env-0", "env-1", "trainer")), *(f"{name}.old1.journal" for name in ("env-0", "env-1", "trainer"))]
    )
    assert_equal(compare(tmp_path))
    assert read(tmp_path / "env-0.old1.journal").events >= 500


def test_a_worker_that_is_killed_costs_its_open_block_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "FLUSH_EVENTS", 500)
    makers = [lambda i=i: walk(tmp_path, i) for i in range(2)]
    envs = LedgerVectorEnv(AsyncVectorEnv(makers, context="fork"), tmp_path / "trainer.npz")
    drive(envs, 3000)
    envs.processes[1].kill()
    envs.processes[1].join()
    with pytest.raises((EOFError, BrokenPipeError, ConnectionResetError)):
        drive(envs, 10)
    envs.close(terminate=True)
    comparison = compare(tmp_path, tmp_path / "trainer.npz")
    assert comparison.equal
    assert comparison.exit_status == 3
    assert comparison.events > 2 * 2000
    assert {sentence.split(":")[0] for sentence in comparison.hops[0].unknown} >= {"env 1"}


def test_the_report_says_why_recording_has_stopped(tmp_path: Path) -> None:
    envs = walks(tmp_path, n=2)
    drive(envs, 20)
    envs.envs[1]._recorder.fail(ValueError("a reason"))
    drive(envs, 20)
    envs.close()
    comparison = compare(tmp_path)
    assert comparison.exit_status == 3
    (sentence,) = comparison.hops[0].unknown
    assert "because the ledger of the tap 'env' has no end: recording was stopped (ValueError: a reason)" in sentence


def test_workers_that_are_with_the_environment_at_the_exit_lose_their_open_block_and_it_is_said(tmp_path: Path) -> None:
    run_python(UNCLOSED + "envs.step_async(envs.action_space.sample())", tmp_path, "async")
    comparison = compare(tmp_path)
    assert comparison.equal
    assert comparison.exit_status in (2, 3)
    assert len(comparison.hops[0].unknown) >= 3
    assert all("has no end" in sentence for sentence in comparison.hops[0].unknown[:3])


def test_the_copy_in_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from common import drive, drive_one, walks
envs = walks(Path(sys.argv[1]), n=2)
drive(envs, 30)
pid = os.fork()
if pid == 0:
    drive(envs, 9000)
    envs.flush()
    envs.call("flush")
    envs.close()
    sys.exit(7)  # runs what is registered for the exit
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert sorted(os.listdir(sys.argv[1])) == ["env-0.journal", "env-1.journal", "trainer.journal"], os.listdir(sys.argv[1])
drive(envs, 30)
envs.close()
print(len(envs.envs))
"""
    run_python(code, tmp_path)
    assert_equal(compare(tmp_path))
    assert names(tmp_path) == ["env-0.npz", "env-1.npz", "trainer.npz"]
    events = {len(stream) for stream in read(tmp_path / "trainer.npz").streams.values()}
    assert max(events) < 100  # what the child did is not among them


def test_a_fork_before_the_first_event_records_in_the_child(tmp_path: Path) -> None:
    env = walk(tmp_path, 0)
    process = multiprocessing.get_context("fork").Process(target=drive_and_close, args=(env,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert read(tmp_path / "env-0.npz").events > 20


def drive_and_close(env: Any, steps: int = 20) -> None:
    (drive_one if isinstance(env, gym.Env) else drive)(env, steps)
    env.close()


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("keep_values", [False, True])
def test_a_copy_made_before_the_first_event_records_like_the_original(tmp_path: Path, how: str, keep_values: bool) -> None:
    env = COPIES[how](walk(tmp_path, 0, keep_values=keep_values))
    events = drive_one(env, 30)
    env.close()
    ledger = read(tmp_path / "env-0.npz")
    assert_recorded(ledger.streams[0].columns, events, env)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_made_while_recording_is_no_part_of_the_run(tmp_path: Path, how: str, recwarn: pytest.WarningsRecorder) -> None:
    env = walk(tmp_path, 0)
    events = drive_one(env, 10)
    other = COPIES[how](env)
    drive_one(other, 10)  # planning on a copy, for instance
    again = COPIES[how](other)
    drive_one(again, 10)
    for one in (other, again):
        one.flush()
        one.close()
    assert names(tmp_path) == ["env-0.journal"]
    for action in (0, 1):
        events.append((1, action, *env.step(action)[:4]))
    env.close()
    assert_recorded(read(tmp_path / "env-0.npz").streams[0].columns, events, env)
    assert not [one for one in recwarn if issubclass(one.category, RuntimeWarning)]


class Failing(Walk):
    """Raises in the n-th step, before anything has happened."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__(lengths=(1000,))
        self._at, self._error = at, error

    def step(self, action: Any) -> Any:
        self._at -= 1
        if self._at == 0:
            raise self._error
        return super().step(action)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=repr)
def test_a_step_that_raises_is_no_event_and_recording_goes_on(tmp_path: Path, error: BaseException) -> None:
    env = LedgerEnv(Failing(5, error), tmp_path, 0, keep_values=True)
    events = [(RESET, None, env.reset()[0], 0.0, False, False)]
    for action in (1, 2, 3, 0, 2, 1):
        try:
            events.append((1, action, *env.step(action)[:4]))
        except BaseException as one:
            caught = one
    env.close()
    assert caught is error  # the very same, untouched
    ledger = read(tmp_path / "env-0.npz")
    assert len(events) == 6
    assert_recorded(ledger.streams[0].columns, events, env)
    np.testing.assert_array_equal(ledger.streams[0].values["values_act_0"], [0, 1, 2, 3, 0, 1])
    assert not ledger.open_end


def test_a_reset_that_raises_is_no_event(tmp_path: Path) -> None:
    class Unready(Walk):
        def reset(self, **options: Any) -> Any:
            if self._episode == -1:
                self._episode = 0
                raise RuntimeError("not yet")
            return super().reset(**options)

    env = LedgerEnv(Unready(), tmp_path, 0)
    with pytest.raises(RuntimeError, match="not yet"):
        env.reset()
    events = drive_one(env, 10)
    env.close()
    assert_recorded(read(tmp_path / "env-0.npz").streams[0].columns, events, env)


def recording_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]


@pytest.mark.parametrize("side", ["env", "trainer"])
def test_where_nothing_can_be_written_training_goes_on_with_one_warning(tmp_path: Path, side: str) -> None:
    (tmp_path / "file").write_text("no directory")
    makers = [lambda: LedgerEnv(Walk(), tmp_path / "file" / "below" if side == "env" else tmp_path, 0)]
    envs = LedgerVectorEnv(SyncVectorEnv(makers), (tmp_path / "file" if side == "trainer" else tmp_path) / "trainer.npz")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drive(envs, 9000)  # more than one block
        envs.close()
    (message,) = recording_warnings(caught)
    assert message.startswith("stepledger: recording to ")
    assert re.search("training goes on: (NotADirectory|FileExists)Error", message)
    with pytest.raises(LedgerError, match="comparing takes two sides"):
        compare(tmp_path)


@pytest.mark.parametrize("side", ["env", "trainer"])
def test_on_error_raise_stops_training_instead(tmp_path: Path, side: str) -> None:
    (tmp_path / "file").write_text("no directory")
    env = LedgerEnv(Walk(), tmp_path / "file" if side == "env" else tmp_path, 0, on_error="raise")
    envs = LedgerVectorEnv(SyncVectorEnv([lambda: env]), (tmp_path / "file" if side == "trainer" else tmp_path) / "x.npz", on_error="raise")
    with pytest.raises((NotADirectoryError, FileExistsError)):
        envs.reset()


@pytest.mark.parametrize("value", ["stop", None])
def test_an_unknown_on_error_is_refused_at_construction(tmp_path: Path, value: Any) -> None:
    with pytest.raises(LedgerError, match=r"on_error=.* is unknown: use 'warn' or 'raise'"):
        LedgerEnv(Walk(), tmp_path, 0, on_error=value)
    with pytest.raises(LedgerError, match=r"on_error=.* is unknown: use 'warn' or 'raise'"):
        LedgerVectorEnv(SyncVectorEnv([Walk]), tmp_path / "trainer.npz", on_error=value)


@pytest.mark.parametrize("dtype", [np.float16, np.int32, ">f4", "complex64", np.longdouble, "no dtype"], ids=str)
def test_a_reward_dtype_that_cannot_be_recorded_is_refused_at_construction(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(LedgerError, match="use np\\.float32 or np\\.float64"):
        LedgerEnv(Walk(), tmp_path, 0, reward_dtype=dtype)


FULL = """
import resource, sys, warnings
from pathlib import Path
import stepledger.recorder
from common import drive, walks
stepledger.recorder.FLUSH_EVENTS = 512
# As on a full disk: writing beyond this raises OSError, since Python ignores SIGXFSZ.
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    envs = walks(Path(sys.argv[1]), n=2, keep_values={"keep": True, "last": 300}.get(sys.argv[3], False))
    drive(envs, 3000)
    if sys.argv[4] == "space again":
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    envs.close()
print("".join(f"{one.message}\\n" for one in caught), end="")
"""


@pytest.mark.parametrize(
    ("limit", "keep"),
    [(100, "no values"), (20_000, "no values"), (60_000, "keep"), (85_000, "last"), (100_000, "no values"), (160_000, "keep")],
)
@pytest.mark.parametrize("then", ["space again", "still full"])
def test_a_full_disk_stops_recording_and_never_makes_a_difference(tmp_path: Path, limit: int, keep: str, then: str) -> None:
    process = run_python(FULL, tmp_path, limit, keep, then)
    messages = process.stdout.splitlines()
    assert len(messages) == len(set(messages)) <= 3  # one for each recorder, at most
    assert all("stopped, training goes on: OSError" in message for message in messages)
    assert not list(tmp_path.glob("*.tmp"))
    if not messages:
        assert_equal(compare(tmp_path))
        return
    if limit == 100:  # not even a meta
        with pytest.raises(LedgerError):
            compare(tmp_path)
        return
    comparison = compare(tmp_path)
    assert comparison.equal, str(comparison)
    assert not comparison.complete
    assert comparison.exit_status == 3


def test_a_write_that_fails_once_marks_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "FLUSH_EVENTS", 500)
    envs = walks(tmp_path, n=2)
    drive(envs, 1000)

    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    recorder = envs.envs[1]._recorder
    monkeypatch.setattr(recorder._journal, "append", no_space)
    with pytest.warns(RuntimeWarning, match="No space left on device") as caught:
        drive_and_close(envs, 1000)
    assert len(caught) == 1
    ledger = read(tmp_path / "env-1.npz")
    assert ledger.open_end
    assert "No space left on device" in ledger.meta["stopped"]
    comparison = compare(tmp_path)
    assert comparison.exit_status == 3
    assert comparison.equal
    assert {sentence.split(":")[0] for sentence in comparison.hops[0].unknown} == {"env 1"}


def test_a_ledger_that_cannot_be_sealed_stays_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    envs = walks(tmp_path, n=1)
    drive(envs, 30)

    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stepledger.sealed._write_members", no_space)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        envs.close()
    assert names(tmp_path) == ["env-0.journal", "trainer.journal"]
    comparison = compare(tmp_path)
    assert comparison.equal
    assert comparison.events > 30
    assert comparison.exit_status == 3


@pytest.mark.parametrize("after", [0, 1, 100])
def test_an_interrupt_while_a_block_is_being_written_reaches_the_user_and_marks_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(recorder_module, "FLUSH_EVENTS", 50)
    envs = walks(tmp_path, n=1)
    drive(envs, 200)
    journal = envs.envs[0]._recorder._journal
    file = journal._file

    class Interrupted:
        def write(self, data: Any) -> int:
            journal._file = file
            file.write(bytes(data[:after]))
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> Any:
            return getattr(file, name)

    journal._file = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        drive(envs, 200)
    drive(envs, 20)  # somebody caught it, and goes on
    envs.close()
    ledger = read(tmp_path / "env-0.npz")
    assert ledger.meta["stopped"].startswith("KeyboardInterrupt")
    comparison = compare(tmp_path)
    assert comparison.equal
    assert comparison.exit_status == 3
    assert comparison.events >= 200


def test_a_directory_that_is_taken_away_while_recording_costs_the_ledgers_not_the_training(tmp_path: Path) -> None:
    envs = walks(tmp_path / "ledger", n=2)
    drive(envs, 10)
    shutil.rmtree(tmp_path / "ledger")
    drive(envs, 10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        envs.close()
    assert len(recording_warnings(caught)) == 3
    assert envs.closed


class Broken(Walk):
    """The n-th observation is one that its space can't hold."""

    def __init__(self, at: int) -> None:
        super().__init__(lengths=(1000,))
        self._at = at

    def _observation(self) -> Any:
        self._at -= 1
        return super()._observation() if self._at else {"no": "array"}


def test_an_observation_that_cannot_be_digested_stops_the_recording_not_the_training(tmp_path: Path) -> None:
    env = LedgerEnv(Broken(50), tmp_path, 0)
    with pytest.warns(RuntimeWarning, match="stopped, training goes on: TypeError") as caught:
        events = drive_one(env, 100)
    env.close()
    assert len(caught) == 1
    assert len(events) == 101
    ledger = read(tmp_path / "env-0.npz")
    assert "TypeError" in ledger.meta["stopped"]
    assert ledger.open_end
    # Everything up to the bad one is there.
    assert_recorded(ledger.streams[0].columns, events[:49], env)


def test_an_observation_that_cannot_be_digested_is_raised_if_asked_for(tmp_path: Path) -> None:
    env = LedgerEnv(Broken(3), tmp_path, 0, on_error="raise")
    env.reset()
    env.step(0)
    with pytest.raises(TypeError):
        env.step(0)
    env.step(0)  # not recorded any more, and raises nothing
    env.close()
    assert read(tmp_path / "env-0.npz").open_end


@pytest.mark.parametrize("at", ["action", "reward", "flag"])
def test_whatever_comes_back_is_handed_on_even_if_it_cannot_be_recorded(tmp_path: Path, at: str) -> None:
    class Odd:
        def __bool__(self) -> bool:
            raise ValueError("ambiguous")

    class Strange(Walk):
        def step(self, action: Any) -> Any:
            result = (self._observation(), "much" if at == "reward" else 1.0, Odd() if at == "flag" else False, False, {})
            self.given = result
            return result

    env = LedgerEnv(Strange(), tmp_path, 0)
    env.reset()
    with pytest.warns(RuntimeWarning, match="training goes on"):
        assert env.step("left" if at == "action" else 0) is env.unwrapped.given
    assert env.step(0) is env.unwrapped.given
    env.close()


def test_a_step_that_returns_too_little_is_the_environments_own_fault(tmp_path: Path) -> None:
    class Short(Walk):
        def step(self, action: Any) -> Any:
            return self._observation(), 0.0, False, {}

    env = LedgerEnv(Short(), tmp_path, 0)
    env.reset()
    with pytest.warns(RuntimeWarning, match="training goes on: ValueError"):
        assert len(env.step(0)) == 4


SAME_INDEX = "were recorded at the same time under one name: give each environment an index"


def test_an_index_used_twice_is_warned_of_while_recording_and_refused_afterwards(tmp_path: Path) -> None:
    makers = [lambda: walk(tmp_path, 0), lambda: walk(tmp_path, 0), lambda: walk(tmp_path, 0)]
    envs = LedgerVectorEnv(SyncVectorEnv(makers), tmp_path / "trainer.npz")
    with pytest.warns(RuntimeWarning, match="give each environment an index") as caught:
        drive(envs, 30)
    envs.close()
    assert len(caught) == 2
    for trainer in (None, tmp_path / "trainer.npz"):
        with pytest.raises(LedgerError, match=SAME_INDEX):
            compare(tmp_path, trainer)
    # Recording again, correctly, in the same directory makes it good.
    envs = walks(tmp_path)
    drive(envs, 30)
    envs.close()
    for trainer in (None, tmp_path / "trainer.npz"):
        assert_equal(compare(tmp_path, trainer))


def test_an_index_used_twice_is_found_across_processes(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from common import walk
import stepledger, gymnasium
envs = gymnasium.vector.AsyncVectorEnv([lambda: walk(Path(sys.argv[1]), 0)] * 4)
envs = stepledger.LedgerVectorEnv(envs, Path(sys.argv[1]) / "trainer.npz")
envs.reset()
envs.step(envs.action_space.sample())
envs.close()
"""
    for attempt in range(3):  # the four begin at the same moment
        directory = tmp_path / str(attempt)
        assert run_python(code, directory).stderr.count("give each environment an index") == 3
        with pytest.raises(LedgerError, match=SAME_INDEX):
            compare(directory)


def test_an_index_used_twice_is_an_error_if_asked_for(tmp_path: Path) -> None:
    first, second = walk(tmp_path, 0), walk(tmp_path, 0, on_error="raise")
    first.reset()
    with pytest.raises(LedgerError, match="give each environment an index"):
        second.reset()
    first.close()


def test_the_path_of_two_vector_ledgers_is_told_apart_too(tmp_path: Path) -> None:
    first, second = (LedgerVectorEnv(SyncVectorEnv([lambda i=i: walk(tmp_path, i)]), tmp_path / "trainer.npz") for i in range(2))
    first.reset()
    with pytest.warns(RuntimeWarning, match="each vector env a path"):
        second.reset()
    for one in (first, second):
        one.close()
    with pytest.raises(LedgerError, match=SAME_INDEX):
        compare(tmp_path)


def test_a_script_run_again_keeps_the_old_ledgers_and_compares_the_new(tmp_path: Path) -> None:
    events = []
    for steps in (10, 20, 30):
        envs = walks(tmp_path, n=2)
        drive(envs, steps)
        envs.close()
        for comparison in (compare(tmp_path), compare(tmp_path, tmp_path / "trainer.npz")):
            assert_equal(comparison)
        events.append(comparison.events)
    assert events == sorted(set(events))
    stems = ["env-0", "env-1", "trainer"]
    assert names(tmp_path) == sorted([*(f"{stem}.npz" for stem in stems), *(f"{stem}.old{k}.npz" for stem in stems for k in (1, 2))])
    assert read(tmp_path / "env-0.old1.npz").events < read(tmp_path / "env-0.old2.npz").events < read(tmp_path / "env-0.npz").events


def test_a_journal_can_be_compared_while_it_is_being_recorded(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from common import drive, walks
envs = walks(Path(sys.argv[1]), n=2)
drive(envs, 10_000)
print("ready", flush=True)
while True:
    drive(envs, 1000)
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=environment())
    try:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(20):
            comparison = compare(tmp_path, tmp_path / "trainer.npz")
            assert comparison.equal, str(comparison)
            assert comparison.events > 0
    finally:
        process.kill()
        process.communicate()


MEMORY = """
import sys
from common import peak
import gymnasium as gym
import numpy as np
from gymnasium.vector import SyncVectorEnv
from stepledger import LedgerEnv

class Trivial(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (4,))
    action_space = gym.spaces.Discrete(2)
    given = np.zeros(4, np.float32), 0.0, False, False, {}

    def reset(self, **options):
        return self.given[0], {}

    def step(self, action):
        return self.given

env = LedgerEnv(Trivial(), sys.argv[1], 0)
env.reset()
step = env.step
for _ in range(int(sys.argv[2])):
    step(1)
env.close()
print(peak())
"""


def test_recording_ten_times_as_many_events_takes_no_more_memory(tmp_path: Path) -> None:
    # benchmarks/memory.py does the same with ten million.
    small, large = (int(run_python(MEMORY, tmp_path / str(events), events).stdout) for events in (100_000, 1_000_000))
    # Kilobytes; the million takes 31 MB on disk. Up to 16 MB of that may be in memory while the file is sealed.
    assert large < small + 20 * 1024


def test_sealing_a_long_journal_of_many_streams_takes_no_more_memory(tmp_path: Path) -> None:
    code = """
import sys
import numpy as np
from pathlib import Path
from common import peak
from stepledger.digest import SpaceDigest
from stepledger.format import StreamKey
from stepledger.recorder import Recorder, describe
from gymnasium import spaces
n = 64
space = SpaceDigest(spaces.Discrete(4))
meta = describe("vector", space, space, [StreamKey(env=env) for env in range(n)], reward_dtype=np.float32, digest="xxh3_64")
recorder = Recorder(Path(sys.argv[1]) / "trainer.npz", meta)
row = bytes(range(16)) * n + bytes(10 * n)
for _ in range(int(sys.argv[2]) // n):
    recorder.append(row)
recorder.close()
print(peak())
"""
    small, large = (int(run_python(code, tmp_path / str(events), events).stdout) for events in (160_000, 1_600_000))
    assert large < small + 26 * 1024  # the larger takes 50 MB on disk
    assert read(tmp_path / "1600000" / "trainer.npz").events == 1_600_000


def test_the_process_that_writes_is_the_one_that_opened(tmp_path: Path) -> None:
    env = walk(tmp_path, 0)
    env.reset()
    assert env._recorder._pid == os.getpid()
    env.close()


def test_warnings_that_are_errors_do_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    env = walk(tmp_path / "file", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drive_one(env, 20)
    env.close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_recorded_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    run_walks(tmp_path)
    assert_equal(compare(tmp_path))


def test_a_forked_child_does_not_hold_what_its_killed_parent_recorded(tmp_path: Path) -> None:
    code = """
import os, sys, time
from pathlib import Path
from common import drive_one, walk
env = walk(Path(sys.argv[1]), 0)
drive_one(env, 20)
child = os.fork()
if child == 0:
    os.close(1), os.close(2)  # whoever reads them need not wait
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), 9)
"""
    child = int(run_python(code, tmp_path, check=False).stdout)
    try:
        env = walk(tmp_path, 0)
        drive_one(env, 20)
        env.close()
    finally:
        os.kill(child, signal.SIGKILL)
    assert "conflicts_with" not in read(tmp_path / "env-0.npz").meta
    assert list(tmp_path.glob("env-0.old1.journal"))


def test_an_environment_that_becomes_slow_is_still_flushed_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "FLUSH_SECONDS", 0.2)
    env = walk(tmp_path, 0)
    drive_one(env, 3000)
    before = read(tmp_path / "env-0.journal").events
    env.reset()
    for step in range(400):
        if step % 10 == 0:
            time.sleep(0.05)
        env.step(0)
    assert read(tmp_path / "env-0.journal").events >= before + 100
    env.close()


@pytest.mark.parametrize("events", [0, 1, 3000])
def test_a_ledger_of_many_streams_has_each_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: int) -> None:
    # In pieces of all sizes: several streams in one, one stream in one, several for one stream.
    monkeypatch.setattr("stepledger.sealed._PIECE_BYTES", 4000)
    monkeypatch.setattr(recorder_module, "FLUSH_EVENTS", 700)
    rng = np.random.default_rng(0)
    owners = np.minimum(rng.geometric(0.05, events) - 1, 49)
    space = SpaceDigest(gym.spaces.Discrete(4))
    meta = describe("vector", space, space, [StreamKey(env=env) for env in range(50)], reward_dtype=np.float32, digest="xxh3_64")
    recorder = BatchRecorder(tmp_path / "trainer.npz", meta)
    recorder.begin()
    for at in range(0, events, 100):
        batch = np.zeros(len(owners[at : at + 100]), recorder.dtype)
        batch["stream"], batch["h_obs"], batch["kind"] = owners[at : at + 100], np.arange(at, at + len(batch)), 1
        recorder.append(batch)
    recorder.close()
    ledger = read(tmp_path / "trainer.npz")
    assert ledger.events == events
    for env in range(50):
        np.testing.assert_array_equal(ledger.streams[env].data["h_obs"], np.flatnonzero(owners == env))
        np.testing.assert_array_equal(ledger.streams[env].columns["step"], np.arange(1, 1 + (owners == env).sum()))


def test_what_happens_to_a_ledger_with_a_taken_name_is_not_done_to_the_other_one(tmp_path: Path) -> None:
    own, other = walk(tmp_path, 0), walk(tmp_path, 0)
    own.reset()
    with pytest.warns(RuntimeWarning, match="goes to another file"):
        other.reset()
    for _ in range(3000):
        other.step(0)
    other.write_journal()
    size = (tmp_path / "env-0.conflict1.journal").stat().st_size
    other.forget({str(tmp_path / "env-0.npz"): [2000]})
    assert (tmp_path / "env-0.conflict1.journal").stat().st_size == size
    own.close()
    other.close()
    with pytest.warns(RuntimeWarning, match=r"env-0\.conflict1\.npz was closed, and what comes now is not recorded"):
        other.reset()
    assert "stopped" not in read(tmp_path / "env-0.npz").meta
    assert "after it was closed" in read(tmp_path / "env-0.conflict1.npz").meta["stopped"]


@pytest.mark.skipif(os.name != "posix", reason="there is no such limit elsewhere")
def test_a_process_with_many_environments_keeps_descriptors_for_the_run(tmp_path: Path) -> None:
    code = """
import resource, sys, warnings
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from common import drive, walks
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    envs = walks(Path(sys.argv[1]), n=150)
    drive(envs, 5)
    files = [open("/dev/null") for _ in range(10)]
    envs.close()
print(*(one.message for one in caught), sep="\\n")
"""
    (said,) = run_python(code, tmp_path).stdout.splitlines()
    assert re.search(r"training goes on: .*: raise the limit \(ulimit -n\), or put fewer environments into one process\.$", said)
    recorded = len(list(tmp_path.glob("env-*.npz")))
    assert 50 < recorded < 100
    comparison = compare(tmp_path)
    assert (comparison.exit_status, comparison.differences, len(comparison.hops[0].unpaired)) == (2, (), 150 - recorded)
