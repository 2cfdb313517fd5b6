"""The vector tap: what a vector env hands to the trainer, in each autoreset mode."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from common import MODES, VECTORS, Crashes, Doubles, Walk, assert_equal, drive, run_python, run_walks, vector_of, walk, walks
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import concatenate, create_empty_array
from gymnasium.wrappers.vector import NormalizeObservation, RecordEpisodeStatistics
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepledger import LedgerEnv, LedgerError, LedgerVectorEnv, compare, read
from stepledger.recover import recover

modern = pytest.mark.skipif(len(MODES) == 1, reason="this Gymnasium has next-step mode alone")


@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep_values", [False, True])
def test_a_run_without_a_fault_is_equal_and_complete(tmp_path: Path, kind: str, mode: str, keep_values: bool) -> None:
    comparison = run_walks(tmp_path, 60, kind=kind, mode=mode, keep_values=keep_values)
    assert_equal(comparison)
    trainer = read(tmp_path / "trainer.npz")
    assert trainer.meta["autoreset_mode"] == mode
    assert comparison.events == trainer.events
    for index in range(3):
        given, received = read(tmp_path / f"env-{index}.npz"), trainer.streams[index]
        assert len(received) == given.events
        assert int((received.data["kind"] == 0).sum()) > 5  # episodes
        for name, values in received.values.items():
            np.testing.assert_array_equal(values, given.streams[index].values[name])


@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [(1,), (1, 2), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_episodes_of_length_one_and_a_single_environment(tmp_path: Path, kind: str, mode: str, lengths: tuple[int, ...], n: int) -> None:
    makers = [functools.partial(walk, tmp_path, index, lengths) for index in range(n)]
    envs = LedgerVectorEnv(vector_of(makers, kind, mode), tmp_path / "trainer.npz")
    drive(envs, 25)
    envs.close()
    comparison = compare(tmp_path)
    assert_equal(comparison)
    resets = sum(int((stream.data["kind"] == 0).sum()) for stream in read(tmp_path / "trainer.npz").streams.values())
    assert comparison.hops[0].fields["obs"].compared == comparison.events
    assert comparison.hops[0].fields["terminated"].compared == comparison.events - resets


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    calls=st.lists(st.sampled_from(["step"] * 8 + ["reset", "mask", "flush"]), max_size=60),
    lengths=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3),
    mode=st.sampled_from(MODES),
    block=st.integers(1, 12),
    keep_values=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_whatever_is_called_and_wherever_blocks_end_there_is_no_false_alarm(
    tmp_path_factory: pytest.TempPathFactory,
    calls: list[str],
    lengths: list[list[int]],
    mode: str,
    block: int,
    keep_values: bool,
    seed: int,
) -> None:
    directory = tmp_path_factory.mktemp("calls")
    rng = np.random.default_rng(seed)
    n = len(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepledger.recorder.FLUSH_EVENTS", block)
        makers = [functools.partial(walk, directory, index, tuple(lengths[index]), keep_values=keep_values) for index in range(n)]
        envs = LedgerVectorEnv(vector_of(makers, "sync", mode), directory / "trainer.npz", keep_values=keep_values)
        envs.reset()
        ended = np.zeros(n, bool)
        for call in calls:
            if mode == "Disabled" and ended.any() and call != "reset":
                envs.reset(options={"reset_mask": ended | (rng.random(n) < 0.3)})
                ended[:] = False
            if call == "step":
                ended = np.logical_or(*envs.step(rng.integers(0, 4, n))[2:4])
            elif call == "flush":
                envs.call("flush")
                envs.flush()
                assert_equal(compare(directory))
            elif call == "mask" and len(MODES) > 1:
                mask = rng.random(n) < 0.5
                mask[rng.integers(n)] = True
                envs.reset(options={"reset_mask": mask})
                ended[mask] = False
            else:
                envs.reset()
                ended[:] = False
        envs.close()
    comparison = compare(directory)
    assert_equal(comparison)
    assert comparison.events >= n + n * calls.count("step") * (mode != "NextStep")
    trainer = read(directory / "trainer.npz")
    for index in range(n):
        given, received = read(directory / f"env-{index}.npz").streams[index], trainer.streams[index]
        for name, values in received.values.items():
            np.testing.assert_array_equal(values, given.values[name])


def test_more_environments_than_a_block_has_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepledger.recorder.FLUSH_EVENTS", 4)
    envs = walks(tmp_path, n=12)
    drive(envs, 30)
    envs.close()
    comparison = compare(tmp_path)
    assert_equal(comparison)
    assert comparison.hops[0].streams == 12


@pytest.mark.parametrize("mode", MODES)
def test_a_manual_reset_in_the_middle_is_a_reset(tmp_path: Path, mode: str) -> None:
    envs = walks(tmp_path, mode=mode)
    for steps in (7, 0, 1, 12, 3):
        drive(envs, steps)
    envs.close()
    assert_equal(compare(tmp_path))


@pytest.mark.parametrize("mode", MODES)
def test_a_manual_reset_right_after_an_end_is_one_reset(tmp_path: Path, mode: str) -> None:
    makers = [functools.partial(walk, tmp_path, index, (2,)) for index in range(2)]
    envs = LedgerVectorEnv(vector_of(makers, "sync", mode), tmp_path / "trainer.npz")
    for _ in range(4):
        envs.reset()
        envs.step(envs.action_space.sample())
        assert np.logical_or(*envs.step(envs.action_space.sample())[2:4]).all()
    envs.close()
    assert_equal(compare(tmp_path))


@modern
@pytest.mark.parametrize("kind", VECTORS)
def test_a_masked_reset_is_a_reset_of_the_masked_environments(tmp_path: Path, kind: str) -> None:
    envs = walks(tmp_path, n=3, kind=kind, mode="Disabled")
    envs.reset(seed=0)
    masks = [[True, False, False], [False, True, True], [True, True, True], [False, False, True]]
    for mask in masks:
        envs.step(envs.action_space.sample())
        options = {"reset_mask": np.array(mask)}
        envs.reset(options=options)
    envs.close()
    assert_equal(compare(tmp_path))
    trainer = read(tmp_path / "trainer.npz")
    resets = [int((trainer.streams[index].data["kind"] == 0).sum()) for index in range(3)]
    assert resets == [1 + sum(mask[index] for mask in masks) for index in range(3)]


@modern
@pytest.mark.parametrize("kind", VECTORS)
def test_a_masked_reset_is_seen_through_wrappers_outside(tmp_path: Path, kind: str) -> None:
    envs = RecordEpisodeStatistics(walks(tmp_path, n=3, kind=kind, mode="Disabled"))
    drive(envs, 60)
    envs.close()
    comparison = compare(tmp_path)
    assert_equal(comparison)
    assert comparison.events > 3 * 60


@modern
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_masked_reset_in_another_mode_is_that_too(tmp_path: Path, mode: str) -> None:
    envs = walks(tmp_path, n=3, mode=mode)
    envs.reset()
    for step in range(30):
        envs.step(envs.action_space.sample())
        if step % 4 == 0:
            envs.reset(options={"reset_mask": np.arange(3) == step % 3})
    envs.close()
    assert_equal(compare(tmp_path))


def test_wrappers_outside_may_change_values(tmp_path: Path) -> None:
    envs = NormalizeObservation(RecordEpisodeStatistics(walks(tmp_path)))
    drive(envs, 40)
    envs.close()
    assert_equal(compare(tmp_path))


@pytest.mark.parametrize("mode", MODES)
def test_steps_and_resets_in_two_halves_are_recorded(tmp_path: Path, mode: str) -> None:
    envs = walks(tmp_path, n=2, kind="async", mode=mode)
    for _ in range(3):
        envs.reset_async(seed=[1, 2])
        envs.reset_wait(timeout=10)
        for _ in range(15):
            envs.step_async(envs.action_space.sample())
            *_, terminated, truncated, _ = envs.step_wait(timeout=10)
            ended = terminated | truncated
            if mode == "Disabled" and ended.any():
                envs.reset_async(options={"reset_mask": ended})
                envs.reset_wait()
    envs.close()
    comparison = compare(tmp_path)
    assert_equal(comparison)
    assert comparison.events > 2 * 3 * 15


def test_a_sync_vector_env_has_no_halves(tmp_path: Path) -> None:
    envs = walks(tmp_path)
    assert not hasattr(envs, "step_wait")
    with pytest.raises(AttributeError):
        envs.no_such_attribute  # noqa: B018
    envs.close()


@pytest.mark.filterwarnings("ignore:.*Calling `close` while waiting:UserWarning")
def test_a_step_still_under_way_at_the_end_is_no_difference(tmp_path: Path) -> None:
    envs = walks(tmp_path, n=2, kind="async")
    drive(envs, 10)
    envs.step_async(envs.action_space.sample())
    envs.close()
    comparison = compare(tmp_path)
    assert_equal(comparison)
    assert len(comparison.hops[0].notes) == 2
    assert "its last event was still under way when the tap 'vector' was closed" in comparison.hops[0].notes[0]


def test_a_step_that_times_out_is_no_event_of_the_trainer(tmp_path: Path) -> None:
    class Slow(Walk):
        def step(self, action: Any) -> Any:
            if action == 3:
                import time

                time.sleep(0.7)
            return super().step(action)

    makers = [lambda i=i: LedgerEnv(Slow(seed=i), tmp_path, i) for i in range(2)]
    envs = LedgerVectorEnv(AsyncVectorEnv(makers, context="fork"), tmp_path / "trainer.npz")
    envs.reset()
    envs.step(np.array([0, 1]))
    envs.step_async(np.array([0, 3]))
    with pytest.raises(multiprocessing.TimeoutError):
        envs.step_wait(timeout=0.1)
    envs.close(timeout=5)
    comparison = compare(tmp_path)
    assert comparison.equal
    assert comparison.exit_status == 0
    raised, *under_way = comparison.hops[0].notes
    assert raised.startswith("a step of the vector env raised TimeoutError: ")
    assert len(under_way) == 2


def test_attributes_and_calls_are_forwarded(tmp_path: Path) -> None:
    envs = walks(tmp_path, n=2)
    assert envs.num_envs == 2
    assert envs.single_action_space == spaces.Discrete(4)
    assert envs.get_attr("_lengths") == ((3, 5, 1, 4), (4, 5, 1, 4))
    assert [type(env) for env in envs.envs] == [LedgerEnv, LedgerEnv]
    envs.set_attr("level", [3, 4])
    assert envs.call("get_wrapper_attr", "level") == (3, 4)
    assert envs.unwrapped is envs.env
    assert envs.closed is False
    envs.reset()
    envs.close()
    assert envs.closed is True


@pytest.mark.parametrize("mode", MODES)
def test_a_vector_env_that_hands_out_its_own_buffer_is_recorded_as_it_was_then(tmp_path: Path, mode: str) -> None:
    makers = [functools.partial(walk, tmp_path, index, keep_values=True) for index in range(2)]
    envs = LedgerVectorEnv(vector_of(makers, "sync", mode, copy=False), tmp_path / "trainer.npz", keep_values=True)
    drive(envs, 40)
    envs.close()
    assert_equal(compare(tmp_path))
    for index in range(2):
        given, received = (read(tmp_path / name).streams[index].values for name in (f"env-{index}.npz", "trainer.npz"))
        np.testing.assert_array_equal(given["values_obs_0"], received["values_obs_0"])


SPACES = {
    "dict": spaces.Dict({"image": spaces.Box(0, 255, (4, 4, 3), np.uint8), "speed": spaces.Box(-1, 1, (), np.float64)}),
    "tuple": spaces.Tuple((spaces.Discrete(5), spaces.Dict({"a": spaces.MultiBinary(3), "b": spaces.Box(-1, 1, (2,))}))),
    "large": spaces.Box(-1, 1, (40, 40)),
    "text": spaces.Dict({"text": spaces.Text(5), "x": spaces.Box(-1, 1, (2,))}),
}


def test_text_that_shared_memory_does_not_carry_is_found(tmp_path: Path) -> None:
    # AsyncVectorEnv reads text from shared memory once, when it is made, and hands that out for ever (Gymnasium 1.0 to 1.4). Whether this
    # Gymnasium does, is for the text itself to say.
    makers = [lambda i=i: LedgerEnv(Walk((3,), i, observation_space=spaces.Text(5)), tmp_path, i) for i in range(2)]
    envs = LedgerVectorEnv(AsyncVectorEnv(makers, shared_memory=True), tmp_path / "trainer.npz")
    received = [envs.reset()[0]] + [envs.step([0, 0])[0] for _ in range(8)]
    envs.close()
    comparison = compare(tmp_path)
    assert comparison.equal == (len(set(received)) > 1)
    if not comparison.equal:
        assert comparison.exit_status == 1
        assert comparison.hops[0].differences == 2 * len(received)
        assert {one.fields for one in comparison.differences} == {("obs",)}


@pytest.mark.parametrize(("kind", "options"), [("sync", {}), ("async", {"shared_memory": True}), ("async", {"shared_memory": False})])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("space", SPACES)
def test_composite_observations_cross_in_every_mode(tmp_path: Path, kind: str, mode: str, space: str, options: dict[str, bool]) -> None:
    if space == "text" and options.get("shared_memory"):
        pytest.skip("Gymnasium's shared memory does not carry text")
    makers = [
        lambda i=i: LedgerEnv(Walk((3, 1, 2), i, observation_space=SPACES[space], action_space=SPACES[space]), tmp_path, i)
        for i in range(2)
    ]
    envs = LedgerVectorEnv(vector_of(makers, kind, mode, **options), tmp_path / "trainer.npz")
    drive(envs, 15)
    envs.close()
    assert_equal(compare(tmp_path))


class Custom(VectorEnv):
    """A vector env of somebody's own, with walks inside that nobody can reach."""

    def __init__(self, mode: Any, directory: Path | None = None, infos: str = "object array") -> None:
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.num_envs = 2
        self._infos = infos
        self._walks = [walk(directory, index) if directory else Walk(seed=index) for index in range(2)]
        self.single_observation_space = self._walks[0].observation_space
        self.single_action_space = self._walks[0].action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, 2)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, 2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.stack([one.reset()[0] for one in self._walks]), {}

    def step(self, actions: Any) -> Any:
        """Same-step mode."""
        observations, rewards, terminated, truncated, _ = map(list, zip(*(one.step(a) for one, a in zip(self._walks, actions))))
        infos: dict[str, Any] = {}
        ended = np.logical_or(terminated, truncated)
        if ended.any() and self._infos != "absent":
            infos["final_obs"] = [one if end else None for one, end in zip(observations, ended)]
            if self._infos == "object array":
                final = np.full(2, None, object)
                for index in np.flatnonzero(ended):
                    final[index] = observations[index]
                infos.update(final_obs=final, _final_obs=ended)
        for index in np.flatnonzero(ended):
            observations[index] = self._walks[index].reset()[0]
        return np.stack(observations), np.array(rewards), np.array(terminated), np.array(truncated), infos

    def close_extras(self, **_: Any) -> None:
        for one in self._walks:
            one.close()


