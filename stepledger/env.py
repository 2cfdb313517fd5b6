"""The env tap."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
import numpy.typing as npt

from .bounds import described
from .checks import EnvChecks, Resets
from .digest import MISSING, SpaceDigest
from .errors import LedgerError
from .flush import Flush
from .format import Place, StreamKey
from .recorder import RESET_FLAG, ROW, Recorder, describe
from .recording import OnError, check_on_error
from .window import keeping

__all__ = ["LedgerEnv"]


class LedgerEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Records what an environment gives, in the environment's own process.

    It goes outermost there: after ``TimeLimit``, ``Monitor`` and your own wrappers, as the last thing before the environment is handed
    to a vector env or a server. Whatever is inside it counts as the environment.

    The ledger is written to ``directory/env-{index}.npz`` when the environment is closed (also by `flush`, and at interpreter exit).
    While recording, events are in ``env-{index}.journal``. An earlier recording of that name is kept as ``env-{index}.old1.npz``.

    A vector env's ``call`` and ``env_method`` find this wrapper's own methods first: an environment that has a method ``flush``,
    ``write_journal``, ``save_values``, ``forget``, ``stop_recording`` or ``begin_again`` itself needs another name for it there.

    Args:
        env: The environment.
        directory: Where to write; made if it isn't there. A relative one is resolved now. `None`: `ledger_place` tells it, and events are
            kept in memory until then.
        index: The environment's position in the trainer's vector env. `None`: `LedgerVectorEnv` or `stepledger.sb3.LedgerVecEnv`,
            put around the vector env, tells it.
        reward_dtype: ``np.float32`` or ``np.float64``; rewards are compared after the cast to it. The same on both sides.
        keep_values: Also store observations and actions, so that a report prints both sides' values. A number, 2 or more: keep those of
            so many events, the last ones, in memory, and store them when the ledger is written, and when a comparison that runs beside
            the recording finds a difference. The same on both sides, or a report has the values of one.
        digest: ``"xxh3_64"`` or ``"blake2b"``. The same on both sides.
        on_error: What happens when recording fails (a full disk, a value that does not fit the space): ``"warn"`` once, mark the
            ledger, and let training go on; or ``"raise"``.
        flush_every: When this process is killed, at most so many events of this ledger are lost, besides the one that is happening: a
            block of so many is written. `None`: 8,192. A vector env writes at least one step of all its environments at a time.
        flush_seconds: A block that is so old is written with the next event, however few it has. `None`: 2. While events come fast the
            clock is not looked at for each; when they become slow all of a sudden, up to 256 more may come before it is.

    Raises:
        LedgerError: A space or a setting can't be recorded.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        directory: str | os.PathLike[str] | None,
        index: int | None = None,
        *,
        reward_dtype: npt.DTypeLike = np.float32,
        keep_values: bool | int = False,
        digest: str = "xxh3_64",
        on_error: OnError = "warn",
        flush_every: int | None = None,
        flush_seconds: float | None = None,
    ) -> None:
        if not isinstance(env, gymnasium.Env):
            raise LedgerError(f"LedgerEnv goes around a gymnasium.Env, and not around a {type(env).__name__}: wrap a single environment.")
        super().__init__(env)
        if index is not None and (not isinstance(index, (int, np.integer)) or index < 0):
            raise LedgerError(f"index={index!r} is no position in a vector env: use 0, 1, 2, ...")
        self._directory = None if directory is None else os.path.abspath(directory)
        self._given = index is not None
        self._place = Place(None, StreamKey(env=int(index or 0))) if self._given else None
        self._options: dict[str, Any] = {"reward_dtype": reward_dtype, "keep_values": keeping(keep_values), "digest": digest}
        check_on_error(on_error)
        self._on_error = on_error
        self._flush = Flush.of(flush_every, flush_seconds)
        self._prepare()

    def _prepare(self) -> None:
        self._observations = SpaceDigest(self.env.observation_space, self._options["digest"])
        self._actions = SpaceDigest(self.env.action_space, self._options["digest"])
        more: dict[str, Any] = {"time_limit": limit} if (limit := time_limit(self.env)) else {}
        self._meta = describe("env", self._observations, self._actions, [StreamKey()], **self._options, **more)
        if self._options["keep_values"]:
            both = {"obs": (self.env.observation_space, self._observations), "act": (self.env.action_space, self._actions)}
            self._meta["bounds"] = {which: [described(space, path) for path in digest.paths] for which, (space, digest) in both.items()}
        self._recorder: Recorder | None = None
        self._checks: EnvChecks | None = None
        self._passive = False

    @property
    def spec(self) -> gymnasium.envs.registration.EnvSpec | None:  # type: ignore[override]
        """Of the environment inside: one that is made again from it has no ledger, which would take the name of this one."""
        return self.env.spec

    @property
    def ledger_place(self) -> Place | None:
        """Where this ledger is written; `None` while nobody has told. Set by the tap around the vector env, before the first event."""
        return self._place

    @ledger_place.setter
    def ledger_place(self, place: Place) -> None:
        given = self._place if self._given and place.directory is None else None
        self._place = place if given is None else given._replace(run=place.run)
        if place.options is not None and self._recorder is None:
            self._options = dict(place.options)
            self._on_error = self._options.pop("on_error")
            self._flush = Flush.of(self._options.pop("flush_every"), self._options.pop("flush_seconds"))
            passive = self._passive
            self._prepare()
            self._passive = passive
        if self._recorder is not None:
            self._tell(self._recorder)

    @property
    def has_recorded(self) -> bool:
        """Whether there was an event, so that a ledger may be open under the name and the run that were known then."""
        return self._recorder is not None

    def begin_again(self) -> None:
        """End the ledger, and begin another one at the next event, which sets the first one aside."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def _tell(self, recorder: Recorder) -> None:
        """Tell the recorder its file, if it is known."""
        place = self._place
        if place is None:
            if self._directory is None:
                return
            raise LedgerError(
                "this LedgerEnv does not know its position: pass index=, or put LedgerVectorEnv (stepledger.sb3.LedgerVecEnv) "
                "around the vector env before its first reset."
            )
        if place.directory is not None:
            recorder.place(place.path(f"env-{place.key.env}"), **place.meta())
        elif self._directory is not None:
            recorder.place(Path(self._directory, f"env-{place.key.env}.npz"), **place.meta())

    def set_wrapper_attr(self, name: str, value: Any, **kwargs: Any) -> Any:
        """Set an attribute on this wrapper or on one inside it."""
        if name == "ledger_place":  # Gymnasium 1.0 begins with the wrapper inside the outermost one
            self.ledger_place = value
            return True
        return super().set_wrapper_attr(name, value, **kwargs)

    def _begin(self) -> Recorder:
        """Make the recorder at the first event, in the process in which the environment lives."""
        recorder = Recorder(None, self._meta, on_error=self._on_error, flush=self._flush)
        recorder.recording = not self._passive
        recorder.digest_action, recorder.digest_observation = self._actions.one, self._observations.one
        if recorder.recording:
            try:
                self._tell(recorder)
            except LedgerError as error:
                recorder.fail(error)
        self._recorder = recorder
        if self._options["keep_values"]:
            self._keep_values(recorder)
        self._resets = Resets(recorder.final)
        self._checks = EnvChecks(recorder, self.env, self._observations) if recorder.recording else None
        return recorder

    def _keep_values(self, recorder: Recorder) -> None:
        """Make the two digest functions store what they digest: the action's values wait until its step has come back."""
        observations, actions = self._observations, self._actions
        action: list[Any] | None = None

        def digest_action(value: Any) -> bytes:
            nonlocal action
            action = [leaf if isinstance(leaf, bytes) else leaf.copy() for leaf in actions.values(value)]
            return actions.one(value)

        def digest_observation(value: Any) -> bytes:
            nonlocal action
            digest = observations.one(value)
            recorder.keep(observations.values(value), action)
            action = None
            return digest

        recorder.digest_action, recorder.digest_observation = digest_action, digest_observation

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment and record a reset event."""
        if self._checks is not None:
            self._checks.before_reset()
        result = self.env.reset(seed=seed, options=options)
        recorder = self._recorder or self._begin()
        if not recorder.recording:
            recorder.used_after_close()
        else:
            try:
                recorder.append(_row(MISSING, recorder.digest_observation(result[0]), 0.0, False, False)[:-2] + _RESET)
                self._resets.count(seed, options)
            except BaseException as error:
                recorder.fail(error)
        return result

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the environment and record a step event. The action is digested before the environment sees it."""
        recorder = self._recorder or self._begin()
        if not recorder.recording:
            recorder.used_after_close()
            return self.env.step(action)
        try:
            h_action = recorder.digest_action(action)
        except BaseException as error:
            recorder.fail(error)
            return self.env.step(action)
        result = self.env.step(action)
        try:
            observation, reward, terminated, truncated, _ = result
            buffer = recorder.buffer
            buffer += _row(h_action, recorder.digest_observation(observation), reward, terminated, truncated)
            if len(buffer) >= recorder.limit:
                recorder.tick()
        except struct.error:
            recorder.fail(LedgerError(f"the reward {reward!r} is no number."))
        except BaseException as error:
            recorder.fail(error)
        return result

    def flush(self) -> None:
        """Write the ledger of everything so far; recording goes on."""
        if self._recorder is not None:
            self._recorder.flush()

    def write_journal(self) -> None:
        """Write everything so far to the journal, which is much cheaper than `flush`."""
        if self._recorder is not None:
            self._recorder.write()

    def save_values(self, streams: Mapping[str, Sequence[int]]) -> None:
        """Write kept values that are in memory only, see `stepledger.recording.Recording.save_values`."""
        if self._recorder is not None:
            self._recorder.save_values(streams)

    def forget(self, events: Mapping[str, Sequence[int]]) -> None:
        """Drop events from the journal, see `stepledger.recording.Recording.forget`."""
        if self._recorder is not None:
            self._recorder.forget(events)

    def stop_recording(self) -> None:
        """Write the ledger and record no more; the environment stays open."""
        self._passive = True
        if self._recorder is not None:
            self._recorder.close()

    def close(self) -> None:
        """Write the ledger, then close the environment."""
        try:
            self.stop_recording()
            if self._recorder is not None:
                self._recorder.ended = True
        finally:
            self.env.close()  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        # A copy made before the first event records like the original. A later one (planning on a copy of the environment, for
        # instance) is no part of the run.
        state = {name: value for name, value in self.__dict__.items() if name not in _RUNTIME}
        state["_passive"] = self._recorder is not None or self._passive
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        passive = self._passive
        self._prepare()
        self._passive = passive


def time_limit(env: Any) -> int | None:
    """The number of steps after which an environment says that its episodes are truncated, if it says so."""
    limits: list[Any] = []
    # Not by the spec of the outermost wrapper: that makes a copy of all below it, keeps it, and may warn.
    with contextlib.suppress(Exception):
        while isinstance(env, gymnasium.Wrapper):
            if isinstance(env, gymnasium.wrappers.TimeLimit):
                limits.append(env._max_episode_steps)
            env = env.env
        limits = limits or [env.spec.max_episode_steps]
    limits = [int(limit) for limit in limits if isinstance(limit, (int, np.integer)) and 0 < limit < 1 << 62]
    return min(limits, default=None)


#: What a copy makes for itself.
_RUNTIME = {"_recorder", "_observations", "_actions", "_meta", "_checks", "_resets"}

_row = ROW.pack

#: What stands for the flags of a reset.
_RESET = bytes([RESET_FLAG, 0])
