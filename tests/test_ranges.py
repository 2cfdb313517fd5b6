"""Faults that last are one difference each: whichever fields are late or exchanged, wherever that begins, over ends and resets."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from common import MODES, Walk, compare_in_parts, drive, vector_of
from gymnasium import spaces
from gymnasium.vector import VectorEnv, VectorWrapper

from stepledger import Comparison, Difference, LedgerEnv, LedgerVectorEnv, compare

ACTIONS: dict[str, spaces.Space] = {
    "two": spaces.Discrete(2),
    "many": spaces.Discrete(1000),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "dict": spaces.Dict({"throttle": spaces.Box(-1, 1, (1,), np.float32), "gear": spaces.Discrete(3)}),
}
#: Which fields are another reply's.
FIELDS: dict[str, tuple[str, ...]] = {
    "reply": ("obs", "reward", "flags"),
    "ends right": ("obs", "reward"),
    "obs": ("obs",),
    "reward": ("reward",),
}
CODES = {"reply": ("SL307", "SL308"), "ends right": ("SL307", "SL308"), "obs": ("SL102", "SL103"), "reward": ("SL102", "SL103")}
LENGTHS = [(13, 17, 4, 1, 9), (11, 6, 2, 15)]


def of_fields(fields: Sequence[str], wrong: Sequence[Any], right: Sequence[Any]) -> tuple[Any, ...]:
    which = ("obs", "reward", "flags", "flags")
    return tuple(one if name in fields else other for name, one, other in zip(which, wrong, right))


class Queue(gym.Wrapper):
    """Answers with the reply before, from one request on: a queue in which one reply was left.

    Args:
        env: What gives the replies.
        fields: Those that come from the queue.
        resets: ``"kept"``: they are answered with their own observation, and the queue is as it was; ``"emptied"``: likewise, and theirs is
            what the step behind them is answered with; ``"passed"``: likewise, and that step is answered right; ``"shifted"``: they go
            through the queue too.
        since: Number of that request; resets count.
        late: How many replies are in the queue.
        until: Number of the request from which on all is well again.
    """

    def __init__(self, env: gym.Env, fields: Sequence[str], resets: str, since: int, late: int = 1, until: int = 1 << 30) -> None:
        super().__init__(env)
        self._fields, self._resets, self._since, self._late, self._until = fields, resets, since, late, until
        self._requests = 0
        self._queue: list[Any] = []

    def _due(self) -> bool:
        self._requests += 1
        return self._since < self._requests <= self._until

    def reset(self, **kwargs: Any) -> Any:
        obs, info = self.env.reset(**kwargs)
        due, reply = self._due(), (obs, 0.0, False, False)
        if self._resets == "shifted":
            return self._through(reply, due)[0], info
        if self._resets == "emptied":
            self._queue = [reply] * self._late
        if self._resets == "passed":
            self._queue = []
        return obs, info

    def step(self, action: Any) -> Any:
        *reply, info = self.env.step(action)
        return *self._through(tuple(reply), self._due()), info

    def _through(self, reply: tuple[Any, ...], due: bool) -> tuple[Any, ...]:
        self._queue.append(copy.deepcopy(reply))
        if len(self._queue) <= self._late:
            return reply
        late = self._queue.pop(0)
        return of_fields(self._fields, late, reply) if due else reply


def queued(directory: Path, i: int, action: str, options: dict[str, Any], n: int = 2) -> gym.Env:
    env = LedgerEnv(Walk(LENGTHS[i % 2], i, action_space=copy.deepcopy(ACTIONS[action])), directory, i)
    return Queue(env, **options) if i == 1 else env


def run(directory: Path, makers: list[Any], kind: str, mode: str, outside: Any = None, steps: int = 150) -> Comparison:
    venv = vector_of(makers, kind, mode)
    venv = LedgerVectorEnv(outside(venv) if outside else venv, directory / "trainer")
    drive(venv, steps)
    venv.close()
    return compare(directory)


def run_queued(
    directory: Path, action: str = "box", kind: str = "sync", mode: str = MODES[0], fields: str = "reply", **options: Any
) -> Comparison:
    options = {"resets": "kept", "since": 20, "fields": FIELDS[fields], **options}
    return run(directory, [functools.partial(queued, directory, i, action, options) for i in range(2)], kind, mode)


def assert_one(comparison: Comparison, code: str, fields: str, envs: int = 1) -> Difference:
    """One difference, which says how long it lasts, also where it is several environments'."""
    (hop,) = comparison.hops
    assert hop.differences == len(comparison.differences) == 1, str(comparison)
    (difference,) = comparison.differences
    assert [one.code for one in difference.explanations][:1] == [code]
    assert f"({difference.events:,} events)" in difference.explanations[0].text
    assert hop.lost == hop.extra == 0
    differing = {name for name, one in hop.fields.items() if one.differences}
    assert set(difference.fields) == differing if envs == 1 else set(difference.fields) <= differing
    most = max(one.differences for one in hop.fields.values()) / envs
    assert 0.9 * most <= difference.events <= (1.5 if fields == "reward" else 1.3) * most
    return difference


