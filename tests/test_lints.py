"""Lints: what is suspicious in one ledger is named, clean runs are silent, and recording stays what it was."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from common import MODES, Walk, compare_in_parts, drive, drive_one, rewrite, vector_of, walk, walks
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from stepledger import Ledger, LedgerEnv, LedgerError, LedgerVectorEnv, checks, compare, read
from stepledger.bounds import SpaceBounds, described
from stepledger.cli import main
from stepledger.format import Place, StreamKey
from stepledger.ledger import Streams, read_all
from stepledger.lints import LINTS, LISTED, Linter
from stepledger.result import Finding


def findings(directory: Path) -> list[Finding]:
    linter = Linter()
    linter.add([read(directory)] if directory.suffix else read_all(directory, read)[0])
    return list(linter.findings())


def codes(found: Any) -> list[str]:
    return [one.code for one in found]


class Scripted(gym.Env):
    """Gives what it is told to: observations in turn, rewards in turn, ends after so many steps."""

    def __init__(self, space: spaces.Space, observations: list[Any], rewards: tuple[float, ...] = (0.0,), length: int = 10) -> None:
        self.observation_space, self.action_space = space, spaces.Discrete(3)
        self._observations, self._rewards, self._length = observations, rewards, length
        self._calls = self._steps = 0

    def _next(self) -> Any:
        self._calls += 1
        return self._observations[(self._calls - 1) % len(self._observations)]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._next(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        reward = self._rewards[self._calls % len(self._rewards)]
        return self._next(), reward, False, self._steps == self._length, {}


TAXI = max(name for name in gym.registry if name.startswith("Taxi-"))

UNIT = spaces.Box(-1, 1, (2,), np.float32)


def record(env: gym.Env, directory: Path, steps: int = 60, *, act: Callable[[int], Any] | None = None, **options: Any) -> Ledger:
    """Step one environment with a ledger and a reset at each end."""
    one = LedgerEnv(env, directory, 0, **options)
    one.reset(seed=0)
    one.action_space.seed(0)
    for step in range(steps):
        *_, terminated, truncated, _ = one.step(one.action_space.sample() if act is None else act(step))
        if terminated or truncated:
            one.reset()
    one.close()
    return read(directory / "env-0.npz")


NAMES = ["CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1", TAXI, "FrozenLake-v1", "Blackjack-v1"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "name"), [*(("sync", name) for name in NAMES), ("async", "CartPole-v1"), ("async", TAXI)])
def test_clean_environments_are_silent(tmp_path: Path, name: str, kind: str, mode: str) -> None:
    makers = [functools.partial(_made, name, tmp_path, index) for index in range(3)]
    envs = LedgerVectorEnv(vector_of(makers, kind, mode), tmp_path / "trainer.npz")
    drive(envs, 300)
    envs.close()
    comparison = compare(tmp_path)
    assert comparison.exit_status == 0
    assert comparison.warnings == ()
    assert findings(tmp_path / "trainer.npz") == findings(tmp_path) == []
    assert "warning" not in str(comparison)


def _made(name: str, directory: Path, index: int, **options: Any) -> gym.Env:
    return LedgerEnv(gym.make(name), directory, index, **options)


def test_a_walk_with_all_three_ends_is_silent_at_both_taps(tmp_path: Path) -> None:
    envs = walks(tmp_path)
    drive(envs, 200)
    envs.close()
    assert compare(tmp_path).warnings == ()
    assert findings(tmp_path / "trainer.npz") == []


@pytest.mark.parametrize("keep_values", [False, True])
def test_an_action_outside_of_its_space_is_named(tmp_path: Path, keep_values: bool) -> None:
    ledger = record(Scripted(UNIT, [np.zeros(2)]), tmp_path, act=lambda step: 3 if step in (4, 25) else 1, keep_values=keep_values)
    (found,) = findings(ledger.path)
    assert (found.code, found.episode, found.step, found.count, found.env) == ("SL601", 0, 5, 2, 0)
    assert "3" in found.text


def test_a_box_action_beyond_its_bounds_is_named_and_one_that_was_rounded_is_not(tmp_path: Path) -> None:
    rounded = np.float32(2) * (1 + np.finfo(np.float32).eps)
    assert record(gym.make("Pendulum-v1"), tmp_path / "rounded", act=lambda step: np.array([rounded])) is not None
    assert findings(tmp_path / "rounded") == []
    record(gym.make("Pendulum-v1"), tmp_path / "beyond", act=lambda step: np.array([2.01 if step == 7 else 0.0], np.float32))
    (found,) = findings(tmp_path / "beyond")
    assert (found.code, found.episode, found.step, found.count) == ("SL601", 0, 8, 1)
    assert "above 2.0" in found.text


@pytest.mark.parametrize("keep_values", [False, True])
@pytest.mark.parametrize(
    ("value", "code", "said"),
    [
        ([0.5, 1.5], "SL602", "1.5 is above 1.0"),
        ([-3, 0], "SL602", "-3.0 is below -1.0"),
        ([np.nan, 0], "SL603", "nan"),
        ([0, np.inf], "SL602", "inf is above 1.0"),
    ],
)
def test_an_observation_outside_of_its_space_or_not_finite_is_named(
    tmp_path: Path, value: list[float], code: str, said: str, keep_values: bool
) -> None:
    observations = [np.zeros(2, np.float32)] * 13 + [np.array(value, np.float32)]
    ledger = record(Scripted(UNIT, observations), tmp_path, keep_values=keep_values)
    found = findings(ledger.path)
    assert found[0].code == code
    assert said in found[0].text
    # Each tenth step ends an episode, and a reset follows.
    assert (found[0].episode, found[0].step, found[0].count) == (1, 2, 4)
    assert codes(found[1:]) == (["SL603"] if value[1] == np.inf else [])


def test_with_kept_values_all_steps_are_looked_at_and_else_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CALLS", 20)
    observations = [np.zeros(2, np.float32)] * 40 + [np.full(2, 5, np.float32)] + [np.zeros(2, np.float32)] * 59
    record(Scripted(UNIT, observations), tmp_path / "digests")
    record(Scripted(UNIT, observations), tmp_path / "values", keep_values=True)
    assert findings(tmp_path / "digests") == []
    assert codes(findings(tmp_path / "values")) == ["SL602"]
    linter = Linter()
    linter.add(read_all(tmp_path / "digests", read)[0])
    assert linter.made["SL602"] == 20
    assert linter.made["SL605"] == read(tmp_path / "digests" / "env-0.npz").events


OUTSIDE: list[tuple[spaces.Space, Any, Any]] = [
    (spaces.Box(-1, 1, (2,), np.float32), np.array([0.5, 1.0]), np.array([0.5, 1.1])),
    (spaces.Box(-np.inf, np.inf, (2,), np.float32), np.array([1e30, -1e30]), np.zeros(3)),
    (spaces.Box(np.array([-1, -np.inf]), np.array([1, np.inf]), dtype=np.float64), np.array([1, 1e9]), np.array([1.1, 0])),
    (spaces.Box(0, 255, (2, 2), np.uint8), np.full((2, 2), 255), np.full((2, 2), 256)),
    (spaces.Box(0, 10, (2,), np.int64), [0, 10], [0, 11]),
    (spaces.Box(np.array([-1, -1e6]), np.array([1, 1e6]), dtype=np.float32), np.array([1 + 2e-7, 1e6]), np.array([1 + 2e-6, 0])),
    (spaces.Box(0, 1, (2,), np.float16), np.array([0, 1.0001]), np.array([0, 1.1])),
    (spaces.Discrete(3, start=-1), np.array([1]), np.int64(2)),
    (spaces.Discrete(3), 2.0, 1.5),
    (spaces.MultiDiscrete([2, 3]), np.array([1, 2]), np.array([2, 0])),
    (spaces.MultiBinary(2), np.array([True, False]), np.array([2, 0])),
    (spaces.Text(3, charset="ab"), "aba", "abc"),
    (spaces.Sequence(spaces.Box(-1, 1, (), np.float32)), (0.5, 1.0), (0.5, 2.0)),
    (spaces.Sequence(spaces.Box(-1, 1, (1,), np.float32), stack=True), np.ones((3, 1)), np.full((3, 1), 2.0)),
    (
        spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple([spaces.Box(0, 1, (1,), np.float32)])}),
        {"a": 1, "b": (np.zeros(1),)},
        {"a": 1, "b": (np.full(1, 2.0),)},
    ),
    (
        spaces.Graph(spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)),
        spaces.GraphInstance(np.zeros((2, 1)), np.array([1]), np.array([[0, 1]])),
        spaces.GraphInstance(np.full((2, 1), 3.0), np.array([1]), np.array([[0, 1]])),
    ),
    (spaces.OneOf([spaces.Discrete(2), spaces.Box(-1, 1, (1,), np.float32)]), (1, np.zeros(1)), (0, 2)),
]


@pytest.mark.parametrize(("space", "inside", "outside"), OUTSIDE, ids=[type(one[0]).__name__ for one in OUTSIDE])
def test_every_space_knows_what_is_outside_after_the_cast(space: spaces.Space, inside: Any, outside: Any) -> None:
    look = SpaceBounds(space).look
    assert look(inside) == ("", "")
    assert look(outside)[0]
    space.seed(0)
    assert all(look(space.sample()) == ("", "") for _ in range(50))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("reward_dtype", [np.float32, np.float64])
def test_a_reward_that_is_not_finite_is_named(tmp_path: Path, bad: float, reward_dtype: Any) -> None:
    rewards = (0.0,) * 6 + (bad,)
    ledger = record(Scripted(UNIT, [np.zeros(2)], rewards), tmp_path, steps=9, reward_dtype=reward_dtype)
    (found,) = findings(ledger.path)
    assert (found.code, found.episode, found.step, found.count) == ("SL604", 0, 6, 1)
    assert str(bad) in found.text


def test_a_reward_too_large_for_its_dtype_is_not_finite(tmp_path: Path) -> None:
    rewards = (1e300,)
    assert codes(findings(record(Scripted(UNIT, [np.zeros(2)], rewards), tmp_path / "32", steps=5).path)) == ["SL604"]
    assert findings(record(Scripted(UNIT, [np.zeros(2)], rewards), tmp_path / "64", steps=5, reward_dtype=np.float64).path) == []


def test_a_step_after_the_end_of_its_episode_is_named(tmp_path: Path) -> None:
    env = LedgerEnv(Walk((3, 5, 4)), tmp_path, 0)
    env.reset()
    for _ in range(4):  # the fourth step is behind the end
        env.step(0)
    env.reset()
    env.step(0)
    env.close()
    (found,) = findings(tmp_path)
    assert (found.code, found.episode, found.step, found.count) == ("SL605", 0, 4, 1)


def test_a_reset_in_the_middle_of_an_episode_is_named(tmp_path: Path) -> None:
    env = LedgerEnv(Walk((5, 5, 5)), tmp_path, 0)
    for steps in (2, 5, 3, 5):
        env.reset()
        env.reset()  # behind another reset it cuts nothing off
        for _ in range(steps):
            env.step(0)
    env.close()
    (found,) = findings(tmp_path)
    assert (found.code, found.episode, found.step, found.count) == ("SL606", 1, 2, 2)


class GoesOn(gym.Wrapper):
    """Keeps time limits to itself."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, _, info = self.env.step(action)
        return observation, reward, terminated, False, info


