"""The vector tap for Stable-Baselines3."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from common import Crashes, Walk, assert_equal, run_python, walk
from gymnasium import spaces

from stepledger import LedgerEnv, LedgerError, compare, read

pytest.importorskip("stable_baselines3")
torch = pytest.importorskip("torch")

from stable_baselines3 import A2C, DQN, PPO, SAC  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback  # noqa: E402
from stable_baselines3.common.monitor import Monitor  # noqa: E402
from stable_baselines3.common.vec_env import (  # noqa: E402
    DummyVecEnv,
    SubprocVecEnv,
    VecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

from stepledger.sb3 import LedgerVecEnv  # noqa: E402

pytestmark = pytest.mark.sb3

KINDS = {"dummy": DummyVecEnv, "subproc": functools.partial(SubprocVecEnv, start_method="fork")}

torch.set_num_threads(1)


def venv_of(directory: Path, n: int = 3, kind: str = "dummy", lengths: tuple[int, ...] = (3, 5, 1, 4), **options: Any) -> LedgerVecEnv:
    makers = [functools.partial(walk, directory, index, (*lengths, 1 + index), **options) for index in range(n)]
    return LedgerVecEnv(KINDS[kind](makers), directory / "trainer.npz", **options)


def drive(venv: Any, steps: int) -> list[Any]:
    rng = np.random.default_rng(0)
    venv.action_space.seed(0)
    seen = [venv.reset()]
    for _ in range(steps):
        actions = np.array([venv.action_space.sample() for _ in range(venv.num_envs)])
        seen.append(venv.step(actions))
        if rng.random() < 0.02:
            seen.append(venv.reset())
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"keep_values": True, "digest": "blake2b"}, {"keep_values": 20}])
def test_a_run_without_a_fault_is_equal_and_complete(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    venv = venv_of(tmp_path, kind=kind, **options)
    drive(venv, 80)
    venv.close()
    comparison = compare(tmp_path, tmp_path / "trainer.npz")
    assert_equal(comparison)
    trainer = read(tmp_path / "trainer.npz")
    assert comparison.events == trainer.events > 3 * 80
    for index in range(3):
        given, received = read(tmp_path / f"env-{index}.npz").streams[index], trainer.streams[index]
        np.testing.assert_array_equal(given.data["h_rew"], received.data["h_rew"])
        for name, values in received.values.items():
            np.testing.assert_array_equal(values, given.values[name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(1,), (1, 2)], ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_episodes_of_length_one_and_a_single_environment(tmp_path: Path, kind: str, lengths: tuple[int, ...], n: int) -> None:
    venv = venv_of(tmp_path, n, kind, lengths)
    drive(venv, 25)
    venv.close()
    assert_equal(compare(tmp_path))


def test_the_flag_that_cannot_arrive_is_not_compared_where_it_cannot(tmp_path: Path) -> None:
    venv = venv_of(tmp_path)
    drive(venv, 60)
    venv.close()
    comparison = compare(tmp_path)
    assert_equal(comparison)
    given = read(tmp_path / "env-0.npz").streams[0].data
    received = read(tmp_path / "trainer.npz").streams[0].data
    both = given["terminated"] & given["truncated"]
    assert both.any()
    assert not received["truncated"][both].any()
    assert "where terminated is not set" in comparison.hops[0].fields["truncated"].note


DICT = spaces.Dict({"image": spaces.Box(0, 255, (6, 6, 3), np.uint8), "position": spaces.Box(-1, 1, (2,))})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("space", "action"),
    [
        (DICT, spaces.Box(-1, 1, (2,))),
        (spaces.Box(0, 255, (6, 6, 3), np.uint8), spaces.MultiDiscrete([3, 4])),
        (spaces.Discrete(7), spaces.MultiBinary(3)),
        (spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,)))), spaces.Discrete(3)),
    ],
    ids=["dict", "image", "discrete", "tuple"],
)
def test_observations_and_actions_of_every_kind_cross(tmp_path: Path, kind: str, space: spaces.Space, action: spaces.Space) -> None:
    makers = [lambda i=i: LedgerEnv(Walk((3, 1), i, observation_space=space, action_space=action), tmp_path) for i in range(2)]
    venv = LedgerVecEnv(KINDS[kind](makers), tmp_path / "trainer.npz")
    drive(venv, 20)
    venv.close()
    assert_equal(compare(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_another_dtype_than_declared_are_cast(tmp_path: Path, kind: str) -> None:
    class Float64(Walk):
        def _observation(self) -> Any:
            return super()._observation().astype(np.float64)

    makers = [lambda i=i: LedgerEnv(Float64(seed=i), tmp_path, i) for i in range(2)]
    venv = LedgerVecEnv(KINDS[kind](makers), tmp_path / "trainer.npz")
    drive(venv, 20)
    venv.close()
    assert_equal(compare(tmp_path))


OUTSIDE = {
    "VecNormalize": VecNormalize,
    "VecFrameStack": lambda venv: VecFrameStack(venv, 3),
    "VecMonitor": VecMonitor,
    "all": lambda venv: VecMonitor(VecFrameStack(VecNormalize(venv), 2)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outside", OUTSIDE)
def test_wrappers_outside_may_change_values(tmp_path: Path, kind: str, outside: str) -> None:
    venv = OUTSIDE[outside](venv_of(tmp_path, kind=kind, keep_values=True))
    drive(venv, 60)
    venv.close()
    assert_equal(compare(tmp_path))


def test_images_may_be_transposed_outside(tmp_path: Path) -> None:
    makers = [lambda i=i: LedgerEnv(Walk((3, 1), i, observation_space=spaces.Box(0, 255, (6, 5, 3), np.uint8)), tmp_path) for i in range(2)]
    venv = VecTransposeImage(LedgerVecEnv(DummyVecEnv(makers), tmp_path / "trainer.npz"))
    assert drive(venv, 20)[0].shape == (2, 3, 6, 5)
    venv.close()
    assert_equal(compare(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_told_also_through_wrappers(tmp_path: Path, kind: str) -> None:
    makers = [lambda i=i: Monitor(LedgerEnv(Walk(seed=i), tmp_path)) for i in range(3)]
    venv = LedgerVecEnv(KINDS[kind](makers), tmp_path / "trainer.npz")
    drive(venv, 20)
    venv.close()
    comparison = compare(tmp_path)
    assert_equal(comparison)
    assert comparison.hops[0].streams == 3
    assert read(tmp_path / "env-2.npz").meta["run"] == read(tmp_path / "trainer.npz").meta["run"] != ""


def test_environments_without_a_ledger_are_left_alone(tmp_path: Path) -> None:
    venv = LedgerVecEnv(DummyVecEnv([Walk, Walk]), tmp_path / "trainer.npz")
    drive(venv, 20)
    venv.close()
    assert not hasattr(venv.unwrapped.envs[0], "ledger_place")
    with pytest.raises(LedgerError, match="only ledgers of the tap 'vector'"):
        compare(tmp_path)


def test_it_is_a_vec_env_like_any_other(tmp_path: Path) -> None:
    venv = venv_of(tmp_path, n=2)
    assert venv.env_is_wrapped(LedgerEnv) == [True, True]
    assert venv.get_attr("_lengths") == [(3, 5, 1, 4, 1), (3, 5, 1, 4, 2)]
    venv.set_attr("level", 4)
    assert venv.get_attr("level", [1]) == [4]
    assert venv.env_method("has_wrapper_attr", "ledger_place") == [True, True]
    assert venv.seed(3) == [3, 4]
    assert venv.num_envs == 2
    assert venv.observation_space == venv.unwrapped.observation_space
    venv.close()


def test_a_step_in_two_halves_is_recorded_as_it_was_sent(tmp_path: Path) -> None:
    makers = [lambda i=i: LedgerEnv(Walk(seed=i, action_space=spaces.Box(-1, 1, (2,))), tmp_path, keep_values=True) for i in range(2)]
    venv = LedgerVecEnv(KINDS["subproc"](makers), tmp_path / "trainer.npz", keep_values=True)
    venv.reset()
    actions = np.zeros((2, 2), np.float32)
    for step in range(12):
        actions[:] = step / 10
        venv.step_async(actions)
        actions[:] = 9
        venv.step_wait()
    venv.close()
    assert_equal(compare(tmp_path))


def test_a_step_still_under_way_at_the_end_is_no_difference(tmp_path: Path) -> None:
    venv = venv_of(tmp_path, n=2, kind="subproc", lengths=(100,))
    drive(venv, 5)
    venv.step_async(np.array([1, 2]))
    venv.close()
    comparison = compare(tmp_path)
    assert_equal(comparison)
    assert len(comparison.hops[0].notes) == 2


def test_closing_twice_and_resetting_twice_are_fine(tmp_path: Path) -> None:
    venv = venv_of(tmp_path, kind="subproc")
    venv.reset()
    venv.reset()
    venv.close()
    venv.close()
    assert_equal(compare(tmp_path), events=6)


def test_a_final_observation_that_is_missing_is_a_difference(tmp_path: Path) -> None:
    class Forgets(DummyVecEnv):
        def step_wait(self) -> Any:
            observations, rewards, dones, infos = super().step_wait()
            for info in infos:
                info.pop("terminal_observation", None)
            return observations, rewards, dones, infos

    makers = [functools.partial(walk, tmp_path, index, (4,)) for index in range(2)]
    venv = LedgerVecEnv(Forgets(makers), tmp_path / "trainer.npz")
    venv.reset()
    for _ in range(8):
        venv.step(np.array([0, 1]))
    venv.close()
    comparison = compare(tmp_path)
    assert comparison.exit_status == 1
    assert comparison.hops[0].differences == 4
    assert {(one.step, one.fields, one.second["obs"]) for one in comparison.differences} == {(4, ("obs",), "nothing")}


def test_a_reset_behind_the_vector_envs_back_is_found(tmp_path: Path) -> None:
    venv = venv_of(tmp_path, n=2, lengths=(50,))
    drive(venv, 10)
    venv.env_method("reset", indices=1)
    for _ in range(10):
        venv.step(np.array([0, 1]))
    venv.close()
    comparison = compare(tmp_path)
    assert comparison.exit_status == 1
    (difference,) = comparison.differences
    assert (difference.env, difference.kind, difference.step) == (1, "lost", 0)


class Remote(VecEnv):
    """A client of environments elsewhere: nothing of them can be reached but their steps."""

    def __init__(self, venv: VecEnv) -> None:
        self.venv = venv
        super().__init__(venv.num_envs, venv.observation_space, venv.action_space)

    def reset(self) -> Any:
        return self.venv.reset()

    def step_async(self, actions: Any) -> None:
        self.venv.step_async(actions)

    def step_wait(self) -> Any:
        return self.venv.step_wait()

    def close(self) -> None:
        self.venv.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> Any:
        if attr_name == "render_mode":  # the base class asks for it
            return [None] * self.num_envs
        raise NotImplementedError

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> Any:
        raise NotImplementedError

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


def test_a_client_whose_environments_cannot_be_reached_is_recorded(tmp_path: Path) -> None:
    makers = [functools.partial(walk, tmp_path, index) for index in range(2)]
    venv = LedgerVecEnv(Remote(DummyVecEnv(makers)), tmp_path / "trainer.npz")
    drive(venv, 30)
    venv.close()
    assert read(tmp_path / "trainer.npz").meta["run"] == ""
    assert_equal(compare(tmp_path))


def cart_pole(directory: Path | None, index: int, **options: Any) -> gym.Env:
    env = gym.make("CartPole-v1")
    return Monitor(env if directory is None else LedgerEnv(env, directory, **options))


def pendulum(directory: Path | None, index: int, **options: Any) -> gym.Env:
    env = gym.make("Pendulum-v1", max_episode_steps=60)
    return Monitor(env if directory is None else LedgerEnv(env, directory, **options))


def trained(algorithm: Any, make: Any, directory: Path | None, kind: str, n: int, steps: int, **options: Any) -> Any:
    """A trained model, with ledgers if a directory is given."""
    keep = {"keep_values": True} if kind == "dummy" else {}
    venv: Any = KINDS[kind]([functools.partial(make, directory, index, **keep) for index in range(n)])
    if directory is not None:
        venv = LedgerVecEnv(venv, directory / "trainer.npz", **keep)
    venv = VecNormalize(venv)
    model = algorithm("MlpPolicy", venv, seed=7, device="cpu", **options)
    model.learn(steps)
    venv.close()
    return model


def assert_same_weights(one: Any, other: Any) -> None:
    weights, others = one.policy.state_dict(), other.policy.state_dict()
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert tensor.numpy().tobytes() == others[name].numpy().tobytes(), name


@pytest.mark.parametrize(
    ("algorithm", "make", "n", "steps", "options"),
    [
        (PPO, cart_pole, 3, 768, {"n_steps": 64, "n_epochs": 2, "batch_size": 64}),
        (PPO, pendulum, 3, 768, {"n_steps": 64, "n_epochs": 2, "batch_size": 64}),
        (A2C, cart_pole, 2, 300, {}),
        (DQN, cart_pole, 1, 400, {"learning_starts": 100}),
        (SAC, pendulum, 2, 300, {"learning_starts": 200}),
    ],
    ids=["PPO-discrete", "PPO-box", "A2C", "DQN", "SAC"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_same_weights_bit_for_bit(
    tmp_path: Path, algorithm: Any, make: Any, n: int, steps: int, options: dict[str, Any], kind: str
) -> None:
    plain = trained(algorithm, make, None, kind, n, steps, **options)
    recorded = trained(algorithm, make, tmp_path, kind, n, steps, **options)
    assert_same_weights(plain, recorded)
    comparison = compare(tmp_path)
    assert_equal(comparison)
    assert comparison.events >= steps


def test_recording_changes_nothing_of_what_a_vec_env_gives(tmp_path: Path) -> None:
    makers = [functools.partial(cart_pole, None, index) for index in range(2)]
    plain = DummyVecEnv(makers)
    recorded = LedgerVecEnv(DummyVecEnv([functools.partial(cart_pole, tmp_path, index) for index in range(2)]), tmp_path / "trainer.npz")
    for venv in (plain, recorded):
        venv.seed(3)
    for one, other in zip(drive(plain, 100), drive(recorded, 100), strict=True):
        if isinstance(one, np.ndarray):
            np.testing.assert_array_equal(one, other)
            continue
        for a, b in zip(one[:3], other[:3]):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        for a, b in zip(one[3], other[3]):
            assert a.keys() == b.keys()
            if "terminal_observation" in a:
                np.testing.assert_array_equal(a["terminal_observation"], b["terminal_observation"])
    plain.close()
    recorded.close()


def test_an_evaluation_between_rollouts_has_ledgers_of_its_own(tmp_path: Path) -> None:
    venv = LedgerVecEnv(DummyVecEnv([functools.partial(cart_pole, tmp_path / "train", i) for i in range(2)]), tmp_path / "train" / "t.npz")
    other = LedgerVecEnv(DummyVecEnv([functools.partial(cart_pole, tmp_path / "eval", 0)]), tmp_path / "eval" / "t.npz")
    model = PPO("MlpPolicy", venv, n_steps=32, batch_size=32, n_epochs=1, seed=0, device="cpu")
    model.learn(192, callback=EvalCallback(other, eval_freq=32, n_eval_episodes=2, verbose=0))
    venv.close()
    other.close()
    for name in ("train", "eval"):
        assert_equal(compare(tmp_path / name))


def test_a_reset_from_a_callback_is_an_event_of_both_sides(tmp_path: Path) -> None:
    class Resets(BaseCallback):
        def _on_step(self) -> bool:
            if self.n_calls % 20 == 0:
                self.training_env.reset()
            return True

    venv = LedgerVecEnv(DummyVecEnv([functools.partial(cart_pole, tmp_path, i) for i in range(2)]), tmp_path / "trainer.npz")
    PPO("MlpPolicy", venv, n_steps=64, batch_size=64, n_epochs=1, device="cpu").learn(256, callback=Resets())
    venv.close()
    assert_equal(compare(tmp_path))


def test_models_and_statistics_are_saved_and_loaded_as_without_ledgers(tmp_path: Path) -> None:
    venv = VecNormalize(venv_of(tmp_path / "one"))
    model = PPO("MlpPolicy", venv, n_steps=16, batch_size=16, n_epochs=1, device="cpu")
    model.learn(96)
    model.save(tmp_path / "model")
    venv.save(str(tmp_path / "statistics.pkl"))
    venv.close()
    again = VecNormalize.load(str(tmp_path / "statistics.pkl"), venv_of(tmp_path / "two"))
    loaded = PPO.load(tmp_path / "model", env=again, device="cpu")
    assert_same_weights(model, loaded)
    loaded.learn(96)
    again.close()
    for name in ("one", "two"):
        assert_equal(compare(tmp_path / name))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_started_afresh_record_too(tmp_path: Path, method: str) -> None:
    code = """
