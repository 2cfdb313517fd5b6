"""The env tap: what it records is what the environment gave, and the environment does not notice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from common import VECTORS, Walk, assert_equal, drive, drive_one, vector_of, walk
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv

from stepledger import LedgerEnv, LedgerError, LedgerVectorEnv, compare, read
from stepledger.digest import SpaceDigest


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and np.array_equal(one, other)


@pytest.mark.parametrize("options", [{}, {"keep_values": 20}, {"keep_values": True, "digest": "blake2b", "reward_dtype": np.float64}])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "Blackjack-v1"])
def test_recording_changes_nothing(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    plain = drive_one(gym.make(name), 300, seed=3)
    recorded = drive_one(LedgerEnv(gym.make(name), tmp_path, 0, **options), 300, seed=3)
    assert len(plain) == len(recorded)
    assert all(map(same, plain, recorded))


def test_results_are_handed_on_as_they_are_not_as_copies(tmp_path: Path) -> None:
    class Given(Walk):
        def step(self, action: Any) -> Any:
            self.action, self.result = action, super().step(action)
            return self.result

        def reset(self, **options: Any) -> Any:
            self.result = super().reset(**options)
            return self.result

    inner = Given(action_space=spaces.Box(-1, 1, (2,)))
    env = LedgerEnv(inner, tmp_path, 0, keep_values=True)
    assert env.reset(seed=1, options={"a": 1}) is inner.result
    action = np.array([0.5, -0.5])  # float64 for a float32 space: the environment sees what was sent
    assert env.step(action) is inner.result
    assert inner.action is action


def test_seeds_and_options_reach_the_environment_and_nothing_else_does(tmp_path: Path) -> None:
    class Asked(Walk):
        calls: list[Any]

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.calls = [*getattr(self, "calls", []), (seed, options)]
            return super().reset(seed=seed, options=options)

    env = LedgerEnv(Asked(), tmp_path, 0)
    options = {"level": 3}
    env.reset()
    env.reset(seed=7, options=options)
    assert env.unwrapped.calls == [(None, None), (7, options)]
    assert env.unwrapped.calls[1][1] is options
    before = env.unwrapped.np_random.bit_generator.state
    env.flush()
    assert env.unwrapped.np_random.bit_generator.state == before


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the checker, about the environment itself
def test_it_is_an_environment_like_any_other(tmp_path: Path) -> None:
    env = LedgerEnv(gym.make("CartPole-v1"), tmp_path, 0)
    check_env(env, skip_render_check=True, skip_close_check=True)
    assert env.spec is not None
    assert env.spec.id == "CartPole-v1"
    assert env.observation_space == env.unwrapped.observation_space
    assert env.get_wrapper_attr("gravity") == env.unwrapped.gravity
    env.set_wrapper_attr("gravity", 1.0)
    assert env.unwrapped.gravity == 1.0
    assert env.has_wrapper_attr("ledger_place")
    env.close()


def test_the_action_is_digested_before_the_environment_sees_it(tmp_path: Path) -> None:
    class Clips(Walk):
        def step(self, action: Any) -> Any:
            action.clip(-0.1, 0.1, out=action)  # an environment that changes its argument
            return super().step(action)

    space = spaces.Box(-1, 1, (2,))
    env = LedgerEnv(Clips(action_space=space), tmp_path, 0, keep_values=True)
    env.reset()
    sent = np.array([0.75, -0.5], np.float32)
    env.step(sent.copy())
    env.close()
    stream = read(tmp_path / "env-0.npz").streams[0]
    assert stream.columns["h_act"][1] == int.from_bytes(SpaceDigest(space).one(sent), "big")
    np.testing.assert_array_equal(stream.values["values_act_0"][1], sent)


@pytest.mark.parametrize("keep_values", [False, True])
def test_an_environment_that_reuses_its_buffer_is_recorded_as_it_was_then(tmp_path: Path, keep_values: bool) -> None:
    class Reuses(Walk):
        def __init__(self) -> None:
            super().__init__(lengths=(100,))
            self.buffer = np.zeros(3, np.float32)

        def _observation(self) -> Any:
            self.buffer[:] = super()._observation()
            return self.buffer

    env = LedgerEnv(Reuses(), tmp_path, 0, keep_values=keep_values)
    digest = SpaceDigest(env.observation_space)
    seen = [env.reset()[0].copy()] + [env.step(0)[0].copy() for _ in range(20)]
    env.close()
    stream = read(tmp_path / "env-0.npz").streams[0]
    assert stream.columns["h_obs"].tolist() == [int.from_bytes(digest.one(one), "big") for one in seen]
    if keep_values:
        np.testing.assert_array_equal(stream.values["values_obs_0"], seen)


def test_what_the_environment_gives_is_cast_to_its_space(tmp_path: Path) -> None:
    class Loose(Walk):
        """Declares float32, and gives what comes to hand."""

        def _observation(self) -> Any:
            value = super()._observation()
            return [value.astype(np.float64), value, value.tolist(), tuple(value), np.ma.masked_array(value)][self._left % 5]

    makers = [lambda i=i: LedgerEnv(Loose(lengths=(9,), seed=i), tmp_path, i) for i in range(2)]
    envs = LedgerVectorEnv(SyncVectorEnv(makers), tmp_path / "trainer.npz")
    drive(envs, 40)
    envs.close()
    assert_equal(compare(tmp_path))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(5, start=-2),
        spaces.MultiDiscrete([3, 4]),
        spaces.MultiBinary([2, 2]),
        spaces.Box(0, 255, (4, 4, 3), np.uint8),
        spaces.Box(-1, 1, (3,), np.float16),
        spaces.Box(-1, 1, (), np.float64),
        spaces.Box(0, 1, (3,), bool),
        spaces.Text(5),
        spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.MultiBinary(3)))}),
        spaces.Tuple((spaces.Text(3), spaces.Dict({"x": spaces.Discrete(2)}))),
        spaces.Sequence(spaces.Box(-1, 1, (2,))),
        spaces.Sequence(spaces.Discrete(4), stack=True),
        spaces.Graph(spaces.Box(-1, 1, (2,)), None),
        spaces.Graph(spaces.Box(-1, 1, (2,)), spaces.Discrete(3)),
        spaces.OneOf((spaces.Discrete(3), spaces.Box(-1, 1, (2,)))),
    ],
    ids=str,
)
@pytest.mark.parametrize("keep_values", [False, True])
def test_every_space_crosses_a_vector_env_without_a_false_alarm(tmp_path: Path, space: spaces.Space, keep_values: bool) -> None:
    # As observation and as action, both ways.
    makers = [
        lambda i=i: LedgerEnv(Walk((2, 3), i, observation_space=space, action_space=space), tmp_path, i, keep_values=keep_values)
        for i in range(2)
    ]
    envs = LedgerVectorEnv(SyncVectorEnv(makers), tmp_path / "trainer.npz", keep_values=keep_values)
    drive(envs, 12)
    envs.close()
    assert_equal(compare(tmp_path))


@pytest.mark.parametrize("index", [-1, 1.5, "0", (0,)])
def test_an_index_that_is_no_position_is_refused(tmp_path: Path, index: Any) -> None:
    with pytest.raises(LedgerError, match=r"is no position in a vector env: use 0, 1, 2, \.\.\."):
        LedgerEnv(Walk(), tmp_path, index)


def test_an_index_of_numpy_is_an_index(tmp_path: Path) -> None:
    env = walk(tmp_path, np.int64(3))
    env.reset()
    env.close()
    assert [path.name for path in tmp_path.iterdir()] == ["env-3.npz"]


@pytest.mark.parametrize("first", ["reset", "step"])
@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_without_a_position_it_says_how_to_give_one(tmp_path: Path, first: str, on_error: Any) -> None:
    env = LedgerEnv(Walk(), tmp_path, on_error=on_error)
    if first == "step":
        env.unwrapped.reset()
    warns = pytest.raises(LedgerError) if on_error == "raise" else pytest.warns(RuntimeWarning)
    with warns as caught:
        env.reset() if first == "reset" else env.step(0)
    message = str(caught.value) if on_error == "raise" else str(caught[0].message)
    assert re.search(r"does not know its position: pass index=, or put LedgerVectorEnv .* around", message)
    if on_error == "warn":
        assert message.startswith("stepledger: recording stopped, training goes on: ")
        assert len(caught) == 1
        assert len(drive_one(env, 30)) > 30  # the run goes on
    env.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("space", ["observation_space", "action_space"])
def test_a_space_that_cannot_be_recorded_is_refused_at_construction(tmp_path: Path, space: str) -> None:
    class Strange(spaces.Space):
        pass

    with pytest.raises(LedgerError, match="a space of type Strange can't be recorded: "):
        LedgerEnv(Walk(**{space: Strange()}), tmp_path, 0)


class Outer(gym.Wrapper):
    """A wrapper outside the ledger, which does nothing, so that whatever is outside counts as the boundary."""


@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("wrappers", [0, 1, 2])
def test_a_vector_ledger_tells_positions_also_through_wrappers(tmp_path: Path, kind: str, wrappers: int) -> None:
    def make(index: int) -> gym.Env:
        env: gym.Env = LedgerEnv(gym.wrappers.TimeLimit(Walk(seed=index), 100), tmp_path)
        for _ in range(wrappers):
            env = Outer(env)
        return env

    envs = LedgerVectorEnv(vector_of([lambda i=i: make(i) for i in range(3)], kind), tmp_path / "trainer.npz")
    drive(envs, 20)
    envs.close()
    comparison = compare(tmp_path)
    assert_equal(comparison)
    assert comparison.hops[0].streams == 3
    assert read(tmp_path / "env-2.npz").meta["run"] == read(tmp_path / "trainer.npz").meta["run"] != ""


def test_an_index_that_was_given_stays(tmp_path: Path) -> None:
    # The environments' order in the vector env is not that of their indices: what is compared is what the indices say.
    makers = [lambda i=i: walk(tmp_path, i) for i in (1, 0)]
    envs = LedgerVectorEnv(SyncVectorEnv(makers), tmp_path / "trainer.npz")
    drive(envs, 20)
    envs.close()
    comparison = compare(tmp_path)
    assert comparison.exit_status == 1
    assert comparison.hops[0].streams_different == 2


def test_ledgers_without_a_ledger_in_some_environments_are_not_told(tmp_path: Path) -> None:
    envs = LedgerVectorEnv(SyncVectorEnv([Walk, lambda: walk(tmp_path, 1)]), tmp_path / "trainer.npz")
    drive(envs, 20)
    envs.close()
    assert not hasattr(envs.envs[0], "ledger_place")  # nothing was set on a stranger
    comparison = compare(tmp_path)
    assert comparison.exit_status == 2
    assert comparison.equal
    (sentence,) = comparison.hops[0].unpaired
    assert "env 0 has " in sentence
    assert "no ledger at the tap 'env'" in sentence


def test_recording_can_be_stopped_while_the_environment_goes_on(tmp_path: Path) -> None:
    env = walk(tmp_path, 0)
    events = drive_one(env, 10)
    env.stop_recording()
    drive_one(env, 10)
    env.close()
    ledger = read(tmp_path / "env-0.npz")
    assert ledger.events == len(events)
    assert ledger.meta["closed"]


def test_the_environment_is_closed_even_if_its_ledger_can_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Closing(Walk):
        def close(self) -> None:
            closed.append(True)

    env = LedgerEnv(Closing(), tmp_path, 0, on_error="raise")
    env.reset()

    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stepledger.sealed._write_members", no_space)
    with pytest.raises(OSError, match="No space"):
        env.close()
    assert closed == [True]


def test_two_ledgers_around_one_environment_keep_to_themselves(tmp_path: Path) -> None:
    inner = walk(tmp_path / "inner", 0)
    outer = LedgerEnv(inner, tmp_path / "outer", 0)
    drive_one(outer, 20)
    outer.close()
    one, other = (read(tmp_path / name / "env-0.npz").streams[0].columns for name in ("inner", "outer"))
    for name, column in one.items():
        np.testing.assert_array_equal(column, other[name])


def test_an_environment_that_goes_on_after_close_is_said_to_and_its_ledger_has_no_end(tmp_path: Path) -> None:
    env = walk(tmp_path, 0)
    drive_one(env, 20)
    env.close()
    before = read(tmp_path / "env-0.npz")
    with pytest.warns(RuntimeWarning, match="was closed, and what comes now is not recorded") as warned:
        drive_one(env, 20)
    assert len(warned) == 1
    assert warned[0].filename == drive_one.__code__.co_filename  # whose line it is, not one of this package
    after = read(tmp_path / "env-0.npz")
    assert after.open_end
    assert not before.open_end
    assert after.events == before.events
    for name, column in before.streams[0].columns.items():
        np.testing.assert_array_equal(after.streams[0].columns[name], column)


def test_an_environment_that_goes_on_after_stop_recording_does_so_on_purpose(tmp_path: Path) -> None:
    env = walk(tmp_path, 0)
    drive_one(env, 20)
    env.stop_recording()
    drive_one(env, 20)
    env.close()
    assert not read(tmp_path / "env-0.npz").open_end


def test_an_environment_that_was_told_nothing_and_is_not_to_record_goes_on(tmp_path: Path) -> None:
    env = walk(tmp_path, None)
    env.stop_recording()
    drive_one(env, 20)
    env.close()
    assert not list(tmp_path.iterdir())


def test_an_environment_that_is_made_again_from_its_spec_has_no_ledger(tmp_path: Path) -> None:
    env = LedgerEnv(gym.make("CartPole-v1"), tmp_path, 0)
    assert env.spec is not None
    again = gym.make(env.spec)
    assert again.spec is not None
    assert again.spec.id == "CartPole-v1"
    assert not again.has_wrapper_attr("ledger_place")
