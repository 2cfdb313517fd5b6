"""Comparing while training goes on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stepledger import Comparison
from stepledger.errors import LedgerError
from stepledger.follow import Follower, Watcher
from stepledger.ledger import Ledger
from stepledger.recording import warn
from stepledger.report.text import line

from .processes import Deadline
from .run import Run

__all__ = ["Live", "Watch", "metrics"]

OnDifference = Literal["log", "warn", "stop"]
Retain = Literal["all", "differences"]


@dataclass(frozen=True)
class Watch:
    """When and how a run is compared while it trains; see `stepledger_ray.LedgerCallback`.

    Raises:
        LedgerError: A setting is unknown, or there is nothing that it could have an effect on.
    """

    compare_every: int | None = None
    on_difference: OnDifference = "log"
    retain: Retain = "all"

    def __post_init__(self) -> None:
        every = self.compare_every
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise LedgerError(f"compare_every={every!r} is no number of iterations: use 1, 2, ...; None compares at the end only.")
        if self.on_difference not in ("log", "warn", "stop"):
            raise LedgerError(f"on_difference={self.on_difference!r} is unknown: use 'log', 'warn' or 'stop'.")
        if self.retain not in ("all", "differences"):
            raise LedgerError(f"retain={self.retain!r} is unknown: use 'all' or 'differences'.")
        if every is None and (self.on_difference != "log" or self.retain != "all"):
            raise LedgerError("on_difference and retain are about comparing while training goes on: pass compare_every= too.")


class Live:
    """The comparison of a run that goes on: in a process of its own, which follows the ledgers.

    Args:
        run: The run.
        watch: What to do when there is a difference.
    """

    def __init__(self, run: Run, watch: Watch) -> None:
        self._run = run
        self._watch = watch
        self._here = ray.get_runtime_context().get_node_id()
        self._comparing = _actor(Watcher, self._here, soft=True).remote(Path(run.directory), run.id)
        self._followers: dict[str, Any] = {}
        self._told = False

    def compare(self, nodes: Iterable[str], end: bool = False) -> tuple[Comparison, dict[str, list[int]]]:
        """Compare what has been written since the last time.

        Args:
            nodes: Ids of those on which something is recorded.
            end: Nothing more will come.

        Returns:
            What was found so far; for each ledger, how many events of each of its streams may be dropped.

        Raises:
            LedgerError: The ledgers can't be compared.
            RayError: The comparing process, or a node, is gone.
        """
        for node in nodes:
            if node != self._here and node not in self._followers:
                self._followers[node] = _actor(_Following, node, soft=False).remote(self._run)
        news = [follower.news.remote() for follower in self._followers.values()]
        found, drop, error = ray.get(self._comparing.compare.remote(end, *news), timeout=Deadline().left)
        if error:
            raise LedgerError(error)
        return found, drop if self._watch.retain == "differences" else {}

    def differing(self) -> dict[str, list[int]]:
        """For each ledger, which of its streams had a difference in the last comparison that the one before did not have.

        Raises:
            RayError: The comparing process is gone.
        """
        found: dict[str, list[int]] = ray.get(self._comparing.differing.remote(), timeout=Deadline().left)
        return found

    def close(self) -> None:
        """End the comparing processes: they would be there as long as the driver is."""
        for actor in (self._comparing, *self._followers.values()):
            ray.kill(actor)

    def tell(self, comparison: Comparison) -> bool:
        """Say what the first difference is, once; whether the run is to be stopped for it."""
        if not comparison.differences:
            return False
        if not self._told:
            self._told = True
            hop = comparison.differences[0].hop
            text = f"{hop}: {line(comparison.differences[0])}"
            if self._watch.on_difference == "log":
                print(f"stepledger: {text}", flush=True)
            else:
                warn(text)
        return self._watch.on_difference == "stop"


def _actor(of: type, node: str, soft: bool) -> Any:
    return ray.remote(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=soft))(of)


class _Following:
    """An actor on a node that does not share the driver's file system."""

    def __init__(self, run: Run) -> None:
        self._follower = None if run.is_here() else Follower(Path(run.directory), run.id)

    def news(self) -> list[Ledger]:
        return [] if self._follower is None else self._follower.news()


def metrics(comparison: Comparison) -> dict[str, Any]:
    """What goes into the algorithm's result dict: the numbers of all hops together, and of each."""
    hops = {
        hop.name.replace(": ", "_").replace(" -> ", "_to_"): {"events_compared": hop.events, "differences": hop.differences}
        for hop in comparison.hops
    }
    differences = sum(hop.differences for hop in comparison.hops)
    return {"events_compared": comparison.events, "differences": differences, **hops}