@modern
@pytest.mark.parametrize("mode", [None, "Sometimes", 3])
def test_a_vector_env_that_does_not_say_how_it_resets_is_refused_with_what_to_do(tmp_path: Path, mode: Any) -> None:
    envs = Custom(mode)
    with pytest.raises(LedgerError, match=r"state 'NextStep', 'SameStep' or 'Disabled' .* or pass autoreset_mode="):
        LedgerVectorEnv(envs, tmp_path / "trainer.npz")
    assert not envs.closed
    if mode is None:
        with pytest.raises(LedgerError, match="autoreset_mode='sometimes' is unknown: use 'NextStep', 'SameStep' or 'Disabled'"):
            LedgerVectorEnv(envs, tmp_path / "trainer.npz", autoreset_mode="sometimes")


@modern
@pytest.mark.parametrize("stated", [*MODES, gym.vector.AutoresetMode.SAME_STEP if len(MODES) > 1 else "SameStep"])
@pytest.mark.parametrize("said", [*MODES, "nonsense"])
def test_a_mode_that_contradicts_the_stated_one_is_refused(tmp_path: Path, stated: Any, said: str) -> None:
    envs = Custom(stated)
    if getattr(stated, "value", stated) == said:
        LedgerVectorEnv(envs, tmp_path / "trainer.npz", autoreset_mode=said).close()
        return
    with pytest.raises(LedgerError, match="is unknown: use" if said == "nonsense" else "contradicts the vector env .*: leave it out"):
        LedgerVectorEnv(envs, tmp_path / "trainer.npz", autoreset_mode=said)
    assert not envs.closed


