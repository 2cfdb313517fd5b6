"""The learner tap for Stable-Baselines3: what it finds, and what it leaves as it was."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from common import Walk
from gymnasium import spaces

from stepledger import LedgerEnv, LedgerError, compare, read

pytest.importorskip("stable_baselines3")
torch = pytest.importorskip("torch")

from learner_sb3 import (  # noqa: E402
    ALGORITHMS,
    HOOKS,
    LENGTHS,
    STRAYS,
    VECS,
    WRAPPERS,
    Strayed,
    learn,
    model_of,
    strayed,
    venv_of,
)
from stable_baselines3 import DQN, PPO, SAC  # noqa: E402
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer, RolloutBuffer  # noqa: E402
from stable_baselines3.common.callbacks import (  # noqa: E402
    BaseCallback,
    CallbackList,
    EvalCallback,
    EveryNTimesteps,
    StopTrainingOnMaxEpisodes,
)
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.noise import NormalActionNoise  # noqa: E402
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm  # noqa: E402
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor  # noqa: E402
from stable_baselines3.common.vec_env import (  # noqa: E402
    DummyVecEnv,
    SubprocVecEnv,
    VecEnvWrapper,
    VecExtractDictObs,
    VecMonitor,
    VecNormalize,
)

from stepledger.sb3 import LedgerCallback, LedgerVecEnv  # noqa: E402
from stepledger.sb3.hooks import _hooked  # noqa: E402

pytestmark = [pytest.mark.sb3, pytest.mark.filterwarnings("ignore:Training and eval env:UserWarning")]

torch.set_num_threads(1)

#: As for the fault matrix (tests/test_faults.py): only so many cases that each value occurs.
SHORT = os.environ.get("STEPLEDGER_MATRIX") == "short"
LONG = os.environ.get("STEPLEDGER_LONG") == "1"
STEPS = 20_000 if LONG else 320


def cases(*parts: Any, share: float, seed: int = 0) -> list[tuple[Any, ...]]:
    """All combinations in a long run; else a seeded share of them that has every value of every part."""
    whole = [()]
    for part in parts:
        whole = [(*one, value) for one in whole for value in part]
    if LONG:
        return whole
    order = np.random.default_rng(seed).permutation(len(whole)).tolist()
    chosen, seen = [], set()
    for at in order:
        new = {(index, value) for index, value in enumerate(whole[at])} - seen
        if new or (len(chosen) < share * len(whole) and not SHORT):
            chosen.append(whole[at])
            seen |= new
    return chosen


def assert_silent(callback: LedgerCallback) -> None:
    comparison = callback.comparison
    assert comparison is not None
    assert comparison.exit_status == 0, str(comparison)
    assert callback.differences == 0
    hop = comparison.hops[-1]
    assert hop.name == "vector -> learner"
    assert hop.coverage["sampled"] == hop.coverage["learned_once"] == hop.events > 0
    assert not _hooked


def learner_hop(callback: LedgerCallback) -> Any:
    assert callback.comparison is not None
    return next(hop for hop in callback.comparison.hops if hop.name == "vector -> learner")


@pytest.mark.parametrize(("algorithm", "kind", "wrapper"), cases(ALGORITHMS, VECS, WRAPPERS, share=0.1))
def test_a_run_without_a_fault_is_silent(tmp_path: Path, algorithm: str, kind: str, wrapper: str) -> None:
    venv = venv_of(algorithm, kind, wrapper)
    assert_silent(learn(model_of(algorithm, venv), tmp_path, STEPS))
    venv.close()


STRAY_CASES = [
    case
    for case in cases(ALGORITHMS, VECS, WRAPPERS, [*STRAYS, "EvalCallback"], HOOKS, share=0.012, seed=1)
    if case[1] == "dummy" or case[3] != "envs[0]"
]


@pytest.mark.parametrize(("algorithm", "kind", "wrapper", "stray", "hook"), STRAY_CASES)
def test_a_stray_call_is_found_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str, kind: str, wrapper: str, stray: str, hook: str
) -> None:
    venv = venv_of(algorithm, kind, wrapper)
    callback = learn(model_of(algorithm, venv), tmp_path, STEPS, strayed(stray, hook, venv))
    venv.close()
    assert callback.comparison is not None
    assert callback.comparison.exit_status == 1
    report, live = str(callback.comparison), capsys.readouterr().out.splitlines()[0]
    for text in (report, live):
        assert "a callback reset the training env" in text
        assert "called from " in text
        assert "learner_sb3.py:" in text
    assert callback.differences == learner_hop(callback).differences
    assert str(compare(tmp_path)) == report
    assert not _hooked


class Shadow(gym.Wrapper):
    """Counts episodes and steps on its own, to say where an event is."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.place = (-1, 0)

    def reset(self, **options: Any) -> Any:
        self.place = (self.place[0] + 1, 0)
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        self.place = (self.place[0], self.place[1] + 1)
        return self.env.step(action)


@pytest.mark.parametrize("algorithm", ["PPO", "DQN", "SAC"])
def test_a_crossing_is_named_at_its_env_episode_and_step(tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str) -> None:
    places: list[list[tuple[int, int]]] = []

    def reset(callback: BaseCallback) -> None:
        envs = callback.training_env.unwrapped.envs
        places.append([env.place for env in envs])
        callback.training_env.reset()
        places.append([env.place for env in envs])

    line = inspect.getsourcelines(reset)[1] + 3
    venv = venv_of(algorithm, n=3, around=lambda env, index: Shadow(env))
    callback = learn(model_of(algorithm, venv), tmp_path, 300, Strayed("step", reset, at=(20,)))
    found = callback.comparison.differences
    assert [(one.env, one.episode, one.step) for one in found] == [(env, episode, 1) for env, (episode, _) in enumerate(places[1])]
    (episode, step), after = places[0][0], places[1][0][0]
    sentence = (
        f"a callback reset the training env between call 20 and 21 (called from test_sb3_learner.py:{line}); "
        f"the next transition of env 0 joins episode {episode} step {step} to episode {after} step 1; 3 stored transitions cross a reset"
    )
    assert sentence in str(callback.comparison)
    assert f"stepledger: {sentence}" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["PPO", "DQN", "SAC"])
def test_several_stray_calls_are_told_apart(tmp_path: Path, algorithm: str) -> None:
    venv = venv_of(algorithm)
    callback = learn(model_of(algorithm, venv), tmp_path, 200, Strayed("step", STRAYS["reset"], at=(10, 11, 40)))
    notes = [note for note in learner_hop(callback).notes if "a callback" in note]
    assert [note.split(" (")[0].split("between ")[1] for note in notes] == ["call 10 and 11", "call 11 and 12", "call 40 and 41"]
    assert learner_hop(callback).differences == callback.differences == 6


