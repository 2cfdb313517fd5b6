"""Where in a run differences are: each environment by its steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ..format import StreamKey
from ..pairs import group_of, stream_name
from ..result import Comparison, Difference
from ..strays import LEARN
from .context import Recorded

__all__ = ["WIDTH", "Line", "Timeline", "timeline"]

#: Of a line, in its own units.
WIDTH = 1000

#: Lines that are shown; those without a difference are left out first.
_LINES = 40


@dataclass(frozen=True)
class Line:
    """One environment.

    Attributes:
        name: ``"env 3"``.
        events: Number of its events.
        extent: Where it ends, of `WIDTH`.
        differences: Where differences are, of `WIDTH`; several at one place are one.
        runs: Where differences of several events in a row begin and end, likewise.
        restarts: Where a new process went on with it, after a failure or from a checkpoint, or a new ``learn()`` of Stable-Baselines3.
        checkpoints: Where a checkpoint was saved.
        count: Number of its differences, at all hops.
        elsewhere: It has none because what differs is told at another environment's.
    """

    name: str
    events: int
    extent: int
    differences: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    restarts: tuple[int, ...]
    checkpoints: tuple[int, ...]
    count: int
    elsewhere: bool = False


@dataclass(frozen=True)
class Timeline:
    """The environments of one group of ledgers.

    Attributes:
        group: The group; empty for those that sample for training.
        lines: One for each environment.
        events: What the whole width stands for.
        left_out: Number of environments that are not shown.
    """

    group: str
    lines: tuple[Line, ...]
    events: int
    left_out: int


def timeline(recorded: Recorded, comparison: Comparison, group: str = "") -> Timeline | None:
    """The environments of a group, by their steps; `None` where there are none.

    Args:
        recorded: The ledgers.
        comparison: What was found in them.
        group: The group.
    """
    streams: dict[tuple[int, int, str], list[tuple[StreamKey, int]]] = {}
    for key in recorded.keys(group):
        taps = recorded.taps(key, group)
        length = max(tap.stream.begin + len(tap.stream) for tap in taps)
        streams.setdefault((key.runner, key.env, key.agent), []).append((key, length))
    if not streams:
        return None
    counts: Counter[tuple[int, int, str]] = Counter()
    for hop in comparison.hops:
        if group_of(hop.name) == group:
            counts.update({(one.runner, one.env, one.agent): one.differences for one in hop.different_streams})
    places: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    for difference in comparison.differences:
        which = (difference.runner, difference.env, difference.agent)
        if which in streams and group_of(difference.hop) == group:
            before = sum(length for key, length in streams[which] if key.incarnation < difference.incarnation)
            begin = before + _event(recorded, difference, group)
            places.setdefault(which, []).append((begin, begin + _in_a_row(difference) - 1))
    longest = max(1, *(sum(length for _, length in some) for some in streams.values()))
    order = sorted(streams, key=lambda which: (which not in places and which not in counts, which))
    shown = sorted(order[:_LINES])
    lines = []
    for which in shown:
        lengths = [length for _, length in streams[which]]
        total = sum(lengths)
        here = [(_scaled(begin, longest), _scaled(end, longest)) for begin, end in places.get(which, [])]
        runs = {(begin, end) for begin, end in here if end > begin}
        marks = {begin for begin, _ in here}
        begins = [0, *np.cumsum(lengths).tolist()]
        learns = [begin + event for begin, (key, _) in zip(begins, streams[which]) for event in _learns(recorded, key, group)]
        restarts = {_scaled(place, longest) for place in (*begins[1:-1], *learns)}
        saved = {_scaled(begin + event, longest) for begin, one in zip(begins, streams[which]) for event in _saved(recorded, *one, group)}
        ordered = [tuple(sorted(some)) for some in (marks, restarts, saved)]
        name, extent = stream_name(StreamKey(*which)), _scaled(total, longest)
        lines.append(
            Line(
                name,
                total,
                extent,
                ordered[0],
                tuple(sorted(runs)),
                ordered[1],
                ordered[2],
                counts[which],
                which in counts and not counts[which],
            )
        )
    return Timeline(group, tuple(lines), longest, len(order) - len(shown))


def _learns(recorded: Recorded, key: StreamKey, group: str) -> list[int]:
    """The events of a stream at which ``learn()`` was called again, where its ledger says so."""
    streams = [tap.stream for tap in recorded.taps(key, group) if "by" in tap.stream.data]
    return [stream.begin + int(event) for stream in streams for event in np.flatnonzero(stream.data["by"] == LEARN) if stream.begin + event]


def _saved(recorded: Recorded, key: StreamKey, length: int, group: str) -> set[int]:
    """The numbers of events of a stream at which checkpoints were saved, as far as a ledger of it says so."""
    found: set[int] = set()
    for tap in recorded.taps(key, group):
        at = list(tap.ledger.streams).index(key)
        found |= {row[at] for row in tap.ledger.meta.get("checkpoints", []) if row[at] <= length}
    return found


def _in_a_row(difference: Difference) -> int:
    """Over how many events, one behind another, a difference goes; those of resets of all environments lie anywhere."""
    return 1 if any(one.code == "SL309" for one in difference.explanations[:1]) else max(1, difference.events)


def _scaled(place: int, longest: int) -> int:
    return min(WIDTH, round(WIDTH * place / longest))


def _event(recorded: Recorded, difference: Difference, group: str) -> int:
    """The event of a difference in its stream, since its beginning."""
    if max(difference.position) >= 0:
        return next(position for position in difference.position if position >= 0)
    key = StreamKey(difference.runner, difference.env, difference.agent, difference.incarnation)
    for tap in recorded.taps(key, group):
        columns = tap.stream.columns
        at = np.flatnonzero((columns["episode"] == difference.episode) & (columns["step"] == difference.step))
        if len(at):
            return tap.stream.begin + int(at[0])
    return 0
