"""Aligning two sequences of events: one lost event is one edit, not everything after it.

Events are compared by 64-bit keys. Where the two sequences disagree, the cheapest edit script that leads to `RESYNC` equal events in a
row is searched within `MAX_EDITS` edits (Landau and Vishkin 1989: furthest point reached on each diagonal, edit by edit). Beyond that,
events that each side has just once within a window are matched, as many as there are in one order (patience diff, by Bram Cohen), and what
lies between two of them is searched again. Time is linear in the length of the sequences, whatever they hold.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["RESYNC", "Edit", "align", "common_prefix", "edit_end", "joined", "mixed", "tails"]

#: Equal events in a row after which two sequences are taken to agree again.
RESYNC = 6
#: Edits that are searched exactly at one place.
MAX_EDITS = 24
#: Events on each side that are looked at when that fails; sixteen times as many, up to the second number, where that fails too.
WINDOW, _LONGEST = 4096, 1 << 20
#: Events on each side for which all scripts are tried, where there is no such event.
_TABLE = 512
#: How often, in two sequences: what takes milliseconds for some hundred events must end where that goes on.
_TABLES = 100
#: How often what lies between anchors is searched for anchors again.
_DEPTH = 3

#: Equal events between changed ones over which those are looked into together.
_NEAR = 256
#: Events whose keys are made at a time.
_PIECE = 1 << 15

Keys = npt.NDArray[np.uint64]


class Edit(NamedTuple):
    """Where the sequences disagree.

    Attributes:
        kind: ``"changed"``: ``length`` events of each side, one for one; ``"lost"``: ``length`` events of the first side have no
            counterpart; ``"extra"``: likewise of the second.
        first: Index in the first sequence.
        second: Index in the second sequence.
        length: Number of events.
    """

    kind: Literal["changed", "lost", "extra"]
    first: int
    second: int
    length: int


def align(first: Keys, second: Keys, like: tuple[Keys, Keys] | None = None) -> Iterator[Edit]:
    """The edits that turn the first sequence into the second, in order; neighbouring ones of a kind are joined.

    Args:
        first: A key for each event of the one side.
        second: Of the other.
        like: Further keys of both, of which equal ones say that two events are likely one and the same, changed. They decide between
            scripts of one length.
    """
    yield from joined(_edits(first, second, like, iter(range(_TABLES))), near=0)


def joined(edits: Iterable[Edit], near: int = _NEAR) -> Iterator[Edit]:
    """Neighbouring edits of a kind in one.

    Args:
        edits: In order.
        near: Changed events are neighbours over fewer equal ones between them too, which are then in that edit: fewer to look into.
    """
    last: Edit | None = None
    for edit in edits:
        if last is not None and last.kind == edit.kind:
            end = edit_end(last)
            apart = edit.first - end[0]
            if apart == edit.second - end[1] and (not apart or (edit.kind == "changed" and apart < near)):
                last = last._replace(length=last.length + apart + edit.length)
                continue
        if last is not None:
            yield last
        last = edit
    if last is not None:
        yield last


def mixed(*columns: npt.NDArray[Any]) -> Keys:
    """Several columns in one 64-bit key per event: equal events have equal keys, others almost surely not."""
    keys = np.empty(len(columns[0]), np.uint64)
    for begin in range(0, len(keys), _PIECE):  # which stay in the processor's cache
        part, packed, room = np.zeros(len(keys[begin : begin + _PIECE]), np.uint64), None, 0
        for column in columns:
            values, bits = column[begin : begin + _PIECE].astype(np.uint64), 8 * column.itemsize
            if packed is not None and bits <= room:  # narrow ones go side by side
                packed, room = packed << np.uint64(bits) | values, room - bits
                continue
            if packed is not None:
                _mix(part, packed)
            packed, room = values, 64 - bits
        if packed is not None:
            _mix(part, packed)
        keys[begin : begin + _PIECE] = part
    return keys


def _mix(keys: Keys, values: Keys) -> None:
    # Multiply and shift, so that equal parts in different columns don't cancel (the constant is splitmix64's).
    keys ^= values
    keys *= np.uint64(0x9E3779B97F4A7C15)
    keys ^= keys >> np.uint64(29)


def common_prefix(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> int:
    """Number of equal elements at the beginning."""
    return _common_prefix(first, second, 0, 0)


def tails(first: int, second: int) -> list[Edit]:
    """The edits of sequences of these lengths that are equal as far as both go."""
    if first > second:
        return [Edit("lost", second, second, first - second)]
    return [Edit("extra", first, first, second - first)] if second > first else []


def edit_end(edit: Edit) -> tuple[int, int]:
    """Where both sequences go on behind an edit."""
    return (
        edit.first + (edit.length if edit.kind != "extra" else 0),
        edit.second + (edit.length if edit.kind != "lost" else 0),
    )


def _edits(first: Keys, second: Keys, like: tuple[Keys, Keys] | None, tables: Iterator[int], depth: int = 0) -> Iterator[Edit]:
    i = j = 0
    while True:
        equal = _common_prefix(first, second, i, j)
        i, j = i + equal, j + equal
        if i == len(first) or j == len(second):
            break
        found = _changed_alone(first, second, i, j) or _shortest_script(first, second, i, j, like)
        for edit in found or _between_anchors(first, second, i, j, like, tables, depth):
            yield edit
            i, j = edit_end(edit)
    if i < len(first):
        yield Edit("lost", i, j, len(first) - i)
    if j < len(second):
        yield Edit("extra", i, j, len(second) - j)


def _common_prefix(first: npt.NDArray[Any], second: npt.NDArray[Any], i: int, j: int) -> int:
    """Number of equal events from here on."""
    start, chunk = 0, 64
    limit = min(len(first) - i, len(second) - j)
    while start < limit:
        stop = min(start + chunk, limit)
        different = first[i + start : i + stop] != second[j + start : j + stop]
        at = int(different.argmax())
        if different[at]:
            return start + at
        start, chunk = stop, min(4 * chunk, 1 << 20)
    return limit


def _changed_alone(first: Keys, second: Keys, i: int, j: int) -> list[Edit]:
    """Events from here on that were changed in place, each with `RESYNC` equal ones behind it: no script is shorter."""
    if not np.array_equal(first[i + 1 : i + 1 + RESYNC], second[j + 1 : j + 1 + RESYNC]):
        return []
    common = min(len(first) - i, len(second) - j, WINDOW)
    at = np.flatnonzero(first[i : i + common] != second[j : j + common])
    close = np.diff(at, append=common) <= RESYNC
    number = int(close.argmax()) if close.any() else len(at)
    return [Edit("changed", i + one, j + one, 1) for one in at[:number].tolist()]


def _shortest_script(first: Keys, second: Keys, i: int, j: int, like: tuple[Keys, Keys] | None) -> list[Edit] | None:
    """The shortest script from here to `RESYNC` equal events, or to the end of both; `None` if that is too far."""
    reach = 4 * MAX_EDITS
    a, b = first[i : i + reach].tolist(), second[j : j + reach].tolist()
    # Both sequences end within reach only if these are all that is left of them.
    whole_a, whole_b = i + len(a) == len(first), j + len(b) == len(second)
    # furthest[edits][diagonal] is the largest index into a that this many edits can reach on diagonal = index in b - index in a.
    furthest: list[dict[int, int]] = [{0: 0}]
    for edits in range(1, MAX_EDITS + 1):
        before, now = furthest[-1], {}
        # The straight diagonal first: of two scripts of one length, the one that changes events in place is the likelier.
        for diagonal in sorted(range(-edits, edits + 1), key=abs):
            x = max(
                before.get(diagonal, -2) + 1,  # an event changed
                before.get(diagonal + 1, -2) + 1,  # an event of a lost
                before.get(diagonal - 1, -2),  # an event of b extra
            )
            if x < 0 or x > len(a) or not 0 <= x + diagonal <= len(b):
                continue
            run = 0
            while x < len(a) and x + diagonal < len(b) and a[x] == b[x + diagonal]:
                x, run = x + 1, run + 1
            now[diagonal] = x
            if run >= RESYNC or (whole_a and whole_b and x == len(a) and x + diagonal == len(b)):
                furthest.append(now)
                return _trace(furthest, diagonal, x, i, j, like)
            if (x == len(a) and not whole_a) or (x + diagonal == len(b) and not whole_b):
                return None  # a shorter script than what would be found may lead on from here
        furthest.append(now)
    return None


def _trace(furthest: list[dict[int, int]], diagonal: int, x: int, i: int, j: int, like: tuple[Keys, Keys] | None) -> list[Edit]:
    """The script that reached this point, from its end to its beginning and then turned round."""
    script: list[Edit] = []
    for edits in range(len(furthest) - 1, 0, -1):
        before = furthest[edits - 1]
        changed = before.get(diagonal, -2) + 1
        reached = {"lost": before.get(diagonal + 1, -2) + 1, "extra": before.get(diagonal - 1, -2)}
        # Of scripts of one length, the one that changes events into like ones, else the one that changes events first: an end that only
        # one side saw changes the step, and then there is a reset too many or too few. Otherwise the reset would be compared with a step.
        if like is not None and changed > 0 and like[0][i + changed - 1] == like[1][j + changed - 1 + diagonal]:
            reached = {"changed": changed, **reached}
        else:
            reached["changed"] = changed
        kind = max(reached, key=lambda name: reached[name])
        at = reached[kind]
        if kind == "changed":
            script.append(Edit("changed", i + at - 1, j + at - 1 + diagonal, 1))
        elif kind == "lost":
            script.append(Edit("lost", i + at - 1, j + at + diagonal, 1))
            diagonal += 1
        else:
            script.append(Edit("extra", i + at, j + at + diagonal - 1, 1))
            diagonal -= 1
    return script[::-1]


def _between_anchors(
    first: Keys, second: Keys, i: int, j: int, like: tuple[Keys, Keys] | None, tables: Iterator[int], depth: int
) -> Iterator[Edit]:
    """Edits that lead to the last event, within a window, that both sides have just once; or through all of it."""
    window = WINDOW
    while True:
        a, b = first[i : i + window], second[j : j + window]
        in_a, in_b = _once_in_both(a, b)
        rest = max(len(first) - i, len(second) - j)
        # Not only a few steps ahead, where the sides have little in common: that is no alignment, and each look takes its time.
        if len(in_a) and in_a[-1] + in_b[-1] >= min(window, rest) // 8:
            break
        if window == WINDOW and next(tables, None) is not None and (edits := _by_table(first, second, i, j, like)):
            yield from edits
            return
        if window >= min(rest, _LONGEST):
            # Only as much as both have: what is then left of one side may still find its counterpart.
            yield Edit("changed", i, j, min(len(a), len(b)))
            return
        window *= 16
    begins = np.concatenate([[0], in_a[:-1] + 1]), np.concatenate([[0], in_b[:-1] + 1])
    gaps = np.flatnonzero((in_a > begins[0]) | (in_b > begins[1]))
    for p, x, q, y in zip(*(part[gaps].tolist() for part in (begins[0], in_a, begins[1], in_b))):
        yield from _gap(first[i + p : i + x], second[j + q : j + y], i + p, j + q, like, tables, depth)


def _by_table(first: Keys, second: Keys, i: int, j: int, like: tuple[Keys, Keys] | None) -> list[Edit]:
    """The first edits of a shortest script, by the table of all prefixes (Wagner and Fischer 1974), where many events are alike."""
    a, b = first[i : i + _TABLE], second[j : j + _TABLE]
    whole = (i + len(a), j + len(b)) == (len(first), len(second))
    if 8 * int(np.isin(a, b).sum()) < (1 if whole else len(a)):
        return []
    columns = np.arange(len(b) + 1, dtype=np.int32)
    costs = np.empty((len(a) + 1, len(b) + 1), np.int32)
    costs[0] = columns
    for x, key in enumerate(a):
        row = costs[x] + 1  # an event of a lost
        np.minimum(row[1:], costs[x, :-1] + (b != key), out=row[1:])  # an event the same, or changed
        costs[x + 1] = np.minimum.accumulate(row - columns) + columns  # events of b extra
    x, y = len(a), len(b)
    if not whole:  # to wherever one side is through at the least cost
        if (at := int(costs[-1].argmin())) < y and costs[-1, at] <= costs[:, -1].min():
            y = at
        else:
            x = int(costs[:, -1].argmin())
        certain = 3 * x // 4
    else:
        certain = x + 1
    edits: list[Edit] = []
    while x or y:
        cost = costs[x, y]
        if x and y and a[x - 1] == b[y - 1] and cost == costs[x - 1, y - 1]:
            x, y = x - 1, y - 1
            continue
        changed = x and y and cost == costs[x - 1, y - 1] + 1
        lost, extra = x and cost == costs[x - 1, y] + 1, y and cost == costs[x, y - 1] + 1
        # As `_trace` decides, from the end too.
        alike = changed and like is not None and like[0][i + x - 1] == like[1][j + y - 1]
        if alike or not (lost or extra):
            x, y = x - 1, y - 1
            edits.append(Edit("changed", i + x, j + y, 1))
        elif lost:
            x -= 1
            edits.append(Edit("lost", i + x, j + y, 1))
        else:
            y -= 1
            edits.append(Edit("extra", i + x, j + y, 1))
    edits = edits[::-1]
    return [edit for edit in edits if edit.first - i < certain] or edits[:1]


def _gap(a: Keys, b: Keys, i: int, j: int, like: tuple[Keys, Keys] | None, tables: Iterator[int], depth: int) -> Iterator[Edit]:
    """Edits between two anchors, of which these events of both sides lie, from i and j on."""
    if len(a) == len(b) == 1 or not len(a) or not len(b) or depth == _DEPTH:
        common = min(len(a), len(b))
        parts = [
            Edit("changed", 0, 0, common),
            Edit("lost", common, common, len(a) - common),
            Edit("extra", len(a), common, len(b) - common),
        ]
        inner: Iterator[Edit] = (edit for edit in parts if edit.length > 0)
    else:
        here = None if like is None else (like[0][i : i + len(a)], like[1][j : j + len(b)])
        inner = _edits(a, b, here, tables, depth + 1)
    return (edit._replace(first=i + edit.first, second=j + edit.second) for edit in inner)


def _once_in_both(a: Keys, b: Keys) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions of events that each side has just once: as many as there are in one order."""
    keys_a, at_a = _once(a, b)
    keys_b, at_b = _once(b, a)
    if not len(keys_a) or not len(keys_b):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    hits = np.minimum(np.searchsorted(keys_b, keys_a), len(keys_b) - 1)
    both = keys_b[hits] == keys_a
    in_a, in_b = at_a[both], at_b[hits[both]]
    order = np.argsort(in_a)
    in_a, in_b = in_a[order], in_b[order]
    rising = _longest_rising(in_b)
    return in_a[rising], in_b[rising]


