"""The vector tap, as a wrapper that one puts in oneself."""

from __future__ import annotations

import functools
import os
import uuid
from typing import Any

import numpy as np
import numpy.typing as npt
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper

from ..checks import RowChecks
from ..digest import SpaceDigest
from ..errors import LedgerError
from ..flush import Flush
from ..format import Place, StreamKey
from ..recorder import Recorder, describe
from ..recording import OnError, warn
from ..vector import MISSING_OBSERVATION, PUT_ON_LATE, SAME_STEP, Result, RowRecorder, ledger_path

__all__ = ["LedgerVecEnv"]


class LedgerVecEnv(VecEnvWrapper):
    """Records what a Stable-Baselines3 ``VecEnv`` hands to the trainer.

    It goes innermost on the trainer's side: directly around ``DummyVecEnv``, ``SubprocVecEnv`` or your own, inside ``VecNormalize``,
    ``VecFrameStack`` and the like, which change values on purpose after the boundary.

    At an episode's end the step has its final observation, from ``info["terminal_observation"]``, and the reset follows. Stable-Baselines3
    delivers one flag for both ends, ``info["TimeLimit.truncated"]``, which is "truncated and not terminated": whether an episode that
    terminated was truncated too is not compared.

    Args:
        venv: The vector env. `LedgerEnv`s in it that were made without an index are told theirs.
        path: The file to write when it is closed (also by `flush`, and at interpreter exit).
        reward_dtype: As in `LedgerEnv`, and the same on both sides; likewise the others. ``DummyVecEnv`` rounds rewards to float32.

    Raises:
        LedgerError: A space or a setting can't be recorded.
    """

    def __init__(
        self,
        venv: VecEnv,
        path: str | os.PathLike[str],
        *,
        reward_dtype: npt.DTypeLike = np.float32,
        keep_values: bool | int = False,
        digest: str = "xxh3_64",
        on_error: OnError = "warn",
        flush_every: int | None = None,
        flush_seconds: float | None = None,
    ) -> None:
        if not isinstance(venv, VecEnv):
            raise LedgerError(
                f"LedgerVecEnv goes around a VecEnv of Stable-Baselines3, and not around a {type(venv).__name__}: use LedgerEnv for one "
                "environment, LedgerVectorEnv for a vector env of Gymnasium."
            )
        flush = Flush.of(flush_every, flush_seconds)
        super().__init__(venv)
        observations = SpaceDigest(venv.observation_space, digest)
        actions = SpaceDigest(venv.action_space, digest)
        meta = describe(
            "vector",
            observations,
            actions,
            [StreamKey(env=env) for env in range(venv.num_envs)],
            reward_dtype=reward_dtype,
            digest=digest,
            keep_values=keep_values,
            autoreset_mode=SAME_STEP,
            flags="exclusive",
            run=(run := _tell_places(venv)),
        )
        recorder = Recorder(ledger_path(path), meta, on_error=on_error, flush=flush)
        if run:
            recorder.stop_workers = functools.partial(venv.env_method, "stop_recording")
        self._rows = RowRecorder(recorder, observations, actions, same_step=True, keep_values=bool(keep_values))
        RowChecks(self._rows, venv.observation_space, venv.num_envs)

    def reset(self) -> Any:
        """Reset the environments and record it."""
        self._rows.recorder.in_flight = True
        try:
            observations = self.venv.reset()
        except BaseException as error:
            self._rows.raised(error, "reset")
            raise
        self._rows.reset(observations)
        return observations

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        """Send the actions and digest them as they were sent."""
        self._rows.send(actions)
        self.venv.step_async(actions)

    def step_wait(self) -> tuple[Any, npt.NDArray[Any], npt.NDArray[Any], list[dict[str, Any]]]:
        """Receive the step and record it."""
        try:
            result = self.venv.step_wait()
            self._rows.receive(result, _unpacked)  # an interrupt may come before it
        except BaseException as error:
            self._rows.raised(error)
            raise
        return result

    def flush(self) -> None:
        """Write the ledger of everything so far; recording goes on."""
        self._rows.recorder.flush()

    def close(self) -> None:
        """Close the environments, then write the ledger."""
        try:
            self.venv.close()
        finally:
            self._rows.recorder.close()
            self._rows.recorder.ended = True


def _tell_places(venv: VecEnv) -> str:
    """Tell the `LedgerEnv`s their positions; the identity of the run, or the empty string if they can't be reached."""
    run = uuid.uuid4().hex
    try:
        if not venv.has_attr("ledger_place"):
            return ""
    except NotImplementedError:
        return ""
    if any(venv.get_attr("has_recorded")):
        warn(PUT_ON_LATE.format("LedgerVecEnv"))
        venv.env_method("begin_again")
    for env in range(venv.num_envs):
        venv.env_method("set_wrapper_attr", "ledger_place", Place(None, StreamKey(env=env), run), indices=env)
    return run


def _unpacked(result: Any) -> Result:
    observations, rewards, dones, infos = result
    truncated = np.fromiter((bool(info.get("TimeLimit.truncated", False)) for info in infos), bool, len(infos))
    dones = np.asarray(dones, bool)
    return (
        observations,
        rewards,
        dones & ~truncated,
        dones & truncated,
        lambda env: infos[env].get("terminal_observation", MISSING_OBSERVATION),
    )
