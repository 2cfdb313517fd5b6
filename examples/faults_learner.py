"""Faults between RLlib's samplers and what learns from their samples, to try the hop into the learner on.

    config.callbacks([functools.partial(LedgerCallback, "ledger"), functools.partial(LearnerFaultCallback, "transition:stale_obs")])

`LEARNER_FAULTS` names them. With a replay buffer a fault changes what the buffer gives, elsewhere what leaves the EnvRunners, behind their
last ledger. With ``log=`` each change is written down, found by comparing the samples before and after.
"""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

__all__ = ["LEARNER_FAULTS", "LearnerFaultCallback", "read_changes"]

#: Name -> what the fault does. Transitions are steps of a chunk of an episode, as an EnvRunner or a replay buffer gives it.
LEARNER_FAULTS = {
    "transition:crosses_reset": "its next observation is the first one of another chunk",
    "transition:stale_obs": "its observation is another one's",
    "transition:wrong_successor": "its next observation is another one's",
    "transition:duplicated": "it comes once more, in a chunk of its own",
    "transition:never_sampled": "its chunk comes as one of an episode that nobody sampled",
    "chunk:dropped": "its chunk does not come",
    "chunk:repeated": "its chunk comes once more",
}

Samples = list[SingleAgentEpisode]
#: Episode id and time step.
Place = tuple[str, int]


