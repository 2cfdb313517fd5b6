"""An environment of the shape of FetchPickAndPlace, and the scripts of the post that `docs/reward-collapses.md` is about."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.callbacks import BaseCallback


class FetchLike(gym.Env):
    """Move a point to a goal: 25 numbers, an achieved and a desired goal of 3 each, 4 actions, -1 for each step away from the goal."""

    def __init__(self, seed: int = 0) -> None:
        goal = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        observation = spaces.Box(-np.inf, np.inf, (25,), np.float64)
        self.observation_space = spaces.Dict({"observation": observation, "achieved_goal": goal, "desired_goal": goal})
        self.action_space = spaces.Box(-1, 1, (4,), np.float32)
        self._rng = np.random.default_rng(seed)

    def _observation(self) -> dict[str, Any]:
        observation = np.concatenate([self._at, self._goal, self._at - self._goal, np.zeros(16)])
        return {"observation": observation, "achieved_goal": self._at.copy(), "desired_goal": self._goal.copy()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._at, self._goal = self._rng.uniform(-0.2, 0.2, (2, 3))
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._at = self._at + 0.03 * np.asarray(action[:3], np.float64)
        return self._observation(), float(self.compute_reward(self._at, self._goal, {})), False, False, {}

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return -(np.linalg.norm(np.asarray(achieved) - desired, axis=-1) > 0.05).astype(np.float64)


def make_env(seed: int = 0) -> Any:
    def _init() -> gym.Env:
        return TimeLimit(FetchLike(seed), 50)

    return _init


class VideoRecorderCallback(BaseCallback):
    """As in the post, word for word: it returns nothing."""

    every = 50000

    def _on_step(self):  # type: ignore[no-untyped-def]
        if self.n_calls % self.every == 0:
            obs = self.training_env.reset()
            # Record episode...
            for _ in range(100):
                action, _ = self.model.predict(obs, deterministic=True)
                obs, _reward, done, _info = self.training_env.step(action)
                if done.any():
                    obs = self.training_env.reset()


class VideoEvery(VideoRecorderCallback):
    """The same that goes on, and counts steps of the environments, as the post means it."""

    def __init__(self, steps: int, envs: int) -> None:
        super().__init__()
        self.every = max(1, steps // envs)

    def _on_step(self) -> bool:
        super()._on_step()
        return True
