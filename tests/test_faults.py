"""Every fault between an environment and its trainer is found where it was made, and nowhere else; runs without one are silent.

Each case of the matrix runs a few environments of random values, injects one fault between the two ledgers, and wants exactly the
injections back: environment, episode, step, fields and kind.
"""

from __future__ import annotations

import copy
import functools
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from common import MODES, VECTORS, assert_equal, compare_by_piece, compare_in_parts, drive, vector_of
from faults import ENV_FAULTS, FAULTS, VECTOR_FAULTS, Dose, FaultyEnv, FaultyVectorEnv, Injection, read_log
from gymnasium import spaces
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.wrappers import vector as wrappers

from stepledger import Comparison, LedgerEnv, LedgerVectorEnv, compare, read
from stepledger.codes import CATALOGUE

ENVS = 3

#: With this, at other versions than the ones that are tested in full, each fault is made at one event, and in one autoreset mode often.
SHORT = os.environ.get("STEPLEDGER_MATRIX") == "short"
#: With this, more of the same.
LONG = os.environ.get("STEPLEDGER_LONG") == "1"
#: How much of each fault is injected: at one event, or at one in a hundred.
DOSES = ["one"] if SHORT else ["one", "some"]

VECTOR = spaces.Box(-np.inf, np.inf, (4,), np.float32)
IMAGE, SQUARE = spaces.Box(0, 255, (6, 5, 3), np.uint8), spaces.Box(0, 255, (5, 5, 3), np.uint8)
DICT = spaces.Dict({"camera": IMAGE, "position": VECTOR, "gear": spaces.Discrete(1000)})
TORQUE, LEVER, LEVERS = spaces.Box(-2, 2, (2,), np.float32), spaces.Discrete(1000), spaces.MultiDiscrete([1000, 1000])

SB3 = {"dummy": ("DummyVecEnv", {}), "subproc": ("SubprocVecEnv", {"start_method": "fork"})}


