"""The processes of an algorithm: asked all at the same time, within one time limit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray

__all__ = ["TIMEOUT", "Deadline", "ask", "learners", "name_of", "remote_runners", "runners", "tell"]

#: Seconds in which processes and nodes have to answer; one that takes longer is left out, and that is said.
TIMEOUT = 120.0

#: Bytes that are moved or compared in a second at the very least: more of them have longer.
_PACE = 1 << 20

#: Seconds that are left to whoever is asked behind one that took all of the time: its answer may be there already.
_LEAST = 5.0


class Deadline:
    """When waiting for Ray ends: one for all that is waited for together, so that what doesn't come is not waited for again and again.

    Args:
        size: Bytes that are moved or compared meanwhile.
    """

    def __init__(self, size: int = 0) -> None:
        self._until = time.monotonic() + TIMEOUT + size / _PACE

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return max(_LEAST, self._until - time.monotonic())


def name_of(runner: int, evaluation: bool) -> str:
    """What an EnvRunner is called."""
    return f"{'evaluation ' if evaluation else ''}EnvRunner {runner}"


def runners(algorithm: Any) -> dict[str, Any]:
    """The EnvRunners for training and for evaluation by their names: actors, and local ones."""
    found: dict[str, Any] = {}
    for evaluation, name in enumerate(("env_runner_group", "eval_env_runner_group")):
        group = getattr(algorithm, name, None)
        if group is not None:
            local = group.local_env_runner
            found |= {} if local is None else {name_of(0, bool(evaluation)): local}
            found |= remote_runners(group, bool(evaluation), group._worker_manager.actor_ids())
    return found


def remote_runners(group: Any, evaluation: bool, indices: Iterable[int]) -> dict[str, Any]:
    """The EnvRunners of a group that have these indices, and are not known to be dead."""
    actors, alive = group._worker_manager.actors(), set(group._worker_manager.healthy_actor_ids())
    return {name_of(index, evaluation): actors[index] for index in indices if index in alive}


def learners(algorithm: Any) -> dict[str, Any]:
    """The processes that make train batches of episodes, by their names: the aggregators where there are any, else the Learners."""
    aggregators, group = getattr(algorithm, "_aggregator_actor_manager", None), algorithm.learner_group
    if aggregators is not None:  # one that came back may not be known to be well yet
        return {f"Learner {index}": actor for index, actor in aggregators.actors().items()}
    if group.is_local:
        return {"Learner 0": group._learner}
    manager = group._worker_manager
    return {f"Learner {index}": manager.actors()[index] for index in manager.healthy_actor_ids()}


def ask(calls: Mapping[str, tuple[Any, Callable[[Any], Any]]], deadline: Deadline) -> tuple[dict[str, Any], dict[str, Any]]:
    """Call functions in processes.

    Args:
        calls: Name of a process -> the process, and the function, which takes what lives in it.
        deadline: When waiting for answers ends.

    Returns:
        What the functions gave; of processes that gave no answer, and are alive for all that is known, the answers to come.
    """
    # Not by RLlib's own foreach_...(), which asks one group after the other, and doesn't say who is missing.
    under_way = {process.apply.remote(function): name for name, (process, function) in calls.items() if _is_remote(process)}
    answers = {name: function(process) for name, (process, function) in calls.items() if not _is_remote(process)}
    ready, late = ray.wait(list(under_way), num_returns=len(under_way), timeout=deadline.left) if under_way else ([], [])
    for reference in ready:
        with contextlib.suppress(ray.exceptions.RayError):  # it died: its ledgers say so
            answers[under_way[reference]] = ray.get(reference)
    return answers, {under_way[reference]: reference for reference in late}


def tell(processes: Iterable[Any], function: Callable[[Any], Any]) -> None:
    """Call a function in processes, without waiting for what it gives."""
    for process in processes:
        if _is_remote(process):
            process.apply.remote(function)
        else:
            function(process)


def _is_remote(process: Any) -> bool:
    return isinstance(process, ray.actor.ActorHandle)