def test_an_episode_longer_than_the_time_limit_is_named(tmp_path: Path) -> None:
    def made(name: str, env: gym.Env) -> list[Finding]:
        record(env, tmp_path / name, steps=450)
        return findings(tmp_path / name)

    assert made("limited", gym.make("Pendulum-v1")) == []
    (found,) = made("lost", GoesOn(gym.make("Pendulum-v1")))
    assert (found.code, found.episode, found.step, found.text) == ("SL607", 0, 450, "an episode of 450 steps, and the time limit is 200")
    assert made("longer", gym.wrappers.TimeLimit(gym.make("Pendulum-v1").unwrapped, 220)) == []
    assert read(tmp_path / "longer" / "env-0.npz").meta["time_limit"] == 220
    for name, env in {"none": gym.make("Pendulum-v1", max_episode_steps=-1), "unwrapped": gym.make("Pendulum-v1").unwrapped}.items():
        assert made(name, env) == []
        assert "time_limit" not in read(tmp_path / name / "env-0.npz").meta


class Ends(gym.Wrapper):
    """Delivers time limits as terminations."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated or truncated, False, info


def test_time_limits_that_arrive_as_terminations_are_suspicious(tmp_path: Path) -> None:
    record(Ends(gym.make("Pendulum-v1", max_episode_steps=15)), tmp_path / "many", steps=15 * 20)
    (found,) = findings(tmp_path / "many")
    assert (found.code, found.text) == ("SL608", "all 20 terminated episodes have 15 steps, as many as the time limit")
    record(Ends(gym.make("Pendulum-v1", max_episode_steps=15)), tmp_path / "few", steps=15 * 19)
    record(gym.make("Pendulum-v1", max_episode_steps=15), tmp_path / "truncated", steps=15 * 30)
    record(Ends(Scripted(UNIT, [np.zeros(2)], length=1)), tmp_path / "bandit", steps=30)
    for name in ("few", "truncated", "bandit"):
        assert findings(tmp_path / name) == [], name


@pytest.mark.parametrize("name", ["CartPole-v1", "FrozenLake-v1"])
def test_environments_of_one_seed_are_named(tmp_path: Path, name: str) -> None:
    envs = LedgerVectorEnv(SyncVectorEnv([functools.partial(_made, name, tmp_path, index) for index in range(4)]), tmp_path / "trainer.npz")
    envs.action_space.seed(0)
    envs.reset(seed=[5, 7, 5, 8])
    for _ in range(300):
        actions = envs.action_space.sample()
        actions[2] = actions[0]
        envs.step(actions)
    envs.close()
    (found,) = compare(tmp_path).warnings
    assert (found.code, found.env, found.tap) == ("SL609", 2, "env")
    assert found.text == "its first 256 events are those of env 0"
    assert codes(findings(tmp_path / "trainer.npz")) == ["SL609"]


def test_environments_of_one_seed_with_actions_of_their_own_are_known_by_their_resets(tmp_path: Path) -> None:
    def run(name: str, directory: Path) -> list[Finding]:
        envs = SyncVectorEnv([functools.partial(_made, name, directory, index) for index in range(3)])
        envs.action_space.seed(0)
        envs.reset(seed=[5, 7, 5])
        for _ in range(500):
            envs.step(envs.action_space.sample())
        envs.close()
        return findings(directory)

    (found,) = run("CartPole-v1", tmp_path / "random")
    assert (found.code, found.env) == ("SL609", 2)
    assert "resets are those of env 0" in found.text
    # One start state, and randomness of their own afterwards: that all of them begin there says nothing.
    assert run("FrozenLake-v1", tmp_path / "fixed") == []


class Coin(Walk):
    """Begins in one of two states."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.full(3, self._rng.integers(2), np.float32), {}