# Nothing of the run changes.


def weights(algorithm: str, wrapper: str, directory: Path | None) -> list[Any]:
    venv = venv_of(algorithm, wrapper=wrapper)
    venv.seed(5)
    model = model_of(algorithm, venv)
    model.learn(320, callback=None if directory is None else LedgerCallback(directory))
    return list(model.policy.state_dict().values())


@pytest.mark.parametrize(("algorithm", "wrapper"), cases(ALGORITHMS, ["plain", "both"], share=0.4))
def test_weights_are_the_same_bit_for_bit(tmp_path: Path, algorithm: str, wrapper: str) -> None:
    for one, other in zip(weights(algorithm, wrapper, tmp_path), weights(algorithm, wrapper, None), strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


def methods(*things: Any) -> dict[tuple[type, str], Any]:
    return {(cls, name): value for thing in things for cls in type(thing).__mro__ for name, value in vars(cls).items()}


class Raising(BaseCallback):
    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def _raise(self, where: str) -> None:
        if where == self._where:
            raise KeyError(where)

    def _init_callback(self) -> None:
        self._raise("init")

    def _on_training_start(self) -> None:
        self._raise("training_start")

    def _on_rollout_start(self) -> None:
        self._raise("rollout_start")

    def _on_step(self) -> bool:
        self._raise("step")
        return True

    def _on_rollout_end(self) -> None:
        self._raise("rollout_end")

    def _on_training_end(self) -> None:
        self._raise("training_end")


@pytest.mark.parametrize("where", ["", "init", "training_start", "rollout_start", "step", "rollout_end", "training_end", "env", "train"])
@pytest.mark.parametrize("first", [True, False])
def test_everything_is_restored_also_after_an_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, first: bool) -> None:
    venv = venv_of("PPO", wrapper="VecNormalize")
    model = model_of("PPO", venv)
    raising = Raising(where)
    if where == "env":
        monkeypatch.setattr(Walk, "step", lambda self, action: {}[where])
    if where == "train":
        monkeypatch.setattr(PPO, "train", lambda self: {}[where])
    things = (model, venv, venv.venv, model.rollout_buffer, raising, *venv.venv.envs, venv.venv.envs[0].unwrapped)
    before = methods(*things)
    callback = LedgerCallback(tmp_path)
    try:
        model.learn(100, callback=[callback, raising] if first else [raising, callback])
        assert not where
    except KeyError:
        assert where
    assert methods(*things) == before
    assert not _hooked
    if where == "step":  # and it can go on
        raising._where = ""
        model.learn(100, callback=[callback, raising])
        assert_silent(callback)


@pytest.mark.parametrize("algorithm", ["PPO", "DQN"])
def test_an_interrupt_leaves_whole_ledgers_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str) -> None:
    def interrupt(callback: BaseCallback) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn(model_of(algorithm, venv_of(algorithm)), tmp_path, 100, Strayed("step", interrupt, at=(20,)))
    sentence = f"learn() ended with KeyboardInterrupt; compare what was recorded until then with: stepledger compare {tmp_path}"
    assert capsys.readouterr().out.count(sentence) == 1
    comparison = compare(tmp_path)
    assert comparison.exit_status in (0, 3), str(comparison)
    assert comparison.events == 2 * 19


@pytest.mark.parametrize("algorithm", ["DQN", "HER", "PPO"])
def test_saving_goes_on_working_while_it_records(tmp_path: Path, algorithm: str) -> None:
    def save(callback: BaseCallback) -> None:
        callback.model.save(tmp_path / "model")
        if hasattr(callback.model, "replay_buffer"):
            callback.model.save_replay_buffer(tmp_path / "buffer")
            assert pickle.loads((tmp_path / "buffer.pkl").read_bytes()).size() > 0
        pickle.dumps(callback.training_env) if algorithm != "PPO" else None

    venv = venv_of(algorithm)
    callback = learn(model_of(algorithm, venv), tmp_path / "run", 200, Strayed("step", save))
    assert_silent(callback)
    cls = ALGORITHMS[algorithm][0]
    loaded = cls.load(tmp_path / "model", env=venv_of(algorithm), device="cpu")
    loaded.learn(100)


@pytest.mark.parametrize("algorithm", ["PPO", "SAC"])
def test_an_evaluation_on_an_env_of_its_own_is_silent(tmp_path: Path, algorithm: str) -> None:
    venv = venv_of(algorithm, wrapper="VecNormalize")
    evaluation = EvalCallback(VecNormalize(venv_of(algorithm), training=False), eval_freq=20, n_eval_episodes=2, verbose=0, warn=False)
    callback = learn(model_of(algorithm, venv), tmp_path, 200, evaluation)
    assert_silent(callback)


def test_an_error_of_the_recording_ends_it_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepledger.sb3.stored import StoredRows

    monkeypatch.setattr(StoredRows, "record", lambda *arguments: {}["full"])
    model = model_of("DQN", venv_of("DQN"))
    with pytest.warns(RuntimeWarning, match="stopped, training goes on: KeyError: 'full'"):
        callback = learn(model, tmp_path, 100)
    assert model.num_timesteps >= 100
    assert not _hooked
    assert callback.comparison is None or callback.comparison.exit_status != 0


# Runs that go on, and what may happen in between.


@pytest.mark.parametrize(
    "algorithm", [name for name in ALGORITHMS if name in ("PPO", "DQN", "DQN n-step", "DQN memory", "HER", "RecurrentPPO")]
)
@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.filterwarnings("ignore:The last trajectory in the replay buffer will be truncated")
def test_learning_several_times_is_silent(tmp_path: Path, algorithm: str, reset: bool) -> None:
    model, callback = model_of(algorithm, venv_of(algorithm)), LedgerCallback(tmp_path)
    for _ in range(3):
        model.learn(130, callback=callback, reset_num_timesteps=reset)
        if not (reset and algorithm in ("HER", "DQN n-step")):
            assert_silent(callback)
    if reset and algorithm in ("HER", "DQN n-step"):  # Stable-Baselines3 goes on with the open episodes, see docs/known-differences.md
        assert {one.fields for one in callback.comparison.differences} == {("episode_start",)}
        assert "were open when learn() reset the environments" in str(callback.comparison)
        assert callback.differences == learner_hop(callback).differences > 0