import functools, sys
from pathlib import Path
import numpy as np
from common import walk
from stable_baselines3.common.vec_env import SubprocVecEnv
from stepledger.sb3 import LedgerVecEnv
if __name__ == "__main__":
    directory = Path(sys.argv[1])
    venv = SubprocVecEnv([functools.partial(walk, directory, None) for _ in range(2)], start_method=sys.argv[2])
    venv = LedgerVecEnv(venv, directory / "trainer.npz")
    venv.reset()
    for _ in range(20):
        venv.step(np.array([0, 1]))
    venv.close()
"""
    run_python(code, tmp_path, method)
    comparison = compare(tmp_path)
    assert_equal(comparison)
    assert comparison.hops[0].streams == 2


@pytest.mark.parametrize("kind", ["DummyVecEnv", "SubprocVecEnv"])
def test_a_script_that_forgets_to_close_leaves_whole_ledgers(tmp_path: Path, kind: str) -> None:
    code = """
import functools, sys
from pathlib import Path
import numpy as np
from common import walk
from stable_baselines3.common import vec_env
from stepledger.sb3 import LedgerVecEnv
if __name__ == "__main__":
    directory = Path(sys.argv[1])
    venv = getattr(vec_env, sys.argv[2])([functools.partial(walk, directory, None) for _ in range(2)])
    venv = LedgerVecEnv(venv, directory / "trainer.npz")
    venv.reset()
    for _ in range(20):
        venv.step(np.array([0, 1]))