@pytest.mark.parametrize("since", [14, *(pytest.param(at, marks=pytest.mark.long) for at in (1, 20))])
@pytest.mark.parametrize("resets", ["kept", "emptied", "passed", "shifted"])
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("mode", MODES)
def test_replies_that_are_late_are_one_difference_over_ends_and_resets(
    tmp_path: Path, mode: str, fields: str, resets: str, since: int
) -> None:
    """Request 14 is the reset of the second environment."""
    action = list(ACTIONS)[(since + len(resets)) % 4]
    comparison = run_queued(tmp_path, action, mode=mode, fields=fields, resets=resets, since=since)
    difference = assert_one(comparison, CODES[fields][0], fields)
    assert "the one before" in difference.explanations[0].text
    for seed in range(2):
        assert compare_in_parts(tmp_path, seed) == comparison


@pytest.mark.parametrize("resets", ["kept", "shifted"])
@pytest.mark.parametrize("fields", ["reply", "obs"])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_that_is_so_whatever_the_actions_are(tmp_path: Path, mode: str, action: str, fields: str, resets: str) -> None:
    assert_one(run_queued(tmp_path, action, mode=mode, fields=fields, resets=resets), CODES[fields][0], fields)


@pytest.mark.parametrize("late", [1, 2, 3])
@pytest.mark.parametrize("fields", FIELDS)
def test_replies_of_other_processes_that_are_late_by_several_are_one_difference(tmp_path: Path, fields: str, late: int) -> None:
    assert_one(run_queued(tmp_path, kind="async", fields=fields, resets="shifted", late=late), CODES[fields][0], fields)


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("until", [40, 55, 56, 57])
def test_a_range_ends_where_its_fault_does(tmp_path: Path, fields: str, until: int) -> None:
    """Request 55 is a reset of the second environment, and 56 the first step behind it."""
    comparison = run_queued(tmp_path, fields=fields, until=until)
    difference = assert_one(comparison, CODES[fields][0], fields)
    assert difference.events <= until - 20
    for seed in range(2):
        assert compare_in_parts(tmp_path, seed) == comparison