def test_few_start_states_in_common_are_chance(tmp_path: Path) -> None:
    # With 2^-7 for each pair, some of so many envs begin alike seven times.
    makers = [functools.partial(lambda index: LedgerEnv(Coin((2,), seed=index), tmp_path, index), index) for index in range(64)]
    envs = SyncVectorEnv(makers)
    drive(envs, 20)
    envs.close()
    assert findings(tmp_path) == []


class Reuses(Walk):
    """Fills one array again and again."""

    def __init__(self, handed_out: str, **options: Any) -> None:
        super().__init__(**options)
        self._buffer, self._handed_out = np.zeros(3, np.float32), handed_out

    def _observation(self) -> Any:
        self._buffer[:] = super()._observation()
        return {"same": self._buffer, "view": self._buffer[:], "copy": self._buffer.copy()}[self._handed_out]


@pytest.mark.parametrize("handed_out", ["same", "view", "copy"])
def test_an_environment_that_fills_its_array_again_is_named(tmp_path: Path, handed_out: str) -> None:
    record(Reuses(handed_out), tmp_path, steps=30)
    found = findings(tmp_path)
    assert codes(found) == ([] if handed_out == "copy" else ["SL610"])
    if found:
        assert (found[0].episode, found[0].step) == (0, 0)


def test_who_changes_an_observation_that_it_was_given_is_not_the_environment(tmp_path: Path) -> None:
    env = LedgerEnv(Walk((3, 5)), tmp_path, 0)
    for _ in range(4):
        observation, _ = env.reset()
        for _ in range(3):
            observation *= 0
            observation = env.step(0)[0]
        observation += 1
    env.close()
    assert "SL610" not in codes(findings(tmp_path))