@modern
@pytest.mark.parametrize("infos", ["object array", "list"])
@pytest.mark.parametrize("mode", ["said", "SameStep", "member"])
def test_a_custom_vector_env_is_recorded_in_the_mode_it_is_said_to_have(tmp_path: Path, mode: str, infos: str) -> None:
    given = gym.vector.AutoresetMode.SAME_STEP if mode == "member" else None if mode == "said" else mode
    envs = LedgerVectorEnv(
        Custom(given, tmp_path, infos), tmp_path / "trainer.npz", **({"autoreset_mode": "SameStep"} if mode == "said" else {})
    )
    drive(envs, 40)
    envs.close()
    assert_equal(compare(tmp_path))


@modern
def test_final_observations_that_never_arrive_are_a_difference_in_each_last_step(tmp_path: Path) -> None:
    envs = LedgerVectorEnv(Custom("SameStep", tmp_path, "absent"), tmp_path / "trainer.npz")
    drive(envs, 40)
    envs.close()
    comparison = compare(tmp_path)
    assert comparison.exit_status == 1
    ends = sum(
        int(
            (
                read(tmp_path / f"env-{i}.npz").streams[i].data["terminated"] | read(tmp_path / f"env-{i}.npz").streams[i].data["truncated"]
            ).sum()
        )
        for i in range(2)
    )
    assert comparison.hops[0].differences == ends
    assert {one.fields for one in comparison.differences} == {("obs",)}
    assert {one.second["obs"] for one in comparison.differences} == {"nothing"}