@pytest.mark.parametrize("algorithm", ["PPO", "DQN", "SAC"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_beginning_to_record_in_the_middle_of_a_run_is_silent(tmp_path: Path, algorithm: str, wrapper: str) -> None:
    model = model_of(algorithm, with_ledgers(tmp_path, "dummy", wrapper, algorithm))
    model.learn(70)
    callback = LedgerCallback(tmp_path)
    model.learn(64, callback=callback, reset_num_timesteps=False)
    assert_silent(callback)
    assert "events came before learn()" in str(callback.comparison)


@pytest.mark.parametrize("algorithm", ["PPO", "DQN", "SAC"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_evaluation_between_two_calls_of_learn_is_found(tmp_path: Path, algorithm: str, wrapper: str) -> None:
    """Where the observation is not told to the trainer; a ``learn()`` that resets the env itself is not disturbed by it."""
    for reset in (False, True):
        model, callback = model_of(algorithm, venv_of(algorithm, wrapper=wrapper)), LedgerCallback(tmp_path / str(reset))
        for _ in range(2):
            model.learn(64, callback=callback, reset_num_timesteps=reset)
            evaluate_policy(model, model.get_env(), n_eval_episodes=2)
        if reset:
            assert_silent(callback)
        else:
            assert callback.differences == learner_hop(callback).differences == 2
            assert "a place that nobody watched, between two calls of learn()" in str(callback.comparison)
            assert "somebody reset or stepped the training env between call" in str(callback.comparison)


@pytest.mark.parametrize("algorithm", ["PPO", "DQN"])
def test_a_stray_call_of_a_callback_that_is_initialised_before(tmp_path: Path, algorithm: str) -> None:
    class Eager(BaseCallback):
        def _init_callback(self) -> None:
            self.training_env.reset()

        def _on_step(self) -> bool:
            return True

    for first in (True, False):
        callback, eager = LedgerCallback(tmp_path / str(first)), Eager()
        model_of(algorithm, venv_of(algorithm)).learn(64, callback=[eager, callback] if first else [callback, eager])
        assert callback.differences == learner_hop(callback).differences == 2


@pytest.mark.parametrize("child", [lambda callback: EveryNTimesteps(20, callback), lambda callback: CallbackList([callback])])
def test_it_records_inside_another_callback_that_is_the_only_one(tmp_path: Path, child: Any) -> None:
    callback = LedgerCallback(tmp_path)
    model_of("PPO", venv_of("PPO")).learn(64, callback=child(callback))
    assert_silent(callback)


@pytest.mark.parametrize("algorithm", ["PPO", "SAC"])
def test_another_env_and_a_loaded_model_go_on(tmp_path: Path, algorithm: str) -> None:
    model, callback = model_of(algorithm, venv_of(algorithm)), LedgerCallback(tmp_path / "run")
    model.learn(100, callback=callback)
    model.set_env(venv_of(algorithm))
    model.learn(100, callback=callback)
    assert_silent(callback)
    model.save(tmp_path / "model")
    loaded = type(model).load(tmp_path / "model", env=venv_of(algorithm), device="cpu")
    loaded.learn(100, callback=callback, reset_num_timesteps=False)
    assert_silent(callback)


def test_a_callback_that_stops_learning_is_no_fault(tmp_path: Path) -> None:
    for algorithm in ("PPO", "DQN"):
        model = model_of(algorithm, venv_of(algorithm))
        assert_silent(learn(model, tmp_path / algorithm, 1000, StopTrainingOnMaxEpisodes(3)))


def test_going_on_after_a_callback_has_stopped_is_one(tmp_path: Path) -> None:
    """Stable-Baselines3 returns before it has stored the step, and goes on from the observation before it."""
    model, callback = model_of("DQN", venv_of("DQN")), LedgerCallback(tmp_path)
    model.learn(1000, callback=[callback, StopTrainingOnMaxEpisodes(3)])
    model.learn(100, callback=callback, reset_num_timesteps=False)
    assert callback.comparison.exit_status == 1
    assert {one.fields for one in callback.comparison.differences} == {("obs",)}


IMAGE = spaces.Box(0, 255, (36, 36, 3), np.uint8)
DICT = spaces.Dict({"image": IMAGE, "position": spaces.Box(-1, 1, (2,))})


def of_space(space: spaces.Space, kind: str = "dummy", **more: Any) -> Any:
    return VECS[kind]([lambda i=i: Walk(LENGTHS, i, observation_space=space, **more) for i in range(2)])


@pytest.mark.parametrize("kind", VECS)
@pytest.mark.parametrize(
    ("space", "policy"),
    [(IMAGE, "CnnPolicy"), (DICT, "MultiInputPolicy"), (spaces.Discrete(5), "MlpPolicy"), (spaces.MultiBinary(4), "MlpPolicy")],
    ids=["image", "dict", "discrete", "binary"],
)
@pytest.mark.parametrize("cls", [PPO, DQN])
def test_observations_of_every_kind(tmp_path: Path, kind: str, space: spaces.Space, policy: str, cls: Any) -> None:
    options = {"n_steps": 16, "batch_size": 16, "n_epochs": 1} if cls is PPO else {"learning_starts": 1000, "buffer_size": 100}
    venv = of_space(space, kind)
    callback = learn(cls(policy, venv, device="cpu", **options), tmp_path, 64, Strayed("step", STRAYS["reset"], at=(9,)))
    venv.close()
    assert {(one.step, one.kind) for one in callback.comparison.differences} <= {(0, "extra"), (1, "changed")}
    assert callback.comparison.exit_status == 1
    model = cls(policy, of_space(space, kind), device="cpu", **options)
    assert_silent(learn(model, tmp_path / "clean", 64))
    model.env.close()


@pytest.mark.parametrize(
    "space",
    [BOX64 := spaces.Box(np.array([-2.0, 0.1]), np.array([3.0, 7.7]), dtype=np.float64), spaces.Box(-1, 1, (2, 2), np.float32)],
    ids=["f8", "2x2"],
)
@pytest.mark.parametrize(
    ("cls", "more"),
    [(PPO, {"n_steps": 32, "batch_size": 32}), (SAC, {"learning_starts": 20, "buffer_size": 500, "train_freq": (1, "step")})],
)
def test_actions_of_float64_and_of_several_axes(tmp_path: Path, space: spaces.Space, cls: Any, more: dict[str, Any]) -> None:
    venv = DummyVecEnv([lambda i=i: Walk(LENGTHS, i, action_space=space) for i in range(2)])
    assert_silent(learn(cls("MlpPolicy", venv, device="cpu", policy_kwargs={"net_arch": [8]}, **more), tmp_path, 200))


class Reusing(DummyVecEnv):
    """Gives the same arrays of rewards and ends at each step, with other values."""

    def step_wait(self) -> Any:
        observations, _, _, infos = super().step_wait()
        return observations, self.buf_rews, self.buf_dones, infos


def test_arrays_that_the_vecenv_uses_again_are_recorded_as_they_were(tmp_path: Path) -> None:
    venv = Reusing([lambda seed=seed: ALGORITHMS["DQN"][2](seed) for seed in range(2)])
    assert_silent(learn(model_of("DQN", venv), tmp_path, STEPS))
    with np.load(tmp_path / "vector.npz") as vector:
        ends, kind = vector["terminated"] | vector["truncated"], vector["kind"]
    assert np.count_nonzero(ends) == np.count_nonzero(kind == 0) - 2 > 0  # a reset behind each end, and one at the beginning


def test_action_noise_episodic_training_and_a_buffer_that_goes_round(tmp_path: Path) -> None:
    venv = venv_of("TD3", n=1)
    noise = NormalActionNoise(np.zeros(2), 0.3 * np.ones(2))
    model = model_of("TD3", venv, action_noise=noise, train_freq=(1, "episode"), buffer_size=50)
    assert_silent(learn(model, tmp_path, 300))


def test_a_wrapper_of_its_own_that_makes_another_observation(tmp_path: Path) -> None:
    for kind in VECS:
        venv = VecExtractDictObs(of_space(spaces.Dict({"a": spaces.Box(-1, 1, (3,)), "b": spaces.Box(-1, 1, (2,))}), kind), "a")
        assert_silent(learn(PPO("MlpPolicy", VecMonitor(venv), n_steps=32, batch_size=32, device="cpu"), tmp_path / kind, 64))
        venv.close()


# The env side.


def with_ledgers(directory: Path, kind: str, wrapper: str = "plain", algorithm: str = "PPO") -> Any:
    return venv_of(algorithm, kind, wrapper, around=lambda env, index: LedgerEnv(env, directory, index))


@pytest.mark.parametrize("kind", VECS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_env_side_is_compared_too(tmp_path: Path, kind: str, wrapper: str) -> None:
    venv = with_ledgers(tmp_path, kind, wrapper)
    venv.reset()  # before learn(): nobody can have seen it but the environments
    model, callback = model_of("PPO", venv), LedgerCallback(tmp_path)
    for _ in range(2):
        model.learn(100, callback=callback)
    assert_silent(callback)
    assert [hop.name for hop in callback.comparison.hops] == ["env -> vector", "vector -> learner"]
    assert callback.comparison.hops[0].events > 200
    venv.close()
    callback.close()
    assert compare(tmp_path).exit_status == 0


@pytest.mark.parametrize("kind", VECS)
@pytest.mark.filterwarnings("ignore:.*this LedgerEnv does not know its position")
def test_environments_that_could_not_be_told_their_position_are_missed(tmp_path: Path, kind: str) -> None:
    venv = venv_of("PPO", kind, "plain", around=lambda env, index: LedgerEnv(env, tmp_path))
    callback = LedgerCallback(tmp_path)
    with pytest.warns(RuntimeWarning, match="does not know its position and records nothing: pass it as index="):
        model_of("PPO", venv).learn(100, callback=callback)
    venv.close()
    assert callback.comparison.exit_status == 2
    assert "no ledger of the tap 'env'" in str(callback.comparison)


@pytest.mark.parametrize("kind", VECS)
def test_stray_calls_are_on_both_sides_and_only_the_learner_differs(tmp_path: Path, kind: str) -> None:
    venv = with_ledgers(tmp_path, kind)
    callback = learn(
        model_of("PPO", venv), tmp_path, 100, strayed("reset and three steps", "step", venv), strayed("env_method", "step", venv, (30,))
    )
    first, second = callback.comparison.hops
    assert first.differences == 0
    assert second.differences == 4
    venv.close()


# Buffers that store something else than they were given.


def stored_otherwise(model: Any, row: int, name: str, value: Any) -> None:
    """Have the buffer of a model put something else into a row, of env 1: a value, or what a function makes of the right one."""
    buffer = model.rollout_buffer if hasattr(model, "rollout_buffer") else model.replay_buffer

    class Faulty(type(buffer)):  # type: ignore[misc]
        def add(self, *args: Any, **kwargs: Any) -> None:
            pos = self.pos
            super().add(*args, **kwargs)
            if pos == row:
                next_only = name == "next_observations" and self.optimize_memory_usage
                column, place = (self.observations, pos + 1) if next_only else (getattr(self, name), pos)
                column = column["observation"] if isinstance(column, dict) else column
                column[place, 1] = value(column[place, 1]) if callable(value) else value

    buffer.__class__ = Faulty


def more(value: Any) -> Any:
    return value + 1e-3


def other(value: Any) -> Any:
    return (value + 1) % 2


#: Rows of the second episode: its second step, and its last, which a time limit has ended.
MIDDLE, END = "middle", "end"
PLACES = {"HER": {MIDDLE: (12, 2), END: (21, 11)}}
ELSEWHERE = {MIDDLE: (10, 2), END: (25, 17)}
ON = {
    "obs": (MIDDLE, "observations", more, ("obs",)),
    "action": (MIDDLE, "actions", 0.123, ("action",)),
    "reward": (MIDDLE, "rewards", more, ("reward",)),
    "reward of a time limit": (END, "rewards", more, ("reward",)),
    "episode_start": (MIDDLE, "episode_starts", other, ("episode_start",)),
}
OFF = {
    "obs": (MIDDLE, "observations", more, ("obs",)),
    "action": (MIDDLE, "actions", 0.123, ("action",)),
    "reward": (MIDDLE, "rewards", more, ("reward",)),
    "next_obs": (MIDDLE, "next_observations", more, ("next_obs",)),
    "final next_obs": (END, "next_observations", more, ("next_obs",)),
    "done": (MIDDLE, "dones", 1, ("terminated",)),
    "done of a time limit": (END, "dones", 0, ("truncated",)),
    "time limit": (END, "timeouts", 0, ("terminated", "truncated")),
}
FAULTS = [
    (algorithm, field)
    for algorithm, (cls, *_) in ALGORITHMS.items()
    for field in (OFF if issubclass(cls, OffPolicyAlgorithm) else ON)
    # what that buffer does not store: it has nothing of its own for a final observation, and no time limits
    if algorithm != "DQN memory" or field not in ("final next_obs", "time limit")
]


@pytest.mark.parametrize(
    ("algorithm", "field", "wrapper"),
    [(*case, wrapper) for at, case in enumerate(FAULTS) for index, wrapper in enumerate(WRAPPERS) if LONG or index == at % len(WRAPPERS)],
)
def test_a_buffer_that_stores_something_else_is_found(tmp_path: Path, algorithm: str, field: str, wrapper: str) -> None:
    """The table of fields in the documentation, cell by cell."""
    off_policy = issubclass(ALGORITHMS[algorithm][0], OffPolicyAlgorithm)
    place, name, value, fields = (OFF if off_policy else ON)[field]
    row, step = PLACES.get(algorithm, ELSEWHERE)[place]
    if algorithm == "DQN memory" and fields == ("truncated",):
        fields = ("terminated",)  # which is any end of an episode there
    if algorithm == "HER" and wrapper in ("VecFrameStack", "both"):
        wrapper = "VecNormalize"  # its goals are not stacked
    model = model_of(algorithm, venv_of(algorithm, wrapper=wrapper), **({} if off_policy else {"n_steps": 64}))
    discrete = field == "action" and not isinstance(model.action_space, spaces.Box)
    stored_otherwise(model, row, name, other if discrete else value)
    callback = learn(model, tmp_path, 128)
    first, *others = callback.comparison.differences
    assert (first.env, first.fields) == (1, fields)
    assert (first.episode, first.step) == (1, step)
    # Buffers that join rows by the ends that they have stored begin an episode there, and the same row is the next one's beginning.
    assert {(one.env, one.episode, one.step) for one in others} <= {(1, first.episode, first.step + 1), (1, 2, 1)}
    assert {field for one in others for field in one.fields} <= {"episode_start", "obs"}


def test_a_buffer_that_forgets_a_row_is_found(tmp_path: Path) -> None:
    class Forgets(ReplayBuffer):
        added = 0

        def add(self, *args: Any, **kwargs: Any) -> None:
            self.added += 1
            if self.added == 10:
                return
            super().add(*args, **kwargs)

    callback = learn(model_of("DQN", venv_of("DQN"), replay_buffer_class=Forgets), tmp_path, 60)
    assert callback.comparison.exit_status == 1


class Integers(gym.Env):
    """Integer rewards and a time limit of 5 steps."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def reset(self, **options: Any) -> Any:
        self._at = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self._at += 1
        return np.full(2, self._at / 5, np.float32), 1, False, self._at == 5, {}


def test_integer_rewards_cut_the_bootstrap_value_with_subproc(tmp_path: Path) -> None:
    """`SubprocVecEnv` stacks integers, and the value of the final observation is added in place: Stable-Baselines3 2.9."""
    venv = SubprocVecEnv([Integers] * 2, start_method="fork")
    callback = learn(PPO("MlpPolicy", venv, n_steps=20, batch_size=20, device="cpu", seed=0), tmp_path, 40)
    venv.close()
    assert {(one.step, one.fields) for one in callback.comparison.differences} == {(5, ("reward",))}
    venv = DummyVecEnv([Integers] * 2)
    assert_silent(learn(PPO("MlpPolicy", venv, n_steps=20, batch_size=20, device="cpu", seed=0), tmp_path / "dummy", 40))


def buffer_class(base: Any, add: Any) -> Any:
    """A buffer with this ``add(self, super_add, *args)``."""

    class Own(base):  # type: ignore[misc, valid-type]
        def add(self, *args: Any) -> None:
            add(self, super().add, *args)

    return Own


def test_a_time_limit_whose_value_was_never_added_is_found(tmp_path: Path) -> None:
    def add(buffer: Any, store: Any, obs: Any, actions: Any, rewards: Any, *others: Any) -> None:
        store(obs, actions, np.ones_like(rewards), *others)

    venv = venv_of("PPO", around=lambda env, index: gym.wrappers.TransformReward(env, lambda _: 1.0))
    callback = learn(model_of("PPO", venv, rollout_buffer_class=buffer_class(RolloutBuffer, add)), tmp_path, 64)
    found = callback.comparison.differences
    assert {(one.episode, one.step, one.fields) for one in found} == {(1, 17, ("reward",))}
    assert "2 rewards of a time limit were stored without gamma * V(final observation)" in str(callback.comparison)


def test_a_time_limit_that_was_kept_from_the_trainer_is_found(tmp_path: Path) -> None:
    def forget(callback: BaseCallback) -> None:
        for info in callback.locals["infos"]:
            info.pop("TimeLimit.truncated", None)

    for algorithm in ("PPO", "DQN"):
        callback = learn(model_of(algorithm, venv_of(algorithm)), tmp_path / algorithm, 64, Strayed("step", forget, at=range(100)))
        assert {one.fields for one in callback.comparison.differences} == {
            ("reward",) if algorithm == "PPO" else ("terminated", "truncated")
        }
        assert callback.differences == learner_hop(callback).differences > 0


@pytest.mark.parametrize("reward", [-1000.0, -100.0, 0.0, 1e-6])
def test_a_reward_that_cancels_the_value_of_a_time_limit_is_no_difference(tmp_path: Path, reward: float) -> None:
    venv = venv_of("PPO", around=lambda env, index: gym.wrappers.TransformReward(env, lambda _: reward))
    model = model_of("PPO", venv)
    with torch.no_grad():
        model.policy.value_net.bias.fill_(-reward)
    assert_silent(learn(model, tmp_path, 320))


class Noisy(BaseFeaturesExtractor):
    """Draws and counts at each call, so that one call more changes the run."""

    def __init__(self, observation_space: spaces.Space) -> None:
        super().__init__(observation_space, 3)
        self.register_buffer("calls", torch.zeros(()))
        self._generator = torch.Generator().manual_seed(0)

    def forward(self, observations: Any) -> Any:
        self.calls += 1
        return observations + 0.1 * torch.randn(observations.shape, generator=self._generator) + 1e-4 * self.calls


@pytest.mark.parametrize("algorithm", ["PPO", "DQN"])
def test_a_policy_that_changes_whenever_it_is_asked_is_not_asked(tmp_path: Path, algorithm: str) -> None:
    def train(*callbacks: BaseCallback) -> list[bytes]:
        kwargs = {"net_arch": [8], "features_extractor_class": Noisy}
        model = model_of(algorithm, venv_of(algorithm), policy_kwargs=kwargs)
        model.learn(200, callback=list(callbacks))
        return [value.numpy().tobytes() for value in model.policy.state_dict().values()]

    callback = LedgerCallback(tmp_path)
    assert train(callback) == train()
    assert_silent(callback)


class Turned(VecEnvWrapper):
    """Sends another action than it was asked for."""

    def step_async(self, actions: Any) -> None:
        self.venv.step_async(actions * np.float32(0.5) if actions.dtype.kind == "f" else (actions + 1) % 4)

    def step_wait(self) -> Any:
        return self.venv.step_wait()

    def reset(self) -> Any:
        return self.venv.reset()


class InPlace(Turned):
    """Changes what it hands on in the arrays that it was given."""

    def step_async(self, actions: Any) -> None:
        self.venv.step_async(actions)

    def step_wait(self) -> Any:
        observations, rewards, dones, infos = self.venv.step_wait()
        observations *= np.float32(0.5)
        rewards *= np.float32(0.1)
        for info in infos:
            if "terminal_observation" in info:
                info["terminal_observation"] = info["terminal_observation"] * np.float32(0.5)
        return observations, rewards, dones, infos


@pytest.mark.parametrize("algorithm", ["PPO", "DQN", "SAC"])
def test_a_wrapper_that_changes_arrays_in_place_is_no_difference(tmp_path: Path, algorithm: str) -> None:
    assert_silent(learn(model_of(algorithm, InPlace(with_ledgers(tmp_path, "dummy", algorithm=algorithm))), tmp_path, 100))


class Together(DummyVecEnv):
    """Resets all environments by itself within a step, when one has ended, as simulators do that step all at once."""

    def step_wait(self) -> Any:
        observations, rewards, dones, infos = super().step_wait()
        if dones.any():
            for env in np.flatnonzero(~dones):
                infos[env]["terminal_observation"] = observations[env].copy()
            observations, dones = self.reset(), np.ones_like(dones)
        return observations, rewards, dones, infos


@pytest.mark.parametrize("algorithm", ["PPO", "DQN"])
def test_a_vecenv_that_resets_itself_within_a_step_is_no_stray_call(tmp_path: Path, algorithm: str) -> None:
    venv = Together([lambda i=i: Walk((9,), i) for i in range(2)])
    assert_silent(learn(model_of(algorithm, venv), tmp_path, 100))


@pytest.mark.parametrize("algorithm", ["DQN n-step", "DQN"])
@pytest.mark.parametrize("space", [spaces.Discrete(5), spaces.Box(-1, 1, (3,))], ids=["discrete", "box"])
def test_recording_that_begins_in_the_middle_knows_the_rows_in_any_form(tmp_path: Path, algorithm: str, space: spaces.Space) -> None:
    model = model_of(algorithm, of_space(space))
    model.learn(50)
    callback = LedgerCallback(tmp_path)
    model.learn(60, reset_num_timesteps=False, callback=callback)
    assert_silent(callback)


def test_values_that_cannot_be_heard_are_said_to_be_not_compared(tmp_path: Path) -> None:
    model = model_of("PPO", venv_of("PPO"))
    original = model.policy.predict_values
    model.policy.predict_values = lambda *args, **kwargs: original(*args, **kwargs)
    callback = learn(model, tmp_path, 64)
    assert_silent(callback)
    assert "2 rewards of a time limit were not compared: predict_values is replaced" in str(callback.comparison)


def test_a_reset_below_a_wrapper_that_makes_another_observation_is_found(tmp_path: Path) -> None:
    class Doubled(gym.ObservationWrapper):
        def __init__(self, env: gym.Env) -> None:
            super().__init__(env)
            self.observation_space = spaces.Dict({"a": env.observation_space, "b": env.observation_space})

        def observation(self, observation: Any) -> Any:
            return {"a": observation, "b": observation}

    venv = DummyVecEnv([lambda i=i: Doubled(Walk(LENGTHS, i)) for i in range(2)])
    stray = Strayed("step", lambda callback: callback.training_env.envs[0].unwrapped.reset(), at=(5,))
    callback = learn(PPO("MultiInputPolicy", venv, n_steps=32, batch_size=32, device="cpu"), tmp_path, 64, stray)
    assert callback.differences == learner_hop(callback).differences == 1
    assert "a callback reset the training env between call 5 and 6" in str(callback.comparison)


@pytest.mark.parametrize("bound", [1.0, 1000.0])
def test_float64_actions_of_a_large_range_are_equal_as_float32_holds_them(tmp_path: Path, bound: float) -> None:
    space = spaces.Box(-bound, bound, (1,), np.float64)
    venv = DummyVecEnv([lambda i=i: Walk(LENGTHS, i, action_space=space) for i in range(2)])
    assert_silent(learn(model_of("SAC", venv), tmp_path, 400))


def test_a_callback_beside_it_can_be_pickled(tmp_path: Path) -> None:
    def pickled(callback: BaseCallback) -> None:
        copies.append(cloudpickle.loads(cloudpickle.dumps(callback)))

    copies: list[Any] = []
    model = model_of("PPO", venv_of("PPO"))
    callback = learn(model, tmp_path, 64, Strayed("step", pickled))
    assert_silent(callback)
    assert copies
    with pytest.warns(RuntimeWarning, match="a copy of a LedgerCallback and records nothing"):
        model.learn(64, callback=copy.deepcopy(callback))


def test_a_buffer_of_one_row_is_read(tmp_path: Path) -> None:
    callback = learn(model_of("DQN", venv_of("DQN"), buffer_size=2, batch_size=1), tmp_path, 60)
    assert_silent(callback)


@pytest.mark.parametrize("algorithm", ["PPO", "PPO Box", "DQN", "SAC"])
def test_a_wrapper_that_changes_actions_is_no_difference(tmp_path: Path, algorithm: str) -> None:
    assert_silent(learn(model_of(algorithm, Turned(with_ledgers(tmp_path, "dummy", algorithm=algorithm))), tmp_path, 100))


def test_rows_that_a_buffer_adds_by_itself_are_named(tmp_path: Path) -> None:
    def twice(buffer: Any, store: Any, obs: Any, next_obs: Any, actions: Any, rewards: Any, *others: Any) -> None:
        store(obs, next_obs, actions, rewards, *others)
        store(-obs, -next_obs, actions, rewards, *others)

    callback = learn(model_of("DQN", venv_of("DQN"), replay_buffer_class=buffer_class(ReplayBuffer, twice)), tmp_path, 60)
    assert callback.comparison.exit_status == 0
    assert "32 rows were added to the buffer beside those of the trainer's steps, and not compared" in str(callback.comparison)


def test_a_buffer_that_stores_rows_later_is_not_compared(tmp_path: Path) -> None:
    def later(buffer: Any, store: Any, *row: Any) -> None:
        waiting.append(row)
        if len(waiting) == 3:
            store(*waiting.pop(0))

    waiting: list[Any] = []
    with pytest.warns(RuntimeWarning) as caught:
        callback = learn(
            model_of("DQN", venv_of("DQN"), replay_buffer_class=buffer_class(ReplayBuffer, later)),
            tmp_path,
            60,
            Strayed("step", STRAYS["reset"]),
        )
    assert "Own stores no row when one is added, as one does that joins several first: what it stores" in one_sentence(caught)
    assert callback.comparison is None
    assert callback.differences == 2


def test_a_method_of_the_environments_that_resets_them_is_a_stray_call(tmp_path: Path) -> None:
    class Levels(gym.Wrapper):
        def set_level(self, level: int) -> None:
            self.reset()

    venv = venv_of("PPO", around=lambda env, index: Levels(env))
    stray = Strayed("step", lambda callback: callback.training_env.env_method("set_level", 3), at=(5,))
    callback = learn(model_of("PPO", venv), tmp_path, 64, stray)
    assert callback.differences == learner_hop(callback).differences == 2
    assert "a callback reset the training env 2 times between call 5 and 6" in str(callback.comparison)


SCRIPT = """
import sys
import gymnasium as gym
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import CallbackList, CheckpointCallback, BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from gymnasium.envs.classic_control import CartPoleEnv
from stepledger.sb3 import LedgerCallback

class MyEnv(CartPoleEnv):
    def step(self, action):
        return super().step(action)

class MyBuffer(ReplayBuffer):
    def add(self, *args, **kwargs):
        super().add(*args, **kwargs)

class Evaluates(BaseCallback):
    def _on_step(self):
        if self.n_calls == 20:
            other = SubprocVecEnv([MyEnv] * 2, start_method="spawn")
            other.reset()
            other.step([0, 1])
            other.close()
        return True

if __name__ == "__main__":
    ledger = LedgerCallback(sys.argv[1])
    model = DQN("MlpPolicy", DummyVecEnv([MyEnv]), replay_buffer_class=MyBuffer, device="cpu")
    model.learn(60, callback=[CheckpointCallback(20, sys.argv[1] + "-models", save_replay_buffer=True), Evaluates(), ledger])
    DQN.load(sys.argv[1] + "-models/rl_model_40_steps").set_env(DummyVecEnv([MyEnv]))
    sys.exit(ledger.comparison.exit_status)
"""


def test_classes_that_a_script_defines_are_pickled_as_ever(tmp_path: Path) -> None:
    """By their values, patched methods and all: when a model is saved, and when a worker is started."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "script.py", tmp_path / "run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# What is done about a difference.


@pytest.mark.parametrize("algorithm", ["PPO", "DQN"])
def test_it_can_stop_the_run(tmp_path: Path, algorithm: str) -> None:
    model = model_of(algorithm, venv_of(algorithm))
    with pytest.warns(RuntimeWarning, match="a callback reset the training env between call 10 and 11"):
        callback = learn(model, tmp_path, 2_000, Strayed("step", STRAYS["reset"], at=(10,)), on_difference="stop")
    assert model.num_timesteps == 2 * 12
    assert callback.differences == learner_hop(callback).differences == 2


def test_stopping_is_over_when_it_learns_again(tmp_path: Path) -> None:
    model, stray = model_of("DQN", venv_of("DQN")), Strayed("step", STRAYS["reset"], at=(10,))
    with pytest.warns(RuntimeWarning, match="a callback reset the training env between call 10 and 11"):
        callback = learn(model, tmp_path, 2_000, stray, on_difference="stop")
    model.learn(200, callback=callback)
    assert model.num_timesteps == 200


def test_it_can_warn(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="a callback reset the training env") as caught:
        learn(model_of("PPO", venv_of("PPO")), tmp_path, 64, Strayed("step", STRAYS["reset"], at=(5, 9)), on_difference="warn")
    assert len([one for one in caught if "stepledger" in str(one.message)]) == 1


def test_the_number_of_differences_is_logged(tmp_path: Path) -> None:
    from stable_baselines3.common.logger import configure

    for algorithm in ("PPO", "DQN"):
        model = model_of(algorithm, venv_of(algorithm))
        model.set_logger(configure(str(tmp_path / algorithm), ["csv"]))
        model.learn(
            300, callback=[LedgerCallback(tmp_path / algorithm / "run"), Strayed("step", STRAYS["reset"], at=(10,))], log_interval=1
        )
        header, *rows = (tmp_path / algorithm / "progress.csv").read_text().splitlines()
        column = header.split(",").index("stepledger/differences")
        assert float(rows[-1].split(",")[column]) == 2


# What it is given wrongly.


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"on_difference": "raise"}, "on_difference='raise' is unknown: use 'log', 'warn' or 'stop'"),
        ({"digest": "md5"}, "digest 'md5' is unknown"),
        ({"on_error": "ignore"}, "on_error='ignore' is unknown"),
    ],
)
def test_an_unknown_setting_is_refused(tmp_path: Path, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LedgerError, match=sentence):
        LedgerCallback(tmp_path, **arguments)


def test_a_file_in_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="names a file: LedgerCallback takes the run directory"):
        LedgerCallback(tmp_path / "learner.npz")


