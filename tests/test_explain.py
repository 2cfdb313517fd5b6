"""What a difference is said to be: from digests alone, from kept values, and where nothing is known of it.

The matrix of faults between an environment and its trainer is in `test_faults`; here is what is not in it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from common import MODES, Walk, assert_equal, compare_in_parts, drive, vector_of
from faults import Dose, FaultyVectorEnv
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper

from stepledger import Comparison, LearnerLedger, LedgerEnv, LedgerVectorEnv, compare
from stepledger.changes import changes
from stepledger.compare import load
from stepledger.constants import Constants
from stepledger.digest import SpaceDigest
from stepledger.report.context import Recorded
from stepledger.result import KEPT

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTIONS = spaces.Box(-1, 1, (2,), np.float32)


def codes(comparison: Comparison) -> list[list[str]]:
    return [[one.code for one in difference.explanations] for difference in comparison.differences]


# What values are made of each other

A = np.array([0.1234567, -1.9876543, 300.12345, 0.7654321], np.float32)
PICTURE = np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8)
WITH_ALPHA = np.random.default_rng(1).integers(0, 256, (6, 5, 4), np.uint8)
FRAMES = np.random.default_rng(2).integers(0, 256, (3, 6, 5, 3), np.uint8)
SMALL = np.random.default_rng(3).integers(0, 256, (3, 5, 3), np.uint8)
LONG = np.random.default_rng(4).uniform(-3, 3, 17).astype(np.float32)
MADE: dict[str, tuple[Any, Any, str]] = {
    "zeros": (A, np.zeros_like(A), "SL101"),
    "float16": (A, A.astype(np.float16).astype(np.float32), "SL104"),
    "bfloat16, cut": (A, (A.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32), "SL105"),
    "float32": (A.astype(np.float64) / 3, (A.astype(np.float64) / 3).astype(np.float32).astype(np.float64), "SL106"),
    "any factor, of several numbers": (A, A * np.float32(0.7318), "SL107"),
    "a round factor, of one number": (A[:1], A[:1] * np.float32(0.1), "SL107"),
    "pixels": (A, A / np.float32(255), "SL107"),
    "whole numbers": (np.array([3, 8, 100]), np.array([1, 4, 50]), "SL107"),
    "clipped": (A, np.clip(A, -1.5, 1.5), "SL108"),
    "clipped to a bound of its own, twice": (A, np.clip(A, 0.3333333, None), "SL108"),
    "NaN in a place": (A, np.where(A > 1, np.nan, A).astype(np.float32), "SL109"),
    "8 bits": (A / 300, (np.round(A / 300 * 127) / 127).astype(np.float32), "SL110"),
    "8 bits over the range": (LONG, (np.round((LONG + 3) / 6 * 255).astype(np.uint8) / 255 * 6 - 3).astype(np.float32), "SL110"),
    "8 bits over the range, cut": (LONG, (np.floor((LONG + 3) / 6 * 255) / 255 * 6 - 3).astype(np.float32), "SL110"),
    "fewer levels of an image": (PICTURE, PICTURE // 16 * 16, "SL110"),
    "levels rounded": (PICTURE, np.minimum(np.round(PICTURE / 16) * 16, 240).astype(np.uint8), "SL110"),
    "channels last": (PICTURE, PICTURE[..., ::-1], "SL111"),
    "channels first": (np.moveaxis(PICTURE, -1, 0), np.moveaxis(PICTURE, -1, 0)[::-1], "SL111"),
    "axes": (PICTURE, np.moveaxis(PICTURE, -1, 0).reshape(PICTURE.shape), "SL112"),
    "a matrix": (A.reshape(2, 2), A.reshape(2, 2).T, "SL112"),
    "channels last, with alpha": (WITH_ALPHA, WITH_ALPHA[..., [2, 1, 0, 3]], "SL111"),
    "all four channels": (WITH_ALPHA, WITH_ALPHA[..., ::-1], "SL111"),
    "channels of a stack of frames": (FRAMES, FRAMES[..., ::-1], "SL111"),
    "upside down": (PICTURE, PICTURE[::-1], "SL117"),
    "left and right": (PICTURE, PICTURE[:, ::-1], "SL117"),
    "turned by half": (PICTURE, PICTURE[::-1, ::-1], "SL117"),
    "upside down, channels first": (np.moveaxis(PICTURE, -1, 0), np.moveaxis(PICTURE, -1, 0)[:, ::-1], "SL117"),
    "upside down, as high as there are channels": (SMALL, SMALL[::-1], "SL117"),
    "frames upside down": (FRAMES, FRAMES[:, ::-1], "SL117"),
    "a matrix upside down": (PICTURE[..., 0], PICTURE[::-1, :, 0], "SL117"),
    "everything reversed": (PICTURE, PICTURE[::-1, ::-1, ::-1], "SL117"),
}


@pytest.mark.parametrize("name", MADE)
def test_how_a_value_was_made_is_recognised(name: str) -> None:
    given, received, code = MADE[name]
    assert [one.code for one in changes("obs", [(given, received)])][:1] == [code]


@pytest.mark.parametrize(
    "received",
    [np.roll(LONG, 1), np.round(LONG), LONG + np.float32(0.5), np.where(LONG > 2, 0, LONG), np.random.default_rng(5).permutation(LONG)],
    ids=["rolled", "whole numbers", "shifted", "in places", "in another order"],
)
def test_other_numbers_are_on_no_grid_by_chance(received: Any) -> None:
    found = [one.text for one in changes("obs", [(LONG, received)]) if one.code == "SL110"]
    assert found == (["obs is quantised to 8 bits, steps of 1/1"] if (received == np.rint(received)).all() else [])


@pytest.mark.parametrize(
    ("given", "received"),
    [
        (np.array([0.0, 3.0, np.nan], np.float32), np.array([-0.0, 3.0, np.nan], np.float32)),
        (np.array([0.0]), np.array([-0.0])),
        (np.array([0x7FC00000], np.uint32).view(np.float32), np.array([0xFFC00001], np.uint32).view(np.float32)),
    ],
    ids=["a zero of several numbers", "a zero", "NaN"],
)
def test_equal_numbers_of_other_bits_are_not_called_rounded_or_clipped(given: Any, received: Any) -> None:
    assert [one.code for one in changes("obs", [(given, received)])] == ["SL116"]
    assert [one.code for one in changes("obs", [(given, received), (A, A * np.float32(0.5))])] == ["SL107"]


SINGLE: dict[str, tuple[Any, Any, list[str]]] = {
    "a round number": (np.float32(2), np.float32(1), ["may be scaled by 0.5", "may be clipped to at most 1"]),
    "again and again": (np.ones(3, np.float32), np.full(3, 2, np.float32), ["may be scaled by 2"]),
    "an index": (np.array(2), np.array(4), []),
    "an index below a bound": (np.array(7), np.array(1), []),
    "a pixel at a bound": (np.array(250), np.array(192), ["may be clipped to at most 192"]),
    "up to a bound": (np.float32(1), np.float32(7), []),
    "away from zero": (np.float32(-0.31), np.float32(-1), []),
    "to the other sign": (np.float32(-3.1), np.float32(1), []),
    "to zero, of several": (np.array([-3.1, 2], np.float32), np.array([0, 2], np.float32), ["may be clipped to at least 0"]),
    "to no usual bound": (np.float32(8.3), np.float32(7), []),
    "negated": (np.array([2.5, 4], np.float32), np.array([-2.5, -4], np.float32), ["is negated (scaled by -1)"]),
    "many digits": (np.float32(1.0425134), np.float32(1.0425134) * np.float32(0.5), ["is scaled by 0.5"]),
    "several": (np.array([2, 4], np.float32), np.array([1, 2], np.float32), ["is scaled by 0.5"]),
    "several to one bound": (np.array([2, 4.5], np.float32), np.array([1, 1], np.float32), ["is clipped to at most 1"]),
    "a few whole numbers to one": (np.array([3, 4, 1]), np.array([2, 2, 1]), ["may be clipped to at most 2"]),
    "many whole numbers to one bound": (np.arange(12), np.minimum(np.arange(12), 3), ["is clipped to at most 3"]),
    "a few indices": (np.array([3, 1]), np.array([1, 0]), ["may be scaled by 0.5"]),
    "numbers that float64 confuses": (np.array([2**62 + 1, -(2**62)]), np.array([-(2**62), 2**62 + 1]), []),
}


@pytest.mark.parametrize("name", SINGLE)
def test_one_pair_of_numbers_is_no_proof_of_a_factor_or_a_bound(name: str) -> None:
    given, received, texts = SINGLE[name]
    found = changes("obs", [(given, received)])
    assert [one.text.removeprefix("obs ") for one in found if one.code in ("SL107", "SL108")] == texts


@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "u1"])
@pytest.mark.parametrize(("size", "most"), [(1, 3), (2, 3), (2, 5), (4, 4), (4, 10), (16, 4)])
def test_whole_numbers_that_are_others_by_chance_are_not_said_to_be_made_of_them(size: int, most: int, dtype: str) -> None:
    """Boards, indices and counts: one or more of them are replaced by any other."""
    rng = np.random.default_rng(size)
    tried = wrong = 0
    for changed in rng.integers(1, size + 1, 300).tolist():
        given = rng.integers(0, most, size).astype(dtype)
        received = given.copy()
        received[rng.permutation(size)[:changed]] = rng.integers(0, most, changed)
        if not np.array_equal(given, received) and received.any():
            tried += 1
            wrong += any(" is " in one.text for one in changes("obs", [(given, received)]))
    assert tried > 100
    assert wrong <= 0.02 * tried  # of two numbers, another two may be their double


def test_one_whole_number_may_be_rounded_or_only_another_one() -> None:
    found = changes("reward", [(np.float32(2049), np.float32(2048))])
    assert [one.text for one in found] == ["reward may be rounded to float16"]
    assert changes("reward", [(np.float32(0.1), np.float16(0.1).astype(np.float32))])[0].text == "reward is rounded to float16"


UNKNOWN: dict[str, tuple[Any, Any]] = {
    "noise": (A, A + np.float32(0.01) * np.array([1, -2, 3, 1], np.float32)),
    "one number of several": (A, np.where(A > 100, 17.3456, A).astype(np.float32)),
    "one number, by no round factor": (A[:1], A[:1] * np.float32(0.7318)),
    "one number, to no round bound": (A[:1], A[:1] - np.float32(0.01234)),
    "noise of a picture": (PICTURE, PICTURE ^ 1),
    "a picture that is rolled": (PICTURE, np.roll(PICTURE, 1, 0)),
    "frames in the reverse order": (FRAMES, FRAMES[::-1]),
    "a list in the reverse order": (A, A[::-1]),
    "other whole numbers": (np.array(537), np.array(229)),
    "text": ("left", "right"),
    "nothing": (np.zeros((0,), np.float32), np.zeros((0,), np.float32)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_made_in_no_known_way_is_not_named(name: str) -> None:
    found = changes("obs", [UNKNOWN[name]])
    assert [one.code for one in found if one.code not in ("SL101",)] == []


def test_all_leaves_that_differ_must_fit() -> None:
    half = (A, A * np.float32(0.5))
    assert [one.code for one in changes("obs", [half, half])] == ["SL107"]
    assert changes("obs", [half, UNKNOWN["noise"]]) == []
    assert changes("obs", [half, ("left", "right")]) == []


SPACES = [
    BOX,
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiBinary(3),
    spaces.Dict({"a": BOX, "b": spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 255, (2, 2), np.uint8)])}),
]


@pytest.mark.parametrize("space", SPACES, ids=lambda space: type(space).__name__)
@pytest.mark.parametrize("digest", ["xxh3_64", "blake2b"])
def test_the_digest_of_zeros_is_known_from_what_a_ledger_says_of_its_space(space: spaces.Space, digest: str) -> None:
    def zeros(space: spaces.Space) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: zeros(part) for key, part in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(map(zeros, space.spaces))
        return np.zeros(space.shape, space.dtype)

    made = SpaceDigest(space, digest)
    known = Constants({"observation_space": made.description, "action_space": made.description, "digest": digest})
    assert known.digest("obs", 0.0) == int.from_bytes(made.one(zeros(space)), "big")


@pytest.mark.parametrize(
    "description",
    [
        {"type": "Box", "dtype": "<f4", "shape": [1 << 40]},
        {"type": "Box", "dtype": "object", "shape": [3]},
        {"type": "Box"},
        {"type": "Graph", "nodes": {}, "edges": None},
        {"type": "Dict", "leaves": [[["a"], {"type": "Box", "dtype": "<f4", "shape": ["x"]}]]},
    ],
)
def test_a_space_that_can_not_be_made_again_has_no_known_values(description: dict[str, Any]) -> None:
    known = Constants({"observation_space": description, "action_space": description, "digest": "xxh3_64"})
    assert known.digest("obs", 0.0) is None
    assert known.digest("action", math.nan) is None


# Memory


class Buffered(Walk):
    """Hands out one array, and writes each observation into it."""

    buffer: Any = None

    def _observation(self) -> Any:
        if self.buffer is None:
            self.buffer = np.zeros(self.observation_space.shape, self.observation_space.dtype)
        self.buffer[:] = super()._observation()
        return self.buffer


def buffered(directory: Path, index: int) -> gym.Env:
    return LedgerEnv(Buffered((3 + index, 5, 1, 4), index), directory, index)


@pytest.mark.sb3
def test_a_final_observation_in_info_that_the_reset_overwrote_is_named(tmp_path: Path) -> None:
    """The fault ``info:aliased``: DummyVecEnv puts the environment's own array into info, and resets the environment."""
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    from stepledger.sb3 import LedgerVecEnv

    venv = LedgerVecEnv(vec_env.DummyVecEnv([functools.partial(buffered, tmp_path, index) for index in range(2)]), tmp_path / "trainer")
    venv.reset()
    for _ in range(30):
        venv.step(np.array([0, 1]))
    venv.close()
    comparison = compare(tmp_path)
    assert len(comparison.differences) > 10
    assert {(one.fields, *codes) for one, codes in zip(comparison.differences, codes(comparison))} == {(("obs",), "SL114")}


