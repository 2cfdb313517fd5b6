"""The sides of the steps around a place beside each other, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import pairwise, zip_longest

from .context import Context, Row
from .pairing import Side
from .values import marked_leaves, unequal_leaves

__all__ = ["MARK", "beside", "cell"]

#: Stands before each field in which two sides differ.
MARK = "*"

#: Columns between two sides.
_GAP = 2

#: Narrower sides can't be read: then lines are longer than the terminal.
_NARROWEST = 24

#: Elements that are named of those in which two values differ.
_ELEMENTS = 6


def beside(context: Context, width: int = 120) -> Iterator[str]:
    """The lines; each side is a column, ``>`` marks the place that was asked for, and ``*`` a field in which sides differ.

    Args:
        context: The steps.
        width: Characters in a line, where that is possible.
    """
    if not context.rows:
        yield f"  (the steps around it can't be shown: {context.missing})"
        return
    labels = [_label(row) for row in context.rows]
    margin = max(len(label) for label in labels) + _GAP
    column = max(_NARROWEST, (width - margin) // len(context.taps) - _GAP)
    yield _line(" " * margin, [[tap] for tap in context.taps], column)[0]
    for row, label in zip(context.rows, labels):
        if row.left_out:
            yield f"  ... {row.left_out:,} more"
            continue
        yield from _line(label.ljust(margin), [_wrapped(cell(row, number), column) for number in range(len(context.taps))], column)
    if context.here is not None:
        yield from _elements(context.here)


def cell(row: Row, number: int) -> list[str]:
    """What a row says of one tap: a text for each field, those that differ with a mark before them."""
    side = row.sides[number] if number < len(row.sides) else None
    if side is None:
        if "event" in row.differ:
            return [f"{MARK}no such event"]
        given = next((one for one in row.sides if one is not None), None)
        return ["no transition" if given is not None and given.kind == "reset" else "not learned from"]
    texts = [text for name in side.values for text in _field(number, name, row)]
    return [*_kind(side, row), *texts, *([f"{MARK if 'event' in row.differ else ''}({side.note})"] if side.note else [])]


def _kind(side: Side, row: Row) -> list[str]:
    if "kind" in row.differ:
        return [f"{MARK}{side.kind}"]
    return ["reset"] if side.kind == "reset" else []


def _field(number: int, name: str, row: Row) -> list[str]:
    side = row.sides[number]
    assert side is not None
    value = side.values[name]
    if name in ("terminated", "truncated", "episode_start"):  # most are not set
        return [f"{MARK}{name} {value.text}"] if name in row.differ else [name] if value.text == "True" else []
    others = [other.values[name] for other in row.sides if other is not None and other is not side and name in other.values]
    leaves = marked_leaves(name, value, others)
    # The sides may have been compared after one of them was changed by a known function: their digests alone don't tell.
    # Nor do kept values where they have the shape of the space: then all of it is marked.
    some = any(marked for _, marked in leaves)
    return [f"{MARK if name in row.differ and (marked or not some) else ''}{text}" for text, marked in leaves]


def _label(row: Row) -> str:
    if row.left_out:
        return ""
    return f"{'>' if row.here else ' '} " + (f"episode {row.episode} step {row.step}" if row.episode >= 0 else "")


def _wrapped(texts: list[str], width: int) -> list[str]:
    """Texts one behind the other, in lines of a width; a text is broken only where it is longer than that."""
    lines: list[str] = []
    for text in texts:
        if lines and len(lines[-1]) + len(text) + 2 <= width:
            lines[-1] += f"  {text}"
        else:
            lines += textwrap.wrap(text, width, break_on_hyphens=False) or [""]
    return lines


def _line(margin: str, cells: list[list[str]], width: int) -> list[str]:
    lines = []
    for number, parts in enumerate(zip_longest(*cells, fillvalue="")):
        text = (" " * _GAP).join(part.ljust(width) for part in parts)
        lines.append(((margin if number == 0 else " " * len(margin)) + text).rstrip())
    return lines


def _elements(row: Row) -> Iterator[str]:
    """The elements in which kept values differ."""
    sides = [side for side in row.sides if side is not None]
    for first, second in pairwise(sides):
        for name in sorted(row.differ & first.values.keys() & second.values.keys()):
            found, unequal, total = unequal_leaves(name, first.values[name], second.values[name], _ELEMENTS)
            for one in found:
                yield f"    {one.name}: {one.first} | {one.second}"
            if unequal > len(found):
                yield f"    ... {unequal:,} of {total:,} elements of {name} differ"
