"""Algorithms, VecEnvs, wrappers and stray calls for the tests of `stepledger.sb3.LedgerCallback`."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from common import Walk
from gymnasium import spaces
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3, HerReplayBuffer
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecNormalize

from stepledger.sb3 import LedgerCallback

try:
    import sb3_contrib
except ImportError:  # the tests that need it are skipped
    sb3_contrib = None

VECS: dict[str, Any] = {"dummy": DummyVecEnv, "subproc": functools.partial(SubprocVecEnv, start_method="fork")}

WRAPPERS: dict[str, Callable[[VecEnv], VecEnv]] = {
    "plain": lambda venv: venv,
    "VecNormalize": VecNormalize,
    "VecFrameStack": lambda venv: VecFrameStack(venv, 3),
    "both": lambda venv: VecNormalize(VecFrameStack(venv, 2)),
}

LENGTHS = (9, 17, 1, 12)


class Goals(gym.Env):
    """A goal env of the shape that HER takes: reach a random point on a line of integers within 11 steps."""

    def __init__(self, seed: int = 0) -> None:
        box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = spaces.Dict({"observation": box, "achieved_goal": box, "desired_goal": box})
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self._rng = np.random.default_rng(seed)

    def _observation(self) -> dict[str, Any]:
        return {"observation": self._at + 0.5, "achieved_goal": self._at.copy(), "desired_goal": self._goal.copy()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._at, self._goal = self._rng.standard_normal((2, 2)).astype(np.float32)
        self._left = 11
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._at = self._at + np.asarray(action, np.float32) * 0.3
        self._left -= 1
        reward = float(self.compute_reward(self._at, self._goal, {}))
        return self._observation(), reward, reward == 0, self._left == 0, {}

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return -(np.linalg.norm(np.asarray(achieved) - desired, axis=-1) > 0.5).astype(np.float32)


class Masked(Walk):
    """A `Walk` with valid actions."""

    def action_masks(self) -> Any:
        return np.array([True, True, False, True])


BOX = spaces.Box(-2, 3, (2,), np.float32)


def _walk(seed: int, action_space: spaces.Space | None = None, observation_space: spaces.Space | None = None) -> gym.Env:
    return Monitor(Walk((*LENGTHS, 2 + seed), seed, observation_space, action_space))


ON = {"n_steps": 32, "device": "cpu", "seed": 3}
OFF = {"learning_starts": 30, "buffer_size": 5_000, "batch_size": 8, "device": "cpu", "seed": 3, "train_freq": 4}
SMALL = {"policy_kwargs": {"net_arch": [8]}}

#: Name -> algorithm, policy, its environment, arguments.
ALGORITHMS: dict[str, tuple[Any, str, Callable[[int], gym.Env], dict[str, Any]]] = {
    "PPO": (PPO, "MlpPolicy", _walk, {**ON, **SMALL, "batch_size": 32, "n_epochs": 1}),
    "PPO Box": (PPO, "MlpPolicy", functools.partial(_walk, action_space=BOX), {**ON, **SMALL, "batch_size": 32, "n_epochs": 1}),
    "PPO gSDE": (
        PPO,
        "MlpPolicy",
        functools.partial(_walk, action_space=BOX),
        {**ON, "batch_size": 32, "n_epochs": 1, "use_sde": True, "policy_kwargs": {"net_arch": [8], "squash_output": True}},
    ),
    "A2C": (A2C, "MlpPolicy", functools.partial(_walk, action_space=spaces.MultiDiscrete([3, 2])), {**ON, **SMALL}),
    "DQN": (DQN, "MlpPolicy", _walk, {**OFF, **SMALL}),
    "DQN n-step": (DQN, "MlpPolicy", _walk, {**OFF, **SMALL, "n_steps": 3}),
    "DQN memory": (
        DQN,
        "MlpPolicy",
        _walk,
        {**OFF, **SMALL, "optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}},
    ),
    "SAC": (SAC, "MlpPolicy", functools.partial(_walk, action_space=BOX), {**OFF, **SMALL}),
    "TD3": (TD3, "MlpPolicy", functools.partial(_walk, action_space=BOX), {**OFF, **SMALL}),
    "DDPG": (DDPG, "MlpPolicy", functools.partial(_walk, action_space=BOX), {**OFF, **SMALL}),
    "HER": (SAC, "MultiInputPolicy", Goals, {**OFF, **SMALL, "learning_starts": 120, "replay_buffer_class": HerReplayBuffer}),
}
if "n_steps" not in inspect.signature(DQN.__init__).parameters:  # older ones take the buffer alone
    ALGORITHMS["DQN n-step"] = (DQN, "MlpPolicy", _walk, {**OFF, **SMALL, "replay_buffer_class": NStepReplayBuffer})
if sb3_contrib is not None:
    ALGORITHMS |= {
        "RecurrentPPO": (
            sb3_contrib.RecurrentPPO,
            "MlpLstmPolicy",
            functools.partial(_walk, action_space=BOX),
            {**ON, "batch_size": 32, "n_epochs": 1, "policy_kwargs": {"net_arch": [8], "lstm_hidden_size": 8}},
        ),
        "TRPO": (sb3_contrib.TRPO, "MlpPolicy", _walk, {**ON, **SMALL, "batch_size": 32}),
        "MaskablePPO": (
            sb3_contrib.MaskablePPO,
            "MlpPolicy",
            lambda seed: Monitor(Masked((*LENGTHS, 2 + seed), seed)),
            {**ON, **SMALL, "batch_size": 32, "n_epochs": 1},
        ),
        "QRDQN": (sb3_contrib.QRDQN, "MlpPolicy", _walk, {**OFF, **SMALL}),
        "TQC": (sb3_contrib.TQC, "MlpPolicy", functools.partial(_walk, action_space=BOX), {**OFF, **SMALL}),
        "CrossQ": (
            sb3_contrib.CrossQ,
            "MlpPolicy",
            functools.partial(_walk, action_space=BOX),
            {**OFF, "policy_kwargs": {"net_arch": {"pi": [8], "qf": [8]}}},
        ),
    }


def venv_of(
    algorithm: str, kind: str = "dummy", wrapper: str = "plain", n: int = 2, around: Callable[[Any, int], Any] | None = None
) -> VecEnv:
    """The VecEnv of an algorithm; ``around`` wraps each environment."""
    maker = ALGORITHMS[algorithm][2]

    def make(index: int) -> gym.Env:
        env = maker(index)
        return env if around is None else around(env, index)

    return WRAPPERS[wrapper](VECS[kind]([functools.partial(make, index) for index in range(n)]))


def model_of(algorithm: str, venv: VecEnv, **more: Any) -> Any:
    cls, policy, _, options = ALGORITHMS[algorithm]
    return cls(policy, venv, **copy.deepcopy({**options, **more}))  # Stable-Baselines3 changes policy_kwargs


class Strayed(BaseCallback):
    """Does something to the training env in one of its methods, at these calls of it."""

    def __init__(self, hook: str, call: Callable[[BaseCallback], Any], at: tuple[int, ...] = (3,)) -> None:
        super().__init__()
        self._hook, self._call, self._at, self._times = hook, call, at, 0

    def _maybe(self, hook: str) -> None:
        if hook == self._hook:
            self._times += 1
            if self._times in self._at:
                self._call(self)

    def _on_rollout_start(self) -> None:
        self._maybe("rollout_start")

    def _on_rollout_end(self) -> None:
        self._maybe("rollout_end")

    def _on_step(self) -> bool:
        self._maybe("step")
        return True


HOOKS = ("step", "rollout_start", "rollout_end")


def _steps(callback: BaseCallback) -> None:
    env = callback.training_env
    env.reset()
    for _ in range(3):
        env.step(np.array([env.action_space.sample() for _ in range(env.num_envs)]))


def _evaluate(callback: BaseCallback) -> None:
    evaluate_policy(Unmasked(callback.model), callback.training_env, n_eval_episodes=2, warn=False)


class Unmasked:
    """A model with the predictions of a random policy: what is evaluated is no matter here."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def predict(self, observation: Any, **kwargs: Any) -> tuple[Any, Any]:
        n = self._model.n_envs
        return np.array([self._model.action_space.sample() for _ in range(n)]), kwargs.get("state")


STRAYS: dict[str, Callable[[BaseCallback], Any]] = {
    "reset": lambda callback: callback.training_env.reset(),
    "reset and three steps": _steps,
    "evaluate_policy": _evaluate,
    "env_method": lambda callback: callback.training_env.env_method("reset"),
    "envs[0]": lambda callback: callback.training_env.unwrapped.envs[0].reset(),
}


def strayed(stray: str, hook: str, venv: VecEnv, at: tuple[int, ...] = (3,)) -> BaseCallback:
    """A callback with a stray call."""
    if stray == "EvalCallback":
        child = EvalCallback(venv, n_eval_episodes=2, eval_freq=1, warn=False, verbose=0)

        def evaluate(callback: BaseCallback) -> None:
            if child.parent is None and not hasattr(child, "model"):
                child.init_callback(callback.model)
            child.on_step()

        return Strayed(hook, evaluate, at)
    return Strayed(hook, STRAYS[stray], at)


def learn(model: Any, directory: Path, steps: int, *others: BaseCallback, **options: Any) -> LedgerCallback:
    callback = LedgerCallback(directory, **options)
    model.learn(steps, callback=[callback, *others] if others else callback)
    return callback
