"""The vector tap: what a vector env hands to the trainer."""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from .checks import RowChecks
from .digest import MISSING, SpaceDigest
from .env import time_limit
from .errors import LedgerError
from .flush import Flush
from .format import Place, StreamKey
from .recorder import ABSENT, RESET_FLAG, Recorder, describe
from .recording import OnError, warn

__all__ = ["LedgerVectorEnv"]

_MODES = NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"


class RowRecorder:
    """Appends a vector env's results to a recorder, one row per call.

    Used by the taps around Gymnasium's and Stable-Baselines3's vector envs, which differ in where a final observation is found.

    Args:
        recorder: Its streams are the environments, in order.
        observations: Digests single observations.
        actions: Digests single actions.
        same_step: An environment that has ended is reset within the same call, and its final observation comes separately.
        keep_values: As at the recorder's making.
    """

    def __init__(self, recorder: Recorder, observations: SpaceDigest, actions: SpaceDigest, *, same_step: bool, keep_values: bool) -> None:
        self.recorder = recorder
        self._observations = observations
        self._actions = actions
        self._n = n = recorder.streams
        self._same_step = same_step
        self._keep = keep_values
        self._no_actions, self._no_rewards, self._no_flags = MISSING * n, bytes(8 * n), bytes(n)
        self._reset_flags = bytes([RESET_FLAG]) * n
        self._sent: bytes | None = None
        self._sent_values: list[Any] = []
        self._reset_rows = 0

    def send(self, actions: Any) -> None:
        """Digest a batch of actions before the vector env sees them."""
        recorder = self.recorder
        if not recorder.recording:
            recorder.used_after_close()
            return
        recorder.in_flight = True
        try:
            self._sent = b"".join(self._actions.rows(actions))
            if self._keep:
                self._sent_values = _copies(self._actions.batch_values(actions))
        except BaseException as error:
            recorder.fail(error)

    def raised(self, error: BaseException, call: Literal["step", "reset"] = "step") -> None:
        """A call raised: see `stepledger.recording.Recording.raised`."""
        recorder = self.recorder
        recorder.raised(error, call, recorder.appended - (0 if recorder.autoreset else self._reset_rows))

    def receive(self, result: Any, unpacked: Callable[[Any], Result]) -> None:
        """Record a step of every environment.

        Args:
            result: As the vector env gave it.
            unpacked: Makes of it: the batch of observations; rewards, ``(n,)``, any real dtype; terminated, ``(n,)`` bool; truncated,
                ``(n,)`` bool; and a function that in same-step mode gives the final observation of an environment that has ended, or
                `MISSING_OBSERVATION`.
        """
        recorder, n = self.recorder, self._n
        recorder.in_flight = False
        if not recorder.recording:
            return
        try:
            h_act, self._sent = self._sent, None
            if h_act is None:
                raise LedgerError("a step came back that was never sent: step this vector env through the ledger alone.")
            observations, rewards, terminated, truncated, final = unpacked(result)
            h_obs = b"".join(self._observations.rows(observations))
            terminated_ = np.asarray(terminated, bool).tobytes()
            truncated_ = np.asarray(truncated, bool).tobytes()
            rewards_ = np.asarray(rewards, np.float64).tobytes()
            if not (len(h_act) == len(h_obs) == len(rewards_) == 8 * n and len(terminated_) == len(truncated_) == n):
                raise LedgerError(f"a step of {n} environments came with another number of actions, observations, rewards or flags.")
            values = _copies(self._observations.batch_values(observations)) if self._keep else []
            ended = None
            if self._same_step and (terminated_ != self._no_flags or truncated_ != self._no_flags):
                ended = [env for env in range(n) if terminated_[env] or truncated_[env]]
                h_reset, reset_values = h_obs, values
                h_obs, values = self._with_final(h_obs, values, ended, final)
            recorder.append(h_act + h_obs + rewards_ + terminated_ + truncated_)
            if self._keep:
                recorder.keep_rows(values, self._sent_values)
            if ended is not None:
                flags = bytearray([ABSENT]) * n
                for env in ended:
                    flags[env] = RESET_FLAG
                self._reset_row(h_reset, reset_values, flags)
        except BaseException as error:
            recorder.fail(error)

    def _with_final(self, h_obs: bytes, values: list[Any], ended: list[int], final: Callable[[int], Any]) -> tuple[bytes, list[Any]]:
        """The row's digests and values with final observations in the place of reset observations."""
        digests, values = bytearray(h_obs), [list(column) for column in values]
        for env in ended:
            observation, place = final(env), slice(8 * env, 8 * env + 8)
            if observation is MISSING_OBSERVATION:
                digests[place] = MISSING
                for column in values:
                    column[env] = None
                continue
            digests[place] = self._observations.one(observation)
            if self._keep:
                for column, value in zip(values, self._observations.values(observation)):
                    column[env] = value if isinstance(value, bytes) else value.copy()
        return bytes(digests), values

    def reset(self, observations: Any, mask: npt.NDArray[np.bool_] | None = None) -> None:
        """Record a reset of every environment, or of those in the mask, ``(n,)`` bool."""
        recorder, n = self.recorder, self._n
        recorder.in_flight = False
        self._sent = None
        if not recorder.recording:
            recorder.used_after_close()
            return
        try:
            h_obs = b"".join(self._observations.rows(observations))
            if len(h_obs) != 8 * n:
                raise LedgerError(f"a reset of {n} environments came with {len(h_obs) // 8} observations.")
            values = _copies(self._observations.batch_values(observations)) if self._keep else []
            flags = self._reset_flags if mask is None else bytes(RESET_FLAG if mask[env] else ABSENT for env in range(n))
            self._reset_row(h_obs, values, flags)
        except BaseException as error:
            recorder.fail(error)

    def _reset_row(self, h_obs: bytes, values: list[Any], flags: bytes | bytearray) -> None:
        recorder = self.recorder
        self._reset_rows += 1
        recorder.append(self._no_actions + h_obs + self._no_rewards + flags + self._no_flags)
        if self._keep:
            recorder.keep_rows(values, [])