@pytest.mark.parametrize("copy", [True, False])
def test_a_vector_env_that_fills_its_batch_again_is_named(tmp_path: Path, copy: bool) -> None:
    envs = AsyncVectorEnv([functools.partial(walk, tmp_path, index) for index in range(2)], copy=copy)
    envs = LedgerVectorEnv(envs, tmp_path / "trainer.npz")
    drive(envs, 20)
    envs.close()
    assert codes(compare(tmp_path).warnings) == ([] if copy else ["SL610"] * 2)


def test_reset_options_and_seeds_that_reach_no_automatic_reset_are_named(tmp_path: Path) -> None:
    envs = LedgerVectorEnv(SyncVectorEnv([functools.partial(walk, tmp_path, 0)]), tmp_path / "trainer.npz")
    envs.reset(seed=1, options={"difficulty": 3})
    for _ in range(22):  # into the sixth episode
        envs.step(np.zeros(1, int))
    once = envs.reset(seed=2, options={"difficulty": 3})
    assert once
    for _ in range(10):
        envs.step(np.zeros(1, int))
    envs.close()
    found = {one.code: one.text for one in compare(tmp_path).warnings}
    assert found.keys() == {"SL606", "SL611", "SL612"}
    resets = int((read(tmp_path / "env-0.npz").streams[0].data["kind"] == 0).sum())
    assert found["SL611"].startswith(f"options were given to 2 of {resets} resets, and to none of the last")
    assert found["SL612"] == f"seeds were given to 2 of {resets} resets, and not to the others"