class RandomEnv(gym.Env):
    """Random observations and rewards; short episodes that end in each of the three ways, and go on if they are stepped further.

    Nothing repeats by chance, so that every change, loss or exchange of values shows.

    Args:
        index: Each has a course of its own.
        observation_space: Of the observations.
        action_space: Of the actions, which have no effect.
        given: What becomes of each observation and reward before the environment gives it.
    """

    def __init__(
        self,
        index: int,
        observation_space: spaces.Space = VECTOR,
        action_space: spaces.Space = TORQUE,
        given: Callable[[Any, float], tuple[Any, float]] | None = None,
    ) -> None:
        # Seeding a space changes it, and both are shared by all environments.
        self.observation_space, self.action_space = copy.deepcopy((observation_space, action_space))
        self.observation_space.seed(index)
        self._random = np.random.default_rng(index)
        self._given = given
        self._plain = observation_space == VECTOR  # a normal distribution is quicker than a sample
        self._longest = 8 + 2 * index
        self._left = self._ends = 0

    def _random_length(self) -> int:
        return int(self._random.integers(1, self._longest))

    def _gives(self) -> tuple[Any, float]:
        observation = self._random.standard_normal(4).astype(np.float32) if self._plain else self.observation_space.sample()
        reward = 3 * float(self._random.standard_normal())
        return (observation, reward) if self._given is None else self._given(observation, reward)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = self._random_length()
        return self._gives()[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        terminated = truncated = False
        if not self._left:
            terminated, truncated = [(True, False), (False, True), (True, True)][self._ends % 3]
            self._ends += 1
            self._left = self._random_length()
        return *self._gives(), terminated, truncated, {}


def random_env(directory: Path, index: int, *args: Any) -> gym.Env:
    return LedgerEnv(RandomEnv(index, *args), directory, index)


def makers(directory: Path, *args: Any, envs: int = ENVS) -> list[Callable[[], gym.Env]]:
    return [functools.partial(random_env, directory, index, *args) for index in range(envs)]


def sb3_of(makers: list[Callable[[], gym.Env]], vector: str) -> Any:
    name, options = SB3[vector]
    return getattr(pytest.importorskip("stable_baselines3.common.vec_env"), name)(makers, **options)


def drive_sb3(venv: Any, steps: int, resets: bool = False) -> None:
    """Step with random actions; with ``resets`` also reset in the middle of episodes."""
    venv.action_space.seed(0)
    venv.reset()
    for step in range(steps):
        if resets and step % 11 == 5:
            venv.reset()
        venv.step(np.array([venv.action_space.sample() for _ in range(venv.num_envs)]))


# Faults


class Boundary:
    """One fault between a few environments and their trainer.

    Args:
        directory: For the ledgers and the log.
        fault: Its name.
        level: ``"env"``: made in the environment's process; ``"vector"``: in the trainer's.
        dose: ``"one"`` event, ``"few"``: one in a thousand, ``"some"``: one in a hundred, ``"many"``: one in ten, or ``"every"`` one.
        observation_space: Of each environment.
        action_space: Of each environment.
    """

    def __init__(
        self,
        directory: Path,
        fault: str,
        level: str,
        dose: str,
        observation_space: spaces.Space = VECTOR,
        action_space: spaces.Space = TORQUE,
    ) -> None:
        self.directory, self.fault, self.level = directory, fault, level
        self.envs, self.trainer, self.log = directory / "envs", directory / "trainer.npz", directory / "log"
        self.spaces = (observation_space, action_space)
        # All others are recognised from digests alone; but not NaN in one part of a value that has others.
        from_values = ["f16", "bf16", "scale", "clip", "uint8", "bgr", "transpose", *(["nan"] if observation_space == DICT else [])]
        self.keep_values = fault.partition(":")[2] in from_values
        seed = zlib.crc32(f"{fault} {level} {dose}".encode())
        # An end of one sort is one event in twenty.
        rare = fault.startswith(("terminated", "truncated", "both", "final_obs", "reset:extra")) and not fault.endswith("spurious")
        self.only = seed % 2 if dose == "one" else None
        self.dose = {
            "one": Dose(at=seed // 2 % (3 if rare else 20)),
            "some": with_an_injection(Dose(0.2 if rare else 0.01, seed), within=4 if rare else 30),
            "few": with_an_injection(Dose(0.001, seed), within=100 if rare else 1000),
            "many": Dose(0.5 if rare else 0.1, seed),
            "every": Dose(),
        }[dose]
        self.steps = {"one": 80 if rare else 40, "few": 2500, "some": 100, "many": 100, "every": 50}[dose]

    def makers(self, vector: str, exclusive: bool = False) -> list[Callable[[], gym.Env]]:
        # Each process takes its time to start, and an environment and its neighbour are enough.
        envs = 2 if vector in ("async", "subproc") else ENVS
        return [functools.partial(self._make, index, exclusive) for index in range(envs)]

    def _make(self, index: int, exclusive: bool) -> gym.Env:
        # Told its index through what makes the fault.
        env = LedgerEnv(RandomEnv(index, *self.spaces), self.envs, keep_values=self.keep_values)
        if self.level != "env" or self.only not in (None, index):
            return env
        return FaultyEnv(env, self.fault, self.dose, index=index, log=self.log, exclusive=exclusive)

    def run(self, vector: str, mode: str) -> Comparison:
        """Gymnasium."""
        envs = vector_of(self.makers(vector), vector, mode)
        if self.level == "vector":
            envs = FaultyVectorEnv(envs, self.fault, self.dose, log=self.log)
        envs = LedgerVectorEnv(envs, self.trainer, keep_values=self.keep_values)
        drive(envs, self.steps)
        envs.close()
        return compare(self.envs, self.trainer)

    def run_sb3(self, vector: str) -> Comparison:
        """Stable-Baselines3."""
        venv = sb3_of(self.makers(vector, exclusive=True), vector)
        from faults_sb3 import FaultyVecEnv

        from stepledger.sb3 import LedgerVecEnv

        if self.level == "vector":
            venv = FaultyVecEnv(venv, self.fault, self.dose, log=self.log)
        venv = LedgerVecEnv(venv, self.trainer, keep_values=self.keep_values)
        drive_sb3(venv, self.steps)
        venv.close()
        return compare(self.envs, self.trainer)

    def check(self, comparison: Comparison) -> None:
        """The differences are the injections."""
        injections = read_log(self.log)
        assert injections, "nothing was injected, so the case shows nothing"
        if self.only is not None:
            assert len(injections) == (2 if self.fault == "streams:swapped" else 1)  # two streams differ from there on
        lasting = self.fault in LASTING
        (assert_one_range if lasting else assert_exactly)(comparison, injections)
        assert_explained(comparison, self.fault)
        # Ledgers that are read piece by piece give the same, however large a piece is; but among few values, how likely one of them is that
        # of another event by chance can't be told from a few events.
        few = self.spaces[1] in (LEVER, LEVERS) and self.fault.endswith((":stale", ":swap"))
        sizes = (1, 5, 40) if LONG or self.steps <= 40 else (10, 20, 40)
        piece = 10_000 if few else sizes[zlib.crc32(self.fault.encode()) % 3]
        assert compare_by_piece(self.directory, piece, undecided=80) == comparison
        # Nor does it matter how much comes at a time from a run that goes on; but of what is out of reach nothing is claimed.
        in_parts = compare_in_parts(self.directory, seed=self.dose.seed)
        if self.fault == "streams:swapped":
            # It is said at the stream whose events came first, and streams of different lengths are not counted event by event.
            assert in_parts.hops[0].differences == comparison.hops[0].differences
            assert in_parts.hops[0].streams_different == comparison.hops[0].streams_different
        else:
            assert unexplained(in_parts) == unexplained(comparison)
        for one, whole in zip(in_parts.differences, comparison.differences):
            assert set(codes(one)) <= set(codes(whole))
            assert codes(one)[:1] in ([], codes(whole)[:1])


def with_an_injection(dose: Dose, within: int) -> Dose:
    """The dose, with the next seed under which the fault happens at least once among so many events: a run without it shows nothing."""
    while not (np.random.default_rng([dose.seed, 0]).random(within) < dose.rate).any():
        dose = replace(dose, seed=dose.seed + 1)
    return dose


def place(one: Any, step: int = 0) -> tuple[Any, ...]:
    return (one.env, one.episode, one.step + step, one.kind, *sorted(one.fields))


def assert_exactly(comparison: Comparison, injections: Iterable[Injection]) -> None:
    """The differences are the injections, one for one, and the sums over all fields agree with them."""
    injections = list(injections)
    # Events lost in a row are one difference; extra ones in a row all stand before the same event.
    found = [place(one, at if one.kind == "lost" else 0) for one in comparison.differences for at in range(one.events)]
    assert sorted(found) == sorted(map(place, injections))
    (hop,) = comparison.hops
    assert {name: one.differences for name, one in hop.fields.items() if one.differences} == Counter(
        name for one in injections if one.kind == "changed" for name in one.fields
    )
    assert all((one.status == "different") == bool(one.differences) for one in hop.fields.values())
    assert comparison.complete
    assert comparison.exit_status == 1


def assert_one_range(comparison: Comparison, injections: Iterable[Injection]) -> None:
    """One difference for each stream, or for two that are exchanged, that lasts from the injection to the end."""
    made = {one.env: one for one in injections}
    (hop,) = comparison.hops
    assert hop.streams_different == len(made)
    assert hop.lost == hop.extra == 0
    if any("SL308" in codes(one) for one in comparison.differences):
        del made[max(made)]  # said at the other one
    assert hop.differences == len(comparison.differences) == len(made)
    for found in comparison.differences:
        assert place(found)[:4] == place(made[found.env])[:4]
        assert set(found.fields) >= set(made[found.env].fields)
        assert found.events > 1
    assert comparison.exit_status == 1


def assert_ranges(comparison: Comparison, injections: Iterable[Injection]) -> None:
    """One difference for each stream, or for all that have each other's values, from its first injection on."""
    first = {one.env: one for one in reversed(list(injections))}
    (hop,) = comparison.hops
    counted = Counter(name for one in injections for name in one.fields)
    assert {name: one.differences for name, one in hop.fields.items() if one.differences} == counted
    assert hop.streams_different == len(first)
    assert hop.differences == len(comparison.differences) == (1 if "each other's" in str(comparison) else len(first))
    for found in comparison.differences:
        assert place(found) == place(first[found.env])
    assert sum(one.events for one in comparison.differences) >= sum(counted.values()) / (
        len(first) if len(comparison.differences) == 1 else 1
    )


def codes(difference: Any) -> list[str]:
    return [one.code for one in difference.explanations]


#: These change all replies from one step on, whatever the dose.
LASTING = ("reply:shifted", "streams:swapped")

#: Fault -> its code.
CODES = {fault: code for code, one in CATALOGUE.items() for fault in one.faults}

#: Fault -> codes that may come before its own, which must be there too, and why nobody can tell the two by one event.
EITHER = {
    "obs:f16": {"SL105": "few numbers, each with a float16 of no more than 8 significant bits, are rounded alike"},
    "obs:bf16": {"SL104": "likewise"},
    "action:f16": {"SL105": "likewise"},
    "action:bf16": {"SL104": "likewise"},
    "reward:f16": {"SL105": "likewise"},
    "reward:bf16": {"SL104": "likewise"},
    "final_obs:f16": {"SL105": "likewise"},
    "final_obs:bf16": {"SL104": "likewise"},
    "reward:stale": {"SL101": "the reply before is a reset's, and has the reward zero"},
    "reward:swap": {"SL101": "the other environment is being reset, and its reward is zero", "SL102": "likewise, after a reset"},
    "action:stale": {"SL103": "actions that are sent where environments are being reset are not recorded"},
    "action:swap": {"SL102": "likewise"},
    "terminated:as_truncated": {"SL208": "Stable-Baselines3 delivers both flags as terminated: the environment gave both"},
    "step:repeated": {"SL303": "the reply before has no reward"},
    "step:filled": {"SL302": "likewise"},
}


def assert_explained(comparison: Comparison, fault: str) -> None:
    """The first explanation of each difference names the fault."""
    for one in comparison.differences:
        found = codes(one)
        assert found[:1] == [CODES[fault]] or (CODES[fault] in found and found[0] in EITHER.get(fault, {})), f"{fault}: {one}"


def unexplained(comparison: Comparison) -> Comparison:
    """Without explanations, and without what is said of those that would take values."""
    hops = tuple(replace(hop, notes=tuple(note for note in hop.notes if "can't be told" not in note)) for hop in comparison.hops)
    return replace(comparison, hops=hops, differences=tuple(replace(one, explanations=()) for one in comparison.differences))


def impossible(where: str, fault: str, level: str, vector: str = "") -> str:
    """Why there is no such case; empty if there is."""
    if fault not in (ENV_FAULTS if level == "env" else VECTOR_FAULTS):
        return "it takes two environments, a final observation apart, or the environment's own process"
    if where == "sb3":
        if fault == "both:as_terminated":
            return "Stable-Baselines3 delivers both as terminated"
        if fault == "both:as_truncated" and level == "vector":
            return "in the trainer's process both can't be told from terminated"
    elif fault in ("final_obs:reset_obs", "final_obs:missing") and where != "SameStep":
        return "the final observation is the step's own, and the reset comes later"
    elif fault in ("terminated:drop", "truncated:drop") and level == "vector" and (where, vector) == ("Disabled", "sync"):
        return "not silent: SyncVectorEnv refuses to step an environment that has ended"
    return ""


def cases(wheres: Iterable[str], vectors: Iterable[str], faults: Iterable[str] = FAULTS) -> list[Any]:
    """Every combination that can exist."""
    return [
        pytest.param(where, fault, level, vector, id=f"{where}-{fault}@{level}-{vector}")
        for where in wheres
        for fault in faults
        for level in ("env", "vector")
        for vector in vectors
        if not impossible(where, fault, level, vector) and not (SHORT and vector in ("async", "subproc") and level == "vector")
    ]


def in_turn(cases: list[Any]) -> list[Any]:
    """Of the modes in which a fault can be made one; the others take long."""
    modes: dict[Any, list[str]] = {}
    for case in cases:
        modes.setdefault(case.values[1:], []).append(case.values[0])
    chosen = {of: found[zlib.crc32(of[0].encode()) % len(found)] for of, found in modes.items()}
    rest = {"marks": pytest.mark.long}
    return [pytest.param(*one.values, id=one.id, **({} if one.values[0] == chosen[one.values[1:]] else rest)) for one in cases]


def dosed(cases: list[Any]) -> list[Any]:
    """Each case with each dose; what takes processes of its own with one of them, the other takes long."""
    made = []
    for case in in_turn(cases) if SHORT else cases:
        mine = zlib.crc32(case.id.encode()) % len(DOSES)
        for at, dose in enumerate(DOSES):
            long = [pytest.mark.long] if case.values[3] in ("async", "subproc") and at != mine else []
            made.append(pytest.param(*case.values, dose, id=f"{case.id}-{dose}", marks=[*case.marks, *long]))
    return made


def spaces_for(fault: str) -> tuple[spaces.Space, ...]:
    return (IMAGE,) if fault in ("obs:bgr", "obs:transpose") else ()


@pytest.mark.parametrize(("mode", "fault", "level", "vector", "dose"), dosed(cases(MODES, VECTORS)))
def test_a_fault_is_found_where_it_was_made(tmp_path: Path, mode: str, fault: str, level: str, vector: str, dose: str) -> None:
    boundary = Boundary(tmp_path, fault, level, dose, *spaces_for(fault))
    boundary.check(boundary.run(vector, mode))


@pytest.mark.sb3
@pytest.mark.parametrize(("where", "fault", "level", "vector", "dose"), dosed(cases(["sb3"], SB3)))
def test_a_fault_in_sb3_is_found_where_it_was_made(tmp_path: Path, where: str, fault: str, level: str, vector: str, dose: str) -> None:
    boundary = Boundary(tmp_path, fault, level, dose, *spaces_for(fault))
    boundary.check(boundary.run_sb3(vector))


def test_the_matrix_has_every_fault() -> None:
    assert {case.values[1] for case in cases(MODES, VECTORS)} >= set(FAULTS) - {"final_obs:reset_obs", "final_obs:missing"}
    assert {case.values[1] for case in cases(["sb3"], SB3)} == set(FAULTS) - {"both:as_terminated"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "fault", "level", "vector"),
    [*cases(MODES[:1], ["sync"]), *cases(MODES[1:2], ["sync"], ["final_obs:reset_obs", "final_obs:missing"])],
)
def test_a_fault_that_is_rare_is_found_each_time(tmp_path: Path, mode: str, fault: str, level: str, vector: str) -> None:
    boundary = Boundary(tmp_path, fault, level, "few", *spaces_for(fault))
    boundary.check(boundary.run(vector, mode))


@pytest.mark.parametrize(("mode", "fault", "level", "vector"), in_turn(cases(MODES, ["sync"])))
def test_a_fault_that_is_made_often_is_found_each_time(tmp_path: Path, mode: str, fault: str, level: str, vector: str) -> None:
    boundary = Boundary(tmp_path, fault, level, "many", *spaces_for(fault))
    boundary.check(boundary.run(vector, mode))


EVERY = [fault for fault in FAULTS if fault not in LASTING]
#: These are replies of the step before, or of another environment, if they are made at every event.
LASTING_AT_EVERY_EVENT = [f"{field}:{what}" for field in ("obs", "reward") for what in ("stale", "swap")]


@pytest.mark.skipif(SHORT, reason="at other versions each fault is made at one event, or often")
@pytest.mark.parametrize(("mode", "fault", "level", "vector"), in_turn(cases(MODES, ["sync"], EVERY)))
def test_a_fault_at_every_event_is_found_at_every_event(tmp_path: Path, mode: str, fault: str, level: str, vector: str) -> None:
    boundary = Boundary(tmp_path, fault, level, "every", *spaces_for(fault))
    comparison = boundary.run(vector, mode)
    if fault in LASTING_AT_EVERY_EVENT:
        assert_ranges(comparison, read_log(boundary.log))
        assert_explained(comparison, fault)
    else:
        boundary.check(comparison)
    if fault.startswith(("obs", "action", "reward")) and not fault.endswith("clip"):
        assert len(read_log(boundary.log)) > comparison.events / 2  # a reset has no action and no reward, a first step no earlier one


OBSERVATIONS = [name for name in FAULTS if name.startswith(("obs", "final_obs"))]
#: Of the values that the spaces have; a rounding has no effect on integers.
OTHER_SPACES = {
    "dict": ((DICT,), [name for name in OBSERVATIONS if name not in ("obs:bgr", "obs:transpose")]),
    "image": ((IMAGE,), [name for name in OBSERVATIONS if name.endswith(("zero", "stale", "swap", "scale", "clip", "reset_obs"))]),
    "square": ((SQUARE,), ["obs:bgr", "obs:transpose"]),
    "discrete": ((VECTOR, LEVER), ["action:zero", "action:stale", "action:swap"]),
    "multidiscrete": ((LEVER, LEVERS), ["action:zero", "action:stale", "action:swap", "obs:zero", "obs:stale", "obs:swap"]),
}


@pytest.mark.parametrize(
    ("space", "mode", "fault", "level", "vector"),
    [
        pytest.param(space, *case.values, id=f"{space}-{case.id}")
        for space, (_, faults) in OTHER_SPACES.items()
        for case in cases(MODES, VECTORS, faults)
        # Half of them: processes where the observation is large, one process elsewhere.
        if (case.values[3] == "async") == (case.values[0] == "SameStep") and not (SHORT and case.values[0] == "Disabled")
    ],
)
def test_a_fault_is_found_in_other_spaces(tmp_path: Path, space: str, mode: str, fault: str, level: str, vector: str) -> None:
    boundary = Boundary(tmp_path, fault, level, "some", *OTHER_SPACES[space][0])
    boundary.check(boundary.run(vector, mode))


@pytest.mark.sb3
@pytest.mark.parametrize(
    ("space", "where", "fault", "level", "vector"),
    [
        pytest.param(space, *case.values, id=f"{space}-{case.id}")
        for space, (_, faults) in OTHER_SPACES.items()
        for case in cases(["sb3"], ["dummy"], faults)
    ],
)
def test_a_fault_in_sb3_is_found_in_other_spaces(tmp_path: Path, space: str, where: str, fault: str, level: str, vector: str) -> None:
    boundary = Boundary(tmp_path, fault, level, "some", *OTHER_SPACES[space][0])
    boundary.check(boundary.run_sb3(vector))


class Wire(VectorWrapper):
    """Passes on what a vector env gives, changed.

    Args:
        env: The vector env.
        change: Of a batch of observations, of the rewards, and of each final observation.
    """

    def __init__(self, env: VectorEnv, change: Callable[[Any], Any]) -> None:
        super().__init__(env)
        self._change = change

    def reset(self, **kwargs: Any) -> Any:
        observations, infos = self.env.reset(**kwargs)
        return self._change(observations), infos

    def step(self, actions: Any) -> Any:
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        if "final_obs" in infos:
            infos["final_obs"][:] = [self._change(one) for one in infos["final_obs"]]
        return self._change(observations), self._change(rewards), terminated, truncated, infos


@pytest.mark.parametrize("space", [IMAGE, SQUARE], ids=["image", "square"])
def test_a_batch_of_images_with_channels_first_differs_in_every_event(tmp_path: Path, space: spaces.Space) -> None:
    envs = vector_of(makers(tmp_path / "envs", space))
    envs = LedgerVectorEnv(Wire(envs, lambda batch: np.moveaxis(batch, -1, 1) if batch.ndim == 4 else batch), tmp_path / "trainer")
    drive(envs, 20)
    envs.close()
    comparison = compare(tmp_path / "envs", tmp_path / "trainer.npz")
    assert [(one.env, one.fields, one.kind) for one in comparison.differences] == [
        (env, ("obs",), "changed") for env in range(ENVS) for _ in range(21)
    ]


@pytest.mark.skipif("Disabled" not in MODES, reason="this Gymnasium has no disabled mode")
@pytest.mark.parametrize("fault", ["terminated:drop", "truncated:drop"])
def test_an_end_that_the_trainer_never_saw_is_not_silent_in_sync_disabled_mode(tmp_path: Path, fault: str) -> None:
    boundary = Boundary(tmp_path, fault, "vector", "one")
    with pytest.raises(AssertionError):
        boundary.run("sync", "Disabled")


# The check itself can fail


WRONG: dict[str, Callable[[list[Injection]], list[Injection]]] = {
    "another env": lambda found: [replace(found[0], env=(found[0].env + 1) % ENVS), *found[1:]],
    "another episode": lambda found: [replace(found[0], episode=found[0].episode + 1), *found[1:]],
    "another step": lambda found: [replace(found[0], step=found[0].step + 1), *found[1:]],
    "another field": lambda found: [replace(found[0], fields=("reward",)), *found[1:]],
    "one field more": lambda found: [replace(found[0], fields=("obs", "reward")), *found[1:]],
    "another kind": lambda found: [replace(found[0], kind="lost"), *found[1:]],
    "one too few": lambda found: found[1:],
    "one too many": lambda found: [*found, replace(found[-1], step=found[-1].step + 1)],
    "one twice": lambda found: [*found, found[-1]],
    "none": lambda found: [],
}


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, list[Injection]]:
    boundary = Boundary(tmp_path_factory.mktemp("rounded"), "obs:f16", "vector", "some")
    return boundary.run("sync", "NextStep"), read_log(boundary.log)