def one_sentence(caught: Any) -> str:
    (warning,) = [str(one.message) for one in caught if "stepledger" in str(one.message)]
    return warning


def test_a_vecenv_replaced_under_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def replace(callback: BaseCallback) -> None:
        callback.model.env = venv_of("PPO")
        callback.model.env.reset()

    with pytest.warns(RuntimeWarning) as caught:
        callback = learn(model_of("PPO", venv_of("PPO")), tmp_path, 200, Strayed("rollout_end", replace, at=(1,)))
    assert "the VecEnv of the model was replaced under way, after call 32" in one_sentence(caught)
    assert callback.comparison is not None
    assert callback.comparison.exit_status == 3
    assert compare(tmp_path).to_dict() == callback.comparison.to_dict()
    assert f"{callback.comparison}\n" in capsys.readouterr().out


def test_a_vecenv_of_other_spaces(tmp_path: Path) -> None:
    model, callback = model_of("PPO", venv_of("PPO")), LedgerCallback(tmp_path)
    model.learn(64, callback=callback)
    model.save(tmp_path / "model")
    loaded = PPO.load(tmp_path / "model", env=venv_of("PPO", n=3), device="cpu")
    with pytest.warns(RuntimeWarning, match="another number of environments: what comes now is not recorded"):
        loaded.learn(64, callback=callback)
    assert not _hooked


