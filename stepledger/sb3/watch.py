"""What the innermost VecEnv gives, to whom, and what the outermost one hands to the trainer: the vector tap of `LedgerCallback`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from ..digest import SpaceDigest
from ..flush import Flush
from ..format import RESET, STEP, StreamKey
from ..recorder import describe
from ..recording import OnError
from ..strays import LEARN, UNSEEN, UNSTORED, UNWATCHED, Stray
from .callers import Caller, Callers
from .digests import Digester, Digests, FirstBatches, bytes_of
from .handed import HandedStep, StrayCalls, innermost, reset_observation
from .hooks import Gate, Hooks
from .places import Places
from .stage import Row, RowStage, float32_of
from .stored import episode_starts

__all__ = ["VectorWatch"]


@dataclass(slots=True)
class VectorRow(Row):
    """One event of each environment, or of some.

    Attributes:
        kind: RESET; `None` for STEP.
        h_out: Digests of what the outermost VecEnv gave.
        r_out: The rewards that it gave, float32.
        by: Who made it, int64; see `stepledger.strays`.
    """

    kind: npt.NDArray[np.uint8] | None = None
    h_out: Digests | None = None
    r_out: npt.NDArray[np.float32] | None = None
    by: npt.NDArray[np.int64] | None = None


class VectorWatch:
    """Records the events of the innermost VecEnv, and keeps the trainer's last step until it is stored.

    Args:
        model: The algorithm, whose ``env`` is watched.
        path: The ledger.
        digest: As in `stepledger.LedgerEnv`.
        on_error: Likewise.
        flush: When blocks are written.
        fail: Called with an error of the recording.

    Attributes:
        pending: The trainer's last step, if it was not stored yet.
        calls: Number of steps that the trainer has made.
        stray: Calls of somebody else since the trainer's last step, if there were any.
        on_stray: Called with stray calls when the trainer goes on behind them.

    Raises:
        LedgerError: A space can't be recorded.
    """

    def __init__(
        self, model: Any, path: Path, *, digest: str, on_error: OnError, flush: Flush, fail: Callable[[BaseException], None]
    ) -> None:
        self.inner: VecEnv = innermost(model.env)
        self.n = self.inner.num_envs
        self._given = Digester(self.inner.observation_space, digest, self.n)
        self._actions = Digester(self.inner.action_space, digest, self.n)
        self._handed = Digester(model.observation_space, digest, self.n)
        self._space = model.observation_space
        self._same_space = self._given.space.description == self._handed.space.description
        meta = describe(
            "vector",
            self._given.space,
            self._actions.space,
            [StreamKey(env=env) for env in range(self.n)],
            reward_dtype=np.float32,  # what Stable-Baselines3 stores
            digest=digest,
            columns={"h_out": "<u8", "r_out": "<u8", "by": "<i8"},
            handed_space=self._handed.space.description,
            autoreset_mode="SameStep",
            flags="exclusive",
            run="",
        )
        self.recorder = RowStage(path, meta, VectorRow, on_error=on_error, flush=flush, kind=STEP, h_out=UNSEEN)
        FirstBatches(self.recorder.final, self.inner.observation_space, self._given, self._actions)
        self._never, self._always = np.zeros(self.n, bool), np.ones(self.n, bool)
        self._reset_kind = np.full(self.n, RESET, np.uint8)
        self._unseen = Digests(np.full(self.n, UNSEEN, np.uint64))
        self._fail = fail
        self.pending: HandedStep | None = None
        self.stray: StrayCalls | None = None
        self.on_stray: Callable[[StrayCalls], None] | None = None
        self._strays: list[list[Any]] = []
        self.recorder.final["strays"] = self._strays
        self.calls = 0
        self._places = Places(self.n)
        self._out, self._raw_out = self._unseen, b""
        self._fresh = self._never
        self._first = False
        self._new_obs: Any = None
        self._last_known: Any = None
        self._left: Digests | None = None

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
        self._row: VectorRow | None = None  # until it was handed on
        self._reset_row: VectorRow | None = None  # behind the last step
        self._before: StrayCalls | None = None
        if reset or not self._places.begun:
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
        return self._places.begun

    def fits(self, model: Any) -> bool:
        """Whether a model's env can go on in this ledger."""
        inner = innermost(model.env)
        return (
            inner.num_envs == self.n
            and SpaceDigest(inner.observation_space).description == self._given.space.description
            and SpaceDigest(inner.action_space).description == self._actions.space.description
            and SpaceDigest(model.observation_space).description == self._handed.space.description
        )

    def goes_on(self, model: Any) -> bool:
        """Whether a model is where the last ``learn()`` has left it: its env was not reset since."""
        return innermost(model.env) is self.inner and model._last_obs is self._last_known

    def _watch_envs(self, envs: Sequence[gymnasium.Env[Any, Any]], hooks: Hooks) -> None:
        """Also see who calls a single environment past the VecEnv, at its outermost wrapper or at one inside it."""
        for index, env in enumerate(envs):
            layer: Any = env
            while layer is not None:
                hooks.add(layer, "reset", self._single(index, "reset", outermost=layer is env), self._gate)
                if layer is env:  # each layer's step would cost as much again
                    hooks.add(layer, "step", self._single(index, "step"), self._gate)
                layer = layer.env if isinstance(layer, gymnasium.Wrapper) else None

    def _begin(self, model: Any, reset: bool) -> None:
        """The reset with which ``learn()`` began, which nobody could see: its observation as far as it can be told now."""
        self._out, self._raw_out, self._new_obs = self._handed.of(self._stored_form(model._last_obs)), b"", model._last_obs
        if not reset:  # in the middle of an episode
            self._places.begun, self._fresh = True, episode_starts(model)
            return
        obs = reset_observation(model.env, model._last_obs)
        given = self._now() if obs is None else self._given.of(obs)
        row = self._row_of_resets(self._always, self._unseen if given is None else given, LEARN)
        row.h_out = self._out
        self.recorder.add(row)
        self._first, self._fresh = True, self._always
        self._look_back(given, "before the first step")

    def left(self) -> None:
        """Learning has ended: remember where the environments are, if their VecEnv can tell."""
        self._left = self._now()

    def _now(self) -> Digests | None:
        """The observations at which the environments are, if their VecEnv can tell."""
        # Not by a method that stands in its place: this is no batch that came back.
        return Digester.of(self._given, self.inner._obs_from_buf()) if isinstance(self.inner, DummyVecEnv) else None

    def _look_back(self, left: Digests | None, when: str) -> None:
        """Learning goes on: notice that the environments are no longer where it has left them."""
        now = self._now()
        if now is None or left is None:
            return
        moved = now.values != left.values
        if moved.any():
            self._stranger = Caller("somebody", f"{UNWATCHED}, {when}")
            self.recorder.add(self._row_of_resets(moved, now, self._by(resets=1, envs=moved)))
            self._out, self._raw_out = Digests(np.where(moved, np.uint64(UNSEEN), self._out.values)), b""
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
        self.recorder.in_flight = True  # if it raises, environments may have made a step that nobody receives
        if self.recorder.recording:
            try:
                self._sent = self._actions.of(actions), np.array(actions)
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
            self._before.after = self._places.last
            self._before.calls = self._before.calls._replace(handed_over=self._model._last_obs is not self._new_obs)
            self._strays[-1] = list(self._before.calls)
            if self.on_stray is not None:
                self.on_stray(self._before)
        self.calls += 1

    def _on_receive(self, original: Callable[..., Any]) -> Any:
        try:
            result = self._guarded(original)
        except BaseException as error:
            self.recorder.raised(error, "step", self._places.steps)
            raise
        self.recorder.in_flight = False
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
        if self.recorder.recording and self._row is not None:
            try:
                self._hand_over(result)
            except Exception as error:
                self._fail(error)
        return result

    def _record_step(self, result: Any) -> None:
        observations, rewards, dones, infos = result
        assert self._sent is not None
        dones = np.array(dones, bool)  # a copy: rows are looked at later
        digests, given, by = self._given.of(observations), float32_of(rewards, self.n), self._by(steps=1)
        self._places.stepped()
        start = self._fresh if self._before is None else self._fresh | self._before.envs
        self._at = self._places.t, self._out, self._raw_out, start
        row = VectorRow(None, digests, self._sent[0], given, by=self._column(by))
        ended = dones.nonzero()[0].tolist()
        self._seen, self._ends, self._final = (observations, digests, rewards, given), (ended, dones, self._never, dones), digests
        self._row, self._reset_row, self._out, self._raw_out, self._fresh = row, None, self._unseen, b"", dones
        if not ended:
            self.recorder.add(row)
            return
        if late := [env for env in ended if infos[env].get("TimeLimit.truncated", False)]:
            row.truncated = timeout = np.zeros(self.n, bool)
            timeout[late] = True
            self._ends = ended, dones, timeout, dones & ~timeout
        row.terminated = self._ends[-1]
        row.h_obs = self._final = self._given.replaced(digests, _finals(ended, infos))
        self.recorder.add(row, self._row_of_resets(dones, digests, by))

    def _row_of_resets(self, here: npt.NDArray[np.bool_], obs: Digests, by: int) -> VectorRow:
        """The row of a reset of some or all environments, which is to be added."""
        self._reset_row = row = VectorRow(here, obs, kind=self._reset_kind, by=self._column(by))
        self._places.reset(here)
        return row

    def _column(self, by: int) -> npt.NDArray[np.int64] | None:
        return np.full(self.n, by) if by else None

    def _hand_over(self, result: Any) -> None:
        """What the outermost VecEnv gives for the step that was recorded last."""
        observations, rewards, _, infos = result
        seen, digests, rewards_seen, given = self._seen
        raw = self._stored_form(observations)
        # The same object that a wrapper has handed on may hold something else by now.
        unwrapped = self.outer is self.inner
        same = unwrapped and raw is seen and self._same_space
        self._out = digests if same else self._handed.of(raw)
        self._raw_out = self._out.raw or bytes_of(raw, self._space)
        rewards = rewards if self._raw is None else self._raw.old_reward
        if not unwrapped or rewards is not rewards_seen:
            given = float32_of(rewards, self.n)
        next_obs, raw_next = self._out, self._raw_out
        if self._reset_row is not None:
            self._reset_row.h_out = next_obs
            next_obs = self._final if same else self._handed.replaced(next_obs, _finals(self._ends[0], infos))
            raw_next = next_obs.raw if self._raw is None else b""  # a replay buffer holds what VecNormalize makes of these
        row, self._row = self._row, None
        assert row is not None
        row.h_out, row.r_out = next_obs, given
        if self._stranger is None:
            assert self._sent is not None
            reward = given
            if getattr(rewards, "dtype", None) != np.float32:
                with np.errstate(all="ignore"):
                    reward = np.array(rewards, np.float32)
            act, actions = self._sent
            begin = *self._at, act, actions if self._asked is None else self._asked, reward, given
            self.pending = HandedStep(*begin, next_obs, raw_next, *self._ends, infos, self._first, self._before)
            self._pending_row, self.recorder.held, self._new_obs, self._first = row, True, observations, False

    def _on_reset(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._gate.closed:  # the VecEnv's own, as part of a step
            return original(*args, **kwargs)
        self.recorder.in_flight = True
        try:
            observations = self._guarded(original, *args, **kwargs)
        except BaseException as error:
            self.recorder.raised(error, "reset", self._places.steps)
            raise
        self.recorder.in_flight = False
        if self.recorder.recording:
            try:
                self._stranger = self._callers.stranger()
                by = self._by(resets=1) if self._stranger else LEARN
                self.recorder.add(self._row_of_resets(self._always, self._given.of(observations), by))
                self._fresh = self._always
                self._out, self._raw_out = self._unseen, b""
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
        self._out = self._handed.of(self._stored_form(observations))
        if self._reset_row is not None:
            self._reset_row.h_out = self._out

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

    def _single(self, env: int, name: str, outermost: bool = True) -> Callable[..., Any]:
        def handler(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._gate.closed or not self.recorder.recording:
                return original(*args, **kwargs)
            result = self._guarded(original, *args, **kwargs)
            try:
                self._record_single(env, name, args[0] if args else kwargs.get("action"), result, outermost=outermost)
            except Exception as error:
                self._fail(error)
            return result

        return handler

    def _record_single(self, env: int, name: str, action: Any, result: Any, *, first: bool = True, outermost: bool = True) -> None:
        """Record what a single environment gave past its VecEnv; a layer inside it gives what the space need not describe."""
        self._stranger = self._callers.stranger() or Caller("the trainer", "its own code")
        here = np.arange(self.n) == env
        obs = self._unseen.but(env, self._given.one(result[0])) if outermost else self._unseen
        by = self._by(resets=first and name == "reset", steps=first and name == "step", envs=here)
        if name == "reset":
            row = self._row_of_resets(here, obs, by)
        else:
            row = VectorRow(here, obs, self._unseen.but(env, self._actions.one(action)), by=self._column(by))
            row.h_rew = float32_of([result[1]], self.n)
            row.terminated, row.truncated = np.full(self.n, bool(result[2])), np.full(self.n, bool(result[3]) and not result[2])
            self._places.stepped_one(env)
        self.recorder.add(row)
        self._out, self._raw_out = self._out.but(env, UNSEEN), b""
        self._fresh = np.where(here, name == "reset", self._fresh)

    def _by(self, resets: int = 0, steps: int = 0, envs: Any = True) -> int:
        """Who made the event that is being recorded, as the column ``by`` says it."""
        if self._stranger is None:
            return 0
        if self.stray is None:
            place = self._places.last
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

    def saved(self) -> None:
        """The model was saved: remember how many events each environment has had."""
        self.recorder.final.setdefault("checkpoints", []).append((self._places.t.values + 1).tolist())

    def stopped(self) -> None:
        """A rollout has ended, or learning was stopped before the pending step was stored."""
        self._last_known = self._model._last_obs
        if self.pending is not None:
            self._pending_row.by = self._column(UNSTORED)
            if self._reset_row is not None:
                self._reset_row.by = self._column(UNSTORED)
        self.pending, self.recorder.held = None, False


def _finals(ended: list[int], infos: list[dict[str, Any]]) -> list[tuple[int, Any]]:
    """The environments whose episode has ended, with their final observations, as far as there are any."""
    return [(env, infos[env].get("terminal_observation")) for env in ended]