def test_the_injections_agree_with_the_comparison(rounded: tuple[Comparison, list[Injection]]) -> None:
    comparison, injections = rounded
    assert len(injections) > 1
    assert_exactly(comparison, injections)


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_injections_do_not_agree_with_the_comparison(rounded: tuple[Comparison, list[Injection]], wrong: str) -> None:
    comparison, injections = rounded
    with pytest.raises(AssertionError):
        assert_exactly(comparison, WRONG[wrong](injections))


def test_a_wrong_first_injection_does_not_agree_with_the_comparison(tmp_path: Path) -> None:
    boundary = Boundary(tmp_path, "streams:swapped", "vector", "one")
    comparison, injections = boundary.run("sync", "NextStep"), read_log(boundary.log)
    assert_one_range(comparison, injections)
    for wrong in (injections[:1], [replace(injections[0], step=injections[0].step + 1), injections[1]]):
        with pytest.raises(AssertionError):
            assert_one_range(comparison, wrong)


def test_a_change_that_changes_nothing_is_no_injection(tmp_path: Path) -> None:
    """Values that float16 holds exactly arrive as they were."""
    env = RandomEnv(0, given=lambda observation, reward: (observation.astype(np.float16).astype(np.float32), reward))
    faulty = FaultyEnv(LedgerEnv(env, tmp_path, 0), "obs:f16", log=tmp_path / "log")
    faulty.reset()
    for _ in range(20):
        faulty.step(faulty.action_space.sample())  # not of TORQUE, which all share: sampling gives it a generator
    assert read_log(tmp_path / "log") == []


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match=r"can't be made here: use one of .*obs:f16"):
        FaultyEnv(RandomEnv(0), "obs:float16")
    with pytest.raises(ValueError, match="obs:swap"):
        FaultyEnv(RandomEnv(0), "obs:swap")