def test_a_callback_used_for_two_models(tmp_path: Path) -> None:
    callback = LedgerCallback(tmp_path)
    venv = venv_of("PPO")
    model_of("PPO", venv).learn(64, callback=callback)
    with pytest.warns(RuntimeWarning) as caught:
        model_of("PPO", venv).learn(64, callback=callback)
    assert "this LedgerCallback recorded another model, and this one is not recorded" in one_sentence(caught)


def test_a_model_loaded_before_its_first_update_is_the_same_one(tmp_path: Path) -> None:
    model, callback = model_of("DQN", venv_of("DQN"), learning_starts=1000), LedgerCallback(tmp_path / "run")
    model.learn(64, callback=callback)
    model.save(tmp_path / "model")
    DQN.load(tmp_path / "model", env=venv_of("DQN"), device="cpu").learn(64, callback=callback)
    assert_silent(callback)
    with pytest.warns(RuntimeWarning, match="recorded another model"):
        model_of("DQN", venv_of("DQN"), learning_starts=1000, seed=4).learn(64, callback=callback)


def test_a_callback_that_was_closed(tmp_path: Path) -> None:
    model = model_of("PPO", venv_of("PPO"))
    callback = learn(model, tmp_path, 64)
    callback.close()
    with pytest.warns(RuntimeWarning) as caught:
        model.learn(64, callback=callback)
    assert "has ended, this run is not recorded: make another LedgerCallback" in one_sentence(caught)
    assert callback.comparison is None


