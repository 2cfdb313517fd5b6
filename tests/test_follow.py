"""Following ledgers while they are recorded finds what comparing them at the end finds, in memory and space that stay bounded."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import Crashes, Walk, environment, vector_of, walks

import stepledger.journal as journal_module
from stepledger import LedgerEnv, LedgerVectorEnv, compare, read
from stepledger.follow import Follower, Watcher


def steps(envs: Any, number: int) -> None:
    for _ in range(number):
        envs.step(envs.action_space.sample())


def write(envs: Any) -> None:
    envs.call("write_journal")
    envs.write_journal()


@pytest.fixture
def envs(tmp_path: Path) -> Any:
    made = walks(tmp_path, n=3)
    made.reset(seed=0)
    yield made
    made.close()


def run_of(directory: Path) -> str:
    return str(read(next(directory.glob("trainer.*"))).meta["run"])


@pytest.mark.parametrize("forget", [False, True])
def test_round_after_round_finds_what_the_end_finds(tmp_path: Path, envs: Any, forget: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_WORTH_IT", 0)
    steps(envs, 5)
    write(envs)
    watcher = Watcher(tmp_path, run_of(tmp_path))
    counts = []
    rng = np.random.default_rng(0)
    for number in rng.integers(0, 60, 25).tolist():
        steps(envs, number)
        write(envs)
        found, drop, error = watcher.compare(False)
        assert not error
        assert found.equal
        counts.append(found.events)
        if forget:
            envs.call("forget", drop)
            envs.forget(drop)
    assert counts == sorted(counts)
    if forget:
        whole = compare(tmp_path)
        assert whole.exit_status == 2
        assert "nothing is left to be compared" in str(whole)
    steps(envs, 7)
    envs.close()
    found, _, error = watcher.compare(True)
    assert not error
    assert found.exit_status == 0
    whole = compare(tmp_path)
    assert whole.exit_status == 0
    if forget:
        assert whole.events < found.events
        assert "compared while it ran, and dropped" in str(whole)
        assert all(stream.begin > 0 for stream in read(tmp_path / "trainer.npz").streams.values())
        columns = read(tmp_path / "env-1.npz").streams[1].columns
        assert columns["episode"][0] > 10
    else:
        assert found == whole


def test_numbers_of_episodes_and_steps_go_on_behind_what_was_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_WORTH_IT", 0)
    kept, dropped = tmp_path / "kept", tmp_path / "dropped"
    for directory in (kept, dropped):
        envs = walks(directory, n=2)
        envs.action_space.seed(0)
        envs.reset(seed=0)
        for _ in range(4):
            steps(envs, 30)
            write(envs)
        if directory == dropped:
            envs.call("forget", {str(dropped / f"env-{env}.npz"): [70] for env in range(2)})
            envs.forget({str(dropped / "trainer.npz"): [70, 87]})
            steps(envs, 5)
            envs.forget({str(dropped / "trainer.npz"): [71, 90]})  # not worth it
        envs.close()
    for name, begins in (("env-0", {0: 70}), ("env-1", {1: 70}), ("trainer", {0: 70, 1: 87})):
        for env, begin in begins.items():
            whole, part = (read(directory / f"{name}.npz").streams[env] for directory in (kept, dropped))
            assert part.begin == begin
            for column in ("episode", "step", "kind", "h_obs", "h_rew"):
                assert np.array_equal(part.columns[column][: len(whole) - begin], whole.columns[column][begin:])
    assert compare(dropped).exit_status == 0


def test_what_was_not_written_yet_is_not_news(tmp_path: Path, envs: Any) -> None:
    steps(envs, 10)
    write(envs)
    follower = Follower(tmp_path, run_of(tmp_path))
    assert sum(ledger.events for ledger in follower.news()) == 2 * 3 * 11
    steps(envs, 3)
    assert follower.news() == []
    write(envs)
    assert sum(ledger.events for ledger in follower.news()) == 2 * 3 * 3
    assert follower.news() == []


def test_ledgers_of_another_run_are_left_alone(tmp_path: Path, envs: Any) -> None:
    steps(envs, 10)
    write(envs)
    assert Follower(tmp_path, "another").news() == []


def test_a_recorder_that_is_killed_leaves_an_open_end(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from common import walks
envs = walks(Path(sys.argv[1]), n=2)
envs.reset(seed=0)
while True:
    for _ in range(50):
        envs.step(envs.action_space.sample())
    envs.call("write_journal")
    envs.write_journal()
    print(flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=environment())
    assert process.stdout is not None
    process.stdout.readline()
    watcher = Watcher(tmp_path, run_of(tmp_path))
    for _ in range(5):
        found, _, error = watcher.compare(False)
        assert not error
        assert found.equal
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    found, _, error = watcher.compare(True)
    assert not error
    assert found.exit_status == 3
    assert found.events == compare(tmp_path).events


@pytest.mark.parametrize("forget", [False, True])
def test_what_is_said_while_it_goes_on_stays_said(tmp_path: Path, forget: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_WORTH_IT", 0)
    makers = [lambda i=i: LedgerEnv(Crashes(Walk((50,), i), *[10, 40][: 2 * (i == 1)]), tmp_path, i) for i in range(2)]
    envs = LedgerVectorEnv(vector_of(makers, "sync", "NextStep"), tmp_path / "trainer.npz")
    envs.reset(seed=0)
    watcher: Watcher | None = None
    for call in range(80):
        with contextlib.suppress(RuntimeError):
            envs.step(np.full(2, call % 4))
        if call % 7 == 3:
            write(envs)
            watcher = watcher or Watcher(tmp_path, run_of(tmp_path))
            found, drop, error = watcher.compare(False)
            assert not error
            assert found.equal, str(found)
            if forget:
                envs.call("forget", drop)
                envs.forget(drop)
    assert len(read(tmp_path / "trainer.journal").meta["raised"]) == 2
    envs.close()
    assert watcher is not None
    assert watcher.compare(True)[0].equal
    if not forget:
        assert compare(tmp_path).exit_status == 0