"""
    run_python(code, tmp_path, kind)
    assert_equal(compare(tmp_path))


@pytest.mark.parametrize("options", [{"on_error": "stop"}, {"digest": "md5"}, {"reward_dtype": np.int64}])
def test_a_setting_that_cannot_be_recorded_is_refused_at_construction(tmp_path: Path, options: dict[str, Any]) -> None:
    venv = DummyVecEnv([Walk])
    with pytest.raises(LedgerError):
        LedgerVecEnv(venv, tmp_path / "trainer.npz", **options)


def test_float64_rewards_are_rounded_by_the_dummy_vec_env_and_that_is_found(tmp_path: Path) -> None:
    for kind, equal in [("dummy", False), ("subproc", True)]:
        venv = venv_of(tmp_path / kind, n=1, kind=kind, reward_dtype=np.float64)
        drive(venv, 20)
        venv.close()
        comparison = compare(tmp_path / kind)
        assert comparison.equal == equal
        assert all(one.fields == ("reward",) for one in comparison.differences)


@pytest.mark.parametrize("infos", [{}, None, [None, None], {"a": 1}, [5, 5]], ids=repr)
def test_infos_of_a_strange_vec_env_end_the_recording_and_not_the_run(tmp_path: Path, infos: Any) -> None:
    class Strange(DummyVecEnv):
        def step_wait(self) -> Any:
            return *super().step_wait()[:3], infos

    venv = LedgerVecEnv(Strange([Walk, Walk]), tmp_path / "trainer.npz")
    venv.reset()
    with pytest.warns(RuntimeWarning, match="training goes on"):
        venv.step(np.array([0, 1]))
    venv.step(np.array([0, 1]))
    venv.close()


@pytest.mark.parametrize("wrong", [Walk(), gym.vector.SyncVectorEnv([Walk])], ids=["an environment", "a vector env of Gymnasium"])
def test_what_is_no_vec_env_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(LedgerError, match="goes around a VecEnv"):
        LedgerVecEnv(wrong, tmp_path / "trainer.npz")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [True, False])
def test_a_tap_that_is_put_on_after_the_first_reset_says_so(tmp_path: Path, kind: str, again: bool) -> None:
    inner = KINDS[kind]([functools.partial(walk, tmp_path, index) for index in range(2)])
    drive(inner, 10)
    with pytest.warns(RuntimeWarning, match="LedgerVecEnv was put around environments that have recorded already"):
        venv = LedgerVecEnv(inner, tmp_path / "trainer.npz")
    if again:
        venv.reset()
    for _ in range(10):
        venv.step(np.zeros(2, np.int64))
    venv.close()
    comparison = compare(tmp_path)
    assert comparison.exit_status == 0, str(comparison)
    assert comparison.events >= 2 * (10 + again)
    assert (tmp_path / "env-0.old1.npz").exists()


@pytest.mark.parametrize("length", [3, 5, 20])
def test_events_of_a_step_that_raised_elsewhere_are_no_difference(tmp_path: Path, length: int) -> None:
    makers = [lambda i=i: LedgerEnv(Crashes(Walk((length,), i), *[5, 9][: 2 * (i == 1)]), tmp_path, i) for i in range(3)]
    venv = LedgerVecEnv(DummyVecEnv(makers), tmp_path / "trainer.npz")
    venv.reset()
    for call in range(20):
        try:
            venv.step(np.full(3, call % 4))
        except RuntimeError:
            venv.reset()
    venv.close()
    comparison = compare(tmp_path)
    assert_equal(comparison)
    assert comparison.hops[0].notes[0].startswith("a step of the vector env raised RuntimeError: the simulator has crashed; ")
