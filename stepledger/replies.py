"""Whose replies a stream has: whether they are those of some events before, or another environment's.

Which of an event's fields are another one's is not known at first: all of its reply, the observation and the reward while its end flags
are right, or one of these two alone. Each is tried, and those that explain the most stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .align import RESYNC
from .chance import AROUND, collisions
from .digest import MISSING_NUMBER
from .format import RESET, STEP, StreamKey
from .strays import UNSEEN
from .tracks import Neighbours, Track

__all__ = ["BOTH", "GAP", "OBS", "REWARD", "WHOLE", "Late", "Run", "Sides", "Source"]

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
#: The fields that are another event's.
Late = tuple[str, ...]

_FLAGS = ("terminated", "truncated")
WHOLE, BOTH, OBS, REWARD = ("obs", "reward", *_FLAGS), ("obs", "reward"), ("obs",), ("reward",)

#: How many observations and rewards must be another event's, one after the other, to begin with.
_EVIDENCE = 6
#: Within so many events.
_WITHIN = 64
#: How improbable it must be that they are so by chance, as a natural logarithm.
_CHANCE = 20
#: Events in a row which are their own as well as another's, after which it is not known that it lasts.
GAP = 64
#: Events before an event among which the step is that is so many before it, over resets in between.
_BACK = 16


class Sides(NamedTuple):
    """A stream's two sides, and the first sides of the other streams of its vector env.

    Attributes:
        first: What was given.
        second: What was received.
        fields: Those that are compared.
        others: By key.
        neighbours: Finds those of them that have a value in a call.
        end: Whether nothing more will come.
    """

    first: Track
    second: Track
    fields: Sequence[str]
    others: Sequence[tuple[StreamKey, Track]]
    neighbours: Neighbours
    end: bool


class Run(NamedTuple):
    """How far a source explains what was received.

    Attributes:
        length: Up to the last event that is not its own.
        matched: Likewise, with those behind it that are their own as well as the source's.
        late: Which fields may be another event's.
    """

    length: int
    matched: int
    late: tuple[Late, ...]


class _Seen(NamedTuple):
    """Some events in a row: where a source has what was received, for each choice of fields; and where they are not their own."""

    agree: dict[Late, Bools]
    differ: Bools
    obs: Bools
    reward: Bools


class Source:
    """Events of which a stream's later replies may be.

    Args:
        sides: Of the stream.
        i: Index of the first event on the first side.
        j: Likewise on the second.
        shift: By how many events, or steps, the replies are late; 0 where they are another environment's.
        other: What that gave; or what this one did, where its calls are late, and not its events.
        at: Index of the other's event from where on its events are taken one after the other, as its episodes begin and end; else they are
            those of the same calls, and its ends are not taken with them.
        late: Choices of fields; all that there are.
        apart: What a call's number on the first side is more than on the second; the first events are of one call.
    """

    def __init__(
        self,
        sides: Sides,
        i: int,
        j: int,
        shift: int = 0,
        other: Track | None = None,
        at: int | None = None,
        late: Sequence[Late] | None = None,
        apart: int | None = None,
    ) -> None:
        self._sides, self._i, self._j, self._shift, self.other, self.at = sides, i, j, shift, other, at
        first, second = sides.first, sides.second
        choices = (WHOLE, BOTH, OBS, REWARD) if late is None else late
        self._in_sequence = at is not None
        # Where the ends are another's, its events are taken one after the other.
        self.apart = 0
        self.late: tuple[Late, ...] = tuple(one for one in choices if other is None or (one == WHOLE) == self._in_sequence)
        self.limit = max(0, min(len(first) - i, len(second) - j))
        # Events of which all is known that the source gave: the reset behind a step may come later.
        self.certain = self.limit
        if other is not None and at is not None:
            self.apart = first.call(i) - second.call(j) if apart is None else apart
            # Not beyond the calls of which the first side knows its own replies.
            known = other.events_of(first.call(len(first) - 1) - shift)
            self.limit = max(0, min(len(second) - j, (known.stop if len(known) else len(other)) - at)) if len(first) > i else 0
            last = j + self.limit - 1
            cut = second.at("kind", last + 1) == RESET if last + 1 < len(second) else not sides.end
            if cut and not first.by_event and _ended(second, last):
                self.limit = max(0, self.limit - 1)  # with the reset behind it, which is of its call
            self.certain = self.limit
        elif other is not None and self.limit:
            calls, newest = first.calls(i, i + self.limit), other.call(len(other) - 1) if len(other) else -1
            self.limit = int(np.searchsorted(calls, newest, "right"))
            self.certain = (
                int(np.searchsorted(calls, newest, "left")) if _ended(other, len(other) - 1) and not first.by_event else self.limit
            )

    def begins(self) -> bool:
        """Whether there is enough to say that replies are the source's from here on."""
        stop = min(_WITHIN, self.limit)
        if not stop or not self.late:
            return False
        seen = self._seen(0, stop)
        if not seen.differ[0]:
            return False
        for one in self.late:
            matched = _until_false(seen.agree[one])
            at = np.flatnonzero(seen.differ[:matched])
            far = np.flatnonzero(np.diff(at) > RESYNC)  # behind so many equal ones both are taken to agree
            at = at[: int(far[0]) + 1 if len(far) else len(at)]
            number = int(seen.obs[at].sum()), int(seen.reward[at].sum())
            if sum(number) < _EVIDENCE:
                # Until the very end there may be no more of them.
                if matched == stop == self.limit and number == (len(at), len(at)) and len(at) > 1:
                    return True
            elif len(at) >= self._least([2 * some >= len(at) for some in number]):
                return True
        return False

    def is_sure(self) -> bool:
        """Whether it was enough even if nothing more comes."""
        seen = self._seen(0, min(_WITHIN, self.limit))
        found = seen.obs.astype(np.int64) + seen.reward
        return any(int(found[: _until_false(seen.agree[one])].sum()) >= _EVIDENCE for one in self.late)

    def _least(self, differ: Sequence[bool]) -> int:
        """How many events it takes where few values take turns, of which any is another's by chance.

        Args:
            differ: Whether their observations do, and their rewards.
        """
        shares = [self._by_chance(name) for name, which in zip(("obs", "reward"), differ) if which]
        chance = math.prod(shares) if shares else 0.0
        if chance == 1:
            return _WITHIN + 1
        return math.ceil(_CHANCE / -math.log(chance)) if chance else 0

    def _by_chance(self, name: str) -> float:
        """How likely it is that a value that was received was given at some other event too."""
        (first, second), i, j = self._sides[:2], self._i, self._j
        given, received = first.slice("kind", i - AROUND, i + AROUND), second.slice("kind", j, j + AROUND)
        own = collisions(first.slice(name, i - AROUND, i + AROUND)[given == STEP])
        # Where one value is given all along, another is of another environment. Where one is received all along, such as zero, that it was
        # given at some place too says nothing.
        return 0.0 if own == 1 else max(own, collisions(second.slice(name, j, j + AROUND)[received == STEP]))

    def run(self, since: int = 0) -> Run:
        """How far it goes.

        Args:
            since: How many events before were their own as well.
        """
        start, chunk, last, matched = 0, _WITHIN, -1 - since, 0
        alive, late = self.late, self.late
        while start < self.limit and alive:
            stop = min(start + chunk, self.limit)
            seen = self._seen(start, stop)
            ends = {one: start + _until_false(seen.agree[one]) for one in alive}
            matched = max(ends.values())
            at = np.flatnonzero(seen.differ[: matched - start]) + start
            far = np.flatnonzero(np.diff(at, prepend=last) > GAP)
            at = at[: int(far[0]) if len(far) else len(at)]
            if len(at):
                last = int(at[-1])
                late = tuple(one for one in alive if ends[one] > last)
            if matched - last > GAP + 1:
                matched = last + GAP + 1
            if matched < stop:
                break
            alive = tuple(one for one in alive if ends[one] == stop)
            start, chunk = stop, min(4 * chunk, 1 << 20)
        return Run(max(0, last + 1), max(0, matched), late)

    def _seen(self, start: int, stop: int) -> _Seen:
        sides = self._sides
        first, second = sides.first, sides.second
        there = {name: second.slice(name, self._j + start, self._j + stop) for name in ("kind", *WHOLE)}
        own, known = self._own(start, stop, there["kind"])
        here = {name: _taken(first, name, own, known) for name in ("kind", *WHOLE)}
        sources = self._sources(start, stop, own)
        step, was_step = there["kind"] == STEP, (here["kind"] == STEP) & known
        same = {name: known & (there[name] == here[name]) for name in ("kind", *WHOLE)}
        same["obs"] |= there["obs"] == UNSEEN
        same["reward"] |= ~step
        flags = [name for name in _FLAGS if name in sides.fields]
        same_flags: Bools = np.logical_and.reduce([known, *(same[name] for name in flags)])
        # A reset may be answered with its own observation, and the first step behind it may too: a queue that is emptied.
        as_own = same["kind"] & ~step
        before = np.maximum(own - 1, first.begin)
        behind_reset = same["kind"] & step & (_taken(first, "kind", before, known) == RESET)
        ended = step & (there["terminated"] | there["truncated"]).astype(bool)
        apart = ended & (same["obs"] | (there["obs"] == MISSING_NUMBER)) & (not first.by_event)  # final observations come in infos

        def of_source(name: str) -> Bools:
            found: Bools = np.zeros(len(step), bool)
            for track, at, there_is in sources:
                found |= there_is & (_taken(track, name, at, there_is) == there[name])
                if found.all():
                    break
            return found

        obs = of_source("obs") | (same["obs"] & (as_own | behind_reset)) | apart | (there["obs"] == UNSEEN)
        reward = ~step | of_source("reward") | (behind_reset & same["reward"])
        right = same["kind"] & same_flags
        if "action" in sides.fields:
            sent = second.slice("action", self._j + start, self._j + stop) == _taken(first, "action", own, known)
            allowed = ~(step & was_step) | sent
            right = right & allowed
            any_kind = allowed if self._shift else np.ones(len(step), bool)  # actions may have been exchanged too
        else:
            any_kind = np.ones(len(step), bool)
        agree = {BOTH: right & obs & reward, OBS: right & obs & same["reward"], REWARD: right & same["obs"] & reward}
        if WHOLE in self.late:
            either = np.logical_and.reduce([np.ones(len(step), bool), *(of_source(name) for name in flags)])
            if apart.any():  # which of the two it was may come in infos too
                either |= apart & self._ended(sources)
            kinds = same["kind"]  # that of before, where it begins
            if self._in_sequence or first.by_event:
                kinds = kinds | of_source("kind")
            agree[WHOLE] = any_kind & kinds & obs & reward & (~step | either | (behind_reset & same_flags))
        unlike = {"obs": ~same["obs"], "reward": step & ~same["reward"]}
        differ = unlike["obs"] | unlike["reward"] | ~same["kind"] | ~same_flags
        return _Seen(agree, differ, unlike["obs"], unlike["reward"])

    def _ended(self, sources: Sequence[tuple[Track, Ints, Bools]]) -> Bools:
        found = [there_is & (sum(_taken(track, name, at, there_is) for name in _FLAGS) > 0) for track, at, there_is in sources]
        ended: Bools = np.logical_or.reduce(found)
        return ended

    def _own(self, start: int, stop: int, kind: npt.NDArray[Any]) -> tuple[Ints, Bools]:
        """The events of the first side that were made where these were received."""
        first, second = self._sides.first, self._sides.second
        if not self._in_sequence or first.by_event:
            own = np.arange(self._i + start, self._i + stop)
            return own, own < len(first)
        calls = second.calls(self._j + start, self._j + stop) + self.apart
        at, last, known = first.in_calls(calls)
        return np.where(kind == RESET, last, at), known

    def _sources(self, start: int, stop: int, own: Ints) -> list[tuple[Track, Ints, Bools]]:
        """The events whose replies these may be: of what track, which, and of which of them there is one."""
        first, other = self._sides.first, self.other
        if other is not None and self.at is not None:
            at = np.arange(self.at + start, self.at + stop)
            return [(other, at, (at >= other.begin) & (at < len(other)))]
        if other is not None:
            # What a call gave is the observation of the reset behind the step, if there is one.
            at, last, known = other.in_calls(first.calls(self._i + start, self._i + stop))
            return [(other, at, known), (other, last, known)]
        begin = max(first.begin, self._i + start - _BACK)
        kinds = first.slice("kind", begin, self._i + stop)
        steps = np.flatnonzero(kinds == STEP) + begin
        before = np.searchsorted(steps, own) - self._shift
        by_step = np.append(steps, begin - 1)[np.where(before >= 0, before, -1)]
        found = [own - self._shift, by_step]
        if self._shift > 1:  # behind a reset nothing from before it is left
            resets = np.maximum.accumulate(np.where(kinds == RESET, np.arange(begin, self._i + stop), begin - 1))
            found.append(np.maximum(own - self._shift, np.where(own > begin, resets[np.maximum(own - 1 - begin, 0)], begin - 1)))
        if not first.by_event:  # the reset of a call has the reply that the call before gave
            found.append(np.where(kinds[own - begin] == RESET, own - self._shift - 1, begin - 1))
        return [(first, at, at >= begin) for at in found]


def _taken(track: Track, name: str, at: Ints, there_is: Bools) -> npt.NDArray[Any]:
    """A field of events that are near each other, and anything where there is none."""
    if not there_is.any():
        return np.zeros(len(at), np.uint64)
    known = at if there_is.all() else at[there_is]
    begin = int(known.min())
    values = track.slice(name, begin, int(known.max()) + 1)
    return values[np.clip(at - begin, 0, len(values) - 1)]


def _until_false(mask: Bools) -> int:
    return len(mask) if mask.all() else int(mask.argmin())


def _ended(track: Track, i: int) -> bool:
    return track.at("kind", i) == STEP and bool(track.at("terminated", i) or track.at("truncated", i))