def test_a_vecenv_with_a_step_of_its_own(tmp_path: Path) -> None:
    class Fast(DummyVecEnv):
        def step(self, actions: Any) -> Any:
            self.step_async(actions)
            return self.step_wait()

    with pytest.warns(RuntimeWarning) as caught:
        callback = learn(PPO("MlpPolicy", Fast([lambda: Walk(LENGTHS)]), n_steps=32, device="cpu"), tmp_path, 32)
    assert "Fast has a step() of its own" in one_sentence(caught)
    assert callback.comparison is None


def test_two_callbacks_in_one_directory(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="another LedgerCallback is recording into"):
        model_of("PPO", venv_of("PPO")).learn(64, callback=[LedgerCallback(tmp_path), LedgerCallback(tmp_path)])
    again = learn(model_of("PPO", venv_of("PPO")), tmp_path, 64)
    assert_silent(again)
    assert (tmp_path / "learner.old1.npz").exists()


def test_replies_that_were_never_received(tmp_path: Path) -> None:
    """An interrupt between sending and receiving; where ``learn()`` goes on without a reset, one env is a step late from then on."""
    venv = venv_of("PPO", "subproc")
    model = model_of("PPO", venv)
    model.learn(64)
    venv.step_async(np.zeros(2, np.int64))
    venv.remotes[1].recv()  # the interrupt came behind this one
    with pytest.warns(RuntimeWarning, match="its replies were never received"):
        model.learn(64, callback=LedgerCallback(tmp_path), reset_num_timesteps=False)
    for remote in venv.remotes:
        remote.close()
    for process in venv.processes:
        process.terminate()