# Controls: nothing is between the ledgers that changes anything

#: Environments, and steps of their vector env: over 200,000 events whatever the number of modes.
CROWD, MANY = 16, 15_000 // len(MODES)


def run_control(directory: Path, vector: str, mode: str, steps: int, *args: Any, envs: int = ENVS, **options: Any) -> None:
    """Gymnasium without a fault: environments made with these arguments must compare as equal.

    Args:
        directory: For the ledgers.
        vector: A name in `VECTORS`.
        mode: The autoreset mode.
        steps: Of the vector env.
        args: For `RandomEnv`.
        envs: How many.
        options: For the vector env; and ``inside``, ``outside``: what to put around it, and around its ledger; ``drive``: by whom.
    """
    inside, outside = options.pop("inside", None), options.pop("outside", None)
    driven = options.pop("drive", drive)
    venv = vector_of(makers(directory / "envs", *args, envs=envs), vector, mode, **options)
    venv = LedgerVectorEnv(inside(venv) if inside else venv, directory / "trainer")
    driven(outside(venv) if outside else venv, steps)
    venv.close()
    comparison = compare(directory / "envs", directory / "trainer.npz")
    assert_equal(comparison)
    assert comparison.events >= envs * steps
    assert [one.status for one in comparison.hops[0].fields.values()] == ["equal"] * 6


