"""The learner tap for a training loop of one's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .described import space_of
from .digest import SpaceDigest
from .errors import LedgerError
from .flush import Flush
from .format import JOURNAL, TRANSITION, Meta, StreamKey
from .journal import is_locked
from .ledger import peek_all
from .recorder import BatchRecorder, describe, reward_bits
from .recording import OnError, check_on_error, expect, warn
from .vector import ledger_path

__all__ = ["LearnerLedger"]


class LearnerLedger:
    """Records the transitions that a training loop learns from.

    Each must be a step that the vector env gave, with its own successor: it is found in the ledger of a `LedgerVectorEnv` by what it
    holds. A transition that joins the end of an episode to the reset of the next one, as the reset row of next-step autoreset does, is
    named as that.

    Spaces, digest and reward dtype are those of the vector env's ledger, which lies in the same directory. It is looked up at the first
    transitions, so the vector env must have been reset before.

    Args:
        path: The file to write when it is closed (also by `flush`, and at interpreter exit), in the directory of the vector env's ledger.
        each_step_once: The loop promises to learn from every step exactly once, as an on-policy one does that learns from whole rollouts;
            otherwise it is only counted how often each was. Steps behind the last update are then differences too.
        on_error: What happens when recording fails, or can't begin: ``"warn"`` once, mark the ledger if there is one, and let training go
            on; or ``"raise"``.
        flush_every: When this process is killed, at most so many transitions are lost, besides the batch that is being recorded. `None`:
            8,192.
        flush_seconds: Transitions that are so old are written with the next batch. `None`: 2.

    Raises:
        LedgerError: A setting is unknown, or the path names a directory.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        each_step_once: bool = False,
        on_error: OnError = "warn",
        flush_every: int | None = None,
        flush_seconds: float | None = None,
    ) -> None:
        check_on_error(on_error)
        self._flush = Flush.of(flush_every, flush_seconds)
        self._path = ledger_path(path).absolute()
        self._each_step_once, self._on_error = bool(each_step_once), on_error
        self._recorder: BatchRecorder | None = None
        self._refused = False

    def transitions(self, obs: Any, actions: Any, rewards: Any, next_obs: Any, terminated: Any, truncated: Any) -> None:
        """Record a batch of transitions: one step of every environment, some of them, or a sample of a replay buffer.

        Arrays, torch tensors, or dicts and tuples of them as the space has it; n transitions along the first axis.

        Args:
            obs: The observations that the steps began from, as the `LedgerVectorEnv` gave them: before wrappers outside of it, such as
                ``NormalizeObservation``, changed them. Likewise rewards and next observations.
            actions: As they were sent to the environment, not as the policy gave them where they were clipped or scaled on the way.
            rewards: ``(n,)`` or ``(n, 1)``, any real dtype.
            next_obs: The observations that the steps gave: at an episode's end the final one.
            terminated: ``(n,)`` or ``(n, 1)``, bool or 0 and 1: without time limits. The ``dones`` of a sample of Stable-Baselines3's
                replay buffer, which CleanRL uses too, are that.
            truncated: Likewise; `None`, at all calls, where it is not known, as in such a sample: then it is not compared, and the report
                says so.

        Raises:
            LedgerError: Only with ``on_error="raise"``: there is no ledger of a vector env to compare with, or recording failed.
        """
        if self._refused:
            return
        try:
            recorder = self._recorder or self._begin(truncated is not None)
        except Exception as error:
            if self._on_error == "raise":
                raise
            self._refused = True
            warn(f"{self._path} is not recorded, training goes on: {error}")
            return
        if not recorder.recording:
            recorder.used_after_close()
            return
        try:
            recorder.append(self._events(*map(_arrays, (obs, actions, rewards, next_obs, terminated, truncated))))
        except BaseException as error:
            recorder.fail(error)

    def _begin(self, has_truncated: bool) -> BatchRecorder:
        vector = _vector_ledger(self._path)
        digest = vector["digest"]
        self._observations = SpaceDigest(space_of(vector["observation_space"]), digest)
        self._actions = SpaceDigest(space_of(vector["action_space"]), digest)
        self._reward_dtype: str = vector["reward_dtype"]
        meta = describe(
            "learner",
            self._observations,
            self._actions,
            [StreamKey()],
            reward_dtype=self._reward_dtype,
            digest=digest,
            columns={"h_next": "<u8", "h_id": "<u8", "t": "<i8"},
            each_step="once" if self._each_step_once else "",
            replays=True,
            flags="both",
            fields={} if has_truncated else {"truncated": {"skip": "not known to the training loop"}},
            run=vector.get("run", ""),
            taps=(taps := ["vector", "learner"]),
        )
        expect(vector["id"], taps)  # where this ledger can't be written, nothing else says that there was to be one
        self._recorder = BatchRecorder(self._path, meta, on_error=self._on_error, flush=self._flush)
        return self._recorder

    def _events(self, obs: Any, actions: Any, rewards: Any, next_obs: Any, terminated: Any, truncated: Any) -> npt.NDArray[Any]:
        assert self._recorder is not None
        if (truncated is None) != bool(self._recorder.meta["fields"]):
            raise LedgerError("truncated was passed in some calls only: pass it in all of them, or None in all.")
        if truncated is None:
            truncated = np.zeros(np.size(terminated), bool)
        flat = [np.asarray(column).reshape(-1) for column in (rewards, terminated, truncated)]
        columns = [np.frombuffer(b"".join(space.rows(batch)), ">u8") for space, batch in self._batches(obs, actions, next_obs)]
        n = len(flat[0])
        if any(len(column) != n for column in (*flat, *columns)):
            raise LedgerError(f"{n} rewards came with another number of observations, actions or flags: pass batches of one length.")
        events = np.zeros(n, self._recorder.dtype)
        events["kind"], events["t"] = TRANSITION, -1  # nobody says which step it is: it is found by what it holds
        events["h_obs"], events["h_act"], events["h_next"] = columns
        events["h_rew"] = reward_bits(flat[0].astype(np.float64), self._reward_dtype)
        events["terminated"], events["truncated"] = flat[1] != 0, flat[2] != 0
        return events

    def _batches(self, obs: Any, actions: Any, next_obs: Any) -> list[tuple[SpaceDigest, Any]]:
        return [(self._observations, obs), (self._actions, actions), (self._observations, next_obs)]

    def flush(self) -> None:
        """Write the ledger of everything so far; recording goes on."""
        if self._recorder is not None:
            self._recorder.flush()

    def close(self) -> None:
        """Write the ledger and end recording."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder.ended = True


def _arrays(value: Any) -> Any:
    """Torch tensors as arrays, wherever they lie."""
    if isinstance(value, dict):
        return {key: _arrays(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_arrays, value))
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _vector_ledger(path: Path) -> Meta:
    """The meta of the vector env's ledger in the directory.

    Raises:
        LedgerError: There is none, or more than one that is being recorded.
    """
    found = [ledger for ledger in (peek_all(path.parent)[0] if path.parent.is_dir() else []) if ledger.meta["tap"] == "vector"]
    # A journal that nobody holds is of a run that was killed.
    living = [ledger for ledger in found if not ledger.meta["closed"] and is_locked(ledger.path.with_suffix(JOURNAL))]
    if len(living) > 1:
        raise LedgerError(f"{path.parent} holds ledgers of {len(living)} vector envs: give each training loop a directory of its own.")
    if not found:
        raise LedgerError(
            f"{path.parent} holds no ledger of a vector env: put LedgerVectorEnv around it, with a path in there, and reset it first."
        )
    return max(living or found, key=lambda ledger: float(ledger.meta["created"])).meta
