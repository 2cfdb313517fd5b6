"""Faults that last: from one event on every reply is another one's, and that is one difference, with its range.

Alignment finds that nothing agrees any more; here it is asked whether all of it agrees with what was given some events before (replies
are shifted), or with what another environment gave (streams are swapped). Each event is looked at a fixed number of times.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .align import RESYNC, Edit, align, edit_end
from .digest import MISSING_NUMBER
from .format import STEP, StreamKey
from .replies import GAP, Late, Sides, Source

__all__ = ["Range", "Sides", "end_of", "longer", "paired", "tail", "with_ranges"]

#: Events by which replies may be shifted.
_SHIFTS = (1, 2, 3)
#: Events that a range has at least where an alignment would explain them too.
_SURE = 16
#: Events before a place among which the reply that arrived there is looked for.
_NEAR = 16
#: Edits before a range that may have been aligned in another way, between others that are of it.
_ASTRAY = 8
#: Edits before a range that are looked at.
_LOOKS = 256
#: How often events behind a range are aligned again, which may take a look at all of them.
_SEARCHES = 200


class Range(NamedTuple):
    """From here on, the second side's replies are others of the first side's.

    Attributes:
        kind: To tell it from an `Edit`.
        first: Index in the first sequence.
        second: Index in the second sequence.
        length: Number of events of the first.
        second_length: Number of events of the second.
        shift: By how many events, or steps, the replies are late; 0 where they are another environment's.
        other: Whose they are then.
        resume: Index of that stream's next event, since its beginning, where its events are taken one after the other.
        apart: What a call's number is more on the first side then.
        late: Which fields may be another event's; of several choices, each explains all of it.
        tail: Number of events behind it that are another's as well as their own; or may be, as far as is known.
        sure: Whether it is a range even if nothing like it follows.
    """

    kind: Literal["range"]
    first: int
    second: int
    length: int
    second_length: int
    shift: int
    other: StreamKey | None = None
    resume: int = -1
    apart: int = 0
    late: tuple[Late, ...] = ()
    tail: int = 0
    sure: bool = True


def end_of(edit: Edit | Range) -> tuple[int, int]:
    """Where both sequences go on behind it."""
    if isinstance(edit, Range):
        return edit.first + edit.length, edit.second + edit.second_length
    return edit_end(edit)


def with_ranges(
    keys: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]],
    like: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]],
    sides: Sides,
    begin: int,
    lasting: Range | None = None,
) -> list[Edit | Range]:
    """The edits of an alignment, in which what lasts is one range.

    Args:
        keys: A key for each event of both sides, see `stepledger.align.align`.
        like: Further keys.
        sides: What the keys are made of.
        begin: Index there of the event that is the first of the keys.
        lasting: A range that the events before these ended with.
    """
    found: list[Edit | Range] = []
    last, (i, j) = lasting, (0, 0)
    for searches in range(_SEARCHES, -1, -1):
        while last is not None and (more := _resumed(sides, last, i + begin, j + begin)):
            found += [one._replace(first=one.first - begin, second=one.second - begin) for one in more]
            last, (i, j) = more[-1], end_of(found[-1])
        last = None
        for edit, following in _with_next(align(keys[0][i:], keys[1][j:], (like[0][i:], like[1][j:]))):
            edit = edit._replace(first=edit.first + i, second=edit.second + j)
            until = len(keys[1]) if following is None else following.second + j
            if searches:
                last = _range_in(sides, edit._replace(first=edit.first + begin, second=edit.second + begin), until + begin)
            if last is not None and not (found and _undone(found[-1], last, begin)):
                skipped = last.first - begin - edit.first
                found += [Edit("changed", edit.first, edit.second, skipped)] if skipped else []
                found.append(last._replace(first=last.first - begin, second=last.second - begin))
                if _undo_late_actions(sides, found, begin):
                    last = None
                    break
                _begin_earlier(sides, found, begin)
                if end_of(found[-1]) != edit_end(edit) or until == edit_end(edit)[1]:
                    break
                last = None  # both agree again behind it
                continue
            last = None
            found.append(edit)
        else:
            break
        i, j = end_of(found[-1])
    return found


def _undo_late_actions(sides: Sides, edits: list[Edit | Range], begin: int) -> bool:
    """Replace a range, the last of these edits, and what was taken to be lost before it, where in place only the actions differ.

    Replies that are late by so many events as were lost are in place, and it is the actions that are late.
    """
    last = edits[-1]
    assert isinstance(last, Range)
    if not last.shift or "action" not in sides.fields:
        return False
    lost = 0
    for number in range(len(edits) - 2, max(-1, len(edits) - 2 - _ASTRAY), -1):
        before = edits[number]
        if before.kind == "range":
            return False
        lost += {"lost": before.length, "extra": -before.length, "changed": 0}[before.kind]
        if lost == last.shift:
            start, shift = before.second + begin, before.first - before.second
            stop = min(end_of(last)[1] + begin, len(sides.first) - shift)
            same = {
                name: sides.first.slice(name, start + shift, stop + shift) == sides.second.slice(name, start, stop) for name in sides.fields
            }
            if all(same[name].all() for name in sides.fields if name != "action") and not same["action"].all():
                at = (np.flatnonzero(~same["action"]) + before.second).tolist()
                edits[number:] = [Edit("changed", j + shift, j, 1) for j in at]
                return True
    return False


def _begin_earlier(sides: Sides, edits: list[Edit | Range], begin: int) -> None:
    """Let a range, the last of these edits, begin with those before it that are of it too: few values are no evidence at once.

    What was aligned in another way in between, by chance, is then of it as well.
    """
    last = edits[-1]
    assert isinstance(last, Range)

    def from_(number: int) -> Range | None:
        i, j = edits[number].first + begin, edits[number].second + begin
        sources = _sources(sides, last.shift, last.other, i, j)
        whole = _longest([_from(sides, source, i, j, last.shift, last.other, since=0) for source in sources])
        if whole is None or end_of(whole) != (end_of(last)[0] + begin, end_of(last)[1] + begin):
            return None
        return whole._replace(first=edits[number].first, second=edits[number].second)

    places: list[int] = []
    for number in range(len(edits) - 2, max(-1, len(edits) - 2 - _LOOKS), -1):
        before = edits[number]
        if before.kind == "range" or (places or [len(edits) - 1])[-1] - number > _ASTRAY:
            break
        if before.kind == "changed" and before.first - before.second == last.first - last.second:
            places.append(number)
    # All of them that are behind one of it are of it too.
    number = bisect.bisect_left(places, True, key=lambda number: from_(number) is None)
    if number and (whole := from_(places[number - 1])) is not None:
        edits[places[number - 1] :] = [whole]


def _resumed(sides: Sides, last: Range, i: int, j: int) -> list[Any]:
    """How a range goes on here, or behind a few events that something else has changed too; empty where it does not."""
    for skipped in range(RESYNC):
        if (more := longer(sides, last, i, j, skipped)) is not None:
            return [Edit("changed", i, j, skipped), more] if skipped else [more]
    return []


def _with_next(edits: Iterator[Edit]) -> Iterator[tuple[Edit, Edit | None]]:
    before: Edit | None = None
    for edit in edits:
        if before is not None:
            yield before, edit
        before = edit
    if before is not None:
        yield before, None


def _undone(before: Edit | Range, last: Range, begin: int) -> bool:
    """Whether replies are only late by what was taken to be lost just before: then the events are compared in place."""
    return before.kind == "lost" and before.length == last.shift and end_of(before) == (last.first - begin, last.second - begin)


def _range_in(sides: Sides, edit: Edit, until: int) -> Range | None:
    """The range that begins with an edit, if there is one that explains more than the alignment, whose next edit is there.

    Its first events may be changed in another way.
    """
    if not {"obs", "kind", "reward"} <= set(sides.fields):
        return None
    if edit.kind == "changed":
        for skipped in range(min(edit.length, RESYNC)):
            if (found := _range_at(sides, edit.first + skipped, edit.second + skipped)) is not None:
                return found
        return None
    for skipped in (0, 1):
        i, j = edit.first + skipped, edit.second + skipped
        if skipped and any(sides.first.at(name, i - 1) != sides.second.at(name, j - 1) for name in ("kind", "action")):
            return None
        found = _range_at(sides, i, j)
        if found is not None and found.second_length >= max(_SURE, until - j + 1):
            return found
    return None


def _range_at(sides: Sides, i: int, j: int) -> Range | None:
    """The longest range that begins here."""
    first, second, *_ = sides
    if i >= len(first) or j >= len(second):
        return None
    # Most places are none: a look at one value is enough to see that.
    obs, reward = second.at("obs", j), second.at("reward", j)
    field = "obs" if obs not in (first.at("obs", i), MISSING_NUMBER) else "reward"
    value = obs if field == "obs" else reward
    if field == "reward" and (reward == first.at("reward", i) or second.at("kind", j) != STEP):
        return None
    if (first.slice(field, i - _NEAR, i) == value).any():
        found = [one for shift in _SHIFTS if (one := _shifted(sides, shift, i, j)) is not None]
        if found:  # that it is another environment's too is chance
            return max(found, key=lambda one: one.second_length)
    alike = sides.neighbours.having(0, first.call(i), field, value)
    envs = None if alike is None else {row.env for row in alike}
    swapped = [_swapped(sides, key, i, j) for key, _ in sides.others if envs is None or key.env in envs]
    return max((one for one in swapped if one is not None), key=lambda one: one.second_length, default=None)


def longer(sides: Sides, last: Range, i: int = 0, j: int = 0, skipped: int = 0) -> Range | None:
    """A range that ended before these events, as far as it goes on in them.

    Args:
        sides: What the events are of.
        last: The range.
        i: Index of the next event on the first side.
        j: Likewise on the second.
        skipped: Events that are left out, and changed in another way.
    """
    i, j = i + skipped, j + skipped
    sources = _lasting(sides, last, i, j, skipped)
    return _longest([_from(sides, source, i, j, last.shift, last.other, None if skipped else last.tail) for source in sources])


def tail(sides: Sides, last: Range) -> int:
    """How many of the next events, all of which are their own, may be such as a range that ended before them makes them."""
    runs = [(source.run(last.tail), source) for source in _lasting(sides, last, 0, 0, 0)]
    return max((GAP if run.matched >= source.certain else run.matched for run, source in runs if not run.length), default=0)


def _lasting(sides: Sides, last: Range, i: int, j: int, skipped: int) -> Iterator[Source]:
    """What the source of a range is from here on."""
    tracks = [sides.first] if last.other is None else [other for key, other in sides.others if key == last.other]
    for other in tracks:
        at = last.resume - other.stream.begin + skipped
        # Behind what is left out both must be in one call.
        if last.resume >= 0 and other.begin <= at and (not skipped or i in sides.first.events_of(other.call(at) + last.shift)):
            yield Source(sides, i, j, last.shift, other, at, last.late, last.apart)
        yield Source(sides, i, j, last.shift, None if last.other is None else other, late=last.late)


def _shifted(sides: Sides, shift: int, i: int, j: int) -> Range | None:
    """The events from here on that have replies of so many events before, or of so many calls."""
    return _longest([_from(sides, source, i, j, shift) for source in _sources(sides, shift, None, i, j)])


def _swapped(sides: Sides, key: StreamKey, i: int, j: int) -> Range | None:
    """The events from here on that have the replies of another environment."""
    return _longest([_from(sides, source, i, j, 0, key) for source in _sources(sides, 0, key, i, j)])


def _sources(sides: Sides, shift: int, key: StreamKey | None, i: int, j: int) -> Iterator[Source]:
    """What replies from here on may be of, that are late by so many events or calls, or another environment's."""
    first = sides.first
    if key is None:
        for at in [] if first.by_event else first.events_of(first.call(i) - shift)[:1]:
            yield Source(sides, i, j, shift, first, at)
        yield Source(sides, i, j, shift)
    for other in (track for one, track in sides.others if one == key):
        for at in other.events_of(first.call(i)):
            yield Source(sides, i, j, other=other, at=at)
        yield Source(sides, i, j, other=other)


