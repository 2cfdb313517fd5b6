"""The course of one stream: what is suspicious in the order of its events, in rewards and in kept values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .align import mixed
from .bounds import LeafBounds, bounds_of_leaf
from .checks import ACTION_OUTSIDE, CALLS, CHANGED, OBS_NOT_FINITE, OBS_OUTSIDE
from .digest import MISSING_NUMBER
from .format import RESET, STEP, Meta, layouts_of
from .ledger import Stream

__all__ = [
    "AFTER_END",
    "EPISODES",
    "EQUAL_LENGTH",
    "IN_THE_MIDDLE",
    "REWARD",
    "SAID",
    "TOO_LONG",
    "Course",
    "Found",
]

#: Codes of `stepledger.lints.LINTS`.
REWARD, AFTER_END, IN_THE_MIDDLE, TOO_LONG, EQUAL_LENGTH = "SL604", "SL605", "SL606", "SL607", "SL608"

#: Episodes of a stream from which on it says something that all of them have one length.
EPISODES = 20

#: Events of a stream's beginning, and observations of its resets, that are kept to be compared with those of other streams.
_HEAD, _RESETS = 256, 64

Ints = npt.NDArray[np.int64]

#: What came before the steps of an episode that is open: nobody knows, a reset, the end of the one before.
_UNKNOWN, _RESET, _END = range(3)


@dataclass
class Found:
    """Findings of one code in a stream."""

    count: int
    place: tuple[int, int]
    text: str


@dataclass
class Course:
    """What is known of one stream, as far as it has come.

    Attributes:
        events: Number of events since the first of all.
        episode: Of the last one, with `step`.
        opened: What came before the steps of the open episode.
        length: Their number.
        lengths: Of terminated episodes: how many, the shortest, the longest.
        head: Its first events.
        resets: The observations of its first resets.
        from_start: Whether these are from its beginning.
        watched: Whether it says of each event who made it.
        looked: Number of events whose kept values were looked at.
    """

    found: dict[str, Found] = field(default_factory=dict)
    events: int = 0
    episode: int = -1
    step: int = -1
    opened: int = _UNKNOWN
    length: int = 0
    lengths: tuple[int, int, int] = (0, 1 << 62, 0)
    head: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    resets: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    from_start: bool = True
    watched: bool = False
    looked: int = 0

    def note(self, code: str, count: int, place: tuple[int, int], text: str) -> None:
        """Count findings; the first one is kept."""
        if code in self.found:
            self.found[code].count += count
        elif count:
            self.found[code] = Found(count, place, text)

    def take(self, stream: Stream, meta: Meta) -> None:
        """Look at further events."""
        n = len(stream)
        if not n:
            return
        data, kind = stream.data, stream.data["kind"]
        if stream.begin != self.events:
            self.opened, self.length, self.from_start = _UNKNOWN, 0, False
            if stream.last is not None:
                self.episode, self.step = stream.last
        elif not self.events and kind[0] != RESET:  # recording began within an episode
            self.episode, self.step = 0, 0
        flags = data["terminated"] | data["truncated"]
        resets, ends = np.flatnonzero(kind == RESET), np.flatnonzero(flags)
        ends = ends[kind[ends] == STEP]  # a reset ends nothing, whatever flags came with it
        view = _View(self.episode, self.step, kind, resets)
        self._after_ends(view, ends)
        self._episodes(view, data, ends, meta.get("time_limit", 0), meta.get("group") == "evaluation")
        self._rewards(view, data["h_rew"].view(f"<f{data['h_rew'].itemsize}"))
        if "bounds" in meta:
            self._values(view, stream, meta)
        self._begin(data, resets)
        self.events = stream.begin + n
        self.episode, self.step = view.place(n - 1)

    def _after_ends(self, view: _View, ends: Ints) -> None:
        kind = view.kind
        after = ends[ends < len(kind) - 1] + 1
        after = after[kind[after] == STEP]
        if self.opened == _END and not self.length and kind[0] == STEP:
            after = np.concatenate([[0], after])
        self._at(AFTER_END, view, after, "it was stepped after the end of its episode")

    def _episodes(self, view: _View, data: Any, ends: Ints, limit: int, evaluates: bool) -> None:
        """The lengths of episodes. All events between two bounds are steps; an end is the last of its episode, a reset comes behind it."""
        bounds = np.sort(np.concatenate([view.resets, ends]), kind="stable")
        is_reset = view.kind[bounds] == RESET
        before = np.concatenate([[-1 - self.length], bounds])
        lengths = np.diff(before) - is_reset
        opened = np.concatenate([[self.opened], np.where(is_reset, _RESET, _END)])
        self.opened, opened = int(opened[-1]), opened[:-1]
        cut = bounds[is_reset & (lengths > 0) & (opened != _END)]
        self.watched = "by" in data
        if self.watched:  # calls that are not the trainer's have notes of their own, and a new learn() resets
            cut = cut[data["by"][cut] == 0]
        if len(cut) and not evaluates:  # a number of episodes is sampled then, and the reset that cuts off the others is meant
            place = view.place(int(cut[0]) - 1) if cut[0] else (self.episode, self.step)
            self.note(IN_THE_MIDDLE, len(cut), place, "a reset in the middle of the episode, behind this step")
        if limit:
            long = np.flatnonzero((lengths > limit) & (opened != _END))
            if len(long):
                at, most = int(bounds[long[0]]) - int(is_reset[long[0]]), int(lengths[long].max())
                self.note(TOO_LONG, len(long), view.place(max(at, 0)), _too_long(most, limit))
        terminated = lengths[(opened == _RESET) & ~is_reset & data["terminated"][bounds]]
        if len(terminated):
            count, least, most = self.lengths
            self.lengths = count + len(terminated), min(least, int(terminated.min())), max(most, int(terminated.max()))
        self.length = len(view.kind) - 1 - int(before[-1])

    def _rewards(self, view: _View, rewards: npt.NDArray[Any]) -> None:
        finite = np.isfinite(rewards)
        if not finite.all():
            at = np.flatnonzero(~finite)
            self._at(REWARD, view, at, f"the reward is {rewards[at[0]]}")

    def _values(self, view: _View, stream: Stream, meta: Meta) -> None:
        """Kept values: of all events, or of those that have some and were not looked at while recording."""
        events, first = np.arange(len(stream)), 0
        if stream.kept is not None:
            first = int(np.searchsorted(stream.kept, CALLS - stream.begin))
            events = stream.kept[first:]
        self.looked += len(events)
        step = view.kind == STEP
        for which, codes, known in (
            ("obs", (OBS_OUTSIDE, OBS_NOT_FINITE), stream.data["h_obs"] != MISSING_NUMBER),
            ("act", (ACTION_OUTSIDE, ACTION_OUTSIDE), step),
        ):
            for (name, bounds), path in zip(_bounded(meta, which), meta["leaves"][which]):
                if bounds is None:
                    continue
                rows = stream.values[name][first:]
                with np.errstate(all="ignore"):
                    found = bounds.look_at_rows(rows)
                for number, (code, bad) in enumerate(zip(codes, found or ())):
                    at = np.flatnonzero(bad & known[events])
                    if len(at):
                        where = "".join(f"{key!r}: " for key in path)
                        self._at(code, view, events[at], f"{SAID[code]} ({where}{bounds.look(rows[at[0]])[number]})")

    def _begin(self, data: Any, resets: Ints) -> None:
        """What its beginning is, to be compared with that of others."""
        if not self.from_start:
            return
        if (room := _HEAD - len(self.head)) > 0:
            columns = [data[name][:room] for name in ("kind", "h_act", "h_obs", "h_rew", "terminated", "truncated")]
            self.head = np.concatenate([self.head, mixed(*columns)])
        if (room := _RESETS - len(self.resets)) > 0:
            self.resets = np.concatenate([self.resets, data["h_obs"][resets[:room]]])

    def _at(self, code: str, view: _View, at: Ints, text: str) -> None:
        if len(at):
            self.note(code, len(at), view.place(int(at[0])), text)

    def findings(self, limit: int) -> dict[str, Found]:
        """All of this stream alone."""
        found = dict(self.found)
        if limit and self.length > limit and self.opened != _END:
            one = found.get(TOO_LONG, Found(0, (self.episode, self.step), _too_long(self.length, limit)))
            found[TOO_LONG] = Found(one.count + 1, one.place, one.text)
        count, least, most = self.lengths
        if count >= EPISODES and 1 < least == most:
            of_limit = ", as many as the time limit" if least == limit else ""
            found[EQUAL_LENGTH] = Found(1, (-1, -1), f"all {count:,} terminated episodes have {least:,} steps{of_limit}")
        return found


def _too_long(length: int, limit: int) -> str:
    return f"an episode of {length:,} steps, and the time limit is {limit:,}"


SAID = {
    ACTION_OUTSIDE: "the action is outside of its space",
    OBS_OUTSIDE: "the observation is outside of its space",
    OBS_NOT_FINITE: "the observation is not finite",
    CHANGED: "the environment changed what it had handed out",
}


class _View:
    """Events that have come, and where they are in their stream; numbers as of `stepledger.format.EpisodeCounter`."""

    def __init__(self, episode: int, step: int, kind: npt.NDArray[np.uint8], resets: Ints) -> None:
        self.kind, self.resets = kind, resets
        self._episode, self._step = episode, step

    def place(self, at: int) -> tuple[int, int]:
        """Episode and step of an event."""
        before = int(np.searchsorted(self.resets, at, side="right"))
        if before:
            return self._episode + before, at - int(self.resets[before - 1])
        # Recording began within an episode, which counts as 0, and its first step as 1.
        return max(self._episode, 0), max(self._step, 0) + 1 + at


def _bounded(meta: Meta, which: str) -> Iterator[tuple[str, LeafBounds | None]]:
    """Name and bounds of each column of kept values; `None` where they can't be looked at."""
    written = iter(meta["bounds"][which])
    for name, layout in layouts_of(meta):
        if name.startswith(f"values_{which}_"):
            one, bounds = next(written), None
            if one is not None and layout is not None and layout[0].kind in "fiub":
                with contextlib.suppress(ValueError, OverflowError):  # whoever wrote the file may have written anything
                    bounds = bounds_of_leaf(one, *layout)
            yield name, bounds