def test_one_seed_at_the_beginning_and_options_for_each_reset_are_as_they_should_be(tmp_path: Path) -> None:
    env = LedgerEnv(Walk((3, 5)), tmp_path, 0)
    for episode in range(6):
        env.reset(seed=4 if not episode else None, options={"difficulty": episode})
        for _ in range((3, 5)[episode % 2]):
            env.step(0)
    env.close()
    assert findings(tmp_path) == []


def test_options_whose_truth_nobody_knows_end_no_recording(tmp_path: Path) -> None:
    env = LedgerEnv(Walk((3, 5)), tmp_path, 0)
    env.reset(options=np.zeros(2))
    env.reset(options={"difficulty": 1})
    env.reset()
    env.close()
    assert read(tmp_path / "env-0.npz").events == 3
    assert findings(tmp_path) == []


def test_a_mask_of_disabled_autoreset_is_no_option(tmp_path: Path) -> None:
    if "Disabled" not in MODES:
        pytest.skip("this Gymnasium has next-step autoreset only")
    envs = vector_of([functools.partial(walk, tmp_path, index) for index in range(2)], mode="Disabled")
    drive(envs, 40)
    envs.close()
    assert findings(tmp_path) == []


class Level:
    """What a Discrete space's digest takes for a 1, and nothing can be compared with."""

    def __hash__(self) -> int:
        return hash(1)

    def __eq__(self, other: object) -> bool:
        return other == 1


def test_a_check_that_raises_is_not_made_and_recording_goes_on(tmp_path: Path) -> None:
    ledger = record(Scripted(spaces.Discrete(3), [0, Level()]), tmp_path, steps=20)
    assert ledger.meta["checks"]["made"] == ["SL601", "SL610"]
    assert not ledger.open_end
    assert ledger.events > 20
    linter = Linter()
    linter.add([ledger])
    assert linter.made["SL602"] == 0
    assert linter.findings() == ()


def test_afterwards_the_functions_that_digest_are_what_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CALLS", 10)
    env = LedgerEnv(Walk((3, 5)), tmp_path, 0)
    envs = LedgerVectorEnv(SyncVectorEnv([lambda: env]), tmp_path / "trainer.npz")
    drive(envs, 8)
    recorder = env._recorder
    assert recorder is not None
    assert recorder.digest_action != env._actions.one
    drive(envs, 8)
    assert (recorder.digest_action, recorder.digest_observation) == (env._actions.one, env._observations.one)
    assert type(envs._rows._observations) is type(envs._rows._actions) is type(env._observations)
    envs.close()
    assert read(tmp_path / "env-0.npz").meta["checks"]["calls"] == 10
    assert compare(tmp_path).equal


