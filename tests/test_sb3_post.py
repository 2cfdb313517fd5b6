"""The post that says "100K step desync": its scripts tried, and the repairs of `docs/reward-collapses.md`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("stable_baselines3")
torch = pytest.importorskip("torch")

from fetch_like import VideoEvery, VideoRecorderCallback, make_env  # noqa: E402
from learner_sb3 import VECS, learn, model_of, venv_of  # noqa: E402
from stable_baselines3 import PPO  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecMonitor  # noqa: E402

pytestmark = [pytest.mark.sb3, pytest.mark.filterwarnings("ignore:Training and eval env:UserWarning")]

torch.set_num_threads(1)

LONG = os.environ.get("STEPLEDGER_LONG") == "1"
STEPS, ENVS, ROLLOUT, EVERY = (200_000, 16, 2048, 50_000) if LONG else (3_072, 16, 64, 1_024)


def model(venv: Any) -> PPO:
    return PPO("MultiInputPolicy", venv, n_steps=ROLLOUT, batch_size=256, n_epochs=10 if LONG else 1, device="cpu", seed=0)


def envs(kind: str = "subproc") -> Any:
    return VECS[kind]([make_env(index) for index in range(ENVS)])


def hop(callback: Any) -> Any:
    return callback.comparison.hops[-1]


def test_the_callback_of_the_post_ends_training_at_its_first_step(tmp_path: Path) -> None:
    ppo = model(envs("dummy"))
    learn(ppo, tmp_path, STEPS, VideoRecorderCallback())
    assert ppo.num_timesteps == ENVS


@pytest.mark.parametrize("monitor", [False, True], ids=["", "VecMonitor"])
@pytest.mark.parametrize("kind", VECS)
def test_what_its_video_callback_does_and_vecmonitor_does_not_mend(tmp_path: Path, kind: str, monitor: bool) -> None:
    venv = VecMonitor(envs(kind)) if monitor else envs(kind)
    callback = learn(model(venv), tmp_path, STEPS, VideoEvery(EVERY, ENVS))
    venv.close()
    assert callback.comparison.exit_status == 1
    # The last one comes when learning ends.
    notes = [note for note in hop(callback).notes if "a callback reset" in note and "no stored transition" not in note]
    calls = [int(number.replace(",", "")) for note in notes for number in re.findall(r"between call ([\d,]+) and", note)]
    assert calls == [EVERY // ENVS * time for time in range(1, STEPS // EVERY + 1)][: len(calls)]
    assert len(calls) >= STEPS // EVERY - 1
    for note in notes:
        # 100 steps with a reset whenever an episode has ended, which the VecEnv had reset already.
        assert "reset the training env 3 times and stepped it 100 times" in note
        assert "fetch_like.py:" in note
        assert "16 stored transitions cross a reset" in note
    assert hop(callback).differences == 16 * len(notes) == callback.differences


def test_no_env_is_reset_in_the_place_of_another(tmp_path: Path) -> None:
    """Each worker resets its own environment, and whoever was not asked stays where it is, however often somebody resets by hand."""
    from stepledger import LedgerEnv, compare

    def make(index: int) -> Any:
        return lambda: LedgerEnv(make_env(index)(), tmp_path, index)

    venv = SubprocVecEnv([make(index) for index in range(4)], start_method="fork")
    callback = learn(model(venv), tmp_path, STEPS, VideoEvery(EVERY // 2, 4))
    venv.close()
    assert callback.comparison.hops[0].name == "env -> vector"
    assert callback.comparison.hops[0].differences == 0
    callback.close()
    assert compare(tmp_path).hops[0].differences == 0


def test_an_evaluation_on_an_env_of_its_own_is_silent(tmp_path: Path) -> None:
    for kind in VECS:
        evaluation = EvalCallback(VECS[kind]([make_env(9)] * 2), eval_freq=EVERY // ENVS, n_eval_episodes=4, verbose=0, warn=False)
        venv = envs()
        callback = learn(model(venv), tmp_path / kind, STEPS, evaluation)
        venv.close()
        evaluation.eval_env.close()
        assert callback.comparison.exit_status == 0, str(callback.comparison)


class HandsOver(BaseCallback):
    """Resets the training env between two rollouts, and tells the trainer."""

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        model, env = self.model, self.training_env
        model._last_obs = env.reset()
        model._last_episode_starts = np.ones(env.num_envs, bool)


@pytest.mark.parametrize("algorithm", ["PPO", "PPO Box", "A2C"])
@pytest.mark.parametrize("wrapper", ["plain", "VecNormalize", "VecFrameStack"])
def test_a_reset_between_two_rollouts_that_tells_the_trainer_is_silent(tmp_path: Path, algorithm: str, wrapper: str) -> None:
    callback = learn(model_of(algorithm, venv_of(algorithm, wrapper=wrapper)), tmp_path, 300, HandsOver())
    assert callback.comparison.exit_status == 0, str(callback.comparison)
    assert callback.differences == 0


class HandsOverOffPolicy(BaseCallback):
    """The same for an algorithm with a replay buffer of single transitions."""

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        model, env = self.model, self.training_env
        model._last_obs = env.reset().copy()
        if model.get_vec_normalize_env() is not None:
            model._last_original_obs = model.get_vec_normalize_env().get_original_obs()


@pytest.mark.parametrize("algorithm", ["DQN", "SAC"])
@pytest.mark.parametrize("wrapper", ["plain", "VecNormalize", "VecFrameStack"])
def test_likewise_with_a_replay_buffer(tmp_path: Path, algorithm: str, wrapper: str) -> None:
    callback = learn(model_of(algorithm, venv_of(algorithm, wrapper=wrapper)), tmp_path, 300, HandsOverOffPolicy())
    assert callback.comparison.exit_status == 0, str(callback.comparison)
    assert "no stored transition crosses it" in str(callback.comparison)


@pytest.mark.parametrize("algorithm", ["DQN n-step", "HER"])
def test_but_not_with_one_that_joins_transitions(tmp_path: Path, algorithm: str) -> None:
    class HandsOverDicts(HandsOverOffPolicy):
        def _on_rollout_start(self) -> None:
            self.model._last_obs = self.training_env.reset()

    callback = learn(model_of(algorithm, venv_of(algorithm)), tmp_path, 100, HandsOverDicts())
    assert {one.fields for one in callback.comparison.differences} == {("episode_start",)}


class SafeVecEnv:
    """As in the post."""

    def __init__(self, vec_env: Any) -> None:
        self.env = vec_env
        self._last_obs = None

    def reset(self) -> Any:
        obs = self.env.reset()
        self._last_obs = obs
        dummy_actions = np.zeros((self.env.num_envs, *self.env.action_space.shape))
        _, _, _dones, _ = self.env.step(dummy_actions)
        return obs

    def step(self, actions: Any) -> Any:
        return self.env.step(actions)


def test_the_safe_vec_env_of_the_post_is_no_env_and_returns_an_observation_too_old() -> None:
    venv = DummyVecEnv([make_env()])
    safe = SafeVecEnv(venv)
    with pytest.raises((AttributeError, AssertionError, ValueError, TypeError)):
        PPO("MultiInputPolicy", safe, device="cpu")  # type: ignore[arg-type]
    safe.reset()
    assert venv.envs[0].get_wrapper_attr("_elapsed_steps") == 1  # the observation is that of step 0


def test_the_debugging_env_of_the_post_raises() -> None:
    class DebugSubprocVecEnv(SubprocVecEnv):
        def step_wait(self) -> Any:
            obs, rewards, dones, infos = super().step_wait()
            if dones.any():
                print(f"Step {self.num_timesteps}: dones = {dones}")
            return obs, rewards, dones, infos

    venv = DebugSubprocVecEnv([make_env()], start_method="fork")
    venv.reset()
    for _ in range(49):
        venv.step(np.zeros((1, 4), np.float32))
    with pytest.raises(AttributeError, match="num_timesteps"):
        venv.step(np.zeros((1, 4), np.float32))
    venv.close()