def every(vectors: Iterable[str]) -> Any:
    return pytest.mark.parametrize(("vector", "mode"), [(vector, mode) for vector in vectors for mode in MODES])


@every(["sync"])
def test_many_events_without_a_fault_are_silent(tmp_path: Path, vector: str, mode: str) -> None:
    run_control(tmp_path, vector, mode, MANY, envs=CROWD)


def test_the_controls_are_over_200_000_events() -> None:
    assert CROWD * MANY * len(MODES) > 200_000


@every(["async"])
def test_processes_without_a_fault_are_silent(tmp_path: Path, vector: str, mode: str) -> None:
    run_control(tmp_path, vector, mode, 1000)


def drive_with_resets(envs: VectorEnv, steps: int) -> None:
    """Reset all environments, or some of them, also in the middle of episodes."""
    random, ended = np.random.default_rng(0), np.zeros(envs.num_envs, bool)
    disabled = getattr(envs.metadata.get("autoreset_mode"), "value", "") == "Disabled"
    envs.reset(seed=0)
    for at in range(steps):
        mask = ended & disabled
        if at % 7 == 5 and len(MODES) > 1:
            mask = mask | (random.random(envs.num_envs) < 0.5)
        if at % 7 == 3:
            envs.reset()
        elif mask.any():
            envs.reset(options={"reset_mask": mask})
        _, _, terminated, truncated, _ = envs.step(envs.action_space.sample())
        ended = terminated | truncated