@pytest.mark.parametrize("mode", MODES)
def test_vector_envs_that_copy_what_they_are_given_are_silent(tmp_path: Path, mode: str) -> None:
    envs = vector_of([functools.partial(buffered, tmp_path, index) for index in range(2)], mode=mode)
    envs = LedgerVectorEnv(envs, tmp_path / "trainer")
    drive(envs, 30)
    envs.close()
    if mode == "SameStep" and not compare(tmp_path).equal:  # Gymnasium 1132: mended in some versions
        assert {tuple(one) for one in codes(compare(tmp_path))} == {("SL114",)}
    else:
        assert_equal(compare(tmp_path))


def rollout(directory: Path, change: Callable[..., Any] = lambda rows: rows, steps: int = 30, **options: Any) -> Comparison:
    """A loop that stores transitions, and learns from each once at the end; ``change`` changes what was stored of each env."""
    makers = [functools.partial(Walk, (3 + index, 5, 1, 4), index, action_space=ACTIONS) for index in range(2)]
    envs = LedgerVectorEnv(SyncVectorEnv(makers, **options), directory / "vector")
    envs.action_space.seed(0)
    obs, _ = envs.reset(seed=0)
    done, stored = np.zeros(2, bool), []
    actions = np.zeros((2, 2), np.float32)
    for _ in range(steps):
        if options.get("reused"):
            actions[:] = envs.action_space.sample()
        else:
            actions = envs.action_space.sample()
        following, *rest, _ = envs.step(actions)
        stored.append((done, obs, actions, following, *rest))
        obs, done = following, rest[1] | rest[2]
    rows: list[list[list[Any]]] = [[], []]
    for done, obs, actions, following, rewards, terminated, truncated in stored:
        for env in np.flatnonzero(~done).tolist():
            rows[env].append([part[env] for part in (obs, actions, rewards, following, terminated, truncated)])
    envs.close()
    ledger = LearnerLedger(directory / "learner", each_step_once=True)
    for row in [row for of_env in change(rows) for row in of_env]:
        ledger.transitions(*(np.array([part]) for part in row))
    ledger.close()
    return compare(directory)


