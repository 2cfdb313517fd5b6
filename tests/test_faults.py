"""Every fault between an environment and its trainer is found where it was made, and nowhere else; runs without one are silent.

Each case of the matrix runs three environments of random values, injects one fault between the two ledgers, and wants exactly the
injections back: environment, episode, step, fields and kind.
"""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from faults import ENV_FAULTS, FAULTS, VECTOR_FAULTS, Dose, FaultyEnv, FaultyVectorEnv, Injection, read_log
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from stepledger import Comparison, LedgerEnv, LedgerVectorEnv, compare

ENVS = 3
#: Gymnasium 1.0 has one autoreset mode, and no argument for it.
MODES = ("NextStep", "SameStep", "Disabled") if hasattr(gym.vector, "AutoresetMode") else ("NextStep",)

VECTOR = spaces.Box(-8, 8, (4,), np.float32)
IMAGE, SQUARE = spaces.Box(0, 255, (6, 5, 3), np.uint8), spaces.Box(0, 255, (5, 5, 3), np.uint8)
DICT = spaces.Dict({"image": IMAGE, "position": VECTOR, "gear": spaces.Discrete(1000)})
TORQUE = spaces.Box(-2, 2, (2,), np.float32)
LEVERS = spaces.Discrete(1000)


class RandomEnv(gym.Env):
    """Random observations and rewards; short episodes that end in each of the three ways, and go on if they are stepped further.

    Nothing repeats by chance, so that every change, loss or exchange of values shows.
    """

    def __init__(self, index: int, observation_space: spaces.Space = VECTOR, action_space: spaces.Space = TORQUE) -> None:
        # Seeding a space changes it, and both are shared by all environments.
        self.observation_space, self.action_space = copy.deepcopy((observation_space, action_space))
        self.observation_space.seed(index)
        self._random = np.random.default_rng(index)
        self._longest = 8 + 2 * index
        self._left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = int(self._random.integers(1, self._longest))
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        terminated = truncated = False
        if not self._left:
            terminated, truncated = [(True, False), (False, True), (True, True)][self._random.integers(3)]
            self._left = int(self._random.integers(1, self._longest))
        return self.observation_space.sample(), float(3 * self._random.normal()), terminated, truncated, {}


def drive(envs: gym.vector.VectorEnv, mode: str, steps: int) -> None:
    """Step with random actions, as a trainer would in this autoreset mode."""
    envs.action_space.seed(0)
    envs.reset(seed=0)
    for _ in range(steps):
        _, _, terminated, truncated, _ = envs.step(envs.action_space.sample())
        ended = terminated | truncated
        if mode == "Disabled" and ended.any():
            envs.reset(options={"reset_mask": ended})


def drive_sb3(venv: Any, steps: int) -> None:
    venv.action_space.seed(0)
    venv.reset()
    for _ in range(steps):
        venv.step(np.array([venv.action_space.sample() for _ in range(venv.num_envs)]))