def test_a_gymnasium_vector_environment_of_its_own_kind_is_recorded(tmp_path: Path) -> None:
    envs = LedgerVectorEnv(gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point"), tmp_path / "trainer.npz")
    drive(envs, 200)
    envs.close()
    trainer = read(tmp_path / "trainer.npz")
    assert len(trainer.streams) == 3
    assert trainer.events == 3 * 201
    assert all((stream.data["kind"] == 0).sum() > 3 for stream in trainer.streams.values())


@pytest.mark.parametrize("path", ["trainer", "trainer.npz", "deep/er/trainer.npz", "trainer.v2"])
def test_the_file_is_named_as_asked(tmp_path: Path, path: str) -> None:
    envs = LedgerVectorEnv(SyncVectorEnv([Walk]), tmp_path / path)
    envs.reset()
    envs.close()
    assert [str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*.npz")] == [path if path.endswith(".npz") else f"{path}.npz"]


@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("mode", MODES)
def test_recording_changes_nothing(tmp_path: Path, kind: str, mode: str) -> None:
    def trajectory(ledgers: bool) -> list[Any]:
        def make(index: int) -> gym.Env:
            env = gym.make("CartPole-v1")
            return LedgerEnv(env, tmp_path, keep_values=True) if ledgers else env

        envs: Any = vector_of([functools.partial(make, index) for index in range(3)], kind, mode)
        if ledgers:
            envs = LedgerVectorEnv(envs, tmp_path / "trainer.npz", keep_values=True)
        envs.action_space.seed(5)
        seen: list[Any] = [envs.reset(seed=5)]
        for _ in range(150):
            seen.append(envs.step(envs.action_space.sample()))
            ended = np.logical_or(*seen[-1][2:4])
            if mode == "Disabled" and ended.any():
                seen.append(envs.reset(options={"reset_mask": ended}))
        envs.close()
        return seen

    plain, recorded = trajectory(False), trajectory(True)
    assert len(plain) == len(recorded)
    for one, other in zip(plain, recorded):
        assert_same(one, other)
    assert_equal(compare(tmp_path))


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, tuple):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif one.dtype == object:
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
    else:
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_actions_of_any_kind_are_the_actions_that_were_sent(tmp_path: Path) -> None:
    envs = walks(tmp_path, n=2)
    envs.reset()
    for actions in ([1, 2], np.array([3, 0]), np.array([1, 1], np.int8), (2, 3), np.array([1.0, 2.0])):
        envs.step(actions)
    envs.close()
    assert_equal(compare(tmp_path))


def test_an_action_array_that_is_reused_is_recorded_as_it_was_sent(tmp_path: Path) -> None:
    space = spaces.Box(-1, 1, (2,))
    makers = [lambda i=i: LedgerEnv(Walk(seed=i, action_space=space), tmp_path, i, keep_values=True) for i in range(2)]
    envs = LedgerVectorEnv(AsyncVectorEnv(makers), tmp_path / "trainer.npz", keep_values=True)
    envs.reset()
    actions = np.zeros((2, 2), np.float32)
    for step in range(10):
        actions[:] = step / 10
        envs.step_async(actions)
        actions[:] = 9
        envs.step_wait()
    envs.close()
    assert_equal(compare(tmp_path))
    np.testing.assert_array_equal(read(tmp_path / "trainer.npz").streams[0].values["values_act_0"][3], np.float32([0.2, 0.2]))


def test_a_step_that_raises_leaves_the_two_sides_comparable(tmp_path: Path) -> None:
    class Fails(Walk):
        def step(self, action: Any) -> Any:
            if action == 3:
                raise ValueError("no")
            return super().step(action)

    makers = [lambda i=i: LedgerEnv(Fails((100,), seed=i), tmp_path, i) for i in range(2)]
    envs = LedgerVectorEnv(SyncVectorEnv(makers), tmp_path / "trainer.npz")
    envs.reset()
    envs.step(np.array([0, 1]))
    with pytest.raises(ValueError, match="no"):
        envs.step(np.array([0, 3]))  # env 0 was stepped, env 1 was not, and the trainer got neither
    envs.close()
    comparison = compare(tmp_path)
    assert comparison.equal
    assert [note.split(":")[0] for note in comparison.hops[0].notes] == ["a step of the vector env raised ValueError", "env 0"]


def test_what_a_remote_client_cannot_reach_is_not_told_and_not_missed(tmp_path: Path) -> None:
    # A client of environments elsewhere has neither call() nor set_attr(); its environments know their index.
    mode = {"autoreset_mode": "SameStep"} if len(MODES) > 1 else {}
    if not mode:
        pytest.skip("this Gymnasium has next-step mode alone")
    envs = LedgerVectorEnv(Custom(None, tmp_path), tmp_path / "trainer.npz", **mode)
    drive(envs, 20)
    envs.close()
    assert read(tmp_path / "trainer.npz").meta["run"] == ""
    assert_equal(compare(tmp_path))


@pytest.mark.parametrize("wrong", ["actions", "observations"])
def test_a_batch_of_another_size_stops_the_recording_not_the_training(tmp_path: Path, wrong: str) -> None:
    class Cut(Custom):
        def step(self, actions: Any) -> Any:
            observations, *rest = super().step(list(actions)[:2])
            return (observations[:1] if wrong == "observations" else observations, *rest)

    envs = LedgerVectorEnv(Cut("SameStep"), tmp_path / "trainer.npz")
    envs.reset()
    with pytest.warns(RuntimeWarning, match="training goes on: LedgerError: a step of 2 environments came with another number"):
        envs.step([0, 1, 2] if wrong == "actions" else [0, 1])
    envs.step([0, 1])
    envs.close()
    assert read(tmp_path / "trainer.npz").open_end


def test_actions_of_a_tuple_space_may_be_a_list_of_its_parts(tmp_path: Path) -> None:
    space = spaces.Tuple((spaces.Discrete(5), spaces.Box(-1, 1, (2,), np.float32)))
    for n in (2, 3):  # as many environments as parts, and not
        makers = [lambda i=i, n=n: LedgerEnv(Walk(seed=i, action_space=space), tmp_path / str(n), i) for i in range(n)]
        envs = LedgerVectorEnv(SyncVectorEnv(makers), tmp_path / str(n) / "trainer.npz")
        envs.reset(seed=0)
        for _ in range(20):
            envs.step(list(envs.action_space.sample()))
        envs.close()
        assert_equal(compare(tmp_path / str(n)))


class Outside(VectorWrapper):
    """Somebody's wrapper around a vector env; it passes no calls on."""


def test_ledgers_behind_a_wrapper_of_the_vector_env_are_told_their_places(tmp_path: Path) -> None:
    for kind in ("sync", "async"):
        inner = vector_of([functools.partial(walk, tmp_path / kind, None) for _ in range(2)], kind)
        envs = LedgerVectorEnv(Outside(inner), tmp_path / kind / "trainer.npz")
        drive(envs, 20)
        envs.close()
        assert_equal(compare(tmp_path / kind))


@pytest.mark.parametrize("path", [".", "there"])
def test_a_path_that_is_a_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    with pytest.raises(LedgerError, match="is a directory: name the file"):
        LedgerVectorEnv(SyncVectorEnv([Walk]), path)


def test_what_is_no_vector_env_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="goes around a Gymnasium vector env"):
        LedgerVectorEnv(Walk(), tmp_path / "trainer.npz")
    with pytest.raises(LedgerError, match=r"goes around a gymnasium\.Env"):
        LedgerEnv(SyncVectorEnv([Walk]), tmp_path, 0)


