"""What a buffer of Stable-Baselines3 has stored, read back: the learner tap of `LedgerCallback`.

Each field is taken through the known function by which it comes from what the env gave, and recorded as the env gave it where the two
agree; else as it was stored. Which functions these are was measured with stable-baselines3 and sb3-contrib 2.9.2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from ..digest import SpaceDigest
from ..format import TRANSITION, StreamKey
from ..recorder import describe, reward_bits
from ..recording import OnError
from .stage import RowStage, digests
from .watch import Digests, HandedStep

__all__ = ["StoredRows", "buffer_of"]

Flags = npt.NDArray[np.bool_]

#: How far a recomputed value may be from a stored one, relative and absolute: the last digits of float32.
_TOLERANCE = 1e-6

_NOT_STORED = "a rollout buffer stores no"


def buffer_of(model: Any) -> Any:
    """The buffer that a model learns from; `None` if it has none."""
    return getattr(model, "rollout_buffer", None) or getattr(model, "replay_buffer", None)


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
        self._observations = SpaceDigest(model.observation_space, digest)
        self._actions = SpaceDigest(model.action_space, digest)
        self.attach(model)
        meta = describe(
            "learner",
            self._observations,
            self._actions,
            [StreamKey(env=env) for env in range(model.n_envs)],
            reward_dtype=np.float32,
            digest=digest,
            columns={"h_next": "<u8", "h_id": "<u8", "t": "<i8", "start": "<i8"},
            fields=self._said(model),
            flags="exclusive" if self._has_timeouts else "done",
            each_step_once=True,
            run="",
            taps=["vector", "learner"],
        )
        self.recorder = RowStage(path, meta, on_error=on_error)

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

    def position(self) -> tuple[int, npt.NDArray[np.int64]]:
        """Where the next row goes, and which rows end there; to be asked before it is added."""
        starts = np.zeros(self.buffer.n_envs, np.int64)
        if isinstance(self.buffer, HerReplayBuffer):
            starts = self.buffer._current_ep_start == self.buffer.pos
        elif self._joins:
            starts = (self.buffer.dones[self.buffer.pos - 1] != 0) | (self.buffer.timeouts[self.buffer.pos - 1] != 0)
        return int(self.buffer.pos), starts.astype(np.int64)

    def record(self, at: tuple[int, npt.NDArray[np.int64]], step: HandedStep, locals_: dict[str, Any]) -> dict[str, Flags]:
        """Record the row that was added last.

        Args:
            at: `position` before that.
            step: The trainer's step that it should hold.
            locals_: The trainer's local variables, as callbacks get them.

        Returns:
            For each field, in which environments it differs; fields that are not compared are left out.
        """
        buffer, (pos, start) = self.buffer, at
        n = len(step.t)
        h_obs = digests(self._observations, _row(buffer.observations, pos))
        h_act = self._taken_back(buffer.actions[pos], step)
        reward, expected = buffer.rewards[pos].reshape(n), reward_bits(step.reward.astype(np.float64), "<f4")
        bits = np.where(self._rewards_agree(reward, step, locals_), expected, reward_bits(reward.astype(np.float64), "<f4"))
        differs = {"obs": h_obs != step.obs, "action": h_act != step.h_act, "reward": bits != expected}
        terminated = truncated = np.zeros(n, bool)
        if self._on_policy:
            h_next = np.zeros(n, np.uint64)
            start = buffer.episode_starts[pos].reshape(n).astype(np.int64)
        else:
            h_next = self._next_obs(pos, step)
            done = buffer.dones[pos].reshape(n) != 0
            truncated = done & (buffer.timeouts[pos].reshape(n) != 0) if self._has_timeouts else truncated
            terminated = done & ~truncated
            differs["next_obs"] = h_next != step.next_obs
            if self._has_timeouts:
                differs["terminated"], differs["truncated"] = terminated != (step.done & ~step.timeout), truncated != step.timeout
            else:
                differs["terminated"] = done != step.done
        if not self._on_policy and (not self._joins or step.first):
            start = np.full(n, -1)
        else:
            differs["episode_start"] = (start != 0) != step.start
        self.recorder.reserve(1)
        row, columns = self.recorder.add(), self.recorder.columns
        columns["kind"][row] = TRANSITION
        columns["h_obs"][row], columns["h_act"][row], columns["h_rew"][row], columns["h_next"][row] = h_obs, h_act, bits, h_next
        columns["terminated"][row], columns["truncated"][row] = terminated, truncated
        columns["h_id"][row], columns["t"][row], columns["start"][row] = np.arange(1, n + 1), step.t, start
        return differs

    def _taken_back(self, stored: npt.NDArray[Any], step: HandedStep) -> Digests:
        """The digests of stored actions as they are sent to the env."""
        space: gymnasium.Space[Any] = self.model.action_space
        if isinstance(space, spaces.Box):
            stored = stored.reshape(-1, *space.shape)
            if not self._on_policy or self._squashes(self.model):
                sent = self.model.policy.unscale_action(stored)
            else:
                sent = np.clip(stored, space.low, space.high)
            taken = digests(self._actions, sent)
            if stored.dtype != step.actions.dtype:  # replay buffers store float64 actions as float32
                close = np.isclose(sent, step.actions, rtol=_TOLERANCE, atol=_TOLERANCE).reshape(len(sent), -1).all(1)
                taken = np.where(close, step.h_act, taken)
            return taken
        if isinstance(space, spaces.Discrete):
            return digests(self._actions, stored.reshape(-1))
        return digests(self._actions, stored.reshape(-1, *(space.shape or ())))

    def _next_obs(self, pos: int, step: HandedStep) -> Digests:
        buffer = self.buffer
        if buffer.optimize_memory_usage:
            stored = _row(buffer.observations, (pos + 1) % buffer.buffer_size)
        else:
            stored = _row(buffer.next_observations, pos)
        h_next = digests(self._observations, stored)
        if self._normalised is None:
            return h_next
        h_next = h_next.copy()
        for env in np.flatnonzero(step.done & (h_next != step.next_obs)).tolist():
            final = step.infos[env].get("terminal_observation")
            if final is not None and self._observations.one(self._normalised.unnormalize_obs(final)) == int(h_next[env]).to_bytes(8, "big"):
                h_next[env] = step.next_obs[env]
        return h_next

    def _rewards_agree(self, stored: npt.NDArray[Any], step: HandedStep, locals_: dict[str, Any]) -> Flags:
        """In which environments the reward is as it should be stored; NaN equals NaN."""
        equal: Flags = (stored == step.reward) | (np.isnan(stored) & np.isnan(step.reward))
        if not self._on_policy:
            return equal
        for env in np.flatnonzero(step.timeout).tolist():
            final = step.infos[env].get("terminal_observation")
            if final is not None:
                expected = step.reward[env] + self.model.gamma * self._value(final, env, locals_)
                equal[env] = np.isclose(stored[env], expected, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
        return equal

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
