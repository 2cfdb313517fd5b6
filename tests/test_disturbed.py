"""Recording while signals, other threads, interrupts and copies come in between: no event is lost or written twice."""

from __future__ import annotations

import copy
import functools
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import assert_equal, drive, run_python, vector_of, walk, walks

import stepledger.recorder as recorder_module
from stepledger import LedgerVectorEnv, compare, read
from stepledger.recorder import Recorder
from stepledger.recording import Recording


@pytest.fixture
def alarms() -> Iterator[Callable[[Callable[[], Any]], list[int]]]:
    """Calls a function every few hundred steps' time, wherever the interpreter is just then."""

    def start(function: Callable[[], Any]) -> list[int]:
        calls: list[int] = []

        def handler(*_: Any) -> None:
            calls.append(1)
            function()

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
        return calls

    before = signal.getsignal(signal.SIGALRM)
    yield start
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("method", ["flush", "write_journal"])
@pytest.mark.parametrize("keep_values", [False, True])
@pytest.mark.parametrize("side", ["env", "vector"])
def test_a_signal_handler_may_write_at_any_moment(tmp_path: Path, alarms: Any, side: str, keep_values: bool, method: str) -> None:
    envs = walks(tmp_path, n=2, keep_values=keep_values)
    write = getattr(envs if side == "vector" else envs.envs[0], method)
    envs.reset(seed=0)
    calls = alarms(write)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        envs.step(envs.action_space.sample())
    signal.setitimer(signal.ITIMER_REAL, 0)
    envs.close()
    assert len(calls) > 20
    assert_equal(compare(tmp_path))


@pytest.mark.parametrize("keep_values", [False, True])
def test_another_thread_may_write_at_any_moment(tmp_path: Path, keep_values: bool) -> None:
    envs = walks(tmp_path, n=2, keep_values=keep_values)
    envs.reset(seed=0)
    going, flushes = True, []

    def monitor() -> None:
        while going:
            (envs.flush if len(flushes) % 2 else envs.envs[0].flush)()
            flushes.append(1)
            time.sleep(0.003)

    thread = threading.Thread(target=monitor)
    thread.start()
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        envs.step(envs.action_space.sample())
    going = False
    thread.join()
    envs.close()
    assert len(flushes) > 5
    assert_equal(compare(tmp_path))


def test_a_daemon_thread_that_trains_until_the_end_leaves_no_false_difference(tmp_path: Path) -> None:
    run_python(
        """
import sys, threading, time
from pathlib import Path
from common import walks
envs = walks(Path(sys.argv[1]), n=3)
envs.reset(seed=0)
def train():
    while True:
        envs.step(envs.action_space.sample())
threading.Thread(target=train, daemon=True).start()
time.sleep(0.5)
""",
        tmp_path,
    )
    comparison = compare(tmp_path)
    assert comparison.events > 100
    assert comparison.exit_status in (0, 3), str(comparison)


@pytest.mark.parametrize("keep_values", [False, True])
@pytest.mark.parametrize("at", range(1, 60, 3))
def test_an_interrupt_anywhere_in_writing_a_block_makes_no_false_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, keep_values: bool
) -> None:
    """An interrupt comes at the call of a function: at each of those that write a block in turn."""
    monkeypatch.setattr(recorder_module, "FLUSH_EVENTS", 24)
    envs = walks(tmp_path, n=1, keep_values=keep_values)
    drive(envs, 100)
    seen = 0

    def interrupt(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        seen += event in ("call", "c_call", "c_return") and "stepledger" in frame.f_code.co_filename
        if seen == at:
            seen += 1
            raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, "_tick", traced(Recorder._tick, interrupt, sys.setprofile))
    try:
        for _ in range(100):
            envs.step(envs.action_space.sample())
    except KeyboardInterrupt:
        pass
    monkeypatch.undo()
    envs.close()
    comparison = compare(tmp_path)
    # The vector env's own step was interrupted, so that what the environment recorded of it never came back.
    assert comparison.exit_status in (0, 3) or {one.kind for one in comparison.differences} == {"lost"}, str(comparison)
    assert sum(one.events for one in comparison.differences) <= 1


def traced(method: Any, tracer: Any, install: Any) -> Any:
    def with_tracer(self: Recording) -> None:
        install(tracer)
        try:
            method(self)
        finally:
            install(None)

    return with_tracer


def duplicate(how: str, value: Any) -> Any:
    return copy.deepcopy(value) if how == "deepcopy" else pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_copy_of_a_vector_env_is_no_part_of_the_run_once_that_has_begun(tmp_path: Path, begun: bool, how: str) -> None:
    envs = LedgerVectorEnv(vector_of([walk_of(tmp_path, 0), walk_of(tmp_path, 1)]), tmp_path / "trainer.npz")
    if begun:
        drive(envs, 20)
    other = duplicate(how, envs)
    drive(other, 30)
    other.close()
    if begun:
        drive(envs, 20)
        envs.close()
        assert_equal(compare(tmp_path))
        assert read(tmp_path / "trainer.npz").events == 2 * 42
    else:
        assert_equal(compare(tmp_path))
        assert read(tmp_path / "trainer.npz").events == 2 * 31


def walk_of(directory: Path, index: int) -> Any:
    return functools.partial(walk, directory, index)


def test_a_reward_that_is_no_number_is_named(tmp_path: Path) -> None:
    env = walk(tmp_path, 0)
    env.reset()
    plain = env.env.step
    env.env.step = lambda action: (plain(action)[0], None, *plain(action)[2:])  # type: ignore[method-assign]
    with pytest.warns(RuntimeWarning, match="the reward None is no number"):
        env.step(np.int64(0))
    env.close()
