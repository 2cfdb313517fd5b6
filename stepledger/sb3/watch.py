"""What the innermost VecEnv gives, to whom, and what the outermost one hands to the trainer: the vector tap of `LedgerCallback`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from ..digest import SpaceDigest
from ..format import RESET, STEP, StreamKey
from ..recorder import describe
from ..recording import OnError
from ..strays import LEARN, UNSEEN, UNSTORED, Stray
from .callers import Caller, Callers
from .handed import Digests, HandedStep, StrayCalls, innermost, reset_observation
from .hooks import Gate, Hooks
from .stage import RowStage, bits_of, bytes_of, digests
from .stored import episode_starts

__all__ = ["VectorWatch"]


class VectorWatch:
    """Records the events of the innermost VecEnv, and keeps the trainer's last step until it is stored.

    Args:
        model: The algorithm, whose ``env`` is watched.
        path: The ledger.
        digest: As in `stepledger.LedgerEnv`.
        on_error: Likewise.
        fail: Called with an error of the recording.

    Attributes:
        pending: The trainer's last step, if it was not stored yet.
        calls: Number of steps that the trainer has made.
        stray: Calls of somebody else since the trainer's last step, if there were any.
        on_stray: Called with stray calls when the trainer goes on behind them.
        episode: Of each environment's last event.
        step: Likewise.

    Raises:
        LedgerError: A space can't be recorded.
    """

    def __init__(self, model: Any, path: Path, *, digest: str, on_error: OnError, fail: Callable[[BaseException], None]) -> None:
        self.inner: VecEnv = innermost(model.env)
        self.n = self.inner.num_envs
        self._given = SpaceDigest(self.inner.observation_space, digest)
        self._actions = SpaceDigest(self.inner.action_space, digest)
        self._space = model.observation_space
        self.handed = SpaceDigest(model.observation_space, digest)
        self._same_space = self._given.description == self.handed.description
        meta = describe(
            "vector",
            self._given,
            self._actions,
            [StreamKey(env=env) for env in range(self.n)],
            reward_dtype=np.float32,  # what Stable-Baselines3 stores
            digest=digest,
            columns={"h_out": "<u8", "r_out": "<u8", "by": "<i8"},
            handed_space=self.handed.description,
            autoreset_mode="SameStep",
            flags="exclusive",
            run="",
        )
        self.recorder = RowStage(path, meta, on_error=on_error)
        self._step_template = self.recorder.template(kind=STEP, h_out=UNSEEN)
        self._reset_template = self.recorder.template(kind=RESET, h_out=UNSEEN)
        self._never = np.zeros(self.n, bool)
        self._fail = fail
        self.pending: HandedStep | None = None
        self.stray: StrayCalls | None = None
        self.on_stray: Callable[[StrayCalls], None] | None = None
        self._strays: list[list[Any]] = []
        self.recorder.final["strays"] = self._strays
        self.calls = 0
        self._t = np.full(self.n, -1)
        self._out = np.full(self.n, UNSEEN, np.uint64)
        self._raw_out = b""
        self._fresh = np.zeros(self.n, bool)
        self._first = False
        self._new_obs: Any = None
        self.episode, self.step = np.zeros(self.n, np.int64), np.zeros(self.n, np.int64)
        self._begun = False
        self._left: Digests | None = None
        self._last_known: Any = None

    def attach(self, model: Any, hooks: Hooks, reset: bool) -> None:
        """Begin to watch a model's env.

        Args:
            model: The algorithm, which has just begun to learn.
            hooks: Where to add.
            reset: Whether its env was reset for that.
        """
        self._model, self.outer, self.inner = model, model.env, innermost(model.env)
        self._callers = Callers(model)
        # What off-policy algorithms store is what VecNormalize was given, and not what it gave.
        self._raw: VecNormalize | None = model._vec_normalize_env if hasattr(model, "replay_buffer") else None
        self._sent: tuple[Digests, npt.NDArray[Any]] | None = None
        self._asked: npt.NDArray[Any] | None = None
        self._stranger: Caller | None = None
        self._gate = Gate()  # closed while the VecEnv is called, which calls its environments
        self._row = self._reset_row = -1
        self._before: StrayCalls | None = None
        if reset or not self._begun:
            self._begin(model, reset)
        else:
            self._look_back(self._left, "between two calls of learn()")
        hooks.add(self.inner, "step_async", self._on_send)
        hooks.add(self.inner, "step_wait", self._on_receive)
        hooks.add(self.inner, "reset", self._on_reset)
        hooks.add(self.inner, "env_method", self._on_env_method)
        if self.outer is not self.inner:
            hooks.add(self.outer, "step_async", self._on_asked)
            hooks.add(self.outer, "step_wait", self._on_handed)
            hooks.add(self.outer, "reset", self._on_handed_reset)
        if isinstance(self.inner, DummyVecEnv):
            self._watch_envs(self.inner.envs, hooks)

    @property
    def begun(self) -> bool:
        """Whether anything was recorded."""
        return self._begun

    def fits(self, model: Any) -> bool:
        """Whether a model's env can go on in this ledger."""
        inner = innermost(model.env)
        return (
            inner.num_envs == self.n
            and SpaceDigest(inner.observation_space).description == self._given.description
            and SpaceDigest(inner.action_space).description == self._actions.description
            and SpaceDigest(model.observation_space).description == self.handed.description
        )

    def goes_on(self, model: Any) -> bool:
        """Whether a model is where the last ``learn()`` has left it: its env was not reset since."""
        return innermost(model.env) is self.inner and model._last_obs is self._last_known

    def _watch_envs(self, envs: Sequence[gymnasium.Env[Any, Any]], hooks: Hooks) -> None:
        """Also see who calls a single environment past the VecEnv, at its outermost wrapper or at one inside it."""
        for index, env in enumerate(envs):
            layer: Any = env
            while layer is not None:
                hooks.add(layer, "reset", self._single(index, "reset"), self._gate)
                if layer is env:  # each layer's step would cost as much again
                    hooks.add(layer, "step", self._single(index, "step"), self._gate)
                layer = layer.env if isinstance(layer, gymnasium.Wrapper) else None

    def _begin(self, model: Any, reset: bool) -> None:
        """The reset with which ``learn()`` began, which nobody could see: its observation as far as it can be told now."""
        if not reset:  # in the middle of an episode
            self._out[:] = digests(self.handed, self._stored_form(model._last_obs))
            self._begun, self._new_obs, self._fresh = True, model._last_obs, episode_starts(model)
            return
        obs, now = reset_observation(model.env, model._last_obs), self._now()
        given = now if obs is None else digests(self._given, obs)
        self._row_of_resets(True, UNSEEN if given is None else given, LEARN)
        self._out[:] = self.recorder.columns["h_out"][self._reset_row] = digests(self.handed, self._stored_form(model._last_obs))
        self._new_obs, self._first, self._fresh = model._last_obs, True, np.ones(self.n, bool)
        self._look_back(given, "before the first step")

    def left(self) -> None:
        """Learning has ended: remember where the environments are, if their VecEnv can tell."""
        self._left = self._now()

    def _now(self) -> Digests | None:
        """The observations at which the environments are, if their VecEnv can tell."""
        return digests(self._given, self.inner._obs_from_buf()) if isinstance(self.inner, DummyVecEnv) else None

    def _look_back(self, left: Digests | None, when: str) -> None:
        """Learning goes on: notice that the environments are no longer where it has left them."""
        now = self._now()
        if now is None or left is None:
            return
        moved = now != left
        if moved.any():
            self._stranger = Caller("somebody", f"a place that nobody watched, {when}")
            self._row_of_resets(moved, now, self._by(resets=1, envs=moved))
            self._out[moved], self._raw_out = UNSEEN, b""
            self._fresh = self._fresh | moved

    def _stored_form(self, obs: Any) -> Any:
        return obs if self._raw is None else self._raw.old_obs

    # What the trainer, or somebody else, sends and gets.

    def _on_asked(self, original: Callable[..., Any], actions: Any) -> Any:
        """What the outermost VecEnv is asked to do: its wrappers may make other actions of it."""
        try:
            self._asked = np.array(actions)
        except Exception as error:
            self._fail(error)
        return original(actions)

    def _on_send(self, original: Callable[..., Any], actions: Any) -> Any:
        if self.recorder.recording:
            try:
                self._sent = digests(self._actions, actions), np.array(actions)
                self._stranger = self._callers.stranger()
                if self._stranger is None:
                    self._trainer_goes_on()
            except Exception as error:
                self._fail(error)
        return self._guarded(original, actions)

    def _guarded(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the VecEnv, or an environment, whose calls of environments are then no stray ones."""
        gate = self._gate
        before, gate.closed = gate.closed, True
        try:
            return original(*args, **kwargs)
        finally:
            gate.closed = before

    def _trainer_goes_on(self) -> None:
        if self.pending is not None:  # it was not stored, and won't be
            self.pending, self.recorder.held = None, False
        self._before, self.stray = self.stray, None
        if self._before is not None:
            self._before.after = self.episode.copy(), self.step.copy()
            self._before.calls = self._before.calls._replace(handed_over=self._model._last_obs is not self._new_obs)
            self._strays[-1] = list(self._before.calls)
            if self.on_stray is not None:
                self.on_stray(self._before)
        self.calls += 1

    def _on_receive(self, original: Callable[..., Any]) -> Any:
        result = self._guarded(original)
        if self.recorder.recording and self._sent is not None:
            try:
                self._record_step(result)
                if self.outer is self.inner:
                    self._hand_over(result)
            except Exception as error:
                self._fail(error)
        return result

    def _on_handed(self, original: Callable[..., Any]) -> Any:
        result = original()
        if self.recorder.recording and self._row >= 0:
            try:
                self._hand_over(result)
            except Exception as error:
                self._fail(error)
        return result

    def _record_step(self, result: Any) -> None:
        observations, rewards, dones, infos = result
        assert self._sent is not None
        h_obs = digests(self._given, observations)
        self.recorder.reserve(2)
        row, columns = self.recorder.add(self._step_template), self.recorder.columns
        by = self._by(steps=1)
        dones = np.asarray(dones, bool)
        ended = bool(dones.any())
        timeout = self._never
        h_final = h_obs
        if ended:
            h_final, timeout = h_obs.copy(), np.zeros(self.n, bool)
            for env in np.flatnonzero(dones).tolist():
                timeout[env] = bool(infos[env].get("TimeLimit.truncated", False))
                final = infos[env].get("terminal_observation")
                h_final[env] = 0 if final is None else int.from_bytes(self._given.one(final), "big")
            columns["terminated"][row], columns["truncated"][row] = dones & ~timeout, timeout
        columns["h_obs"][row], columns["h_act"][row] = h_final, self._sent[0]
        h_rew = bits_of(rewards)
        columns["h_rew"][row] = h_rew
        if by:
            columns["by"][row] = by
        self._t += 1
        self.step += 1
        self._row, self._reset_row = row, -1
        start = self._fresh if self._before is None else self._fresh | self._before.envs
        self._at = self._t.copy(), self._out.copy(), self._raw_out, start
        self._raw_out = b""
        self._seen = observations, h_obs, dones, timeout
        self._rewards = rewards, h_rew
        self._fresh = dones
        self._out[:] = UNSEEN
        if ended:
            self._row_of_resets(dones, h_obs, by)

    def _row_of_resets(self, present: Any, h_obs: Any, by: int) -> None:
        """Record a reset of some or all environments."""
        self.recorder.reserve(1)
        row, columns = self.recorder.add(self._reset_template, present), self.recorder.columns
        columns["h_obs"][row], columns["by"][row] = h_obs, by
        self._reset_row = row
        here = self.recorder.present[row]
        self._t[here] += 1
        if not self._begun:
            self._begun = True
        else:
            self.episode = self.episode + here
        self.step = np.where(here, 0, self.step)

    def _hand_over(self, result: Any) -> None:
        """What the outermost VecEnv gives for the step that was recorded last."""
        observations, rewards, _, infos = result
        seen, h_obs, dones, timeout = self._seen
        raw, columns = self._stored_form(observations), self.recorder.columns
        self._raw_out = raw_next = bytes_of(raw, self._space)
        self._out[:] = h_obs if raw is seen and self._same_space else digests(self.handed, raw)
        rewards = rewards if self._raw is None else self._raw.old_reward
        given, h_rew = self._rewards
        if rewards is not given:
            h_rew = bits_of(rewards)
        row, self._row = self._row, -1
        h_next = self._out
        if self._reset_row >= 0:
            columns["h_out"][self._reset_row] = self._out
            h_next = self._out.copy()
            for env in np.flatnonzero(dones).tolist():
                final = infos[env].get("terminal_observation")
                h_next[env] = 0 if final is None else int.from_bytes(self.handed.one(final), "big")
            raw_next = self._with_finals(raw, dones, infos)
        columns["h_out"][row] = h_next
        columns["r_out"][row] = h_rew
        if self._stranger is None:
            assert self._sent is not None
            t, obs, raw_obs, start = self._at
            reward = np.array(rewards, np.float32)  # a copy: the trainer adds to it
            h_act, actions = self._sent
            begin = t, obs, raw_obs, start, h_act, actions if self._asked is None else self._asked
            end = h_next.copy(), raw_next, self._reset_row >= 0, dones
            self.pending = HandedStep(*begin, reward, h_rew, *end, timeout, infos, self._first, self._before)
            self._pending_row, self.recorder.held, self._new_obs, self._first = row, True, observations, False

    def _with_finals(self, raw: Any, dones: npt.NDArray[np.bool_], infos: list[dict[str, Any]]) -> bytes:
        """The bytes of a batch with final observations in the place of reset observations, where that is simple."""
        if self._raw is not None or isinstance(raw, dict):
            return b""
        raw = raw.copy()
        for env in np.flatnonzero(dones).tolist():
            final = infos[env].get("terminal_observation")
            if final is None:
                return b""
            raw[env] = final
        return bytes_of(raw, self._space)

    def _on_reset(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        observations = self._guarded(original, *args, **kwargs)
        if self.recorder.recording:
            try:
                self._stranger = self._callers.stranger()
                by = self._by(resets=1) if self._stranger else LEARN
                self._row_of_resets(True, digests(self._given, observations), by)
                self._fresh = np.ones(self.n, bool)
                self._out[:], self._raw_out = UNSEEN, b""
                if self.outer is self.inner:
                    self._hand_over_reset(observations)
            except Exception as error:
                self._fail(error)
        return observations

    def _on_handed_reset(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        observations = original(*args, **kwargs)
        if self.recorder.recording:
            try:
                self._hand_over_reset(observations)
            except Exception as error:
                self._fail(error)
        return observations

    def _hand_over_reset(self, observations: Any) -> None:
        self._out[:] = self.recorder.columns["h_out"][self._reset_row] = digests(self.handed, self._stored_form(observations))

    # Calls of single environments.

    def _on_env_method(self, original: Callable[..., Any], *args: Any, indices: Any = None, **kwargs: Any) -> Any:
        name, *arguments = args or (kwargs.get("method_name"),)
        if name not in ("reset", "step"):  # another method may call one of these, where it can be seen
            return original(*args, indices=indices, **kwargs)
        results = self._guarded(original, *args, indices=indices, **kwargs)
        if self.recorder.recording and not self._gate.closed:
            try:
                envs = self.inner._get_indices(indices)
                action = next(iter([*arguments, *kwargs.values()]), None)
                for env, result in zip(envs, results):
                    self._record_single(env, name, action, result, first=env == next(iter(envs)))
            except Exception as error:
                self._fail(error)
        return results

    def _single(self, env: int, name: str) -> Callable[..., Any]:
        def handler(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._gate.closed or not self.recorder.recording:
                return original(*args, **kwargs)
            result = self._guarded(original, *args, **kwargs)
            try:
                self._record_single(env, name, args[0] if args else kwargs.get("action"), result)
            except Exception as error:
                self._fail(error)
            return result

        return handler

    def _record_single(self, env: int, name: str, action: Any, result: Any, first: bool = True) -> None:
        """Record what a single environment gave past its VecEnv."""
        self._stranger = self._callers.stranger() or Caller("the trainer", "its own code")
        here = np.zeros(self.n, bool)
        here[env] = True
        h_obs = int.from_bytes(self._given.one(result[0]), "big")
        by = self._by(resets=first and name == "reset", steps=first and name == "step", envs=here)
        if name == "reset":
            self._row_of_resets(here, h_obs, by)
        else:
            self.recorder.reserve(1)
            row, columns = self.recorder.add(self._step_template, here), self.recorder.columns
            columns["terminated"][row], columns["truncated"][row] = bool(result[2]), bool(result[3]) and not result[2]
            columns["h_obs"][row], columns["h_act"][row] = h_obs, int.from_bytes(self._actions.one(action), "big")
            columns["h_rew"][row] = bits_of(np.asarray([result[1]], np.float64))
            columns["by"][row] = by
            self._t[env] += 1
            self.step = self.step + here
        self._out[env], self._raw_out = UNSEEN, b""
        self._fresh = np.where(here, name == "reset", self._fresh)

    def _by(self, resets: int = 0, steps: int = 0, envs: Any = True) -> int:
        """Who made the event that is being recorded, as the column ``by`` says it."""
        if self._stranger is None:
            return 0
        if self.stray is None:
            place = self.episode.copy(), self.step.copy()
            self._strays.append([])
            self.stray = StrayCalls(
                Stray(self.calls, 0, 0, *self._stranger), len(self._strays), np.zeros(self.n, bool), place, place, np.zeros(self.n, bool)
            )
        stray = self.stray
        stray.calls = stray.calls._replace(resets=stray.calls.resets + resets, steps=stray.calls.steps + steps)
        stray.envs |= envs
        self._strays[-1] = list(stray.calls)
        return stray.number

    def stored(self) -> None:
        """The pending step was stored."""
        self.pending, self.recorder.held = None, False

    def stopped(self) -> None:
        """A rollout has ended, or learning was stopped before the pending step was stored."""
        self._last_known = self._model._last_obs
        if self.pending is not None:
            self.recorder.columns["by"][self._pending_row] = UNSTORED
            if self._reset_row > self._pending_row:
                self.recorder.columns["by"][self._reset_row] = UNSTORED
        self.pending, self.recorder.held = None, False