@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_around_environments_that_have_recorded_it_says_so_and_compares_what_comes(
    tmp_path: Path, kind: str, mode: str, told: bool, reset: bool
) -> None:
    makers = [functools.partial(walk, tmp_path, None if told else index, (30,)) for index in range(2)]
    inner = vector_of(makers, kind, mode)
    if told:
        with pytest.warns(RuntimeWarning) if kind == "sync" else contextlib.nullcontext():
            inner.reset(seed=0)
    else:
        drive(inner, 10)
    with pytest.warns(RuntimeWarning, match="have recorded already; .*: put it around the vector env before its first reset"):
        envs = LedgerVectorEnv(inner, tmp_path / "trainer.npz")
    if reset:
        envs.reset(seed=1)
    for _ in range(10):
        envs.step(envs.action_space.sample())
    envs.close()
    assert_equal(compare(tmp_path), 2 * (10 + reset))
    assert (tmp_path / "env-0.old1.npz").exists() == (not told)


NESTED = {
    "box": spaces.Box(-1, 1, (2,)),
    "dict": spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Dict(c=spaces.Discrete(5), d=spaces.Tuple([spaces.MultiBinary(3)]))),
    "tuple": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Dict(a=spaces.Discrete(5))]),
}


@modern
@pytest.mark.parametrize("space", NESTED)
@pytest.mark.parametrize("masked", [True, False])
def test_final_observations_may_come_as_a_batch(tmp_path: Path, space: str, masked: bool) -> None:
    class Batches(VectorWrapper):
        """Gives the final observations as it gives observations, with anything where there is none."""

        def step(self, actions: Any) -> Any:
            observations, rewards, terminated, truncated, infos = self.env.step(actions)
            if "final_obs" in infos:
                rows = [self.single_observation_space.sample() if one is None else one for one in infos["final_obs"]]
                infos["final_obs"] = concatenate(self.single_observation_space, rows, create_empty_array(self.single_observation_space, 3))
            if not masked:
                infos.pop("_final_obs", None)
            return observations, rewards, terminated, truncated, infos

    makers = [
        functools.partial(LedgerEnv, Walk((2 + index, 3), index, NESTED[space]), tmp_path, index, keep_values=True) for index in range(3)
    ]
    envs = LedgerVectorEnv(Batches(vector_of(makers, "sync", "SameStep")), tmp_path / "trainer.npz", keep_values=True)
    drive(envs, 30)
    envs.close()
    assert_equal(compare(tmp_path))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("goes_on", ["reset", "step", "step, and steps again"])