#: A step as `RowRecorder.receive` takes it apart.
Result = tuple[Any, Any, Any, Any, Callable[[int], Any]]

#: A final observation that is not where the vector env should have put it.
MISSING_OBSERVATION = object()


def _copies(columns: list[Any]) -> list[list[Any]]:
    return [[value if isinstance(value, bytes) else value.copy() for value in column] for column in columns]


class LedgerVectorEnv(VectorWrapper):
    """Records what a Gymnasium vector env hands to the trainer.

    It goes innermost on the trainer's side: directly around ``AsyncVectorEnv``, ``SyncVectorEnv`` or your own client, inside
    ``NormalizeObservation`` and the like, which change values on purpose after the boundary.

    All three autoreset modes are recorded as the environment sees them. Next-step: the step after an episode's end is a reset, and the
    action sent for it, which is ignored, is no event. Same-step: the step has its final observation, from ``info["final_obs"]``, and
    the reset follows. Disabled: a reset with ``options["reset_mask"]`` is a reset of those environments.

    Args:
        vector_env: The vector env. `LedgerEnv`s in it that were made without an index are told theirs.
        path: The file to write when the vector env is closed (also by `flush`, and at interpreter exit). `None`: `ledger_place` tells it,
            and events are kept in memory until then.
        tap: ``"env"`` where this is the environments' own side: around a vector env that steps all of them itself, inside whatever
            stands between it and another `LedgerVectorEnv`.
        autoreset_mode: For a vector env that doesn't state its mode in ``metadata["autoreset_mode"]``: ``"NextStep"``, ``"SameStep"`` or
            ``"Disabled"``. One that contradicts what the vector env states is refused.
        reward_dtype: As in `LedgerEnv`, and the same on both sides; likewise the others.

    Raises:
        LedgerError: A space, a setting or the autoreset mode can't be recorded.
    """

    def __init__(
        self,
        vector_env: VectorEnv[Any, Any, Any],
        path: str | os.PathLike[str] | None,
        *,
        tap: Literal["vector", "env"] = "vector",
        autoreset_mode: str | None = None,
        reward_dtype: npt.DTypeLike = np.float32,
        keep_values: bool | int = False,
        digest: str = "xxh3_64",
        on_error: OnError = "warn",
        flush_every: int | None = None,
        flush_seconds: float | None = None,
    ) -> None:
        if not isinstance(vector_env, VectorEnv):
            raise LedgerError(
                f"LedgerVectorEnv goes around a Gymnasium vector env, and not around a {type(vector_env).__name__}: use LedgerEnv for one "
                "environment, stepledger.sb3.LedgerVecEnv for a vector env of Stable-Baselines3."
            )
        flush = Flush.of(flush_every, flush_seconds)
        self._place: Place | None = None
        self._tap = tap
        # Without a path this is RLlib's extension, which says what RLlib relies on, whatever the vector env states.
        self._mode = _autoreset_mode(vector_env, autoreset_mode, may_contradict=path is None)
        observations = SpaceDigest(vector_env.single_observation_space, digest)
        actions = SpaceDigest(vector_env.single_action_space, digest)
        run = uuid.uuid4().hex
        places = [Place(None, StreamKey(env=env), run) for env in range(vector_env.num_envs)]
        reached = path is not None and _tell_places(vector_env, places, again=True)
        meta = describe(
            tap,
            observations,
            actions,
            [StreamKey(env=env) for env in range(vector_env.num_envs)],
            reward_dtype=reward_dtype,
            digest=digest,
            keep_values=keep_values,
            autoreset_mode=self._mode,
            run=run if reached else "",
            **({"time_limit": limit} if (limit := time_limit(vector_env.unwrapped)) else {}),
        )
        recorder = Recorder(
            None if path is None else ledger_path(path), meta, autoreset=self._mode == NEXT_STEP, on_error=on_error, flush=flush
        )
        if reached:
            recorder.stop_workers = functools.partial(vector_env.unwrapped.call, "stop_recording")
        self._unpacked = functools.partial(_unpacked, vector_env.single_observation_space)
        self._rows = RowRecorder(recorder, observations, actions, same_step=self._mode == SAME_STEP, keep_values=bool(keep_values))
        if _of_one_space(vector_env):
            RowChecks(self._rows, vector_env.single_observation_space, vector_env.num_envs)
        super().__init__(vector_env)  # last: the remains of a wrapper that refused must not close the vector env when they are collected

    @property
    def ledger_place(self) -> Place | None:
        """Where this ledger is written, if it was told."""
        return self._place

    @ledger_place.setter
    def ledger_place(self, place: Place) -> None:
        """Tell this tap, and the `LedgerEnv`s in the vector env, where to write; before the first event is written."""
        self._place = place
        self._rows.recorder.place(place.path(self._tap), **place.meta(self.num_envs))
        _tell_places(self.env, [place._replace(key=place.key._replace(env=env)) for env in range(self.num_envs)])

    def reset(  # type: ignore[override]
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environments and record it."""
        mask = _reset_mask(options)
        self._rows.recorder.in_flight = True
        try:
            result = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        except BaseException as error:
            self._rows.raised(error, "reset")
            raise
        self._rows.reset(result[0], mask)
        return result

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the environments and record it."""
        self._rows.send(actions)
        try:
            result = self.env.step(actions)
            self._rows.receive(result, self._unpacked)  # an interrupt may come before it
        except BaseException as error:
            self._rows.raised(error)
            raise
        return result

    def flush(self) -> None:
        """Write the ledger of everything so far; recording goes on."""
        self._rows.recorder.flush()

    def write_journal(self) -> None:
        """Write everything so far to the journal, which is much cheaper than `flush`."""
        self._rows.recorder.write()

    def save_values(self, streams: Mapping[str, Sequence[int]]) -> None:
        """Write kept values that are in memory only, see `stepledger.recording.Recording.save_values`."""
        self._rows.recorder.save_values(streams)

    def forget(self, events: Mapping[str, Sequence[int]]) -> None:
        """Drop events from the journal, see `stepledger.recording.Recording.forget`."""
        self._rows.recorder.forget(events)

    def stop_recording(self) -> None:
        """Write the ledger and record no more; the environments stay open."""
        self._rows.recorder.close()

    def close(self, **kwargs: Any) -> None:
        """Close the environments, then write the ledger."""
        try:
            self.env.close(**kwargs)
        finally:
            self.stop_recording()
            self._rows.recorder.ended = True

    def __getattr__(self, name: str) -> Any:
        """What else the vector env has: ``call``, ``set_attr``, ``envs``; its asynchronous calls are recorded too."""
        if name.startswith("_") or name == "env":
            raise AttributeError(name)
        theirs = getattr(self.env, name)
        own = _ASYNCHRONOUS.get(name)
        return theirs if own is None else own.__get__(self)

    def _step_async(self, actions: Any) -> None:
        self._rows.send(actions)
        self.env.step_async(actions)  # type: ignore[attr-defined]

    def _step_wait(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self.env.step_wait(*args, **kwargs)  # type: ignore[attr-defined]
            self._rows.receive(result, self._unpacked)
        except BaseException as error:
            self._rows.raised(error)
            raise
        return result

    def _reset_async(self, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None) -> None:
        self._mask = _reset_mask(options)
        self._rows.recorder.in_flight = True
        self.env.reset_async(seed=seed, options=options)  # type: ignore[attr-defined]

    def _reset_wait(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self.env.reset_wait(*args, **kwargs)  # type: ignore[attr-defined]
        except BaseException as error:
            self._rows.raised(error, "reset")
            raise
        self._rows.reset(result[0], self._mask)
        return result


def _of_one_space(vector_env: VectorEnv[Any, Any, Any]) -> bool:
    """Whether the bounds of the single observation space are those of all environments; a vector env may batch different ones."""
    try:
        batched = batch_space(vector_env.single_observation_space, vector_env.num_envs)
        return bool(batched == vector_env.observation_space)
    except Exception:
        return False


def _unpacked(space: gymnasium.Space[Any], result: Any) -> Result:
    """Takes the result of a step apart; the space is that of one observation."""
    observations, rewards, terminated, truncated, infos = result

    def final(env: int) -> Any:
        given, mask = infos.get("final_obs"), infos.get("_final_obs")
        if given is None or (mask is not None and not mask[env]):
            return MISSING_OBSERVATION
        one = _at(space, given, env)
        return MISSING_OBSERVATION if one is None else one

    return observations, rewards, terminated, truncated, final


def _at(space: gymnasium.Space[Any], batch: Any, env: int) -> Any:
    """One of a batch of values: Gymnasium gives an array of them, others a batch as that of observations, leaf by leaf."""
    if isinstance(space, spaces.Dict) and isinstance(batch, Mapping):
        return {key: _at(part, batch[key], env) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple) and isinstance(batch, tuple):
        return tuple(_at(part, values, env) for part, values in zip(space.spaces, batch, strict=True))
    return batch[env]


_ASYNCHRONOUS: dict[str, Any] = {
    "step_async": LedgerVectorEnv._step_async,
    "step_wait": LedgerVectorEnv._step_wait,
    "reset_async": LedgerVectorEnv._reset_async,
    "reset_wait": LedgerVectorEnv._reset_wait,
}


def _reset_mask(options: dict[str, Any] | None) -> npt.NDArray[np.bool_] | None:
    """A copy of the mask: the vector env takes it out of the options."""
    mask = options.get("reset_mask") if isinstance(options, Mapping) else None  # a vector env of one's own may take others
    with contextlib.suppress(Exception):  # it is for the vector env to refuse
        return None if mask is None else np.array(mask, bool)
    return None


def _autoreset_mode(vector_env: VectorEnv[Any, Any, Any], given: str | None, may_contradict: bool) -> str:
    stated = (vector_env.metadata or {}).get("autoreset_mode")
    if stated is None and given is None and not hasattr(gymnasium.vector, "AutoresetMode"):
        return NEXT_STEP  # Gymnasium 1.0 has no other
    named, said = (str(getattr(mode, "value", mode)) for mode in (stated, given))
    if given is not None and said not in _MODES:
        raise LedgerError(f"autoreset_mode={given!r} is unknown: use 'NextStep', 'SameStep' or 'Disabled'.")
    mode = said if stated is None else named
    if given is not None and mode != said and mode in _MODES and not may_contradict:
        raise LedgerError(
            f"autoreset_mode={given!r} contradicts the vector env {vector_env}, which has the autoreset mode {mode!r}: leave it out, or "
            "state the right one in the vector env's metadata['autoreset_mode']."
        )
    if mode not in _MODES:
        raise LedgerError(
            f"the vector env {vector_env} has the autoreset mode {mode!r}: state 'NextStep', 'SameStep' or 'Disabled' in its "
            "metadata['autoreset_mode'], or pass autoreset_mode= to the ledger."
        )
    return mode


def ledger_path(path: str | os.PathLike[str]) -> Path:
    """The path with the suffix of a ledger.

    Raises:
        LedgerError: It names no file.
    """
    path = Path(path)
    is_directory = False
    with contextlib.suppress(OSError):  # what is wrong with the path is said when it is written to
        is_directory = path.is_dir()
    if not path.name or is_directory:
        raise LedgerError(f"{path} is a directory: name the file to write, such as {path / 'trainer.npz'}.")
    return path if path.suffix == ".npz" else path.with_name(f"{path.name}.npz")


PUT_ON_LATE = (
    "{} was put around environments that have recorded already; what they recorded before is set aside (*.old1.npz) and not compared: put "
    "it around the vector env before its first reset."
)


def _tell_places(vector_env: Any, places: list[Place], again: bool = False) -> bool:
    """Tell the `LedgerEnv`s in a vector env where they write; whether they could be reached (not behind a client of one's own).

    Args:
        vector_env: The vector env.
        places: For each environment.
        again: Those that have recorded already begin another ledger: the trainer's side has nothing of what came before.
    """
    base = vector_env.unwrapped  # a VectorWrapper doesn't pass these calls on
    try:
        # Asking first: setting the attribute on an environment without a ledger would leave it there.
        if not all(base.call("has_wrapper_attr", "ledger_place")):
            return False
    except (AttributeError, NotImplementedError):
        return False
    if again and any(base.call("has_recorded")):
        warn(PUT_ON_LATE.format("LedgerVectorEnv"))
        base.call("begin_again")
    base.set_attr("ledger_place", places)
    return True