_Found = tuple[int, Range]
#: Longer than any that came to an end.
_ALL = 1 << 62


def _from(
    sides: Sides, source: Source, i: int, j: int, shift: int, other: StreamKey | None = None, since: int | None = None
) -> _Found | None:
    """The range of events from here on that have a source's replies, and its length, or that it goes on as far as anything is known.

    Args:
        sides: What the events are of.
        source: Of the replies.
        i: Index of the first event on the first side.
        j: Likewise on the second.
        shift: As `Range` has it.
        other: Likewise.
        since: It is one that goes on behind so many events that were their own too.
    """
    if since is None and not source.begins():
        return None
    run = source.run(since or 0)
    if not run.length:
        return None
    sure = since is not None or source.is_sure()
    reach = run.length if run.matched < source.certain else _ALL
    if source.at is None or source.other is None or sides.first.by_event:
        resume = -1 if source.at is None or source.other is None else source.other.stream.begin + source.at + run.length
        tail = GAP if reach == _ALL else run.matched - run.length
        return reach, Range("range", i, j, run.length, run.length, shift, other, resume, source.apart, run.late, tail, sure)
    # As many calls on the first side, which may have ended more or fewer episodes in them.
    calls = sides.first.events_of(sides.second.call(j + run.matched - 1) + source.apart)
    length = (calls.stop if len(calls) else len(sides.first)) - i
    resume = source.other.stream.begin + source.at + run.matched
    return reach, Range("range", i, j, length, run.matched, shift, other, resume, source.apart, run.late, GAP if reach == _ALL else 0, sure)


