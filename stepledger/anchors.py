"""Aligning by what the trainer did, where hardly an event is the same on both sides.

An alignment looks for equal events, so that a fault at every event leaves it nothing but to compare them one by one. Where one side has
further events in between, that is not how they belong together; but kind and action of an event may still tell, or, where few actions
take turns, how many steps were made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .align import RESYNC, Edit, align, edit_end
from .format import STEP
from .ranges import Range, end_of

__all__ = ["refined"]

#: Events of a stretch that are looked at to see whether it is worth it, and the share of them that must be on both sides.
_PROBE, _SHARE = 4096, 0.3

Keys = npt.NDArray[np.uint64]
Kinds = npt.NDArray[np.uint8]
Columns = Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]


def refined(
    edits: list[Edit | Range], keys: tuple[Keys, Keys], like: tuple[Keys, Keys], kinds: tuple[Kinds, Kinds], columns: Columns
) -> list[Edit | Range]:
    """The edits, where those of a stretch without an agreement are replaced by better ones, if there are any.

    Args:
        edits: In order.
        keys: A key for each event of both sides.
        like: Further keys, of which equal ones say that two events are likely one and the same, changed.
        kinds: Of the events of both sides.
        columns: For each field, both sides.
    """
    found: list[Edit | Range] = []
    for stretch in _stretches(edits):
        better = _better(stretch, keys, like, kinds, columns)
        found += stretch if better is None else better
    return found


def _stretches(edits: list[Edit | Range]) -> Iterator[list[Edit | Range]]:
    """Edits that follow each other with fewer than a few equal events between them; a range stands alone."""
    stretch: list[Edit | Range] = []
    for edit in edits:
        if stretch:
            last = stretch[-1]
            if edit.first - end_of(last)[0] >= RESYNC or isinstance(edit, Range) or isinstance(last, Range):
                yield stretch
                stretch = []
        stretch.append(edit)
    if stretch:
        yield stretch


def _better(
    stretch: list[Edit | Range], keys: tuple[Keys, Keys], like: tuple[Keys, Keys], kinds: tuple[Kinds, Kinds], columns: Columns
) -> list[Edit] | None:
    (i, j), (stop_i, stop_j) = (stretch[0].first, stretch[0].second), end_of(stretch[-1])
    if isinstance(stretch[0], Range) or min(stop_i - i, stop_j - j) < 2:
        return None
    a, b = like[0][i:stop_i], like[1][j:stop_j]
    probe = min(len(a), len(b), _PROBE)
    ways = []
    if any(edit.kind != "changed" for edit in stretch):
        ways.append((_one_by_one(len(a)), _one_by_one(len(b))))
    if not np.array_equal(kinds[0][i:stop_i], kinds[1][j:stop_j]):
        ways.append((_in_calls(kinds[0][i:stop_i]), _in_calls(kinds[1][j:stop_j])))
    # Not where it is the same calls one by one, or nothing in common.
    if not np.array_equal(a[:probe], b[:probe]) and np.isin(a[:probe], b[:probe]).mean() >= _SHARE:
        ways.append((a, b))
    if not ways:
        return None
    found = [list(_with_changed(align(*way), keys, i, j, stop_i, stop_j)) for way in ways]
    best = min(found, key=lambda edits: _cost(edits, columns))
    return best if _cost(best, columns) < _cost(stretch, columns) else None


def _one_by_one(events: int) -> Keys:
    return np.arange(events, dtype=np.uint64)


def _in_calls(kinds: Kinds) -> Keys:
    """A key for each event: in which step it was made, and which of the events of that it is: the step, or a reset behind it."""
    steps = np.cumsum(kinds == STEP)
    begins = np.searchsorted(steps, steps)
    return (steps.astype(np.uint64) << np.uint64(32)) | (np.arange(len(steps)) - begins).astype(np.uint64)


def _cost(edits: Sequence[Edit | Range], columns: Columns) -> int:
    """In how many fields the edits say that events differ; an event that only one side has counts as three."""
    cost = 0
    for kind, i, j, length, *_ in edits:
        if kind == "changed":
            cost += sum(int((first[i : i + length] != second[j : j + length]).sum()) for first, second in columns)
        else:
            cost += 3 * length
    return cost


def _with_changed(alike: Iterator[Edit], keys: tuple[Keys, Keys], i: int, j: int, stop_i: int, stop_j: int) -> Iterator[Edit]:
    """The edits of what is alike, and those of alike events that are not equal."""
    for edit in (*(one._replace(first=one.first + i, second=one.second + j) for one in alike), Edit("changed", stop_i, stop_j, 0)):
        different = np.flatnonzero(keys[0][i : edit.first] != keys[1][j : edit.second])
        for run in np.split(different, np.flatnonzero(np.diff(different) != 1) + 1):
            if len(run):
                yield Edit("changed", i + int(run[0]), j + int(run[0]), len(run))
        if edit.length:
            yield edit
        i, j = edit_end(edit)