class Replies(VectorWrapper):
    """Hands on other replies from one call on: those of the call before, or of other environments.

    Args:
        env: What gives them.
        fields: Those that are others'.
        order: For each environment, whose they are; none: they are those of the call before.
        infos: Whether infos are others' too.
        since: The first of these calls.
        until: The first that is well again.
        resets: Whether resets by hand are others' too.
    """

    def __init__(
        self,
        env: VectorEnv,
        fields: Sequence[str],
        order: Sequence[int] | None,
        infos: bool = True,
        since: int = 20,
        until: int = 1 << 30,
        resets: bool = False,
    ) -> None:
        super().__init__(env)
        self._fields, self._order, self._infos, self._since, self._until = fields, order, infos, since, until
        self._resets, self._calls, self._last = resets, 0, None

    def reset(self, **kwargs: Any) -> Any:
        which = np.array((kwargs.get("options") or {}).get("reset_mask", np.ones(self.num_envs, bool)))
        obs, info = self.env.reset(**kwargs)
        obs = copy.deepcopy(obs)
        last = self._last or (obs, *np.zeros((3, self.num_envs)), info)
        now = obs, np.zeros(self.num_envs), *np.zeros((2, self.num_envs), bool)
        self._last = *(np.where(which.reshape(-1, *[1] * (one.ndim - 1)), one, other) for one, other in zip(now, last)), info
        if self._resets and self._since <= self._calls < self._until:
            obs = obs[list(self._order)]
        return obs, info

    def step(self, actions: Any) -> Any:
        result = copy.deepcopy(self.env.step(actions))
        self._calls += 1
        last, self._last = self._last, result
        if not self._since <= self._calls < self._until:
            return result
        wrong = last if self._order is None else tuple(self._permuted(part) for part in result)
        return *of_fields(self._fields, wrong[:4], result[:4]), wrong[4] if self._infos else result[4]

    def _permuted(self, part: Any) -> Any:
        if isinstance(part, dict):
            return {name: self._permuted(of_name) for name, of_name in part.items()}
        return part[list(self._order)] if isinstance(part, np.ndarray) else part


def run_replies(
    directory: Path, fields: str, order: Sequence[int] | None, mode: str = MODES[0], kind: str = "sync", **options: Any
) -> Comparison:
    lengths = [(13, 17, 4, 1, 9), (11, 6, 2, 15), (8, 3, 19)]
    makers = [functools.partial(LedgerEnv, Walk(lengths[i], i, action_space=ACTIONS["box"]), directory, i) for i in range(3)]
    return run(directory, makers, kind, mode, lambda venv: Replies(venv, FIELDS[fields], order, **options))


ORDERS = {"two": (1, 0, 2), "three": (1, 2, 0), "three, the other way": (2, 0, 1)}


@pytest.mark.parametrize("since", [14, *(pytest.param(at, marks=pytest.mark.long) for at in (1, 22))])
@pytest.mark.parametrize("infos", [True, False])
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", MODES)
def test_replies_that_are_exchanged_are_one_difference(tmp_path: Path, mode: str, order: str, fields: str, infos: bool, since: int) -> None:
    if (infos and (fields == "reward" or mode == "NextStep")) or (mode == "Disabled" and fields == "reply"):
        pytest.skip("infos say nothing of it, or the vector env refuses to step an environment that has ended")
    comparison = run_replies(tmp_path, fields, ORDERS[order], mode, infos=infos, since=since)
    difference = assert_one(comparison, CODES[fields][1], fields, 2 if order == "two" else 3)
    envs = "env 0 and env 1" if order == "two" else "env 0, env 1 and env 2"
    what = {"obs": "obs", "reward": "reward"}.get(fields, "replies")
    assert f"{envs} have each other's {what}" in difference.explanations[0].text
    assert comparison.hops[0].streams_different == (2 if order == "two" else 3)
    for seed in range(2):
        parts = compare_in_parts(tmp_path, seed)
        if order == "two":
            assert parts == comparison
        else:  # it is told at the stream in which it was seen first
            assert replace(parts.hops[0], different_streams=()) == replace(comparison.hops[0], different_streams=())


@pytest.mark.parametrize("since", [14, *(pytest.param(at, marks=pytest.mark.long) for at in (1, 20))])
@pytest.mark.parametrize("infos", [True, False])
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("mode", MODES)
def test_calls_that_are_answered_late_are_one_difference_of_each_environment(
    tmp_path: Path, mode: str, fields: str, infos: bool, since: int
) -> None:
    if (infos and (fields == "reward" or mode == "NextStep")) or (mode == "Disabled" and fields == "reply"):
        pytest.skip("infos say nothing of it, or the vector env refuses to step an environment that has ended")
    comparison = run_replies(tmp_path, fields, None, mode, infos=infos, since=since)
    assert comparison.hops[0].differences == len(comparison.differences) == 3
    assert {one.explanations[0].code for one in comparison.differences} == {CODES[fields][0]}
    for seed in range(2):
        assert compare_in_parts(tmp_path, seed) == comparison