def _once(keys: Keys, others: Keys) -> tuple[Keys, npt.NDArray[np.int64]]:
    """The keys that occur just once, in order, and where; without most of those that the others don't have."""
    at = np.arange(len(keys))
    if len(keys) > _PIECE:  # sorting takes longer than a look into a table
        there = np.zeros(1 << (3 * len(others)).bit_length(), bool)
        mask = np.uint64(len(there) - 1)
        there[others & mask] = True
        at = np.flatnonzero(there[keys & mask])
    order = at[np.argsort(keys[at])]
    ordered = keys[order]
    alone = np.ones(len(order), bool)
    alone[1:] = other = ordered[1:] != ordered[:-1]
    alone[:-1] &= other
    return ordered[alone], order[alone]


def _longest_rising(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Positions of a longest rising subsequence of different values."""
    if (np.diff(values) > 0).all():
        return np.arange(len(values))
    # The smallest end of a rising subsequence of each length, and where it is; and before each value the one that it goes on from.
    ends: list[int] = []
    at_ends: list[int] = []
    before: list[int] = []
    for at, value in enumerate(values.tolist()):
        length = bisect.bisect_left(ends, value)
        before.append(at_ends[length - 1] if length else -1)
        ends[length : length + 1] = [value]
        at_ends[length : length + 1] = [at]
    rising, at = [], at_ends[-1]
    while at >= 0:
        rising.append(at)
        at = before[at]
    return np.array(rising[::-1])