def test_a_loop_that_copies_what_it_stores_is_silent(tmp_path: Path) -> None:
    assert_equal(rollout(tmp_path))


def test_observations_that_are_stored_without_a_copy_are_named(tmp_path: Path) -> None:
    """The fault ``obs:aliased``: a vector env that reuses its buffer, so that an observation becomes the next one."""
    envs = LedgerVectorEnv(SyncVectorEnv([functools.partial(Walk, (3, 5), 0, action_space=ACTIONS)], copy=False), tmp_path / "vector")
    obs, _ = envs.reset(seed=0)
    ledger, done = LearnerLedger(tmp_path / "learner"), np.zeros(1, bool)
    for _ in range(20):
        actions = envs.action_space.sample()
        following, rewards, terminated, truncated, _ = envs.step(actions)
        if not done[0]:
            ledger.transitions(obs, actions, rewards, following, terminated, truncated)
        obs, done = following, terminated | truncated
    envs.close()
    ledger.close()
    comparison = compare(tmp_path)
    # The very first one came from the reset, in an array of its own.
    assert len(comparison.differences) >= 14
    assert {one.fields for one in comparison.differences} == {("obs",)}
    assert {one[0] for one in codes(comparison)} == {"SL113"}


def test_actions_in_an_array_that_is_used_again_are_named(tmp_path: Path) -> None:
    """The fault ``action:aliased``: the loop keeps its array of actions, and writes the next ones into it."""

    def with_aliases(rows: list[list[list[Any]]]) -> list[list[list[Any]]]:
        for of_env in rows:
            for row, later in itertools.pairwise(of_env):
                row[1] = later[1]
        return rows

    comparison = rollout(tmp_path, with_aliases)
    assert {one.fields for one in comparison.differences} == {("action",)}
    assert {one[0] for one in codes(comparison)} == {"SL113"}


