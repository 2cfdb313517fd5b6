"""What the tests of RLlib share: small environments, a small PPO, and recording a run of any config."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from ray.rllib.algorithms.ppo import PPOConfig

from stepledger import Comparison, compare
from stepledger_ray import attach

SAMPLED = ("env_runners", "num_env_steps_sampled_lifetime")
HOPS = ["env -> vector", "vector -> episode", "episode -> learner"]


class Walk(gym.Env):
    """Random observations and rewards; episodes of 4 to 12 steps that terminate, are truncated, or both."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self.action_space = gym.spaces.Box(-2, 3, (2,), np.float32) if (config or {}).get("box", True) else gym.spaces.Discrete(5)
        self._left = self._ends = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(4, 12))
        return self.np_random.standard_normal(3).astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        end = [(True, False), (False, True), (True, True)][self._ends % 3] if self._left == 0 else (False, False)
        if self._left <= 0:
            self._ends += self._left == 0
            self._left = int(self.np_random.integers(4, 12)) if self._left < 0 else 0
        return self.np_random.standard_normal(3).astype(np.float32), float(self.np_random.normal()), *end, {}


def config(runners: int = 0, envs: int = 2, mode: str = "sync", env: Any = Walk, **env_config: Any) -> PPOConfig:
    return (
        PPOConfig()
        .environment(env, env_config=env_config)
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=envs, gym_env_vectorize_mode=gym.VectorizeMode(mode))
        .training(train_batch_size=240, minibatch_size=120, num_epochs=1)
        .rl_module(model_config={"fcnet_hiddens": [8]})
        .debugging(seed=0)
    )


def train(one: PPOConfig, iterations: int = 2) -> Any:
    algorithm = one.build_algo()
    try:
        for _ in range(iterations):
            algorithm.train()
    finally:
        algorithm.stop()
    return algorithm


def record(directory: Path, one: PPOConfig, iterations: int = 2) -> Comparison:
    train(attach(one, directory), iterations)
    return compare(directory)


def hop(result: Comparison, name: str) -> Any:
    return next(one for one in result.hops if one.name == name)


class Corridor(Walk):
    """All episodes begin alike, and observations repeat; only rewards tell steps apart."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__({"box": False})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._x = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._x += 1 if action > 2 else -1
        return np.full(3, self._x, np.float32), *super().step(action)[1:]


class WalkVectorEnv(gym.vector.VectorEnv):
    """Steps its environments itself, as a simulator that runs many at once does."""

    metadata: ClassVar = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, config: dict[str, Any]) -> None:
        self.num_envs = config["num_envs"]
        self._inner = gym.vector.SyncVectorEnv([functools.partial(Walk, config)] * self.num_envs)
        self.single_observation_space, self.single_action_space = self._inner.single_observation_space, self._inner.single_action_space
        self.observation_space, self.action_space = self._inner.observation_space, self._inner.action_space

    def reset(self, **kwargs: Any) -> Any:
        return self._inner.reset(**kwargs)

    def step(self, actions: Any) -> Any:
        return self._inner.step(actions)


class OwnMode(WalkVectorEnv):
    """Resets its environments in a way that no ledger knows."""

    metadata: ClassVar = {"autoreset_mode": "a mode of one's own"}


PRIORITIZED, UNIFORM = "PrioritizedEpisodeReplayBuffer", "EpisodeReplayBuffer"


def sampling(one: Any, runners: int = 0, env: Any = Walk, **env_config: Any) -> Any:
    """The config of any algorithm, made small."""
    return (
        one.environment(env, env_config=env_config)
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=2, rollout_fragment_length=20)
        .rl_module(model_config={"fcnet_hiddens": [8]})
        .reporting(min_sample_timesteps_per_iteration=100, min_time_s_per_iteration=0)
        .debugging(seed=0)
    )


def replaying(one: Any, buffer: str, n_step: Any = 1) -> Any:
    """The config of an algorithm with a replay buffer, with a small one."""
    return one.training(
        n_step=n_step,
        train_batch_size_per_learner=32,
        num_steps_sampled_before_learning_starts=50,
        replay_buffer_config={"type": buffer, "capacity": 1000},
    )
