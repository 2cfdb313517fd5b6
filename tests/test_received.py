"""Where the parts of a Dict or a Tuple come from that are not those that were given, and what is said where values are missing."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from common import MODES, Walk, compare_in_parts, drive, vector_of
from gymnasium import spaces
from gymnasium.vector import VectorEnv, VectorWrapper
from test_explain import ACTIONS, put, rollout

from stepledger import Comparison, LedgerEnv, LedgerVectorEnv, compare
from stepledger.chance import AROUND
from stepledger.format import StreamKey
from stepledger.ledger import Stream
from stepledger.parts import Part, PartDigests
from stepledger.values import NO_VALUES, why_unkept

CAMERA, PLACE, TILT, GEAR = ("camera",), ("pose", 0), ("pose", 1), ("gear",)
SPACE = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (4, 5, 3), np.uint8),
        "pose": spaces.Tuple([spaces.Box(-9, 9, (3,), np.float32), spaces.Box(-9, 9, (2, 2), np.float32)]),
        "gear": spaces.Discrete(1 << 40),
        "mode": spaces.Discrete(2),
    }
)

#: What is made of a leaf: of the batch of this call, and of those of the calls before, the last one first.
Made = Callable[[Any, list[Any]], Any]


def before(k: int) -> Made:
    return lambda now, earlier: earlier[k - 1][0]


def other(now: Any, earlier: list[Any]) -> Any:
    return now[1]


def zero(now: Any, earlier: list[Any]) -> Any:
    return now[0] * 0


def leaf_of(batch: Any, path: tuple[Any, ...]) -> Any:
    return functools.reduce(lambda part, key: part[key], path, batch)


class Leaves(VectorWrapper):
    """Changes leaves of the observations, or of the actions, of the first environment in some calls."""

    def __init__(self, env: VectorEnv, what: str, made: Mapping[tuple[Any, ...], Made], calls: tuple[int, ...]) -> None:
        super().__init__(env)
        self.what, self.made, self.calls, self.call = what, made, calls, 0
        self.batches: list[Any] = []

    def reset(self, **options: Any) -> Any:
        obs, infos = self.env.reset(**options)
        if self.what == "obs":
            self.batches = [copy.deepcopy(obs)]
        return obs, infos

    def step(self, actions: Any) -> Any:
        self.call += 1
        if self.what == "action":
            actions = self._changed(actions)
        obs, *rest = self.env.step(actions)
        return (self._changed(obs) if self.what == "obs" else obs), *rest

    def _changed(self, batch: Any) -> Any:
        given = copy.deepcopy(batch)
        if self.call in self.calls:
            batch = copy.deepcopy(batch)
            for path, made in self.made.items():
                leaf = leaf_of(batch, path)
                leaf[0] = made(leaf_of(given, path), [leaf_of(one, path) for one in self.batches])
        self.batches.insert(0, given)
        return batch


def changed_leaves(
    directory: Path,
    what: str,
    made: Mapping[tuple[Any, ...], Made],
    *,
    calls: tuple[int, ...] = (7,),
    steps: int = 30,
    mode: str = "NextStep",
    lengths: tuple[int, ...] = (99,),
    keep_values: bool | int = True,
) -> Comparison:
    given = {"observation_space": SPACE} if what == "obs" else {"action_space": SPACE}
    makers = [
        lambda i=i: LedgerEnv(Walk(lengths, i, **copy.deepcopy(given)), directory, i, keep_values=keep_values)
        for i in range(3)  # of which two may not have the same by chance
    ]
    envs = Leaves(vector_of(makers, mode=mode), what, made, calls)
    venv = LedgerVectorEnv(envs, directory / "trainer", keep_values=keep_values)
    drive(venv, steps)
    venv.close()
    return compare(directory)


def said(comparison: Comparison) -> list[list[tuple[str, str]]]:
    return [[(one.code, one.text) for one in difference.explanations] for difference in comparison.differences]


PLACES: dict[str, tuple[Made, str, str]] = {
    "the step before": (before(1), "SL102", "is that of the step before (step 6)"),
    "five steps before": (before(5), "SL102", "is that of 5 steps before (step 2)"),
    "another env": (other, "SL103", "is that of env 1 in the same call"),
    "zero": (zero, "SL101", "is zero"),
}
NAMES = {CAMERA: '["camera"]', PLACE: '["pose"][0]', TILT: '["pose"][1]', GEAR: '["gear"]'}


@pytest.mark.parametrize(("what", "path"), [*(("obs", path) for path in NAMES), ("action", PLACE), ("action", GEAR)])
@pytest.mark.parametrize("place", PLACES)
def test_a_leaf_that_comes_from_another_place_is_named_with_it(tmp_path: Path, place: str, path: tuple[Any, ...], what: str) -> None:
    made, code, where = PLACES[place]
    comparison = changed_leaves(tmp_path, what, {path: made})
    assert said(comparison)[0][0] == (code, f"the {what}{NAMES[path]} {where}")
    assert len(comparison.differences) == 1
    assert f"1 x {code} {what} " in str(comparison)
    assert said(compare_in_parts(tmp_path)) == said(comparison)


def test_leaves_that_come_from_one_place_are_told_of_together(tmp_path: Path) -> None:
    comparison = changed_leaves(tmp_path / "two", "obs", {CAMERA: before(2), TILT: before(2)})
    assert said(comparison) == [[("SL102", 'the obs in ["camera"] and ["pose"][1] is that of 2 steps before (step 5)')]]
    # The leaf of two values is among them where it differs.
    comparison = changed_leaves(tmp_path / "four", "obs", {path: before(3) for path in (CAMERA, GEAR, PLACE, TILT)})
    assert said(comparison) == [[("SL102", 'the obs in ["camera"], ["gear"], ["pose"][0] and 1 more is that of 3 steps before (step 4)')]]


def test_leaves_that_differ_for_several_reasons_are_told_of_one_by_one(tmp_path: Path) -> None:
    half: Made = lambda now, earlier: now[0] * np.float32(0.37)  # noqa: E731
    comparison = changed_leaves(tmp_path, "obs", {CAMERA: before(1), GEAR: other, PLACE: half, TILT: half})
    (found,) = said(comparison)
    assert set(found) == {
        ("SL102", 'the obs["camera"] is that of the step before (step 6)'),
        ("SL103", 'the obs["gear"] is that of env 1 in the same call'),
        ("SL107", 'the obs in ["pose"][0] and ["pose"][1] is scaled by 0.37'),
    }


def test_a_leaf_whose_cause_is_known_is_told_of_beside_one_whose_cause_is_not(tmp_path: Path) -> None:
    noise: Made = lambda now, earlier: now[0] + np.float32([0.1, -0.2, 0.05])  # noqa: E731
    comparison = changed_leaves(tmp_path, "obs", {CAMERA: before(1), PLACE: noise})
    assert said(comparison) == [[("SL102", 'the obs["camera"] is that of the step before (step 6)')]]


def test_a_leaf_of_few_values_only_may_be_from_another_place(tmp_path: Path) -> None:
    flipped: Made = lambda now, earlier: 1 - now[0]  # noqa: E731
    comparison = changed_leaves(tmp_path, "obs", {("mode",): flipped}, calls=(20, 23, 27, 31, 36, 40), steps=60)
    texts = [text for found in said(comparison) for _, text in found]
    assert len(comparison.differences) == 6
    assert texts
    assert all(text.startswith('the obs["mode"] ') and " may be " in text for text in texts)
    assert " perhaps " in str(comparison)
    assert "clipped" not in str(comparison)


@pytest.mark.parametrize(("lengths", "keep_values"), [((99,), True), ((5, 9, 2), 500)])
def test_where_a_leaf_comes_from_is_found_however_much_is_compared_at_a_time(
    tmp_path: Path, lengths: tuple[int, ...], keep_values: bool | int
) -> None:
    comparison = changed_leaves(
        tmp_path,
        "obs",
        {CAMERA: before(4), PLACE: other},
        calls=tuple(range(6, 150, 5)),
        steps=150,
        lengths=lengths,
        keep_values=keep_values,
    )
    assert len(comparison.differences) > 20
    assert all({"SL102", "SL103"} <= {code for code, _ in found} for found in said(comparison))
    for seed in range(2):
        in_parts = said(compare_in_parts(tmp_path, seed, rounds=20))
        # What another environment had in the same call may not have come, and what was not kept yet is not judged.
        assert len(in_parts) == len(comparison.differences)
        assert all(set(found) <= set(whole) for found, whole in zip(in_parts, said(comparison)))
        assert sum(found == whole for found, whole in zip(in_parts, said(comparison))) > 0.8 * len(in_parts)


def test_parts_of_a_window_and_of_what_came_before_it_are_those_of_the_whole_stream() -> None:
    rng, part = np.random.default_rng(0), Part("obs", 1)
    data = {"kind": np.ones(150, np.uint8), "h_obs": rng.integers(5, 1 << 60, 150).astype(np.uint64)}
    stream = Stream(StreamKey(), data, {f"values_obs_{leaf}": rng.integers(0, 9, (150, 2)) for leaf in range(2)})
    meta = {"keep_values": True, "leaves": {"obs": [["a"], ["b"]], "act": [[]]}}
    whole = PartDigests(stream, meta, {})
    digests = np.array([whole.at(part, i) for i in range(150)], np.uint64)
    for cut in (0, 1, 3, 63, 64, 65, 100, 150):
        window = PartDigests(stream.after(cut), meta, PartDigests(stream, meta, {}).remembered(cut))
        for start, length in itertools.product(range(-70, 160 - cut, 7), range(-2, 160, 11)):
            first, stop = max(start, -min(cut, AROUND)), min(start + length, 150 - cut)
            np.testing.assert_array_equal(window.slice(part, start, start + length), digests[first + cut : max(first, stop) + cut])
        assert window.at(part, -cut - 1) is window.at(part, 150 - cut) is None


class OneBuffer(Walk):
    """Writes one leaf of each observation into an array that it hands out again and again, and makes the others anew."""

    def _observation(self) -> Any:
        found = super()._observation()
        if not hasattr(self, "buffer"):
            self.buffer = np.zeros_like(found["pose"][0])
        self.buffer[:] = found["pose"][0]
        return {**found, "pose": (self.buffer, found["pose"][1])}


class FinalLeaf(VectorWrapper):
    """With same-step autoreset: in the final observation of the first environment a leaf is that of the observation after it."""

    def __init__(self, env: VectorEnv, path: tuple[Any, ...]) -> None:
        super().__init__(env)
        self.path = path

    def step(self, actions: Any) -> Any:
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        if (terminated | truncated)[0]:
            final = copy.deepcopy(infos["final_obs"][0])
            holder, key = leaf_of(final, self.path[:-1]), self.path[-1]
            value = np.copy(leaf_of(obs, self.path)[0])
            if isinstance(holder, tuple):
                final[self.path[0]] = tuple(value if at == key else part for at, part in enumerate(holder))
            else:
                holder[key] = value
            infos["final_obs"][0] = final
        return obs, rewards, terminated, truncated, infos


@pytest.mark.skipif("SameStep" not in MODES, reason="this Gymnasium has next-step autoreset only")
@pytest.mark.parametrize("path", [CAMERA, PLACE], ids=NAMES.get)
def test_a_leaf_of_the_next_episodes_first_observation_in_a_final_one_is_named(tmp_path: Path, path: tuple[Any, ...]) -> None:
    makers = [lambda i=i: LedgerEnv(Walk((5, 3), i, SPACE), tmp_path, i, keep_values=True) for i in range(2)]
    venv = LedgerVectorEnv(FinalLeaf(vector_of(makers, mode="SameStep"), path), tmp_path / "trainer", keep_values=True)
    drive(venv, 20)
    venv.close()
    comparison = compare(tmp_path)
    assert len(comparison.differences) == 4
    assert {found[0] for found in said(comparison)} == {("SL114", f"the final obs{NAMES[path]} is the first one of the next episode")}
    assert said(compare_in_parts(tmp_path)) == said(comparison)


@pytest.mark.skipif("SameStep" not in MODES, reason="this Gymnasium has next-step autoreset only")
def test_an_env_that_fills_one_leaf_of_its_observation_again_is_named(tmp_path: Path) -> None:
    makers = [lambda: LedgerEnv(OneBuffer((5, 3), 0, SPACE), tmp_path, 0, keep_values=True)]
    venv = LedgerVectorEnv(vector_of(makers, mode="SameStep"), tmp_path / "trainer", keep_values=True)
    drive(venv, 20)
    venv.close()
    comparison = compare(tmp_path)
    if comparison.equal:
        pytest.skip("this Gymnasium copies final observations in depth")
    assert {found[0] for found in said(comparison)} == {("SL114", 'the final obs["pose"][0] is the first one of the next episode')}


# What can't be


class Noisy(VectorWrapper):
    """Sends other actions than it was told, in some calls."""

    def __init__(self, env: VectorEnv, every: int) -> None:
        super().__init__(env)
        self.every, self.call, self.rng = every, 0, np.random.default_rng(0)

    def step(self, actions: Any) -> Any:
        self.call += 1
        if self.call % self.every == 0:
            actions = actions + self.rng.uniform(0.001, 0.01, actions.shape).astype(np.float32)
        return self.env.step(actions)


@pytest.mark.parametrize("mode", MODES)
def test_an_action_is_that_of_a_reset_only_where_actions_are_sent_for_resets(tmp_path: Path, mode: str) -> None:
    makers = [lambda i=i: LedgerEnv(Walk((3 + i, 2), i, action_space=ACTIONS), tmp_path, i) for i in range(3)]
    venv = LedgerVectorEnv(Noisy(vector_of(makers, mode=mode), 2), tmp_path / "trainer")
    drive(venv, 60)
    venv.close()
    texts = [text for found in said(compare(tmp_path)) for _, text in found]
    assert any("was sent for the reset" in text for text in texts) == (mode == "NextStep")
    assert bool(texts) == (mode == "NextStep")


# Values that were not kept

WANTED = "record {} with keep_values=True"
KEPT: dict[str, tuple[bool | int, bool | int, str]] = {
    "none": (False, False, WANTED.format("both sides")),
    "of the environments alone": (True, False, WANTED.format("the tap 'vector' too")),
    "of the vector env alone": (False, True, WANTED.format("the tap 'env' too")),
    "of the last events": (20, 20, "values of the last 20 events alone were there"),
    "of the last events of one": (True, 20, "values of the last 20 events alone were there"),
    "all": (True, True, ""),
}


def noise_of(
    directory: Path, keep: tuple[bool | int, bool | int], change: Callable[[Any], Any], calls: range = range(5, 61, 5)
) -> Comparison:
    class Changed(VectorWrapper):
        call = 0

        def step(self, actions: Any) -> Any:
            self.call += 1
            obs, *rest = self.env.step(actions)
            return (change(obs) if self.call in calls else obs), *rest

    makers = [lambda i=i: LedgerEnv(Walk((9, 14), i), directory, i, keep_values=keep[0]) for i in range(2)]
    venv = LedgerVectorEnv(Changed(vector_of(makers)), directory / "trainer", keep_values=keep[1])
    drive(venv, 60)
    venv.close()
    return compare(directory)


def half_rounded(obs: Any) -> Any:
    return obs.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("kept", KEPT)
def test_where_an_explanation_would_take_values_it_is_said_once_why_there_are_none(tmp_path: Path, kept: str) -> None:
    *keep, why = KEPT[kept]
    comparison = noise_of(tmp_path, (keep[0], keep[1]), half_rounded)
    (hop,) = comparison.hops
    assert len(comparison.differences) > 10
    assert [note for note in hop.notes if why and why in note] == list(hop.notes)
    assert len(hop.notes) == bool(why)
    assert str(comparison).count("can't be told") == bool(why)
    explained = [found for found in said(comparison) if found]
    assert all(found[0][0] == "SL104" for found in explained)
    assert bool(explained) == (keep[0] and keep[1] and True)
    assert (len(explained) < len(comparison.differences)) == bool(why)
    assert compare_in_parts(tmp_path).hops[0].notes == hop.notes


@pytest.mark.parametrize("keep_values", [False, 2])
def test_where_digests_tell_what_it_is_no_values_are_asked_for(tmp_path: Path, keep_values: bool | int) -> None:
    comparison = noise_of(tmp_path, (keep_values, keep_values), np.zeros_like)
    assert {found[0][0] for found in said(comparison)} == {"SL101"}
    assert comparison.hops[0].notes == ()


def test_of_a_tap_that_never_keeps_values_none_are_asked_for() -> None:
    def meta(tap: str, keep_values: bool, **more: Any) -> dict[str, Any]:
        return {"tap": tap, "keep_values": keep_values, **more}

    assert why_unkept(meta("vector", True), meta("episode", False)) == NO_VALUES.format("episode")
    assert "LedgerCallback" in why_unkept(meta("env", True), meta("vector", False, handed_space={}))
    assert WANTED.format("the tap 'env' too") in why_unkept(meta("env", False), meta("vector", True))


@pytest.mark.sb3
def test_with_sb3s_callback_it_is_said_that_it_keeps_no_values(tmp_path: Path) -> None:
    sb3, vec_env = pytest.importorskip("stable_baselines3"), pytest.importorskip("stable_baselines3.common.vec_env")
    from stepledger.sb3 import LedgerCallback

    class Rounded(gym.ObservationWrapper):
        def observation(self, observation: Any) -> Any:
            return half_rounded(observation)

    space = spaces.Box(-9, 9, (3,), np.float32)
    venv = vec_env.DummyVecEnv([lambda: Rounded(LedgerEnv(Walk((9,), 0, space), tmp_path, 0, keep_values=True))])
    callback = LedgerCallback(tmp_path)
    sb3.PPO("MlpPolicy", venv, n_steps=32, batch_size=32, n_epochs=1, device="cpu", seed=0).learn(32, callback=callback)
    assert any("Stable-Baselines3's LedgerCallback" in note for note in callback.comparison.hops[0].notes)
    venv.close()


def test_what_is_learned_from_has_no_values(tmp_path: Path) -> None:
    comparison = rollout(tmp_path / "noise", put(1, 0, lambda rows: rows[0][1][0] + np.float32(0.01)))
    assert comparison.hops[0].notes == (NO_VALUES.format("learner"),)
    assert rollout(tmp_path / "zero", put(1, 0, lambda rows: rows[0][1][0] * 0)).hops[0].notes == ()