@pytest.mark.parametrize("length", [3, 5, 20])
def test_events_of_a_step_that_raised_in_another_environment_are_no_difference(
    tmp_path: Path, mode: str, goes_on: str, length: int
) -> None:
    crashes = (5, 6) if "again" in goes_on else (5,)
    makers = [lambda i=i: LedgerEnv(Crashes(Walk((length,), i), *crashes[: 2 * (i == 1)]), tmp_path, i) for i in range(3)]
    envs = LedgerVectorEnv(vector_of(makers, "sync", mode), tmp_path / "trainer.npz")
    envs.reset(seed=0)
    for call in range(20):
        try:
            _, _, terminated, truncated, _ = envs.step(np.full(3, call % 4))
            if mode == "Disabled" and (terminated | truncated).any():
                envs.reset(options={"reset_mask": terminated | truncated})
        except RuntimeError:
            if goes_on == "reset":
                envs.reset(seed=1)
    envs.close()
    comparison = compare(tmp_path)
    assert not comparison.differences
    assert comparison.equal
    (note,) = comparison.hops[0].notes
    assert note.startswith("a step of the vector env raised RuntimeError: the simulator has crashed; ")
    assert f"note: {note}" in str(comparison)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("goes_on", ["reset", "step"])
@pytest.mark.parametrize("known", [1, 10, 11, 12, 13, 20])  # events of each environment's ledger that survive, about
def test_what_a_killed_process_leaves_behind_a_call_that_raised_is_no_difference(
    tmp_path: Path, mode: str, goes_on: str, known: int
) -> None:
    code = """
import os, sys
from pathlib import Path
import numpy as np
from common import Crashes, Walk, vector_of
from stepledger import LedgerEnv, LedgerVectorEnv
directory, mode, goes_on, known = Path(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4])
makers = [lambda i=i: LedgerEnv(Crashes(Walk((50,), i), *[10][: i == 1]), directory, i, flush_every=known) for i in range(2)]
envs = LedgerVectorEnv(vector_of(makers, "sync", mode), directory / "trainer.npz", flush_every=1)
envs.reset(seed=0)
for call in range(25):
    try:
        envs.step(np.full(2, call % 4))
    except RuntimeError:
        if goes_on == "reset":
            envs.reset(seed=1)
os._exit(0)
"""
    run_python(code, tmp_path, mode, goes_on, known)
    comparison = compare(tmp_path)
    assert comparison.exit_status == 3, str(comparison)
    assert comparison.hops[0].notes[0].startswith("a step of the vector env raised RuntimeError: the simulator has crashed; ")
    recover(tmp_path)
    assert compare(tmp_path).exit_status == 3


