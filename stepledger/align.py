"""Aligning two sequences of events: one lost event is one edit, not everything after it.

Events are compared by 64-bit keys. Where the two sequences disagree, the cheapest edit script that leads to `RESYNC` equal events in a
row is searched within `MAX_EDITS` edits (Landau and Vishkin 1989: furthest point reached on each diagonal, edit by edit). Beyond that,
the nearest run of equal events within a window is used. Time is linear in the length of the sequences, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["RESYNC", "Edit", "align", "edit_end", "mixed"]

#: Equal events in a row after which two sequences are taken to agree again.
RESYNC = 6
#: Edits that are searched exactly at one place.
MAX_EDITS = 24
#: Events on each side within which a run of equal events is looked for when that fails.
WINDOW = 4096

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
    last: Edit | None = None
    for edit in _edits(first, second, like):
        if last is not None and last.kind == edit.kind and edit_end(last) == (edit.first, edit.second):
            last = last._replace(length=last.length + edit.length)
            continue
        if last is not None:
            yield last
        last = edit
    if last is not None:
        yield last


def mixed(*columns: npt.NDArray[Any]) -> Keys:
    """Several columns in one 64-bit key per event: equal events have equal keys, others almost surely not."""
    keys = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        # Multiply and shift, so that equal parts in different columns don't cancel (the constant is splitmix64's).
        keys = (keys ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    return keys


def edit_end(edit: Edit) -> tuple[int, int]:
    """Where both sequences go on behind an edit."""
    return (
        edit.first + (edit.length if edit.kind != "extra" else 0),
        edit.second + (edit.length if edit.kind != "lost" else 0),
    )


def _edits(first: Keys, second: Keys, like: tuple[Keys, Keys] | None) -> Iterator[Edit]:
    i = j = 0
    window = WINDOW
    while True:
        equal = _common_prefix(first, second, i, j)
        i, j = i + equal, j + equal
        if i == len(first) or j == len(second):
            break
        found = _shortest_script(first, second, i, j, like)
        if found is not None:
            window = WINDOW
        else:
            found, agree = _to_nearest_run(first, second, i, j, window)
            # Nothing agrees for a whole window: look in larger steps, so that sequences with nothing in common cost no more than a few.
            window = WINDOW if agree else min(2 * window, 1 << 20)
        for edit in found:
            yield edit
            i, j = edit_end(edit)
    if i < len(first):
        yield Edit("lost", i, j, len(first) - i)
    if j < len(second):
        yield Edit("extra", i, j, len(second) - j)


def _common_prefix(first: Keys, second: Keys, i: int, j: int) -> int:
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


def _shortest_script(first: Keys, second: Keys, i: int, j: int, like: tuple[Keys, Keys] | None) -> list[Edit] | None:
    """The shortest script from here to `RESYNC` equal events, or to the end of both; `None` if it takes more than `MAX_EDITS`."""
    reach = MAX_EDITS + RESYNC + 1
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


def _to_nearest_run(first: Keys, second: Keys, i: int, j: int, window: int) -> tuple[list[Edit], bool]:
    """Edits that lead to the nearest run of `RESYNC` equal events in the window, or through all of it; and whether there is one."""
    a, b = first[i : i + window], second[j : j + window]
    _, in_a, in_b = np.intersect1d(a, b, return_indices=True)
    order = np.argsort(np.maximum(in_a, in_b), kind="stable")
    in_a, in_b = in_a[order], in_b[order]
    good = np.ones(len(in_a), bool)
    for k in range(1, RESYNC):
        inside = (in_a + k < len(a)) & (in_b + k < len(b))
        good &= inside
        good[inside] &= a[in_a[inside] + k] == b[in_b[inside] + k]
    hits = np.flatnonzero(good)
    # Without one, only as much as both have: what is then left of one side may still find its counterpart.
    x, y = (int(in_a[hits[0]]), int(in_b[hits[0]])) if len(hits) else (min(len(a), len(b)),) * 2
    common = min(x, y)
    edits = [Edit("changed", i, j, common)] if common else []
    if x > common:
        edits.append(Edit("lost", i + common, j + y, x - common))
    if y > common:
        edits.append(Edit("extra", i + x, j + common, y - common))
    return edits, bool(len(hits))