# What is learned from


def put(at: int, part: int, value: Callable[[list[list[list[Any]]]], Any]) -> Callable[..., Any]:
    def change(rows: list[list[list[Any]]]) -> list[list[list[Any]]]:
        rows[0][at][part] = value(rows)
        return rows

    return change


def end(rows: list[list[list[Any]]]) -> int:
    return next(at for at, row in enumerate(rows[0]) if row[4] or row[5])


def crossing(rows: list[list[list[Any]]]) -> list[list[list[Any]]]:
    at = end(rows)
    rows[0][at][3] = rows[0][at + 1][0]
    return rows


LEARNED: dict[str, tuple[Callable[..., Any], list[str], int]] = {
    "transition:crosses_reset": (crossing, ["SL502", "SL504"], 1),
    "transition:stale_obs": (put(1, 0, lambda rows: rows[0][0][0]), ["SL503"], 1),
    "transition:wrong_successor": (put(1, 3, lambda rows: rows[0][1][0]), ["SL504"], 1),
    "transition:duplicated": (lambda rows: [[*rows[0], rows[0][5]], rows[1]], ["SL505", "SL508"], 1),
    "transition:never_sampled": (lambda rows: [[*rows[0], [-row for row in rows[0][5][:4]] + rows[0][5][4:]], rows[1]], ["SL506"], 1),
    "chunk:dropped": (lambda rows: [rows[0][:5] + rows[0][9:], rows[1]], ["SL507"], 4),
    "chunk:repeated": (lambda rows: [[*rows[0], *rows[0][0:3]], rows[1]], ["SL508"], 3),
    "zero": (put(1, 0, lambda rows: np.zeros_like(rows[0][0][0])), ["SL101"], 1),
    "reward": (put(1, 2, lambda rows: rows[0][1][2] * 0.5), ["SL107"], 1),
    "action": (put(1, 1, lambda rows: rows[0][0][1]), ["SL102"], 1),
    "terminated": (put(1, 4, lambda rows: True), ["SL201"], 1),
}