@every(VECTORS)
def test_resets_by_hand_are_silent(tmp_path: Path, vector: str, mode: str) -> None:
    run_control(tmp_path, vector, mode, 500, drive=drive_with_resets)


def test_the_reset_that_a_reset_by_hand_brings_once_more_is_found(tmp_path: Path) -> None:
    """AsyncVectorEnv without shared memory resets an environment that had ended again at the next step, and calls that a step.

    A fault of Gymnasium, seen in 1.0 to 1.4; where it is mended, there is nothing to find.
    """
    envs = vector_of(makers(tmp_path / "envs"), "async", shared_memory=False)
    envs = LedgerVectorEnv(envs, tmp_path / "trainer")
    envs.action_space.seed(0)
    envs.reset(seed=0)
    ended = np.zeros(ENVS, bool)
    while not ended.any():
        _, _, terminated, truncated, _ = envs.step(envs.action_space.sample())
        ended = terminated | truncated
    envs.reset()
    envs.step(envs.action_space.sample())
    envs.close()
    # All were reset twice, and stepped last; unless that step was one more reset.
    again = {env for env in range(ENVS) if read(tmp_path / "envs" / f"env-{env}.npz").streams[env].columns["kind"][-1] == 0}
    assert again <= set(np.flatnonzero(ended))
    comparison = compare(tmp_path / "envs", tmp_path / "trainer.npz")
    assert [place(one) for one in comparison.differences] == [(env, 2, 0, "changed", "action", "kind") for env in sorted(again)]


