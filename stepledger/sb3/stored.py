"""What a buffer of Stable-Baselines3 has stored, read back: the learner tap of `LedgerCallback`.

Each field is taken through the known function by which it comes from what the env gave, and recorded as the env gave it where the two
agree; else as it was stored. Which functions these are was measured with stable-baselines3 and sb3-contrib 2.9.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from ..format import TRANSITION, StreamKey
from ..recorder import describe
from ..recording import OnError
from .digests import Digester, Digests, bytes_of
from .handed import HandedStep
from .places import Position
from .stage import Row, RowStage, bits_of, float32_of

__all__ = ["StoredRows", "buffer_of"]

Flags = npt.NDArray[np.bool_]

#: How far a recomputed value may be from a stored one, relative and absolute: the last digits of float32.
_TOLERANCE = 1e-6

_NOT_STORED = "a rollout buffer stores no"


def buffer_of(model: Any) -> Any:
    """The buffer that a model learns from; `None` if it has none."""
    return getattr(model, "rollout_buffer", None) or getattr(model, "replay_buffer", None)


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

    Attributes:
        known: Whether rows of this buffer can be read.
    """

    def __init__(self, model: Any, path: Path, *, digest: str, on_error: OnError) -> None:
        self.buffer = buffer_of(model)
        self.known = isinstance(self.buffer, (RolloutBuffer, ReplayBuffer))
        self._observations = Digester(model.observation_space, digest, model.n_envs)
        self._actions = Digester(model.action_space, digest, model.n_envs)
        self.attach(model)
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
        )
        fixed = {"kind": TRANSITION, "h_id": np.arange(1, model.n_envs + 1), "start": -1}
        self.recorder = RowStage(path, meta, LearnerRow, on_error=on_error, **fixed)

    def attach(self, model: Any) -> None:
        """Go on with a model, and with its buffer of now."""
        self.model, self.buffer = model, buffer_of(model)
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
            said["reward"] = {"note": f"without the gamma * V(final observation) of a time limit, computed again within {_TOLERANCE}"}
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
                starts = (buffer.dones[buffer.pos - 1] != 0) | (buffer.timeouts[buffer.pos - 1] != 0)
        return int(buffer.pos), starts

    def record(
        self, at: tuple[int, npt.NDArray[np.bool_] | None], step: HandedStep, locals_: dict[str, Any]
    ) -> tuple[dict[str, Flags], bool]:
        """Record the row that was added last.

        Args:
            at: `position` before that.
            step: The trainer's step that it should hold.
            locals_: The trainer's local variables, as callbacks get them.

        Returns:
            For each field that differs, in which environments; whether the row says if it begins an episode.
        """
        buffer, (pos, start) = self.buffer, at
        n = len(step.done)
        obs = self._digests(_row(buffer.observations, pos), step.raw_obs, step.obs)
        row = LearnerRow(None, obs, self._taken_back(buffer.actions[pos], step), t=step.t)
        row.h_rew = self._without_bootstrap(buffer.rewards[pos].reshape(n), step, locals_)
        pairs: list[tuple[str, Any, Any]] = [("obs", obs, step.obs), ("action", row.h_act, step.act), ("reward", row.h_rew, step.given)]
        if self._on_policy:
            start = buffer.episode_starts[pos].reshape(n) != 0
        else:
            row.h_next = self._next_obs(pos, step)
            pairs.append(("next_obs", row.h_next, step.next_obs))
            if step.ended or np.count_nonzero(buffer.dones[pos]):
                pairs += self._ends(pos, step, row)
            if step.first:  # nobody promised that what was stored by an earlier learn() ends
                start = None
        if start is not None:
            row.start = start
            pairs.append(("episode_start", start, step.start))
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
        if isinstance(space, spaces.Box):
            stored = stored.reshape(-1, *space.shape)
            if not self._on_policy or self._squashes(self.model):
                sent = self.model.policy.unscale_action(stored)
            else:
                sent = np.clip(stored, space.low, space.high)
            if sent.dtype == step.actions.dtype and sent.tobytes() == step.actions.tobytes():
                return step.act
            taken = self._actions.of(sent)
            if stored.dtype != step.actions.dtype:  # replay buffers store float64 actions as float32
                close = np.isclose(sent, step.actions, rtol=_TOLERANCE, atol=_TOLERANCE).reshape(len(sent), -1).all(1)
                taken = step.act if close.all() else Digests(np.where(close, step.act.values, taken.values))
            return taken
        if stored.dtype == step.actions.dtype and stored.tobytes() == step.actions.tobytes():
            return step.act
        return self._actions.of(stored.reshape(-1, *(space.shape or ())))

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

    def _without_bootstrap(self, stored: npt.NDArray[Any], step: HandedStep, locals_: dict[str, Any]) -> npt.NDArray[np.float32]:
        """Stored rewards; in the place of those that are as they should be stored, the rewards that were given."""
        by_time_limit = [env for env in step.ended if step.timeout[env]] if self._on_policy else []
        if not by_time_limit and stored.tobytes() == step.reward.tobytes():
            return step.given
        rewards = float32_of(stored, len(stored))
        for env in by_time_limit:
            final = step.infos[env].get("terminal_observation")
            if final is not None:
                expected = step.reward[env] + self.model.gamma * self._value(final, env, locals_)
                if np.isclose(stored[env], expected, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
                    rewards[env] = step.given[env]
        return rewards

    def _value(self, obs: Any, env: int, locals_: dict[str, Any]) -> float:
        """V of a final observation, as the trainer computes it."""
        policy = self.model.policy
        arguments: tuple[Any, ...] = (policy.obs_to_tensor(obs)[0],)
        with torch.no_grad():
            if hasattr(self.model, "_last_lstm_states"):
                lstm = tuple(part[:, env : env + 1, :].contiguous() for part in locals_["lstm_states"].vf)
                arguments += (lstm, torch.tensor([False], dtype=torch.float32, device=self.model.device))
            return float(policy.predict_values(*arguments)[0])


def _row(column: Any, pos: int) -> Any:
    return {key: part[pos] for key, part in column.items()} if isinstance(column, dict) else column[pos]


def _is_stored(stored: npt.NDArray[np.float32], flags: Flags) -> bool:
    return stored.tobytes() == flags.astype(np.float32).tobytes()


def _wrong(found: Any, expected: Any) -> Flags:
    """In which environments a column differs, ``(n,)``."""
    if isinstance(found, Digests):
        found, expected = found.values, expected.values
    elif found.dtype == np.float32:
        found, expected = bits_of(found), bits_of(expected)
    return np.asarray(found != expected)