@pytest.mark.parametrize("fault", LEARNED)
def test_a_fault_of_what_is_learned_from_is_named(tmp_path: Path, fault: str) -> None:
    change, expected, events = LEARNED[fault]
    comparison = rollout(tmp_path, change)
    (difference,) = comparison.differences
    assert codes(comparison) == [expected]
    assert difference.events == events


def test_of_an_observation_that_is_the_next_one_it_is_not_said_that_its_array_was_changed(tmp_path: Path) -> None:
    """``obs = next_obs`` may also come one line too early."""
    comparison = rollout(tmp_path, put(1, 0, lambda rows: rows[0][1][3]))
    (difference,) = comparison.differences
    assert [one.code for one in difference.explanations] == ["SL113", "SL503"]
    assert difference.explanations[0].text == "the obs is the one after it: it was replaced, or its array changed, before it was stored"


def test_a_reset_that_was_stored_as_a_transition_is_named(tmp_path: Path) -> None:
    def with_reset(rows: list[list[list[Any]]]) -> list[list[list[Any]]]:
        at = end(rows)
        row = [rows[0][at][3], rows[0][at][1], 0.0, rows[0][at + 1][0], False, False]
        return [[*rows[0], row], rows[1]]

    assert codes(rollout(tmp_path, with_reset)) == [["SL509"]]


class Corridor(gym.Env):
    """Every episode begins in the same cell, and ends in the sixth one behind it."""

    observation_space, action_space = spaces.Discrete(8), spaces.Discrete(2)

    def __init__(self, start: int) -> None:
        self.start = start

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.cell = self.start
        return self.cell, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.cell += 1
        return self.cell % 8, 1.0, self.cell == self.start + 6, False, {}


@pytest.mark.skipif("SameStep" not in MODES, reason="this Gymnasium has next-step autoreset only")
@pytest.mark.parametrize(
    ("start", "fault", "first"),
    [
        (0, "final_obs:zero", "the final obs is zero, which may be chance"),
        (1, "final_obs:reset_obs", "the final obs may be the first one of the next episode"),
    ],
)
def test_where_episodes_begin_alike_a_final_observation_that_is_like_it_may_be_something_else(
    tmp_path: Path, start: int, fault: str, first: str
) -> None:
    envs = vector_of([lambda: LedgerEnv(Corridor(start), tmp_path, 0)], mode="SameStep")
    venv = LedgerVectorEnv(FaultyVectorEnv(envs, fault, Dose(at=2)), tmp_path / "trainer")
    drive(venv, 40)
    venv.close()
    (difference,) = compare(tmp_path).differences
    assert difference.explanations[0].text == first
    assert ("SL114", "the final obs may be the first one of the next episode") in {(one.code, one.text) for one in difference.explanations}


# What lasts


class ResetInstead:
    """Steps an environment by resetting it, and hands that over as a step."""

    def __init__(self, env: gym.Env) -> None:
        self.env = env

    def step(self, action: Any) -> tuple[Any, ...]:
        observation, info = self.env.reset()
        return observation, 0.0, False, False, info


