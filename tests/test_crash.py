"""A recording process that is killed at any moment leaves a true beginning of what happened, and loses no more than it was allowed to.

What happened is known from the environments, which write it down themselves; see `crash_runs`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import TESTS, environment
from crash_runs import A2C, Kill, N, Witness, columns

from stepledger import Comparison, LedgerError, compare, read
from stepledger.format import STEP
from stepledger.ledger import Ledger
from stepledger.recorder import FLUSH_EVENTS
from stepledger.recover import recover

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans of killed processes are waited for as Linux has it")

NEEDS_SB3 = [pytest.mark.sb3, pytest.mark.skipif(A2C is None, reason="needs Stable-Baselines3")]
KINDS = ["sync", "async", *(pytest.param(kind, marks=NEEDS_SB3) for kind in ("subproc", "callback"))]

#: Rows after which a recorder looks at the clock in any case.
STRIDE = 256


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """The process in which runs are started and killed."""
    script = [sys.executable, str(TESTS / "crash_runs.py")]
    process = subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
    yield process
    process.communicate(timeout=60)


def drawn(kind: str, seed: int, directory: Path) -> Kill:
    """A run and a moment of its life."""
    rng = np.random.default_rng(seed)
    # Orphans of a SubprocVecEnv that were forked wait for ever: each holds the trainer's end of the others' pipes.
    victim = str(rng.choice({"async": ["worker", "trainer", "all"], "subproc": ["worker", "all"]}.get(kind, ["trainer"])))
    phase = str(rng.choice(["start", "run", "write", "flush", "slow", "close"]))
    kill = Kill(
        kind, str(directory), victim, "run", events=0, delay=float(rng.uniform(0, 0.003)), steps=300 if kind == "callback" else 1000
    )
    kill.options = {"flush_every": int(rng.choice([1, 7, 100, 1000])), "keep_values": [False, True, 50][int(rng.integers(3))]}
    if phase in ("start", "close"):
        kill.phase, kill.delay = phase, float(rng.uniform(0, 0.4 if phase == "start" else 0.02))
        return kill
    if phase == "write":  # large blocks take most of the time
        kill.steps, kill.size, kill.options = 150, 5000, {"flush_every": int(rng.choice([10, 40, 100])), "keep_values": True}
    elif phase == "flush":  # ledgers are sealed most of the time
        kill.steps, kill.flush_calls = 150, int(rng.integers(1, 4))
    elif phase == "slow":
        kill.steps, kill.pause, kill.options = 500, 0.001, {"flush_seconds": float(rng.choice([0.02, 0.1]))}
    kill.events = int(rng.integers(kill.steps))
    return kill


def recorded(kill: Kill, name: str) -> Ledger | None:
    """A ledger that the run has left, if it holds events."""
    try:
        ledger = read(kill.path(f"{name}.npz"))
    except (LedgerError, FileNotFoundError):
        return None
    return ledger if ledger.events else None


def learned(events: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The transitions of an environment's events, as far as a rollout buffer holds them."""
    steps = np.flatnonzero(events["kind"] == STEP)
    return {"h_obs": events["h_obs"][steps - 1], "h_act": events["h_act"][steps], "h_rew": events["h_rew"][steps]}


def missing(ledger: Ledger | None, env: int, happened: dict[str, np.ndarray], exclusive: bool = False) -> int:
    """How many events at the end of what happened a ledger has not; what it has is a beginning of that."""
    total = len(next(iter(happened.values())))
    if ledger is None:
        return total
    stream = ledger.streams[env]
    assert len(stream) <= total
    for name, column in happened.items():
        if name in stream.columns:
            said = column & ~happened["terminated"] if exclusive and name == "truncated" else column
            np.testing.assert_array_equal(stream.columns[name], said[: len(stream)], err_msg=f"{ledger.path} {name}")
    return total - len(stream)