def test_two_callbacks_in_two_directories(tmp_path: Path) -> None:
    callbacks = [LedgerCallback(tmp_path / name) for name in "ab"]
    model_of("DQN", venv_of("DQN")).learn(64, callback=[*callbacks, Strayed("step", STRAYS["reset"])])
    assert [callback.differences for callback in callbacks] == [2, 2]
    assert not _hooked


def test_an_algorithm_without_a_buffer(tmp_path: Path) -> None:
    contrib = pytest.importorskip("sb3_contrib")
    model = contrib.ARS("MlpPolicy", venv_of("PPO"), n_delta=1, device="cpu")
    with pytest.warns(RuntimeWarning) as caught:
        callback = learn(model, tmp_path, 50)
    assert "ARS has no rollout or replay buffer" in one_sentence(caught)
    assert callback.comparison is None
    assert not _hooked


class Unknown(BaseBuffer):
    """A buffer like no other."""

    def __init__(self, size: int, *args: Any, n_envs: int = 1, optimize_memory_usage: bool = False, **kwargs: Any) -> None:
        super().__init__(size, *args, n_envs=n_envs)
        self.inner = ReplayBuffer(size, *args, n_envs=n_envs)

    def add(self, *args: Any) -> None:
        self.inner.add(*args)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.sample(*args, **kwargs)

    def _get_samples(self, *args: Any) -> Any:
        raise NotImplementedError