class LearnerFaultCallback(RLlibCallback):
    """Makes a fault on the way to the learner; listed behind LedgerCallback.

    Args:
        fault: Of `LEARNER_FAULTS`.
        rate: Share of the transitions (of the chunks, where it is one of chunks) that have it.
        once: At one transition or chunk only, at the second call or later.
        seed: Of the random numbers behind the rate.
        log: File to which the changes are appended; see `read_changes`.
    """

    def __init__(self, fault: str, rate: float = 0.1, *, once: bool = False, seed: int = 0, log: str | None = None) -> None:
        self._fault, self._rate, self._once, self._log = fault, rate, once, log
        self._rng = np.random.default_rng(seed)
        self._calls = 0
        self._done = False

    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Change what the replay buffer gives, where there is one."""
        buffer = getattr(algorithm, "local_replay_buffer", None)
        if buffer is not None:
            sample = buffer.sample
            buffer.sample = lambda *args, **kwargs: self._changed(sample(*args, **kwargs))

    def on_sample_end(self, *, env_runner: Any, samples: Samples, **kwargs: Any) -> None:
        """Change what the EnvRunner has sampled, where no replay buffer comes in between."""
        if not env_runner.config.in_evaluation and "replay_buffer_config" not in vars(env_runner.config):
            samples[:] = self._changed(samples)

    def _changed(self, samples: Samples) -> Samples:
        self._calls += 1
        before = list(_transitions(samples))
        after = _CHANGES[self._fault](list(samples), self._choose)
        made = list(_transitions(after))
        if self._once and before == made:  # what it put in its place was the same: another time
            self._done = False
        if self._log is not None:
            _write(self._log, before, made)
        return after

    def _choose(self) -> bool:
        if self._once:
            chosen = self._calls > 1 and not self._done
            self._done |= chosen
            return chosen
        return bool(self._rng.random() < self._rate)


def _of_transitions(change: Callable[[SingleAgentEpisode, int, SingleAgentEpisode], Samples]) -> Callable[..., Samples]:
    """A fault of single transitions: ``change(chunk, step, other chunk)`` changes the chunk in place and gives chunks to add."""

    def changed(samples: Samples, choose: Callable[[], bool]) -> Samples:
        added: Samples = []
        for at, chunk in enumerate(samples):
            other = samples[at - 1]
            for step in range(len(chunk)):
                if other is not chunk and choose():
                    added += change(chunk, step, other)
        return samples + added

    return changed


def _of_chunks(copies: int) -> Callable[..., Samples]:
    """A fault of whole chunks: those that it chooses come so many times."""
    # Copies, since what makes batches of them changes them.
    return lambda samples, choose: [
        chunk for one in samples for chunk in [one, copy.deepcopy(one)][: copies if len(one) and choose() else 1]
    ]


def _crosses_reset(chunk: SingleAgentEpisode, step: int, other: SingleAgentEpisode) -> Samples:
    chunk.observations.data[chunk.observations.lookback + step + 1] = other.observations.data[other.observations.lookback]
    return []


def _stale_obs(chunk: SingleAgentEpisode, step: int, other: SingleAgentEpisode) -> Samples:
    data, at = chunk.observations.data, chunk.observations.lookback + step
    data[at] = data[at - 1] if at else other.observations.data[-1]
    return []


def _wrong_successor(chunk: SingleAgentEpisode, step: int, other: SingleAgentEpisode) -> Samples:
    chunk.observations.data[chunk.observations.lookback + step + 1] = other.observations.data[-1]
    return []


def _never_sampled(samples: Samples, choose: Callable[[], bool]) -> Samples:
    """A chunk of an episode that nobody sampled, in the place of one that somebody did."""
    found = []
    for chunk in samples:
        if len(chunk) and choose():
            chunk = copy.deepcopy(chunk)
            chunk.id_ = f"nobody's {chunk.id_}"
            data = chunk.observations.data
            chunk.observations.data = [value + 1 for value in data] if isinstance(data, list) else data + 1
        found.append(chunk)
    return found


_CHANGES: dict[str, Callable[..., Samples]] = {
    "transition:crosses_reset": _of_transitions(_crosses_reset),
    "transition:stale_obs": _of_transitions(_stale_obs),
    "transition:wrong_successor": _of_transitions(_wrong_successor),
    "transition:duplicated": _of_transitions(lambda chunk, step, other: [chunk[step : step + 1]]),
    "transition:never_sampled": _never_sampled,
    "chunk:dropped": _of_chunks(0),
    "chunk:repeated": _of_chunks(2),
}


def _transitions(samples: Samples) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Each transition with its place, as values that don't change with the sample."""
    for chunk in samples:
        observations, actions, rewards = chunk.get_observations(), chunk.get_actions(), chunk.get_rewards()
        for step in range(len(chunk)):
            last = step == len(chunk) - 1
            yield (
                (chunk.id_, chunk.t_started + step + 1),
                {
                    "obs": np.asarray(observations[step]).tobytes(),
                    "action": np.asarray(actions[step]).tobytes(),
                    "reward": float(rewards[step]),
                    "next_obs": np.asarray(observations[step + 1]).tobytes(),
                    "terminated": last and chunk.is_terminated,
                    "truncated": last and chunk.is_truncated,
                },
            )


def _write(path: str, before: list[tuple[Place, dict[str, Any]]], after: list[tuple[Place, dict[str, Any]]]) -> None:
    known, came = dict(before), Counter(place for place, _ in after)
    changes: list[dict[str, Any]] = []
    for place, value in after:
        if place not in known:
            changes.append({"step": place[1], "fields": ["event"], "kind": "extra"})
        elif fields := [name for name in value if value[name] != known[place][name]]:
            changes.append({"step": place[1], "fields": fields, "kind": "changed"})
    for place, times in Counter(place for place, _ in before).items():
        kind = "lost" if came[place] < times else "again"
        changes += [{"step": place[1], "fields": ["event"], "kind": kind}] * abs(came[place] - times)
    with open(path, "a") as file:
        file.writelines(json.dumps(change) + "\n" for change in changes)


def read_changes(path: str | os.PathLike[str]) -> Counter[tuple[int, tuple[str, ...], str]]:
    """How many changes of each step, fields and kind a log holds: ``changed``, ``lost``, ``extra`` (nobody sampled it), ``again``."""
    try:
        with open(path) as file:
            changes = [json.loads(line) for line in file]
    except FileNotFoundError:
        changes = []
    return Counter((change["step"], tuple(change["fields"]), change["kind"]) for change in changes)