def test_a_first_reset_that_raises_leaves_no_file_and_is_told_of_by_the_journal_that_comes(tmp_path: Path) -> None:
    class Late(VectorWrapper):
        ready = False

        def reset(self, **kwargs: Any) -> Any:
            if not self.ready:
                raise RuntimeError("the server is not there yet")
            return self.env.reset(**kwargs)

    late = Late(vector_of([lambda: Walk((5,), 0)], "sync", "NextStep"))
    envs = LedgerVectorEnv(late, tmp_path / "trainer.npz")
    with pytest.raises(RuntimeError):
        envs.reset()
    assert not list(tmp_path.iterdir())
    late.ready = True
    envs.reset()
    envs.write_journal()
    meta = read(tmp_path / "trainer.journal").meta
    assert (meta["raised"], len(meta["notes"])) == ([0], 1)
    envs.close()


@pytest.mark.parametrize("options", [[("a", 1)], {"reset_mask": "of no kind"}, 3])
def test_reset_options_of_any_kind_reach_the_vector_env(tmp_path: Path, options: Any) -> None:
    class Takes(VectorWrapper):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.given = options
            return self.env.reset(seed=seed)

    inner = Takes(vector_of([lambda: Walk((5,), 0)], "sync", "NextStep"))
    envs = LedgerVectorEnv(inner, tmp_path / "trainer.npz")
    envs.reset(options=options)
    envs.close()
    assert inner.given is options


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_is_lost_elsewhere_than_in_a_call_that_raised_is_a_difference(tmp_path: Path, mode: str) -> None:
    makers = [lambda: Doubles(LedgerEnv(Walk((20,), 0), tmp_path, 0), 3, 8), lambda: LedgerEnv(Crashes(Walk((20,), 1), 5), tmp_path, 1)]
    envs = LedgerVectorEnv(vector_of(makers, "sync", mode), tmp_path / "trainer.npz")
    envs.reset(seed=0)
    for call in range(15):
        with contextlib.suppress(RuntimeError):
            envs.step(np.full(2, call % 4))
    envs.close()
    comparison = compare(tmp_path)
    assert [(one.env, one.step, one.kind) for one in comparison.differences] == [(0, 3, "lost"), (0, 9, "lost")]
