"""Recorded values as reports show them: in one line, leaf by leaf, and which elements of two of them are unequal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..digest import MISSING_NUMBER
from ..ledger import Ledger, Stream
from ..strays import UNSEEN
from ..values import leaf_name
from .visible import visible

__all__ = [
    "Leaf",
    "Unequal",
    "Value",
    "digest_value",
    "flag_value",
    "kept_value",
    "marked_leaves",
    "reward_value",
    "unequal_elements",
    "unequal_leaves",
]

#: Elements up to which an array is printed as a whole.
_WHOLE = 8

#: Characters of a text that are shown.
_TEXT = 80


@dataclass(frozen=True)
class Leaf:
    """One part of a value that was kept.

    Attributes:
        path: How it is reached from the value's name: ``["camera"]``; empty where the space has one leaf.
        value: An array of any dtype and shape, or a JSON text.
    """

    path: str
    value: npt.NDArray[Any] | str


@dataclass(frozen=True)
class Value:
    """What a side has in one field.

    Attributes:
        text: In one line; of a value that was not kept, its digest.
        leaves: The value itself, where it was kept.
        digest: The beginning of its digest, where it has one.
    """

    text: str
    leaves: tuple[Leaf, ...] = ()
    digest: str = ""


class Unequal(NamedTuple):
    """An element in which two values differ.

    Attributes:
        name: ``obs["camera"][12, 40, 0]``.
        first: On the one side.
        second: On the other.
    """

    name: str
    first: str
    second: str


def flag_value(flag: Any) -> Value:
    """A flag of an end."""
    return Value(str(bool(flag)))


def reward_value(bits: Any, dtype: str) -> Value:
    """A reward from its bits."""
    return Value(str(np.array([bits], np.dtype(dtype.replace("f", "u"))).view(dtype)[0]))


def digest_value(digest: Any) -> Value:
    """A value that was not kept: equal values have equal digests, so that its beginning tells which are alike."""
    text = {MISSING_NUMBER: "nothing", UNSEEN: "not seen"}.get(int(digest), f"#{int(digest):016x}"[:9])
    return Value(text, digest=text)


def kept_value(ledger: Ledger, stream: Stream, name: str, at: int) -> Value:
    """An observation or an action of an event: the value, where it was kept.

    Args:
        ledger: Whose it is.
        stream: The stream.
        name: ``"obs"`` or ``"action"``.
        at: Index of the event in what is left of the stream.
    """
    short = {"obs": "obs", "action": "act"}[name]
    # Where a tap stores another form of it, what it is compared by is in a column of its own.
    digest = stream.data[ledger.meta.get("fields", {}).get(name, {}).get("column", f"h_{short}")][at]
    names = sorted((key for key in stream.values if key.startswith(f"values_{short}_")), key=_number)
    columns, row = [stream.values[key] for key in names], stream.row(at)
    if not columns or row is None or int(digest) in (MISSING_NUMBER, UNSEEN):
        return digest_value(digest)
    paths = ledger.meta["leaves"][short]
    labels = (
        [visible(leaf_name(path)) for path in paths] if len(paths) == len(columns) else [f"[{number}]" for number in range(len(columns))]
    )
    leaves = tuple(Leaf(label, column[row]) for label, column in zip(labels, columns))
    return Value(", ".join(f"{leaf.path} {_short(leaf.value)}".strip() for leaf in leaves), leaves, digest_value(digest).text)


def unequal_leaves(name: str, first: Value, second: Value, most: int) -> tuple[list[Unequal], int, int]:
    """The elements in which two values differ in any bit, as their digests do.

    Args:
        name: Of the field, which the names of elements begin with.
        first: The value on the one side.
        second: On the other.
        most: How many are named.

    Returns:
        The first of them; how many there are; how many elements there are in all.
    """
    found, unequal, total = list[Unequal](), 0, 0
    each = max(1, most // max(1, min(4, len(first.leaves))))  # an image must not hide the others
    for one, other in zip(first.leaves, second.leaves):
        where = f"{name}{one.path}"
        if isinstance(one.value, str) or isinstance(other.value, str):
            total += 1
            if one.value != other.value and isinstance(one.value, str) and isinstance(other.value, str):
                unequal += 1
                found.append(Unequal(where, _short(one.value), _short(other.value)))
            continue
        total += one.value.size
        if one.value.shape != other.value.shape or one.value.dtype != other.value.dtype:
            continue  # the settings are the same, so only a damaged ledger has this
        places = np.argwhere(unequal_elements(one.value, other.value))
        unequal += len(places)
        for place in places[:each].tolist():
            element = tuple(place)
            label = f"{where}[{', '.join(map(str, place))}]" if place else where
            found.append(Unequal(label, _element(one.value[element]), _element(other.value[element])))
    return found[:most], unequal, total


def unequal_elements(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which elements of two arrays of one dtype and shape differ in any bit."""
    if not one.size:
        return np.zeros(one.shape, bool)
    first, second = (np.ascontiguousarray(value).reshape(-1, 1).view(np.uint8) for value in (one, other))
    unequal: npt.NDArray[np.bool_] = (first != second).any(axis=1).reshape(one.shape)
    return unequal


def marked_leaves(name: str, value: Value, others: Sequence[Value]) -> list[tuple[str, bool]]:
    """A value leaf by leaf: the text of each, and whether that leaf differs from one of the others'; of one that was not kept, its digest.

    Args:
        name: Of the field.
        value: The value.
        others: What other sides have in its place.
    """
    if not value.leaves:
        return [(f"{name} {value.text}", any((other.digest or other.text) != value.text for other in others))]
    if any(other.digest and not other.leaves for other in others):  # what the two sides can be compared by comes first
        return [(f"{name} {value.digest} {value.text}", any(other.digest != value.digest for other in others))]
    marked = []
    for number, leaf in enumerate(value.leaves):
        counterparts = [other.leaves[number].value for other in others if number < len(other.leaves)]
        marked.append((f"{name}{leaf.path} {_short(leaf.value)}", any(_unlike(leaf.value, one) for one in counterparts)))
    return marked


def _unlike(one: Any, other: Any) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return bool(isinstance(one, str) != isinstance(other, str) or one != other)
    return one.shape != other.shape or one.dtype != other.dtype or bool(unequal_elements(one, other).any())


def _number(name: str) -> int:
    return int(name.rsplit("_", 1)[1])


def _element(value: Any) -> str:
    return str(value.item() if isinstance(value, np.bool_) else value)


def _short(value: npt.NDArray[Any] | str) -> str:
    if isinstance(value, str):
        return visible(value if len(value) <= _TEXT else f"{value[:_TEXT]}...")
    if value.size > _WHOLE:
        dimensions = "x".join(map(str, value.shape))
        return f"{dimensions} {value.dtype}" if value.ndim > 1 else f"[{', '.join(map(_element, value[:4]))}, ...] of {value.size}"
    if value.ndim == 1:
        return f"[{', '.join(map(_element, value))}]"
    return " ".join(np.array2string(value, separator=", ", floatmode="unique").split())
