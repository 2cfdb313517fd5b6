"""What a buffer of Stable-Baselines3 has stored, read back: the learner tap of `LedgerCallback`.

Each field is taken through the known function by which it comes from what the env gave, and recorded as the env gave it where the two
agree; else as it was stored. Which functions these are was measured with stable-baselines3 and sb3-contrib 2.9.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.common.vec_env import VecCheckNan, VecEnvWrapper, VecMonitor
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from ..flush import Flush
from ..format import TRANSITION, StreamKey
from ..recorder import describe
from ..recording import OnError
from .digests import Digester, Digests, bytes_of
from .handed import HandedStep
from .places import Position
from .stage import Row, RowStage, bits_of, float32_of

__all__ = ["StoredRows", "buffer_of", "episode_starts"]

Flags = npt.NDArray[np.bool_]

#: How far a recomputed value may be from a stored one, relative and absolute: the last digits of float32.
_TOLERANCE = 1e-6

_NOT_STORED = "a rollout buffer stores no"


def buffer_of(model: Any) -> Any:
    """The buffer that a model learns from; `None` if it has none."""
    buffer = getattr(model, "rollout_buffer", None)
    return getattr(model, "replay_buffer", None) if buffer is None else buffer  # an empty one may count as false


def episode_starts(model: Any) -> Flags:
    """Which of a model's environments are at the beginning of an episode, ``(n,)`` bool, as far as the model knows it.

    Off-policy algorithms keep that in their buffer alone: its last row ends an episode, or leads to the observation of now. If it does
    not, the environments were reset since.
    """
    buffer = buffer_of(model)
    if not isinstance(buffer, ReplayBuffer):
        return np.array(model._last_episode_starts, bool)
    ended = np.asarray(buffer.dones[buffer.pos - 1]).reshape(-1) != 0
    overlaid = buffer.optimize_memory_usage
    stored = _row(buffer.observations, buffer.pos) if overlaid else _row(buffer.next_observations, buffer.pos - 1)
    now = model._last_obs if model._vec_normalize_env is None else model._last_original_obs
    goes_on = bool(buffer.size()) and all(
        np.array_equal(one[~ended], _as(one, other)[~ended], equal_nan=one.dtype.kind == "f")
        for one, other in (zip(stored.values(), (now[key] for key in stored)) if isinstance(stored, dict) else [(stored, now)])
    )
    return ended if goes_on else np.ones_like(ended)


@dataclass(slots=True)
class LearnerRow(Row):
    """One transition of each environment.

    Attributes:
        h_next: Digests of next observations.
        t: Positions of the events in their streams.
        start: Whether it begins an episode, bool; `None` where the buffer doesn't say.
    """

    h_next: Digests | None = None
    t: Position | None = None
    start: Flags | None = None


class StoredRows:
    """Records the rows of a rollout or replay buffer.

    Args:
        model: The algorithm.
        path: The ledger.
        digest: As in `stepledger.LedgerEnv`.
        on_error: Likewise.
        flush: When blocks are written.

    Attributes:
        known: Whether rows of this buffer can be read.
        begun: Whether any was.
    """

    def __init__(self, model: Any, path: Path, *, digest: str, on_error: OnError, flush: Flush) -> None:
        self.buffer = buffer_of(model)
        self.known, self.begun = True, False
        self._counts: dict[str, int] = {}
        self._notes: list[str] = []
        self._observations = Digester(model.observation_space, digest, model.n_envs)
        self._actions = Digester(model.action_space, digest, model.n_envs)
        self.attach(model)
        if wrappers := _rewriting(model.env):
            names = ", ".join(wrappers)
            self._notes = [f"observations and rewards as {names} handed them on: what became of them there is not compared"]
        if not self._on_policy:
            self._notes += ["learned from means stored in the replay buffer here: what is drawn from it is not recorded"]
        meta = describe(
            "learner",
            self._observations.space,
            self._actions.space,
            [StreamKey(env=env) for env in range(model.n_envs)],
            reward_dtype=np.float32,
            digest=digest,
            columns={"h_next": "<u8", "h_id": "<u8", "t": "<i8", "start": "<i8"},
            fields=self._said(model),
            flags="exclusive" if self._has_timeouts else "done",
            each_step="once",
            run="",
            taps=["vector", "learner"],
            notes=self._notes,
        )
        fixed = {"kind": TRANSITION, "h_id": np.arange(1, model.n_envs + 1), "start": -1}
        self.recorder = RowStage(path, meta, LearnerRow, on_error=on_error, flush=flush, **fixed)

    def attach(self, model: Any) -> None:
        """Go on with a model, and with its buffer of now."""
        self.model, self.buffer = model, buffer_of(model)
        self.known = self.known and isinstance(self.buffer, (RolloutBuffer, ReplayBuffer))
        self._on_policy = isinstance(self.buffer, RolloutBuffer)
        self._has_timeouts = not self._on_policy and getattr(self.buffer, "handle_timeout_termination", False)
        # Buffers that join several rows in a sample must know where an episode was cut.
        self._joins = isinstance(self.buffer, (HerReplayBuffer, NStepReplayBuffer))
        self._normalised = None if self._on_policy else model._vec_normalize_env

    def _said(self, model: Any) -> dict[str, dict[str, str]]:
        """What the ledger says of its fields: those that can't be compared, and by which functions others are taken first."""
        said: dict[str, dict[str, str]] = {}
        box = isinstance(model.action_space, spaces.Box)
        if self._on_policy:
            said["next_obs"] = {"skip": f"{_NOT_STORED} next observations"}
            said["terminated"] = {"skip": f"{_NOT_STORED} ends, but episode_start of the next row"}
            said["truncated"] = {"skip": f"{_NOT_STORED} time limits, but adds gamma * V(final observation) to the reward"}
            said["reward"] = {"note": f"without the gamma * V(final observation) of a time limit, within {_TOLERANCE}"}
            if box:
                said["action"] = {"note": "unscaled to the action space" if self._squashes(model) else "clipped to the action space"}
        else:
            if box:
                said["action"] = {"note": "unscaled to the action space"}
            if not self._has_timeouts:
                said["truncated"] = {"skip": "this replay buffer stores no time limits"}
                said["terminated"] = {"note": "as the end of the episode, by termination or time limit"}
            if self._normalised is not None:
                said["next_obs"] = {"note": "a final observation after VecNormalize has normalised it and taken that back"}
            if not self._joins:
                said["episode_start"] = {"skip": "this replay buffer stores single transitions"}
        return said

    @staticmethod
    def _squashes(model: Any) -> bool:
        return bool(model.policy.squash_output) and not hasattr(model, "_last_lstm_states")  # RecurrentPPO clips in any case

    def position(self) -> tuple[int, npt.NDArray[np.bool_] | None]:
        """Where the next row goes, and whether it begins an episode, if the buffer knows; to be asked before it is added."""
        buffer = self.buffer
        starts = None
        if self._joins:
            if isinstance(buffer, HerReplayBuffer):
                starts = buffer._current_ep_start == buffer.pos
            else:
                starts = (buffer.dones[buffer.pos - 1] != 0) | (buffer.timeouts[buffer.pos - 1] != 0) | (buffer.size() == 0)
        return int(buffer.pos), starts

    def record(
        self, at: tuple[int, npt.NDArray[np.bool_] | None], step: HandedStep, values: Sequence[Any]
    ) -> tuple[dict[str, Flags], bool]:
        """Record the row that was added last.

        Args:
            at: `position` before that.
            step: The trainer's step that it should hold.
            values: What the policy has answered since that step when it was asked for values, in that order: tensors, ``(1, 1)``.

        Returns:
            For each field that differs, in which environments; whether the row says if it begins an episode.
        """
        buffer, (pos, start) = self.buffer, at
        n = len(step.done)
        obs = self._digests(_row(buffer.observations, pos), step.raw_obs, step.obs)
        row = LearnerRow(None, obs, self._taken_back(buffer.actions[pos], step), t=step.t)
        row.h_rew = self._without_bootstrap(buffer.rewards[pos].reshape(n), step, values)
        pairs: list[tuple[str, Any, Any]] = [("obs", obs, step.obs), ("action", row.h_act, step.act), ("reward", row.h_rew, step.given)]
        if self._on_policy:
            start = buffer.episode_starts[pos].reshape(n) != 0
        else:
            row.h_next = self._next_obs(pos, step)
            pairs.append(("next_obs", row.h_next, step.next_obs))
            if step.ended or np.count_nonzero(buffer.dones[pos]):
                pairs += self._ends(pos, step, row)
            if step.first and start is not None and not start.all():
                self.count(
                    "episodes in the buffer were open when learn() reset the environments: Stable-Baselines3 goes on with them in the new "
                    "ones, in what it makes of several rows",
                    int((~start).sum()),
                )
        if start is not None:
            row.start = start
            pairs.append(("episode_start", start, step.start))
        self.begun = True
        self.recorder.add(row)
        wrong = {field: _wrong(found, expected) for field, found, expected in pairs if found is not expected}
        return {field: envs for field, envs in wrong.items() if envs.any()}, start is not None

    def _ends(self, pos: int, step: HandedStep, row: LearnerRow) -> list[tuple[str, Flags, Flags]]:
        """Fill in what is stored of ends of episodes; what is to be compared of them."""
        dones = self.buffer.dones[pos]
        if not self._has_timeouts:
            row.terminated = row.truncated = ended = dones != 0
            return [("terminated", ended, step.done)]
        timeouts = self.buffer.timeouts[pos]
        if _is_stored(dones, step.done) and _is_stored(timeouts, step.timeout):
            row.terminated, row.truncated = step.terminated, step.timeout
            return []
        ended, timeout = dones != 0, timeouts != 0
        row.terminated, row.truncated = ended & ~timeout, ended & timeout
        return [("terminated", row.terminated, step.terminated), ("truncated", row.truncated, step.timeout)]

    def _digests(self, stored: Any, raw: bytes, handed: Digests) -> Digests:
        """The digests of stored observations, where they are those of what was handed to the trainer."""
        return handed if raw and bytes_of(stored, self.model.observation_space) == raw else self._observations.of(stored)

    def _taken_back(self, stored: npt.NDArray[Any], step: HandedStep) -> Digests:
        """The digests of stored actions as they are sent to the env."""
        space: gymnasium.Space[Any] = self.model.action_space
        sent = stored.reshape(-1, *(space.shape or ()))
        tolerance, scale = 0.0, np.float64(1.0)
        if isinstance(space, spaces.Box):
            scaled = not self._on_policy or self._squashes(self.model)
            sent = self.model.policy.unscale_action(sent) if scaled else np.clip(sent, space.low, space.high)
            if stored.dtype != step.actions.dtype:  # replay buffers store float64 actions as float32
                tolerance = _TOLERANCE
                scale = np.maximum(1.0, (space.high - space.low) / 2) if scaled else scale
        if sent.dtype == step.actions.dtype and sent.tobytes() == step.actions.tobytes():
            return step.act
        # What arrives at the environments may be another action, which a wrapper has made of the trainer's.
        same = np.isclose(sent, step.actions.reshape(sent.shape), rtol=tolerance, atol=tolerance * scale)
        same = same.reshape(len(sent), -1).all(1)
        return step.act if same.all() else Digests(np.where(same, step.act.values, self._actions.of(sent).values))

    def _next_obs(self, pos: int, step: HandedStep) -> Digests:
        buffer = self.buffer
        if buffer.optimize_memory_usage:
            stored = _row(buffer.observations, (pos + 1) % buffer.buffer_size)
        else:
            stored = _row(buffer.next_observations, pos)
        found = self._digests(stored, step.raw_next_obs, step.next_obs)
        if self._normalised is None or found is step.next_obs:
            return found
        for env in np.flatnonzero(step.done & (found.values != step.next_obs.values)).tolist():
            final = step.infos[env].get("terminal_observation")
            if final is not None and self._observations.one(self._normalised.unnormalize_obs(final)) == found.values[env]:
                found = found.but(env, int(step.next_obs.values[env]))
        return found

    def _without_bootstrap(self, stored: npt.NDArray[Any], step: HandedStep, values: Sequence[Any]) -> npt.NDArray[np.float32]:
        """Stored rewards; in the place of those that are as they should be stored, the rewards that were given."""
        by_time_limit = [env for env in step.ended if step.timeout[env]] if self._on_policy else []
        if not by_time_limit and stored.tobytes() == step.reward.tobytes():
            return step.given
        rewards = float32_of(stored, len(stored))
        heard = "predict_values" not in vars(self.model.policy)
        added = [float(self.model.gamma * value[0]) for value in values]
        for env in by_time_limit:
            if step.infos[env].get("terminal_observation") is None:  # the trainer adds nothing then
                continue
            if not heard:
                self.count("rewards of a time limit were not compared: predict_values is replaced on the policy object")
                rewards[env] = step.given[env]
                continue
            given = np.float64(step.reward[env])
            for at, one in enumerate(added):
                if np.isclose(stored[env], given + one, rtol=0, atol=_TOLERANCE * (abs(given) + abs(one)), equal_nan=True):
                    rewards[env] = step.given[env]
                    del added[: at + 1]
                    break
            else:
                if stored[env] == step.reward[env]:
                    self.count("rewards of a time limit were stored without gamma * V(final observation)")
                    rewards[env] = np.nan  # it is not the sum that it should be, though equal to what was given
        return rewards

    def added(self, pos: int) -> int:
        """How many rows were added behind a position."""
        added = int(self.buffer.pos) - pos
        if not added and self.buffer.buffer_size == 1:
            return 1
        return added if added >= 0 else added + int(self.buffer.buffer_size)

    def count(self, sentence: str, number: int = 1) -> None:
        """Count what the report says in a sentence that begins with the number."""
        self._counts[sentence] = self._counts.get(sentence, 0) + number
        self.recorder.final["notes"] = [*self._notes, *(f"{count:,} {sentence}" for sentence, count in self._counts.items())]


def _rewriting(env: Any) -> list[str]:
    """The names of the wrappers around a VecEnv that may make other values of what it gives, the outermost last."""
    names: list[str] = []
    while isinstance(env, VecEnvWrapper):
        names += [] if type(env) in (VecMonitor, VecCheckNan) else [type(env).__name__]
        env = env.venv
    return names[::-1]


def _row(column: Any, pos: int) -> Any:
    return {key: part[pos] for key, part in column.items()} if isinstance(column, dict) else column[pos]


def _as(stored: npt.NDArray[Any], observations: Any) -> npt.NDArray[Any]:
    """Observations in the form in which a buffer stores them."""
    with np.errstate(all="ignore"):
        return np.asarray(observations).astype(stored.dtype, copy=False).reshape(stored.shape)


def _is_stored(stored: npt.NDArray[np.float32], flags: Flags) -> bool:
    return stored.tobytes() == flags.astype(np.float32).tobytes()


def _wrong(found: Any, expected: Any) -> Flags:
    """In which environments a column differs, ``(n,)``."""
    if isinstance(found, Digests):
        found, expected = found.values, expected.values
    elif found.dtype == np.float32:
        found, expected = bits_of(found), bits_of(expected)
    return np.asarray(found != expected)