@pytest.mark.parametrize("keep_values", [False, True])
def test_what_is_recorded_and_given_is_the_same_with_and_without_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_values: bool
) -> None:
    def events(calls: int, directory: Path) -> tuple[list[Any], Ledger]:
        monkeypatch.setattr(checks, "CALLS", calls)
        env = LedgerEnv(gym.make("CartPole-v1"), directory, 0, keep_values=keep_values)
        given = drive_one(env, 100)
        env.close()
        return given, read(directory / "env-0.npz")

    (first, one), (second, other) = events(1, tmp_path / "without"), events(1000, tmp_path / "with")
    for here, there in zip(first, second, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))
    for name, column in one.streams[0].data.items():
        assert np.array_equal(column, other.streams[0].data[name])
    for name, column in one.streams[0].values.items():
        assert np.array_equal(column, other.streams[0].values[name])


def test_findings_are_the_same_however_the_events_come(tmp_path: Path) -> None:
    envs = LedgerVectorEnv(SyncVectorEnv([functools.partial(_limited, tmp_path, index) for index in range(3)]), tmp_path / "trainer.npz")
    envs.reset(seed=3)
    for step in range(600):
        if step % 97 == 50:
            envs.reset()
        envs.step(envs.action_space.sample())
    envs.close()
    whole = compare(tmp_path)
    assert {"SL604", "SL606", "SL607"} <= set(codes(whole.warnings))
    for seed in range(5):
        assert compare_in_parts(tmp_path, seed).warnings == whole.warnings


def _limited(directory: Path, index: int) -> gym.Env:
    walk_ = Walk((3, 25, 7), seed=index)
    env = gym.wrappers.TransformReward(walk_, lambda reward: np.nan if reward > 4.5 else reward)
    env.unwrapped.spec = replace(gym.spec("CartPole-v1"), max_episode_steps=20)
    return LedgerEnv(env, directory, index)


def test_each_end_of_an_episode_is_counted_once_where_events_come_one_by_one(tmp_path: Path) -> None:
    env = LedgerEnv(Walk((3, 1, 4)), tmp_path, 0)
    for steps in (3, 2, 4, 3):  # the second episode ends after one step, and a reset behind the next is none in the middle of it
        env.reset()
        for _ in range(steps):
            env.step(0)
    env.close()
    whole = read(tmp_path / "env-0.npz")
    linter = Linter()
    for at in range(whole.events):
        linter.add([replace(whole, streams=Streams([stream.after(at).until(1) for stream in whole.streams.values()]))])
    assert list(linter.findings()) == findings(tmp_path)
    assert [(one.code, one.episode, one.step) for one in linter.findings()] == [("SL605", 1, 2)]


def test_many_environments_are_listed_up_to_a_bound_and_counted_beyond(tmp_path: Path) -> None:
    for index in range(LISTED + 5):
        env = LedgerEnv(Walk((5,)), tmp_path, index)
        for _ in range(2):
            env.reset()
            env.step(0)
            env.step(index % 4)
        env.close()
    found = [one for one in findings(tmp_path) if one.code == "SL606"]
    assert len(found) == LISTED + 1
    assert (found[-1].env, found[-1].envs, found[-1].count) == (-1, 5, 5)


@pytest.mark.parametrize(("group", "expected"), [("", ["SL606"]), ("evaluation", [])])
def test_an_evaluation_cuts_episodes_off_on_purpose(tmp_path: Path, group: str, expected: list[str]) -> None:
    env = LedgerEnv(Walk((5,)), None)
    env.ledger_place = Place(str(tmp_path), StreamKey(), group=group)
    for _ in range(2):
        env.reset()
        env.step(0)
    env.close()
    assert [one.code for one in findings(tmp_path)] == expected