class Boundary:
    """One fault between three environments and their trainer.

    Args:
        directory: For the ledgers and the log.
        fault: Its name.
        level: ``"env"``: made in the environment's process; ``"vector"``: in the trainer's.
        once: One event, or a share of all.
        observation_space: Of each environment.
        action_space: Of each environment.
        exclusive: As `faults.FaultyEnv` has it.
    """

    def __init__(
        self,
        directory: Path,
        fault: str,
        level: str,
        dose: str,
        observation_space: spaces.Space = VECTOR,
        action_space: spaces.Space = TORQUE,
        *,
        exclusive: bool = False,
    ) -> None:
        self.directory, self.fault, self.level = directory, fault, level
        self.spaces, self.exclusive = (observation_space, action_space), exclusive
        seed = zlib.crc32(f"{fault} {level} {dose}".encode())
        # An end of one sort is one event in twenty.
        rare = fault.startswith(("terminated", "truncated", "both", "final_obs", "reset:extra")) and not fault.endswith("spurious")
        rate = 0.2 if rare else 0.01
        self.only = seed % ENVS if dose == "one" else None
        self.dose = {"one": Dose(at=seed // ENVS % (6 if rare else 60)), "rate": Dose(rate, seed), "every": Dose()}[dose]

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def trainer(self) -> Path:
        return self.directory / "trainer.npz"

    def makers(self) -> list[Callable[[], gym.Env]]:
        return [functools.partial(self._make, index) for index in range(ENVS)]

    def _make(self, index: int) -> gym.Env:
        env = LedgerEnv(RandomEnv(index, *self.spaces), self.directory / "envs")
        if self.level != "env" or self.only not in (None, index):
            return env
        return FaultyEnv(env, self.fault, self.dose, index=index, log=self.log, exclusive=self.exclusive)

    def run(self, vector: Callable[..., gym.vector.VectorEnv], mode: str, steps: int) -> Comparison:
        options = {"autoreset_mode": mode} if len(MODES) > 1 else {}
        envs = vector(self.makers(), **options)
        if self.level == "vector":
            envs = FaultyVectorEnv(envs, self.fault, self.dose, log=self.log)
        envs = LedgerVectorEnv(envs, self.trainer)
        drive(envs, mode, steps)
        envs.close()
        return compare(self.directory / "envs", self.trainer)

    def run_sb3(self, vector: Callable[..., Any], steps: int) -> Comparison:
        from faults_sb3 import FaultyVecEnv

        from stepledger.sb3 import LedgerVecEnv

        venv = vector(self.makers())
        if self.level == "vector":
            venv = FaultyVecEnv(venv, self.fault, self.dose, log=self.log)
        venv = LedgerVecEnv(venv, self.trainer)
        drive_sb3(venv, steps)
        venv.close()
        return compare(self.directory / "envs", self.trainer)

    def injections(self) -> list[Injection]:
        """Those that were made: at least one, or the case shows nothing."""
        injections = read_log(self.log)
        assert injections, "nothing was injected"
        assert self.only is None or len(injections) == 1
        return injections


def assert_exactly(comparison: Comparison, injections: Iterable[Injection]) -> None:
    """The differences are the injections, one for one."""
    found = [
        (one.env, one.episode, one.step + (at if one.kind == "lost" else 0), one.kind, *sorted(one.fields))
        for one in comparison.differences
        for at in range(one.events)
    ]
    expected = [(one.env, one.episode, one.step, one.kind, *sorted(one.fields)) for one in injections]
    assert sorted(found) == sorted(expected)
    assert comparison.complete
    assert not comparison.equal


def assert_first(comparison: Comparison, injections: Iterable[Injection]) -> None:
    """The first difference of each environment is the injection; what comes after it is not looked at."""
    first: dict[int, tuple[Any, ...]] = {}
    for one in comparison.differences:
        first.setdefault(one.env, (one.episode, one.step, one.kind, *sorted(one.fields)))
    assert first == {one.env: (one.episode, one.step, one.kind, *sorted(one.fields)) for one in injections}


def check(boundary: Boundary, comparison: Comparison) -> None:
    endless = boundary.fault in ("reply:shifted", "streams:swapped")
    (assert_first if endless else assert_exactly)(comparison, boundary.injections())


# The matrix


def spaces_for(fault: str) -> tuple[spaces.Space, ...]:
    return (IMAGE,) if fault in ("obs:bgr", "obs:transpose") else ()


def cases(where: str) -> list[Any]:
    """Fault and level of every combination that can exist."""
    found = [(fault, level) for level, known in (("env", ENV_FAULTS), ("vector", VECTOR_FAULTS)) for fault in FAULTS if fault in known]
    return [pytest.param(*case, id="@".join(case)) for case in found if not impossible(where, *case)]


def impossible(where: str, fault: str, level: str) -> str:
    """Why there is no such case; empty if there is."""
    if where == "sb3":
        if fault == "both:as_terminated":
            return "Stable-Baselines3 delivers both as terminated"
        if fault == "both:as_truncated" and level == "vector":
            return "both can't be told from terminated there"
        return ""
    if fault in ("final_obs:reset_obs", "final_obs:missing") and where != "SameStep":
        return "the final observation is the step's own, and the reset comes later"
    if fault in ("terminated:drop", "truncated:drop") and level == "vector" and where == "Disabled":
        return "tested apart: SyncVectorEnv raises when an ended environment is stepped"
    return ""


@pytest.mark.parametrize("dose", ["one", "rate"])
@pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("mode", "fault", "level"), [pytest.param(mode, *case.values, id=f"{mode}-{case.id}") for mode in MODES for case in cases(mode)]
)
def test_gymnasium_fault_is_found_where_it_was_made(
    tmp_path: Path, fault: str, level: str, mode: str, vector: Callable[..., gym.vector.VectorEnv], dose: str
) -> None:
    boundary = Boundary(tmp_path, fault, level, dose, *spaces_for(fault))
    check(boundary, boundary.run(vector, mode, 200))


@pytest.mark.sb3
@pytest.mark.parametrize("dose", ["one", "rate"])
@pytest.mark.parametrize("vector", ["dummy", "subproc"])
@pytest.mark.parametrize(("fault", "level"), cases("sb3"))
def test_sb3_fault_is_found_where_it_was_made(tmp_path: Path, fault: str, level: str, vector: str, dose: str) -> None:
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    boundary = Boundary(tmp_path, fault, level, dose, *spaces_for(fault), exclusive=True)
    make = {"dummy": vec_env.DummyVecEnv, "subproc": functools.partial(vec_env.SubprocVecEnv, start_method="fork")}[vector]
    check(boundary, boundary.run_sb3(make, 200))