def float64(value: Any) -> Any:
    return value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype == np.float32 else value


def float64_finer_than_float32(observation: Any, reward: float) -> tuple[Any, float]:
    return float64(observation) / 3, reward / 3


def sometimes_nan(observation: Any, reward: float) -> tuple[Any, float]:
    if reward > 1:
        observation[1] = np.nan
    return observation, np.nan if abs(reward) < 1 else reward


def slow(observation: Any, reward: float) -> tuple[Any, float]:
    time.sleep(0.001)
    return observation, reward


#: What the environments give; what is between the ledgers; what is outside the trainer's.
CONTROLS: dict[str, dict[str, Any]] = {
    "delay in the environment": {"given": slow},
    "delay on the wire": {"inside": functools.partial(Wire, change=lambda value: time.sleep(0.001) or value)},
    "float64 on the wire": {"inside": functools.partial(Wire, change=float64)},
    "float64 on the wire and back": {"inside": lambda envs: Wire(Wire(envs, float64), lambda value: np.asarray(value, np.float32))},
    "float64 from the environment": {"given": float64_finer_than_float32},
    "NaN from the environment": {"given": sometimes_nan},
    "actions clipped": {"outside": wrappers.ClipAction},
    "actions rescaled": {"outside": functools.partial(wrappers.RescaleAction, min_action=-1.0, max_action=1.0)},
    "rewards normalised": {"outside": wrappers.NormalizeReward},
    "observations normalised": {"outside": wrappers.NormalizeObservation},
}


