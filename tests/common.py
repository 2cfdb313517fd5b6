"""What several test modules need: environments with a known course, recorded runs, and real processes."""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from stepledger import Comparison, LedgerEnv, LedgerVectorEnv, compare, read
from stepledger.compare import Comparer
from stepledger.directory import find
from stepledger.format import StreamKey
from stepledger.ledger import Streams
from stepledger.lockstep import compare_sources
from stepledger.sources import source_of

TESTS = Path(__file__).parent

#: The autoreset modes that this Gymnasium has; 1.0 has next-step only, and no name for it.
MODES = ["NextStep", "SameStep", "Disabled"] if hasattr(gym.vector, "AutoresetMode") else ["NextStep"]
VECTORS = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}

RESET, STEP = 0, 1

#: Faults that `test_rllib` makes between environments and their vector env.
RLLIB_FAULTS = {
    *(f"{what}:{how}" for what in ("obs", "action", "reward") for how in ("zero", "stale", "swap", "f16", "bf16", "scale", "clip", "nan")),
    *(f"final_obs:{how}" for how in ("zero", "stale", "f16", "bf16", "scale", "nan")),
    *("terminated:spurious", "terminated:drop", "terminated:as_truncated"),
    *("truncated:spurious", "truncated:drop", "truncated:as_terminated", "both:as_terminated", "both:as_truncated"),
    *("step:lost", "step:repeated", "step:filled", "reset:hidden", "reset:lost", "reset:extra", "reply:shifted", "streams:swapped"),
}


class Walk(gym.Env):
    """Episodes of known lengths that end in each of the three ways in turn; no two observations are alike.

    Args:
        lengths: Of the episodes, in turn.
        seed: Two environments of different seeds give different observations.
        observation_space: Float values are drawn for a Box; of any other space, samples.
        action_space: The action is part of the reward, so that a wrong one shows.
    """

    ENDS = ((True, False), (False, True), (True, True))

    def __init__(
        self,
        lengths: tuple[int, ...] = (3, 5, 1, 4),
        seed: int = 0,
        observation_space: spaces.Space | None = None,
        action_space: spaces.Space | None = None,
    ) -> None:
        self.observation_space = observation_space or spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = action_space or spaces.Discrete(4)
        self._lengths = lengths
        self._episode = -1
        self._left = 0
        self._rng = np.random.default_rng(seed)
        self.observation_space.seed(int(self._rng.integers(1 << 31)))

    def _observation(self) -> Any:
        space = self.observation_space
        if isinstance(space, spaces.Box) and space.dtype == np.float32:
            return self._rng.standard_normal(space.shape).astype(np.float32)
        return space.sample()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode += 1
        self._left = self._lengths[self._episode % len(self._lengths)]
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        terminated, truncated = self.ENDS[self._episode % 3] if self._left == 0 else (False, False)
        reward = float(self._rng.standard_normal())
        if isinstance(self.action_space, spaces.Discrete):
            reward += float(action)
        return self._observation(), reward, terminated, truncated, {}


def walk(directory: Path, index: int | None, lengths: tuple[int, ...] = (3, 5, 1, 4), **options: Any) -> LedgerEnv:
    """A `Walk` with a ledger; each index has a course of its own."""
    return LedgerEnv(Walk(lengths, seed=index or 0), directory, index, **options)


class AtSteps(gym.Wrapper):
    """Does something before some of its calls of ``step``, numbered from one."""

    def __init__(self, env: gym.Env, *calls: int) -> None:
        super().__init__(env)
        self._calls, self._steps = calls, 0

    def before(self, action: Any) -> None:
        raise NotImplementedError

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps in self._calls:
            self.before(action)
        return super().step(action)


class Crashes(AtSteps):
    """Raises, and goes on when it is called again."""

    def before(self, action: Any) -> None:
        raise RuntimeError("the simulator\nhas crashed")


class Doubles(AtSteps):
    """Steps twice, and loses what came first."""

    def before(self, action: Any) -> None:
        self.env.step(action)


#: Ways to copy a tap.
COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
    "cloudpickle": lambda one: cloudpickle.loads(cloudpickle.dumps(one)),
    "deepcopy": copy.deepcopy,
}


def vector_of(makers: list[Any], kind: str = "sync", mode: str = "NextStep", **options: Any) -> gym.vector.VectorEnv:
    """A `SyncVectorEnv` or `AsyncVectorEnv` in an autoreset mode, whatever Gymnasium this is."""
    if mode != "NextStep":
        options["autoreset_mode"] = mode
    return VECTORS[kind](makers, **options)


def walks(
    directory: Path, n: int = 3, kind: str = "sync", mode: str = "NextStep", *, told: bool = False, **options: Any
) -> LedgerVectorEnv:
    """Both sides of a boundary with n `Walk`s; ``told``: the environments don't know their index and are told it."""
    makers = [functools.partial(walk, directory, None if told else index, (3 + index, 5, 1, 4), **options) for index in range(n)]
    return LedgerVectorEnv(vector_of(makers, kind, mode), directory / "trainer.npz", **options)


