"""The vector faults of `faults` for Stable-Baselines3."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
from faults import EVERY, Batch, BatchFaults, Dose
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper

__all__ = ["FaultyVecEnv"]


class FaultyVecEnv(VecEnvWrapper):
    """Makes faults in the trainer's process, inside its `stepledger.sb3.LedgerVecEnv`.

    Args:
        venv: The vector env.
        fault: A name in `faults.VECTOR_FAULTS`. ``both:...`` never happen: Stable-Baselines3 has one flag for both ends.
        dose: How often.
        log: File to which injections are appended.
    """

    def __init__(self, venv: VecEnv, fault: str, dose: Dose = EVERY, *, log: str | os.PathLike[str] | None = None) -> None:
        super().__init__(venv)
        self._faults = BatchFaults(fault, dose, venv.num_envs, venv.observation_space, venv.action_space, "SameStep", log, exclusive=True)

    def reset(self) -> Any:
        """Reset the environments, with faults."""
        return self._faults.reset(self.venv.reset())

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        """Send the actions, with faults."""
        self.venv.step_async(self._faults.send(actions))

    def step_wait(self) -> tuple[Any, npt.NDArray[Any], npt.NDArray[Any], list[dict[str, Any]]]:
        """Receive the step, with faults."""
        observations, rewards, dones, infos = self.venv.step_wait()
        truncated = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos])
        final = {env: info["terminal_observation"] for env, info in enumerate(infos) if "terminal_observation" in info}
        batch = self._faults.receive(Batch(observations, rewards, dones & ~truncated, dones & truncated, final))
        delivered = []
        for env, info in enumerate(infos):
            info = {name: value for name, value in info.items() if name != "terminal_observation"}
            info["TimeLimit.truncated"] = bool(batch.truncated[env] and not batch.terminated[env])
            if env in batch.final:
                info["terminal_observation"] = batch.final[env]
            delivered.append(info)
        return batch.obs, batch.reward, batch.terminated | batch.truncated, delivered