class ResetsAll(VectorWrapper):
    """A collector that resets all environments when one is done (TorchRL 570): besides their steps, or hidden, in place of them."""

    def __init__(self, env: VectorEnv, hidden: bool) -> None:
        super().__init__(env)
        self.hidden = hidden
        self.ended, self.were_reset = np.zeros((2, env.num_envs), bool)

    def step(self, actions: Any) -> Any:
        envs, others = self.env.envs, ~self.ended & self.ended.any()
        self.were_reset |= others
        if self.hidden:
            self.env.envs = [ResetInstead(env) if other else env for env, other in zip(envs, others)]
        else:
            for env in itertools.compress(envs, others):
                env.reset()
        result = self.env.step(actions)
        self.env.envs = envs
        self.ended = result[2] | result[3]
        return result


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("envs", [2, 4])
def test_resets_of_all_envs_when_one_is_done_are_one_difference(tmp_path: Path, envs: int, hidden: bool) -> None:
    makers = [lambda i=i: LedgerEnv(Walk((5 + i, 7, 4 + i), i, action_space=ACTIONS), tmp_path, i) for i in range(envs)]
    resets = ResetsAll(SyncVectorEnv(makers), hidden)
    venv = LedgerVectorEnv(resets, tmp_path / "trainer")
    drive(venv, 60)
    venv.close()
    comparison = compare(tmp_path)
    (difference,) = comparison.differences
    assert codes(comparison) == [["SL309"]]
    (hop,) = comparison.hops
    assert hop.differences == 1
    assert hop.streams_different == resets.were_reset.sum() >= envs - 1
    assert difference.events == (hop.fields["kind"].differences if hidden else hop.lost) > 4
    assert difference.kind == ("changed" if hidden else "lost")
    assert "whenever one of the" in str(comparison)
    context = Recorded(load(tmp_path)[0]).around(difference)
    assert [row.here for row in context.rows].count(True) == 1  # they are not in a row
    assert context.here is not None
    assert context.here.differ == ({"kind", "action"} if hidden else {"event"})
    for seed in range(5):
        assert compare_in_parts(tmp_path, seed) == comparison


def test_resets_that_are_told_as_one_difference_take_no_room_from_others(tmp_path: Path) -> None:
    makers = [lambda i=i: LedgerEnv(Walk((2 + i, 3), i, action_space=ACTIONS), tmp_path, i) for i in range(2)]
    venv = LedgerVectorEnv(Also(ResetsAll(SyncVectorEnv(makers), hidden=False), {601}, "obs"), tmp_path / "trainer")
    drive(venv, 610)
    venv.close()
    comparison = compare(tmp_path)
    assert comparison.hops[0].differences == len(comparison.differences) == 3
    assert comparison.differences[0].events > 2 * KEPT
    assert [one.fields for one in comparison.differences[1:]] == [("obs",)] * 2


def test_one_lost_reset_when_another_env_is_done_is_no_reset_of_all(tmp_path: Path) -> None:
    class Once(ResetsAll):
        def step(self, actions: Any) -> Any:
            result = super().step(actions)
            self.done = getattr(self, "done", False) or bool(self.ended.any())
            if self.done:
                self.step = super(ResetsAll, self).step  # type: ignore[method-assign]
                self.env.envs[0 if self.ended[1] else 1].reset()
            return result

    makers = [lambda i=i: LedgerEnv(Walk((5 + i, 7, 4 + i), i, action_space=ACTIONS), tmp_path, i) for i in range(3)]
    venv = LedgerVectorEnv(Once(SyncVectorEnv(makers), hidden=False), tmp_path / "trainer")
    drive(venv, 40)
    venv.close()
    assert codes(compare(tmp_path)) == [["SL304"]]


class Late(VectorWrapper):
    """Hands on each reply so many calls later, from one call on to another."""

    def __init__(self, env: VectorEnv, late: int, since: int, until: int) -> None:
        super().__init__(env)
        self.late, self.since, self.until, self.calls, self.replies = late, since, until, 0, []

    def step(self, actions: Any) -> Any:
        result = self.env.step(actions)
        self.calls += 1
        self.replies.append([np.array(part) for part in result[:4]])
        at = self.calls - 1 - (self.late if self.since <= self.calls < self.until else 0)
        return *(part.copy() for part in self.replies[at]), result[4]


@pytest.mark.parametrize("late", [1, 2, 3])
@pytest.mark.parametrize("until", [20, 1000])
def test_replies_that_are_late_for_a_while_are_one_difference(tmp_path: Path, late: int, until: int) -> None:
    makers = [lambda: LedgerEnv(Walk((500,), 0, action_space=ACTIONS), tmp_path, 0)]
    venv = LedgerVectorEnv(Late(SyncVectorEnv(makers), late, 10, until), tmp_path / "trainer")
    drive(venv, 200)
    venv.close()
    comparison = compare(tmp_path)
    (difference,) = comparison.differences
    assert (difference.step, difference.events) == (10, min(until, 201) - 10)
    assert codes(comparison) == [["SL307"]]
    assert f"to episode 0 step {min(until, 201) - 1}" in difference.explanations[0].text
    for seed in range(5):
        assert compare_in_parts(tmp_path, seed) == comparison


class Also(VectorWrapper):
    """One more fault, at some calls: the reward, the observation, or the whole reply."""

    def __init__(self, env: VectorEnv, calls: set[int], what: str) -> None:
        super().__init__(env)
        self.calls, self.what, self.made = calls, what, 0

    def step(self, actions: Any) -> Any:
        obs, rewards, *rest = self.env.step(actions)
        self.made += 1
        if self.made in self.calls:
            obs, rewards = obs * (0 if self.what != "reward" else 1), rewards * (0.5 if self.what != "obs" else 1)
        return obs, rewards, *rest