def _longest(found: list[_Found | None]) -> Range | None:
    """Of several ranges that begin together the longest; where several are, it is not known yet which of them goes on.

    Then both sides have their resets in the same calls so far, and events belong together one by one.
    """
    length = max((one[0] for one in found if one is not None), default=0)
    best = [one[1] for one in found if one is not None and one[0] == length]
    if not best:
        return None
    late = tuple(dict.fromkeys(late for one in best for late in one.late))
    resume = next((one.resume - one.second_length for one in best if one.resume >= 0), None)
    if resume is None:
        return best[0]._replace(late=late)
    return best[-1]._replace(late=late, resume=resume + best[-1].second_length, apart=best[0].apart)


def paired(sides: Sides, last: Range) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
    """Which events of a range belong together, and how many have no counterpart.

    Where another environment's episodes end in other calls, both sides have their resets in other calls too.
    """
    i, j = np.arange(last.first, last.first + last.length), np.arange(last.second, last.second + last.second_length)
    if last.resume < 0 or sides.first.by_event:
        n = min(len(i), len(j))
        return i[:n], j[:n], len(i) + len(j) - 2 * n
    events = []
    for track, at, length, apart in (
        (sides.first, last.first, last.length, 0),
        (sides.second, last.second, last.second_length, last.apart),
    ):
        step = track.slice("kind", at, at + length) == STEP
        events.append(2 * (track.calls(at, at + length) + apart) + ~step)  # the call of the vector env, and which of its events
    both, of_i, of_j = np.intersect1d(*events, return_indices=True)
    return i[of_i], j[of_j], len(i) + len(j) - 2 * len(both)
