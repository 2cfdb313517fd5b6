"""Resets that come to all environments of a vector env when one of them is done: one difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .format import RESET, StreamKey
from .tracks import PAST, Track

__all__ = ["RESETS_OF_ALL", "Reset", "ResetsOfAll"]

#: The code of what explains them.
RESETS_OF_ALL = "SL309"


class Reset(NamedTuple):
    """A reset of which the trainer was not told.

    Attributes:
        call: The call of the vector env after it, or that it was hidden in.
        kind: ``"lost"`` or ``"changed"``.
        place: Episode and step.
        position: Index on both sides since their beginnings.
        kept: Where the difference is kept, or -1.
    """

    call: int
    kind: str
    place: tuple[int, int]
    position: tuple[int, int]
    kept: int


class ResetsOfAll:
    """Tells the resets of one vector env that came to all environments when one was done from those that came at other times."""

    def __init__(self) -> None:
        self._lost = self._of_all = self._calls = self._may = 0
        self._since: int | None = None
        self._found: list[tuple[Reset, StreamKey]] = []
        self._waiting: list[tuple[Reset, StreamKey]] = []

    def take(self, lost: Sequence[tuple[Reset, StreamKey]], seconds: Mapping[StreamKey, Track]) -> list[tuple[Reset, StreamKey]]:
        """Take further resets that the trainer was not told of.

        Args:
            lost: Of all environments.
            seconds: The trainer's side of each.

        Returns:
            Those, also of earlier ones, that are known now to have come to all; none while most came at other times, or it happened once,
            or most often did not when one was done.
        """
        calls: dict[int, list[tuple[Reset, StreamKey]]] = {}
        for reset, key in (*self._waiting, *lost):
            calls.setdefault(reset.call, []).append((reset, key))
        of_all = {call for call, some in calls.items() if _came_to_all(call, {key for _, key in some}, seconds)}
        # What is not compared yet in one environment comes later, as far as events are remembered.
        newest = max((track.call(len(track) - 1) for track in seconds.values()), default=0)
        self._waiting = [one for call, some in calls.items() if call not in of_all and call > newest - PAST for one in some]
        found = [one for call in of_all for one in calls[call]]
        self._lost, self._of_all, self._calls = self._lost + len(lost), self._of_all + len(found), self._calls + len(of_all)
        self._found += found
        if self._since is None:
            self._since = min(of_all, default=None)
        if self._since is not None:
            self._may += _times_that_some_were_reset(self._since, seconds)
        if self._calls < 2 or self._of_all <= 0.9 * self._lost or self._calls <= 0.5 * self._may:
            return []
        found, self._found = self._found, []
        return found


def _times_that_some_were_reset(since: int, seconds: Mapping[StreamKey, Track]) -> int:
    """In how many calls the trainer was told of a reset in some environments, and not in all: then one was done."""
    calls = []
    for track in seconds.values():
        made = track.calls(0, len(track))[track.slice("kind", 0, len(track)) == RESET]
        calls.append(np.unique(made[made >= since - 1]))
    times = np.unique(np.concatenate(calls), return_counts=True)[1] if calls else np.zeros(0, np.int64)
    return int((times < len(seconds)).sum())


def _came_to_all(call: int, keys: set[StreamKey], seconds: Mapping[StreamKey, Track]) -> bool:
    return len(keys) < len(seconds) and all(key in keys or _was_reset(track, call) for key, track in seconds.items())


def _was_reset(track: Track, call: int) -> bool:
    # Where a call is a step, a reset belongs to the step before it.
    return any(track.at("kind", i) == RESET for which in (call - 1, call) for i in track.events_of(which))