# What is no range


class Here(gym.Wrapper):
    """Changes single replies: ``change(the reply before, this one)`` at requests of these numbers."""

    def __init__(self, env: gym.Env, requests: set[int], change: Callable[[Any, Any], Any]) -> None:
        super().__init__(env)
        self._at, self._change, self._requests, self._last = requests, change, 0, None
        self.made = 0

    def reset(self, **kwargs: Any) -> Any:
        obs, info = self.env.reset(**kwargs)
        self._last, self._requests = (obs, 0.0), self._requests + 1
        return obs, info

    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        last, self._last, self._requests = self._last, (obs, reward), self._requests + 1
        if self._requests in self._at:
            obs, reward = self._change(last, (obs, reward))
            self.made += 1
        return obs, reward, *rest


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "obs stale": lambda last, now: (last[0], now[1]),
    "reward stale": lambda last, now: (now[0], last[1]),
    "reply stale": lambda last, now: last,
    "obs zero": lambda last, now: (now[0] * 0, now[1]),
    "reward zero": lambda last, now: (now[0], now[1] * 0),
}


class Turns(Walk):
    """Few observations and rewards take turns, so that any is the one before by chance."""

    def _observation(self) -> Any:
        return np.full(self.observation_space.shape, self._rng.integers(3), np.float32)

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, float(self._rng.integers(2)), *rest


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env", [Walk, Turns])
@pytest.mark.parametrize("what", CHANGES)
def test_single_faults_are_no_range(tmp_path: Path, what: str, env: type[Walk], mode: str) -> None:
    """At one request in ten, of which sometimes two follow each other."""
    requests = set(np.flatnonzero(np.random.default_rng(0).random(600) < 0.1).tolist())
    assert any(at + 1 in requests for at in requests)

    def maker(i: int) -> gym.Env:
        one: gym.Env = LedgerEnv(env(LENGTHS[i], i, action_space=copy.deepcopy(ACTIONS["box"])), tmp_path, i)
        return Here(one, requests, CHANGES[what]) if i else one

    comparison = run(tmp_path, [functools.partial(maker, i) for i in range(2)], "sync", mode, steps=400)
    assert len(comparison.differences) > 10
    assert {one.events for one in comparison.differences} == {1}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("where", ["inside", "behind"])
def test_single_faults_inside_and_behind_a_range_are_counted(tmp_path: Path, where: str, fields: str, mode: str) -> None:
    until, requests = (1 << 30, {53, 70, 71, 86}) if where == "inside" else (50, {80, 81, 100})
    changed: list[Here] = []

    def maker(i: int) -> gym.Env:
        env = queued(tmp_path, i, "box", {"fields": FIELDS[fields], "resets": "kept", "since": 20, "until": until})
        if i == 0:
            return env
        changed.append(Here(env, requests, lambda last, now: (now[0] * 2, now[1] * 3)))
        return changed[-1]

    comparison = run(tmp_path, [functools.partial(maker, i) for i in range(2)], "sync", mode)
    ranges = [one for one in comparison.differences if one.events > 1]
    single = [one for one in comparison.differences if one.events == 1]
    assert len(single) == changed[-1].made > 1
    assert len(ranges) == (
        1 if where == "behind" else 1 + len(single) - sum(one.step == other.step + 1 for one, other in zip(single[1:], single))
    )
    assert {one.explanations[0].code for one in ranges} == {CODES[fields][0]}
    assert comparison.hops[0].differences == len(comparison.differences)
    for seed in range(2):
        assert compare_in_parts(tmp_path, seed) == comparison