@every(VECTORS)
@pytest.mark.parametrize("control", CONTROLS)
def test_what_is_no_fault_is_silent(tmp_path: Path, control: str, vector: str, mode: str) -> None:
    if control == "observations normalised" and mode != "NextStep":
        pytest.skip("Gymnasium 1.2 refuses that wrapper in other modes")
    options = dict(CONTROLS[control])
    run_control(tmp_path, vector, mode, 60, VECTOR, TORQUE, options.pop("given", None), **options)


SPACES: dict[str, spaces.Space] = {
    "dict": DICT,
    "tuple": spaces.Tuple((VECTOR, spaces.Discrete(5))),
    "nested": spaces.Dict({"b": spaces.Tuple((DICT, spaces.MultiBinary(3))), "a": spaces.Dict({"c": VECTOR})}),
    "image": IMAGE,
    "box without axes": spaces.Box(-1, 1, (), np.float32),
    "box of int64": spaces.Box(-(1 << 40), 1 << 40, (2, 2), np.int64),
    "discrete": spaces.Discrete(5, start=-3),
    "multidiscrete": spaces.MultiDiscrete([3, 5]),
    "multibinary": spaces.MultiBinary([2, 3]),
    "text": spaces.Text(12),
    "sequence": spaces.Sequence(VECTOR),
    "stacked sequence": spaces.Sequence(spaces.Discrete(9), stack=True),
    "graph": spaces.Graph(VECTOR, spaces.Discrete(4)),
    "graph without edges": spaces.Graph(spaces.Discrete(4), None),
    "oneof": spaces.OneOf((spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32))),
}


@every(VECTORS)
@pytest.mark.parametrize("space", SPACES)
def test_every_space_is_silent(tmp_path: Path, space: str, vector: str, mode: str) -> None:
    # Gymnasium can't share the memory of all of them.
    options = {"shared_memory": False} if vector == "async" else {}
    run_control(tmp_path, vector, mode, 60, SPACES[space], SPACES[space], **options)


# Stable-Baselines3


def run_sb3_control(directory: Path, vector: str, steps: int, *args: Any, outside: str = "", resets: bool = False) -> None:
    venv = sb3_of(makers(directory / "envs", *args), vector)
    from stable_baselines3.common import vec_env

    from stepledger.sb3 import LedgerVecEnv

    venv = LedgerVecEnv(venv, directory / "trainer")
    if outside:
        venv = getattr(vec_env, outside)(venv, **({"n_stack": 4} if outside == "VecFrameStack" else {}))
    drive_sb3(venv, steps, resets)
    venv.close()
    comparison = compare(directory / "envs", directory / "trainer.npz")
    assert_equal(comparison)
    assert comparison.events >= ENVS * steps


@pytest.mark.sb3
@pytest.mark.parametrize(("vector", "steps"), [("dummy", 5000), ("subproc", 1000)])
def test_many_events_in_sb3_without_a_fault_are_silent(tmp_path: Path, vector: str, steps: int) -> None:
    run_sb3_control(tmp_path, vector, steps)


@pytest.mark.sb3
@pytest.mark.parametrize("vector", SB3)
def test_resets_by_hand_in_sb3_are_silent(tmp_path: Path, vector: str) -> None:
    run_sb3_control(tmp_path, vector, 300, resets=True)


SB3_CONTROLS: dict[str, dict[str, Any]] = {
    "delay": {"given": slow},
    "float64": {"given": float64_finer_than_float32},
    "NaN": {"given": sometimes_nan},
    "VecNormalize": {"outside": "VecNormalize"},
    "VecFrameStack": {"outside": "VecFrameStack"},
    "VecMonitor": {"outside": "VecMonitor"},
    "VecCheckNan": {"outside": "VecCheckNan"},
    "VecTransposeImage": {"space": IMAGE, "outside": "VecTransposeImage"},
    "image": {"space": IMAGE},
    "dict": {"space": DICT},
    "discrete": {"space": LEVER, "action": LEVER},
    "multidiscrete": {"space": LEVERS, "action": LEVERS},
    "multibinary": {"space": spaces.MultiBinary(6), "action": spaces.MultiBinary(6)},
}


@pytest.mark.sb3
@pytest.mark.parametrize("vector", SB3)
@pytest.mark.parametrize("control", SB3_CONTROLS)
def test_what_is_no_fault_in_sb3_is_silent(tmp_path: Path, control: str, vector: str) -> None:
    options = SB3_CONTROLS[control]
    args = (options.get("space", VECTOR), options.get("action", TORQUE), options.get("given"))
    run_sb3_control(tmp_path, vector, 60, *args, outside=options.get("outside", ""))
