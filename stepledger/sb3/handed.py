"""What is handed to the trainer: its steps until they are stored, and what somebody else did in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from stable_baselines3.common.vec_env import (
    VecCheckNan,
    VecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
    VecVideoRecorder,
)

from ..strays import Stray
from .digests import Digests
from .places import Position

__all__ = ["HandedStep", "StrayCalls", "innermost", "reset_observation"]

#: Wrappers that hand observations on as they are.
_TRANSPARENT = (VecMonitor, VecCheckNan, VecVideoRecorder)


def innermost(env: VecEnv) -> VecEnv:
    """The VecEnv inside all wrappers."""
    while isinstance(env, VecEnvWrapper):
        env = env.venv
    return env


def reset_observation(env: VecEnv, handed: Any) -> Any:
    """What the innermost VecEnv gave at a reset that nobody saw, from what the outermost one made of it.

    Args:
        env: The outermost VecEnv.
        handed: Its observations.

    Returns:
        A batch; `None` where a wrapper is not known.
    """
    while isinstance(env, VecEnvWrapper):
        if isinstance(env, VecNormalize):
            handed = env.old_obs
        elif isinstance(env, VecTransposeImage) and isinstance(handed, np.ndarray) and not env.skip:
            handed = np.moveaxis(handed, 1, -1)
        elif isinstance(env, VecFrameStack) and isinstance(handed, np.ndarray):
            stacked = env.stacked_obs
            newest = slice(-(handed.shape[stacked.stack_dimension] // stacked.n_stack), None)
            handed = handed[:, newest] if stacked.channels_first else handed[..., newest]
        elif not isinstance(env, _TRANSPARENT):
            return None
        env = env.venv
    return handed


@dataclass
class StrayCalls:
    """Calls of somebody else between two steps of the trainer.

    Attributes:
        calls: They themselves.
        number: In the column ``by``.
        envs: ``(n,)`` bool: whose environments they reached.
        before: Episodes and steps, ``(n,)`` each, of the last event before them.
        after: Likewise, of the last of them.
        shown: ``(n,)`` bool: whose transitions differ for it.
    """

    calls: Stray
    number: int
    envs: npt.NDArray[np.bool_]
    before: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    after: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    shown: npt.NDArray[np.bool_]


@dataclass(slots=True)
class HandedStep:
    """A step as the trainer got it, until it is stored. Arrays have one entry per environment.

    Attributes:
        t: Positions of the events in their streams.
        obs: Digests of the observations it began from, as they were handed to the trainer.
        raw_obs: Their bytes.
        start: Whether it does not go on from the step before: a reset came in between, or calls of somebody else.
        act: Digests of the actions, as they were sent.
        actions: The actions as they were sent.
        reward: As it is to be stored, float32.
        given: As it is recorded, float32.
        next_obs: Digests; of the final observation where the episode ended.
        raw_next_obs: Their bytes; empty where they were not put together.
        ended: The environments whose episode ended.
        done: The episode ended.
        timeout: It ended by a time limit, and not by a termination.
        terminated: It ended by a termination.
        infos: As they were handed over.
        first: Whether the reset before it is the one with which ``learn()`` began.
        stray: What somebody else did between the step before and this one, if anything.
    """

    t: Position
    obs: Digests
    raw_obs: bytes
    start: npt.NDArray[np.bool_]
    act: Digests
    actions: npt.NDArray[Any]
    reward: npt.NDArray[np.float32]
    given: npt.NDArray[np.float32]
    next_obs: Digests
    raw_next_obs: bytes
    ended: list[int]
    done: npt.NDArray[np.bool_]
    timeout: npt.NDArray[np.bool_]
    terminated: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]]
    first: bool
    stray: StrayCalls | None