def test_warnings_stand_before_the_verdict_and_change_no_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    envs = walks(tmp_path, n=2)
    drive(envs, 5)
    drive(envs, 5)
    envs.close()
    comparison = compare(tmp_path)
    assert comparison.exit_status == 0
    assert comparison.equal
    lines = str(comparison).splitlines()
    assert lines[-1].startswith("no difference: ")
    assert lines[-2].startswith("warning: env ")
    assert comparison.to_dict()["warnings"][0]["code"] == comparison.warnings[0].code
    assert main(["compare", str(tmp_path)]) == 0
    assert main(["lint", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "a reset in the middle of the episode, behind this step [SL606, tap env" in out
    assert main(["lint", str(tmp_path), "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["warnings"] == list(comparison.to_dict()["warnings"])


def test_lint_of_a_clean_ledger_says_what_could_not_be_looked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    envs = walks(tmp_path, n=2)
    drive(envs, 30)
    envs.close()
    assert main(["lint", str(tmp_path / "trainer.npz")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "no warning in what was looked at"
    assert "not looked for: action outside the space [SL601]" in out
    assert "not looked for: episode longer than the time limit [SL607]" in out
    assert not any("SL605" in line for line in out)
    assert main(["lint", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"time_limit": -1},
        {"time_limit": True},
        {"time_limit": "9"},
        {"resets": [1, 2]},
        {"resets": [1, 2, 3, 4, None]},
        {"checks": {}},
        {"checks": {"calls": 1, "made": [1], "found": []}},
        {"checks": {"calls": 1, "made": [], "found": [["SL601", 9, 0, 0, 1, ""]]}},
        {"checks": {"calls": 1, "made": [], "found": [["SL601", 0, 0, 0, 0, ""]]}},
        {"checks": {"calls": 1, "made": [], "found": [["SL601", 0, 0, 0, 1]]}},
        {"bounds": {"obs": []}},
        {"bounds": {"obs": [[0, float("nan")]], "act": [None]}},
        {"bounds": {"obs": [[0, [1, 2]]], "act": [None]}},
        {"bounds": {"obs": [[0, "1"]], "act": [None]}},
    ],
    ids=str,
)
def test_a_damaged_entry_is_an_error_and_no_crash(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = record(Walk(), tmp_path, steps=5, keep_values=True).path
    rewrite(path, **changes)
    with pytest.raises(LedgerError, match="its meta is damaged"):
        read(path)


def test_bounds_that_no_value_can_have_are_not_looked_at(tmp_path: Path) -> None:
    path = record(Walk(), tmp_path, steps=5, keep_values=True).path
    rewrite(path, bounds={"obs": [[-(1 << 63) - 1, [(1 << 64) - 1, -1, 0]]], "act": [[0, -1]]})
    assert codes(findings(path)) == ["SL601"]


def test_what_a_ledger_says_of_a_value_cannot_steer_a_terminal(tmp_path: Path) -> None:
    path = record(Walk(), tmp_path, steps=5).path
    rewrite(path, checks={"calls": 6, "made": [], "found": [["SL602", 0, 0, 1, 1, "\x1b[2J" + "x" * 1000], ["SL999", 0, 0, 1, 1, "?"]]})
    (found,) = findings(path)
    assert "\x1b" not in found.text
    assert len(found.text) < 300


def test_bounds_are_written_short_and_long_ones_not_at_all() -> None:
    assert described(spaces.Box(-1, np.inf, (84, 84), np.float32), ()) == [-1.0, None]
    assert described(spaces.Box(np.array([0, -np.inf]), np.array([1, 2]), dtype=np.float64), ()) == [[0.0, None], [1.0, 2.0]]
    assert described(spaces.Box(np.arange(5000.0), np.inf, dtype=np.float64), ()) is None
    assert described(spaces.Dict({"a": spaces.Text(4), "b": spaces.Discrete(4, start=2)}), ("b",)) == [2, 5]
    assert described(spaces.Dict({"a": spaces.Text(4)}), ("a",)) is None


def test_each_code_says_what_it_means_and_what_to_do_and_so_does_the_page_of_all() -> None:
    page = (Path(__file__).parents[1] / "docs" / "warnings.md").read_text().split("## Codes\n")[1]
    assert page == "".join(f"\n### {code}: {title}\n\n{meaning}\n\n{check}\n" for code, (title, meaning, check) in LINTS.items())
    assert sorted(LINTS) == [f"SL6{number:02d}" for number in range(1, 13)]
