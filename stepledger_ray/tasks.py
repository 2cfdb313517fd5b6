"""The comparison of a run in Ray tasks, so that the driver's memory doesn't grow with the run."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stepledger import Comparison, compare
from stepledger.directory import find
from stepledger.remote import located
from stepledger.result import Progress
from stepledger.split import Part, PartResult, compare_part, join, split

from .processes import Deadline

__all__ = ["compare_run", "with_unknown"]

#: Bytes of ledgers up to which a task would take longer to start than the driver to compare.
_SMALL = 1 << 25


def compare_run(place: str, progress: Progress | None = None) -> Comparison:
    """As `stepledger.compare` of a run directory: in tasks on this node, one for each of its processors at a time, where it is large.

    Args:
        place: The run directory, or the URI that it was stored at.
        progress: Called with how much is done and how much there is.

    Raises:
        LedgerError: It can't be compared.
    """
    directory = located(place)
    if not isinstance(directory, Path) or not ray.is_initialized():
        return compare(place, progress=progress)
    size = sum(path.stat().st_size for name in find(directory) for path in (name, name.with_suffix(".journal")) if path.exists())
    if size < _SMALL:
        return compare(directory, progress=progress)
    processors = os.cpu_count() or 1
    parts, empty, left_out = split(directory, processors)
    found: dict[Part, PartResult] = {}
    for part, result in _in_tasks(parts, processors):
        found[part] = result or compare_part(part)
        if progress is not None:
            progress(sum(one.size for one in found), sum(one.size for one in parts))
    return join([found[part] for part in parts], empty, left_out)


def with_unknown(comparison: Comparison, sentences: Iterable[str]) -> Comparison:
    """The comparison, which says besides what is unknown of its run."""
    first, *others = comparison.hops
    return replace(comparison, hops=(replace(first, unknown=(*first.unknown, *sentences)), *others))


def _in_tasks(parts: Sequence[Part], processors: int) -> Iterator[tuple[Part, PartResult | None]]:
    """Compare parts in tasks on this node, so many at a time; `None` for one whose task was killed, or has not come in time."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # No processor is asked for: the algorithm that is about to stop may still hold all of them. The function is one of the core, so that a
    # task does not wait until RLlib is imported.
    task = ray.remote(num_cpus=0, scheduling_strategy=here)(compare_part)
    waiting, deadline = deque(parts), Deadline(sum(part.size for part in parts))
    under_way: dict[Any, Part] = {}
    while waiting or under_way:
        while waiting and len(under_way) < processors:
            part = waiting.popleft()
            under_way[task.remote(part)] = part
        ready, late = ray.wait(list(under_way), timeout=deadline.left)
        for reference in ready:
            part = under_way.pop(reference)
            try:
                yield part, ray.get(reference)
            except ray.exceptions.RayError:
                yield part, None
        if not ready:
            for reference in late:
                ray.cancel(reference, force=True)
            yield from ((part, None) for part in (*under_way.values(), *waiting))
            return