def drive(envs: Any, steps: int, seed: int = 0) -> None:
    """Reset and step a vector env with random actions; in disabled mode, reset whatever has ended."""
    mode = envs.metadata.get("autoreset_mode")
    disabled = getattr(mode, "value", mode) == "Disabled"
    envs.action_space.seed(seed)
    envs.reset(seed=seed)
    for _ in range(steps):
        _, _, terminated, truncated, _ = envs.step(envs.action_space.sample())
        ended = np.logical_or(terminated, truncated)
        if disabled and ended.any():
            envs.reset(options={"reset_mask": ended})


def run_walks(directory: Path, steps: int = 40, **options: Any) -> Comparison:
    """Record a whole run without a fault and compare it."""
    envs = walks(directory, **options)
    drive(envs, steps)
    envs.close()
    return compare(directory, directory / "trainer.npz")


def compare_in_parts(directory: Path, seed: int = 0, rounds: int = 5) -> Comparison:
    """Compare recorded ledgers as if their events had come bit by bit, one side sometimes a few events behind the other."""
    rng = np.random.default_rng(seed)
    ledgers = [read(path) for path in find(directory)]
    shares = np.sort(rng.random(rounds - 1))
    comparer = Comparer()
    begins: dict[tuple[Path, StreamKey], int] = {}
    for share in [*shares, None]:
        parts = []
        for ledger in ledgers:
            streams = []
            for key, stream in ledger.streams.items():
                begin = begins.get((ledger.path, key), 0)
                end = len(stream) if share is None else max(begin, int(share * len(stream)) - int(rng.integers(4)))
                begins[ledger.path, key] = end
                streams.append(stream.after(begin).until(end - begin))
            parts.append(replace(ledger, streams=Streams(streams)))
        comparer.add(parts)
        comparison = comparer.compare(end=share is None)
    return comparison


def drive_one(env: gym.Env, steps: int, seed: int = 0) -> list[tuple[Any, ...]]:
    """Step one environment, with a reset at each end; returns the events that it gave."""
    env.action_space.seed(seed)
    events: list[tuple[Any, ...]] = [(RESET, None, env.reset(seed=seed)[0], 0.0, False, False)]
    for _ in range(steps):
        action = env.action_space.sample()
        observation, reward, terminated, truncated, _ = env.step(action)
        events.append((STEP, action, observation, reward, terminated, truncated))
        if terminated or truncated:
            events.append((RESET, None, env.reset()[0], 0.0, False, False))
    return events


def assert_equal(comparison: Comparison, events: int | None = None) -> None:
    """Nothing differs, everything was there, and it was not equal for want of events."""
    assert comparison.exit_status == 0, str(comparison)
    assert comparison.equal
    assert comparison.complete
    assert comparison.events > 0
    if events is not None:
        assert comparison.events == events


def run_python(code: str, *arguments: Any, check: bool = True, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that can import the test helpers; `sys.argv[1:]` are the arguments."""
    process = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, env=environment(), **options
    )
    if check:
        assert process.returncode == 0, process.stderr
    return process


def environment() -> dict[str, str]:
    """The environment of a subprocess that can import the test helpers."""
    # Without an empty part, which Python takes for the current directory.
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])}


def stepledger(*arguments: Any, check_stderr: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    process = subprocess.run(
        [sys.executable, "-m", "stepledger", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        **options,
    )
    if check_stderr:
        assert "Traceback" not in process.stderr, process.stderr
    return process


def assert_refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The command line says in one sentence on stderr, and in JSON where that was asked for, why it can't; returns it."""
    from stepledger.cli import main

    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert status == 2
    assert err.startswith("stepledger: ")
    if "json" in arguments:
        assert json.loads(out) == {"error": err.removeprefix("stepledger: ").rstrip("\n"), "exit_status": 2}
    else:
        assert out == ""
    assert err.count("\n") == 1, err
    assert err.endswith((".\n", "compared.\n")), err
    return err


def rewrite(path: Path, changes: dict[str, Any] | None = None, *, drop: tuple[str, ...] = (), **meta: Any) -> None:
    """Change members, or entries of the meta, of a sealed ledger; checksums are right afterwards."""
    with np.load(path) as archive:
        members = {name: archive[name] for name in archive.files if name not in drop}
    if "meta" in members:
        members["meta"] = np.array(json.dumps({**json.loads(str(members["meta"])), **meta}))
    members.update(changes or {})
    np.savez(path, **members)


def member_names(path: Path) -> list[str]:
    """The columns of a sealed ledger, in the order in which they lie in the file."""
    with zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def peak() -> int:
    """The most memory that this process has taken, in kilobytes."""
    # Not ru_maxrss: on Linux that begins with what the parent had when it forked.
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)


def compare_by_piece(directory: Path, piece: int, undecided: int | None = None) -> Comparison:
    """Compare recorded ledgers as large ones are: so many events of each stream at a time."""
    comparer = Comparer()
    comparer.undecided = piece if undecided is None else undecided
    return compare_sources(comparer, [source_of(path) for path in find(directory)], piece)