def test_a_buffer_that_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of("DQN", venv_of("DQN"), replay_buffer_class=Unknown)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback = learn(model, tmp_path, 100, Strayed("step", STRAYS["reset"]))
    assert any("Unknown is no buffer that this version knows" in str(one.message) for one in caught)
    assert "a callback reset the training env between call 3 and 4 (called from learner_sb3.py" in capsys.readouterr().out
    assert callback.comparison is None
    assert model.num_timesteps >= 100


def test_an_env_side_of_other_spaces(tmp_path: Path) -> None:
    other = LedgerEnv(Walk(observation_space=spaces.Discrete(4)), tmp_path, 0)
    other.reset()
    other.close()
    with pytest.warns(RuntimeWarning) as caught:
        callback = learn(model_of("PPO", venv_of("PPO")), tmp_path, 64)
    assert "recorded with different observation spaces" in one_sentence(caught)
    assert callback.comparison is None


def test_ledger_vec_env_inside_is_refused_where_both_would_write(tmp_path: Path) -> None:
    venv = LedgerVecEnv(venv_of("PPO"), tmp_path / "trainer.npz")
    with pytest.warns(RuntimeWarning, match="take LedgerVecEnv out"):
        learn(model_of("PPO", venv), tmp_path, 64)


def test_rows_that_a_callback_adds_are_named_and_not_compared(tmp_path: Path) -> None:
    def add(callback: BaseCallback) -> None:
        buffer = callback.model.replay_buffer
        obs, action = np.zeros((2, 3), np.float32), np.zeros((2, 1), np.int64)
        buffer.add(obs, obs, action, np.zeros(2), np.zeros(2), [{}, {}])

    callback = learn(model_of("DQN", venv_of("DQN")), tmp_path, 100, Strayed("step", add, at=(5, 9)))
    assert callback.differences == 0
    assert callback.comparison.exit_status == 0
    assert "2 rows were added to the buffer outside of a step, and not compared" in str(callback.comparison)


def test_a_ledger_says_what_it_holds(tmp_path: Path) -> None:
    learn(model_of("DQN", venv_of("DQN")), tmp_path, 100)
    learner = read(tmp_path / "learner.npz")
    assert learner.meta["tap"] == "learner"
    assert set(learner.streams[0].data["kind"].tolist()) == {2}
    assert learner.events == 104


class Reversed(VecEnvWrapper):
    """Gives each environment's observation and reward to another, and the reward with the other sign."""

    def reset(self) -> np.ndarray:
        return self.venv.reset()[::-1].copy()

    def step_wait(self) -> Any:
        observations, rewards, dones, infos = self.venv.step_wait()
        return observations[::-1].copy(), -rewards, dones, infos


@pytest.mark.parametrize("algorithm", [PPO, DQN])
def test_wrappers_that_make_other_values_are_named_and_those_that_do_not_are_not(tmp_path: Path, algorithm: Any) -> None:
    notes = []
    for name, wrap in {"none": VecMonitor, "own": lambda venv: VecMonitor(Reversed(venv))}.items():
        venv = wrap(DummyVecEnv([lambda: gym.make("CartPole-v1")] * 2))
        callback = LedgerCallback(tmp_path / name)
        options = {"n_steps": 32} if algorithm is PPO else {"learning_starts": 1000}
        algorithm("MlpPolicy", venv, seed=0, device="cpu", **options).learn(64, callback=callback)
        callback.close()
        assert callback.comparison is not None
        notes.append([note for hop in callback.comparison.hops for note in hop.notes if "handed them on" in note])
    assert notes == [[], ["observations and rewards as Reversed handed them on: what became of them there is not compared"]]