@pytest.mark.parametrize("what", ["reward", "obs", "reply"])
@pytest.mark.parametrize("lengths", [(500,), (7, 9, 4)])
def test_what_lasts_goes_on_behind_another_fault(tmp_path: Path, lengths: tuple[int, ...], what: str) -> None:
    makers = [lambda: LedgerEnv(Walk(lengths, 0, action_space=ACTIONS), tmp_path, 0)]
    venv = LedgerVectorEnv(Also(Late(SyncVectorEnv(makers), 1, 10, 1000), {72, 100, 102}, what), tmp_path / "trainer")
    drive(venv, 150)
    venv.close()
    comparison = compare(tmp_path)
    # One late reply between two faults is told with them.
    assert [one.events for one in comparison.differences] == [62, 1, 27, 1, 1, 1, 48]
    assert [one.events for one, found in zip(comparison.differences, codes(comparison)) if found[:1] == ["SL307"]][-1] == 48
    assert comparison.hops[0].differences == 7
    for seed in range(5):
        assert compare_in_parts(tmp_path, seed) == comparison


class Swapped(VectorWrapper):
    """Exchanges the replies of two environments, from one call on to another; and another fault at one of them."""

    def __init__(self, env: VectorEnv, since: int, until: int, also: int) -> None:
        super().__init__(env)
        self.since, self.until, self.also, self.calls = since, until, also, 0

    def step(self, actions: Any) -> Any:
        obs, *rest, infos = self.env.step(actions)
        self.calls += 1
        obs = obs * 0 if self.calls == self.also else obs
        if self.since <= self.calls < self.until:
            obs, *rest = (part[::-1].copy() for part in (obs, *rest))
            infos = {name: part[::-1].copy() for name, part in infos.items() if name != "final_info"}
        return obs, *rest, infos


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "Disabled"])
@pytest.mark.parametrize(("until", "also"), [(60, 0), (1000, 0), (1000, 100)])
def test_replies_of_streams_that_are_swapped_are_compared_call_by_call(tmp_path: Path, mode: str, until: int, also: int) -> None:
    makers = [functools.partial(LedgerEnv, Walk((7 + i, 9, 4), i, action_space=ACTIONS), tmp_path, i) for i in range(2)]
    venv = LedgerVectorEnv(Swapped(vector_of(makers, mode=mode), 20, until, also), tmp_path / "trainer")
    drive(venv, 150)
    venv.close()
    comparison = compare(tmp_path)
    (hop,) = comparison.hops
    # The fault is one more at both streams, and what lasts is two; where it comes in a call that resets only one of them, there is
    # the reset too.
    assert [one[0] for one in codes(comparison)].count("SL308") == (2 if also else 1)
    assert hop.differences == len(comparison.differences) <= (5 if also else 1)
    if mode == "SameStep" and not also:  # in which each step has an action on both sides
        assert hop.fields["action"].status == "equal"