class Outcome:
    """What a killed run has left, checked.

    Attributes:
        events: That happened in the environments.
        lost: For each ledger whose process was killed, how many events it has not.
        status: Of the comparison.
        age: Seconds from the first event that was lost to the last that happened, at most.
    """

    def __init__(self, kill: Kill, answer: dict[str, Any]) -> None:
        self.kill, self.answer = kill, answer
        self.lost: dict[str, int] = {}
        self.age = 0.0
        self.ledgers: dict[str, Ledger | None] = {}
        happened = [Witness.read(kill.path(f"env-{env}.witness"), kill.size) for env in range(N)]
        self.events = sum(map(len, happened))
        events = [columns(one, kill.size) for one in happened]
        assert not answer["late"], "processes of the run did not end"
        every = kill.options.get("flush_every", FLUSH_EVENTS)
        # Where a worker is killed, the trainer fails, and the interpreter's end terminates the other one. Workers that miss their trainer
        # close.
        dies = answer["status"] != 0 and not (kill.victim == "trainer" and kill.kind == "async")
        for env in range(N):
            ledger = self.ledgers[f"env-{env}"] = recorded(kill, f"env-{env}")
            lost = missing(ledger, env, events[env])
            assert lost <= (every if dies else 0), (env, lost)
            if dies:
                self.lost[f"env-{env}"] = lost
                self._time(happened[env]["time"], lost)
        # What is happening when the process is killed is one step of all environments, whose ends bring resets.
        self._trainer(events, happened, max(every // N, 1) * N + N, every + 4 * N, every - 1 + N)
        self.comparison = self._compared()
        self._recovered()

    def _trainer(self, events: list[dict[str, np.ndarray]], happened: list[np.ndarray], rows: int, of_callback: int, batches: int) -> None:
        kill = self.kill
        if kill.kind == "callback":
            taps = {"vector": of_callback, "learner": of_callback}
        else:
            taps = {"trainer": rows, **({"learner": batches} if kill.kind == "sync" else {})}
        for name, bound in taps.items():
            ledger = self.ledgers[name] = recorded(kill, name)
            if name == "learner" and kill.kind == "sync":
                lost = missing(ledger, 0, columns(Witness.read(kill.path("learner.witness"), kill.size), kill.size))
            else:
                expected = [learned(one) for one in events] if name == "learner" else events
                lost = sum(missing(ledger, env, expected[env], kill.kind in ("subproc", "callback")) for env in range(N))
                if name != "learner" and ledger is not None and kill.victim != "worker":
                    for env in range(N):
                        self._time(happened[env]["time"], len(happened[env]) - len(ledger.streams[env]))
            assert lost <= bound, (name, lost)
            self.lost[name] = lost

    def _time(self, times: np.ndarray, lost: int) -> None:
        """Behind the moment from which a block is old, only so many events come before it is written as the clock is not looked at for."""
        if not lost or self.answer["status"] == 0:
            return
        lost_times = times[-lost:]
        seconds = self.kill.options.get("flush_seconds", 2.0)
        assert np.count_nonzero(lost_times > lost_times[0] + seconds) <= STRIDE
        self.age = max(self.age, float(lost_times[-1] - lost_times[0]))

    def _compared(self) -> Comparison | None:
        whole = all(ledger is not None for ledger in self.ledgers.values())
        try:
            comparison = compare(self.kill.directory)
        except LedgerError:
            assert not whole
            return None
        assert comparison.equal, str(comparison)
        assert not comparison.differences
        open_ends = {name for name, ledger in self.ledgers.items() if ledger is None or ledger.open_end}
        assert comparison.exit_status in ((3,) if whole and open_ends else (0,) if whole else (2, 3)), str(comparison)
        if whole:
            said = [sentence for hop in comparison.hops for sentence in hop.unknown]
            for env in range(N):
                if f"env-{env}" in open_ends:
                    assert any(sentence.startswith(f"env {env}: ") for sentence in said), (env, said)
        return comparison

    def _recovered(self) -> None:
        directory = Path(self.kill.directory)
        if any(directory.glob("*.journal")):
            assert {one.outcome for one in recover(directory)} <= {"sealed", "removed", "empty"}
        assert not list(directory.glob("*.journal"))
        try:
            again: Comparison | None = compare(directory)
        except LedgerError:
            again = None
        assert (again is None) == (self.comparison is None)
        if again is not None and self.comparison is not None:
            assert again.exit_status == self.comparison.exit_status
            assert again.equal
            assert [(hop.name, hop.events, len(hop.unknown)) for hop in again.hops] == [
                (hop.name, hop.events, len(hop.unknown)) for hop in self.comparison.hops
            ]


def kill_and_look(nursery: subprocess.Popen[str], kill: Kill) -> Outcome:
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    print(json.dumps(kill.__dict__), file=nursery.stdin, flush=True)
    answer = json.loads(nursery.stdout.readline())
    try:
        return Outcome(kill, answer)
    except Exception as error:
        said = kill.path("stderr.txt").read_text()[-3000:]
        raise AssertionError(f"{kill} {answer}: {error}\n{said}") from error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_what_survives_a_kill_is_a_beginning_of_what_happened(tmp_path: Path, nursery: subprocess.Popen[str], kind: str, seed: int) -> None:
    kill_and_look(nursery, drawn(kind, 1000 * (seed + 1) + len(kind), tmp_path / "run"))


@pytest.mark.long
@pytest.mark.sb3
def test_no_moment_to_be_killed_at_makes_a_difference(tmp_path: Path, nursery: subprocess.Popen[str]) -> None:
    kinds = ["sync", "async", "subproc", "callback"] if A2C is not None else ["sync", "async"]
    seeds = int(os.environ.get("STEPLEDGER_CRASHES", 200))
    statuses: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    worst: dict[str, tuple[int, int]] = {}
    events = ages = 0.0
    for seed in range(seeds):
        kind = kinds[seed % len(kinds)]
        outcome = kill_and_look(nursery, drawn(kind, seed, tmp_path / str(seed)))
        status = 2 if outcome.comparison is None else outcome.comparison.exit_status
        statuses[kind]["over before it was killed" if outcome.answer["status"] == 0 else f"{status}"] += 1
        events += outcome.events
        ages = max(ages, outcome.age / outcome.kill.options.get("flush_seconds", 2.0))
        every = outcome.kill.options.get("flush_every")
        for name, lost in outcome.lost.items():
            if every is not None:
                key = f"{'env' if name.startswith('env') else name} {every}"
                worst[key] = max(worst.get(key, (0, 0)), (lost, seed))
    print(f"\n{seeds} kills, {events:,.0f} events, 0 differences")
    for kind, counts in statuses.items():
        print(f"  {kind}: exit status {dict(sorted(counts.items()))}")
    for key, (lost, seed) in sorted(worst.items()):
        name, every = key.split()
        print(f"  {name}, flush_every={every}: {lost} events lost at most (seed {seed})")
    print(f"  oldest event lost: {ages:.2f} times flush_seconds")