def test_streams_that_are_swapped_again_and_again_are_one_difference_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each range is longer than what an alignment searches, and there are more of them than searches."""
    monkeypatch.setattr("stepledger.ranges._SEARCHES", 10)

    class Often(Swapped):
        def step(self, actions: Any) -> Any:
            self.since = self.calls + 1 if self.calls // 30 % 2 else 1 << 30
            return super().step(actions)

    makers = [functools.partial(LedgerEnv, Walk((100_000,), i, action_space=ACTIONS), tmp_path, i) for i in range(2)]
    venv = LedgerVectorEnv(Often(vector_of(makers), 0, 1 << 31, 0), tmp_path / "trainer")
    drive(venv, 60 * (ranges := 25))
    venv.close()
    comparison = compare(tmp_path)
    assert comparison.hops[0].differences == ranges
    assert {(one.events, *found) for one, found in zip(comparison.differences, codes(comparison))} == {(30, "SL308")}


# The report


def test_a_value_that_is_made_in_no_known_way_is_said_to_be_unknown(tmp_path: Path) -> None:
    class Noise(VectorWrapper):
        def step(self, actions: Any) -> Any:
            obs, *rest = self.env.step(actions)
            return obs + np.float32(0.01) * np.random.default_rng(0).standard_normal(obs.shape).astype(np.float32), *rest

    for keep_values in (True, False):
        directory = tmp_path / str(keep_values)
        makers = [lambda d=directory, k=keep_values: LedgerEnv(Walk((50,), 0, action_space=ACTIONS), d, 0, keep_values=k)]
        venv = LedgerVectorEnv(Noise(SyncVectorEnv(makers)), directory / "trainer", keep_values=keep_values)
        drive(venv, 20)
        venv.close()
        comparison = compare(directory)
        assert {len(one.explanations) for one in comparison.differences} == {0}
        assert ("no known explanation fits" in str(comparison)) == keep_values  # from digests there was nothing to recognise
        assert "stepledger explain" not in str(comparison)


def test_explanations_are_counted_by_kind_before_the_verdict(tmp_path: Path) -> None:
    class Half(VectorWrapper):
        def step(self, actions: Any) -> Any:
            obs, rewards, *rest = self.env.step(actions)
            return np.zeros_like(obs), rewards * 0.5, *rest

    makers = [lambda: LedgerEnv(Walk((50,), 0, action_space=ACTIONS), tmp_path, 0)]
    venv = LedgerVectorEnv(Half(SyncVectorEnv(makers)), tmp_path / "trainer")
    drive(venv, 20)
    venv.close()
    *_, groups, mention, verdict = str(compare(tmp_path)).splitlines()
    assert groups == "20 x SL101 obs replaced by zeros, since env 0 episode 0 step 1"
    assert mention == "stepledger explain CODE says what a code means and what to check"
    assert verdict.startswith("1 of 1 env differs")


# What may be so by chance, and several faults at once


class Few(gym.Env):
    """Few values take turns, in observations and in rewards."""

    observation_space, action_space = spaces.Discrete(4), spaces.Discrete(2)

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return int(self._rng.integers(4)), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return int(self._rng.integers(4)), float(self._rng.integers(2)), bool(self._rng.random() < 0.1), False, {}


class At(VectorWrapper):
    """Changes what one environment gives in some calls: ``change(obs, reward, terminated)``."""

    def __init__(self, envs: VectorEnv, calls: tuple[int, ...], change: Callable[[Any, Any, Any], tuple[Any, Any, Any]]) -> None:
        super().__init__(envs)
        self._calls, self._change, self._call = calls, change, 0

    def step(self, actions: Any) -> Any:
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        self._call += 1
        if self._call in self._calls:
            obs, rewards, terminated = obs.copy(), rewards.copy(), terminated.copy()
            obs[0], rewards[0], terminated[0] = self._change(obs[0], rewards[0], terminated[0])
        return obs, rewards, terminated, truncated, info


def changed_at(
    directory: Path, calls: tuple[int, ...], change: Any, env: Callable[[int], gym.Env], n: int = 3, steps: int = 60
) -> Comparison:
    makers = [lambda i=i: LedgerEnv(env(i), directory, i, keep_values=True) for i in range(n)]
    venv = LedgerVectorEnv(At(SyncVectorEnv(makers), calls, change), directory / "trainer", keep_values=True)
    drive(venv, steps)
    venv.close()
    return compare(directory)


def test_where_few_values_take_turns_no_other_place_is_said_to_be_the_origin(tmp_path: Path) -> None:
    def change(obs: Any, reward: Any, terminated: Any) -> Any:
        return (obs + 1) % 4, 1 - reward, terminated

    comparison = changed_at(tmp_path, (20, 25, 30, 35, 40), change, Few)
    found = [one for difference in comparison.differences for one in difference.explanations]
    elsewhere = [one for one in found if one.code in ("SL102", "SL103", "SL113", "SL307", "SL308")]
    assert elsewhere
    assert {" may be " in one.text for one in elsewhere} == {True}
    assert {difference.explanations[0].code for difference in comparison.differences} & {"SL102", "SL307", "SL308"}
    assert " perhaps " in str(comparison)


def test_what_is_said_of_one_field_is_not_said_of_another(tmp_path: Path) -> None:
    long = functools.partial(Walk, (99,))
    comparison = changed_at(tmp_path / "two", (20,), lambda obs, reward, end: (obs * 0, reward * 2, end), long)
    assert codes(comparison) == [["SL101", "SL107"]]
    assert "1 x SL101 obs replaced by zeros" in str(comparison)
    comparison = changed_at(tmp_path / "both", (20,), lambda obs, reward, end: (obs * 0, 0, end), long)
    assert [one.text for one in comparison.differences[0].explanations] == ["the obs is zero; the reward is zero"]
    assert "1 x SL101 obs, reward replaced by zeros" in str(comparison)


def test_a_flag_does_not_hide_what_the_observation_was_made_of(tmp_path: Path) -> None:
    comparison = changed_at(tmp_path, (20,), lambda obs, reward, end: (obs * 0, reward, True), functools.partial(Walk, (99,)), steps=20)
    assert codes(comparison) == [["SL201", "SL101"]]


def test_a_long_report_gives_all_explanations_that_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from stepledger.cli import main

    changed_at(tmp_path, (20,), lambda obs, reward, end: (obs * 0, reward * 2, end), functools.partial(Walk, (99,)))
    assert main(["compare", str(tmp_path), "-v"]) == 1
    assert "\n    fits too: the reward is scaled by 2 [SL107]\n" in capsys.readouterr().out
