"""Whether values lie in their space: after the cast that their digest makes, and with room for rounding at the bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

__all__ = ["INSIDE", "LeafBounds", "SpaceBounds", "array_leaves", "bounds_of_leaf", "described"]

#: What is wrong with a value, in words: that it is outside of its space, and that it is not finite; empty where it isn't.
Faults = tuple[str, str]

INSIDE: Faults = ("", "")

#: Steps of a float dtype, at the size of the bounds, by which a value may lie beyond them: it was rounded.
_ROUNDING = 8

#: Elements up to which an array is looked at one by one.
_FEW = 16

#: Elements up to which bounds that differ from element to element are written down.
_WRITTEN = 1024


class _Leaf(Protocol):
    def look(self, value: Any, /) -> Faults: ...


class LeafBounds:
    """The bounds of an array.

    Args:
        dtype: Of the declared space; a float is cast to it before it is looked at.
        shape: Of the declared space, or of what ``low`` and ``high`` broadcast to.
        low: The least values.
        high: The greatest ones.

    Attributes:
        low: As given; likewise ``high``.
    """

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...], low: npt.ArrayLike, high: npt.ArrayLike) -> None:
        self._dtype, self._shape = dtype, shape
        self._float = dtype.kind == "f"
        self.low, self.high = low, high = np.asarray(low), np.asarray(high)
        if self._float:
            low, high = _with_room(low.astype(dtype), high.astype(dtype))
        self._low, self._high = low, high
        # Frames: every value that the dtype has is inside.
        self._all = dtype.kind in "iu" and bool((low <= np.iinfo(dtype).min).all() and (high >= np.iinfo(dtype).max).all())
        # What lies between these is finite too, so that nearly always one look is enough.
        most = np.finfo(dtype).max if self._float else np.inf
        self._least: npt.NDArray[Any] = np.maximum(low, -most) if self._float else low
        self._most: npt.NDArray[Any] = np.minimum(high, most) if self._float else high
        self._few: list[tuple[Any, Any]] | None = None
        if math.prod(shape) <= _FEW:
            self._few = list(zip(*(np.broadcast_to(bound, shape).ravel().tolist() for bound in (self._least, self._most))))

    def look(self, value: Any) -> Faults:
        """What is wrong with one value."""
        array = self._array(value)
        if array.shape != self._shape:
            if _without_ones(array.shape) != _without_ones(self._shape):
                return f"its shape is {array.shape}, and not {self._shape}", ""
            array = array.reshape(self._shape)
        if self._all and array.dtype is self._dtype:
            return INSIDE
        if self._few is None:
            return INSIDE if ((array >= self._least) & (array <= self._most)).all() else self._faults(array)
        for one, (least, most) in zip(array.ravel().tolist(), self._few):  # many times as fast as numpy
            if not least <= one <= most:
                return self._faults(array)
        return INSIDE

    def look_at_rows(self, rows: npt.NDArray[Any]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]] | None:
        """Which of several values, along the first axis, are outside, and which are not finite; `None` where there are none."""
        array = self._array(rows)
        if (self._all and array.dtype is self._dtype) or ((array >= self._least) & (array <= self._most)).all():
            return None
        axes = tuple(range(1, array.ndim))
        nan = np.isnan(array) if array.dtype.kind == "f" else np.zeros(array.shape, bool)
        outside = ~nan & ((array < self._low) | (array > self._high))
        infinite = ~np.isfinite(array) if array.dtype.kind == "f" else nan
        return np.asarray(outside.any(axis=axes)), np.asarray(infinite.any(axis=axes))

    def _array(self, value: Any) -> npt.NDArray[Any]:
        array = np.asarray(value)
        if self._float and array.dtype is not self._dtype:
            with np.errstate(all="ignore"):
                array = array.astype(self._dtype)
        return array  # of integers as it came: the cast would take 300 for 44 in a uint8, which no bound tells

    def _faults(self, array: npt.NDArray[Any]) -> Faults:
        low, high = np.broadcast_to(self._low, array.shape), np.broadcast_to(self._high, array.shape)
        least, most = (np.broadcast_to(bound, array.shape).astype(self._low.dtype) for bound in (self.low, self.high))  # as declared
        infinite = "" if array.dtype.kind != "f" else _first(array, ~np.isfinite(array), "{place}{value}")
        nan = np.isnan(array) if array.dtype.kind == "f" else np.zeros(array.shape, bool)
        outside = _first(array, ~nan & (array < low), "{place}{value} is below {bound}", least)
        return outside or _first(array, ~nan & (array > high), "{place}{value} is above {bound}", most), infinite


def _with_room(low: npt.NDArray[Any], high: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The bounds of floats with what rounding may take a value beyond them; infinite ones as they are."""
    with np.errstate(all="ignore"):  # the room above the greatest float is infinite
        size = np.fmax(*(np.where(np.isfinite(bound), np.abs(bound), np.nan) for bound in (low, high)))
        room = np.nan_to_num(_ROUNDING * np.spacing(size)).astype(low.dtype)
        return np.asarray(low - room), np.asarray(high + room)


def _first(array: npt.NDArray[Any], where: npt.NDArray[np.bool_], text: str, bound: npt.NDArray[Any] | None = None) -> str:
    """A sentence about the first element of those that are set."""
    places = np.argwhere(where)
    if not len(places):
        return ""
    at = tuple(places[0].tolist())
    place = f"{list(at)}: " if at else ""
    return text.format(place=place, value=array[at], bound=None if bound is None else bound[at])


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """As in a digest: leading axes of length one make no difference."""
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape


class _DiscreteBounds:
    """Discrete: one of n integers."""

    def __init__(self, space: spaces.Discrete[Any]) -> None:
        self._start, self._stop = int(space.start), int(space.start) + int(space.n)

    def look(self, value: Any) -> Faults:
        array = np.asarray(value).reshape(-1)
        if array.size == 1 and self._start <= array[0] < self._stop and array[0] == int(array[0]):
            return INSIDE
        what = array[0] if array.size == 1 else f"an array of {array.size} elements"
        return f"{what} is none of the integers from {self._start} to {self._stop - 1}", ""


class _TextBounds:
    """Text: a string of so many characters of an alphabet."""

    def __init__(self, space: spaces.Text) -> None:
        self._space = space

    def look(self, value: Any) -> Faults:
        return INSIDE if self._space.contains(str(value)) else ("the text is too long, too short, or has other characters", "")


class _SequenceBounds:
    """Sequence: each element is one of its space."""

    def __init__(self, space: spaces.Sequence) -> None:
        self._space = space
        self._feature = _leaf_of(space.feature_space)

    def look(self, value: Any) -> Faults:
        if not self._space.stack:
            return _worst(self._feature.look(element) for element in value)
        if isinstance(self._feature, LeafBounds):
            return _rows(self._feature, value)
        return INSIDE if self._space.contains(value) else ("it is no such sequence", "")


class _GraphBounds:
    """Graph: its nodes and edges are of their spaces."""

    def __init__(self, space: spaces.Graph) -> None:
        self._nodes = _leaf_of(space.node_space)
        self._edges = None if space.edge_space is None else _leaf_of(space.edge_space)

    def look(self, value: Any) -> Faults:
        faults = [_worst(map(self._nodes.look, value.nodes))]
        if self._edges is not None and value.edges is not None:
            faults.append(_worst(map(self._edges.look, value.edges)))
        if value.edge_links is not None:
            links = np.asarray(value.edge_links)
            if links.size and (links.min() < 0 or links.max() >= len(value.nodes)):
                faults.append(("an edge leads to a node that isn't there", ""))
        return _worst(iter(faults))


class _OneOfBounds:
    """OneOf: a value of the space whose number comes with it."""

    def __init__(self, space: Any) -> None:
        self._choices = [_leaf_of(choice) for choice in space.spaces]

    def look(self, value: Any) -> Faults:
        choice = int(value[0])
        if not 0 <= choice < len(self._choices):
            return f"{choice} is none of its {len(self._choices)} spaces", ""
        return self._choices[choice].look(value[1])


def _worst(faults: Iterator[Faults]) -> Faults:
    """The first of each kind."""
    outside = infinite = ""
    for one, other in faults:
        outside, infinite = outside or one, infinite or other
    return outside, infinite


def _rows(bounds: LeafBounds, rows: Any) -> Faults:
    return _worst(bounds.look(row) for row in rows)


def _leaf_of(space: spaces.Space[Any]) -> _Leaf:
    if isinstance(space, spaces.Box):
        return LeafBounds(np.dtype(space.dtype), tuple(space.shape), space.low, space.high)
    if isinstance(space, spaces.MultiDiscrete):
        low = np.asarray(getattr(space, "start", np.zeros_like(space.nvec)), np.int64)
        return LeafBounds(np.dtype(space.dtype or np.int64), tuple(space.shape or ()), low, low + np.asarray(space.nvec, np.int64) - 1)
    if isinstance(space, spaces.MultiBinary):
        return LeafBounds(np.dtype(np.int8), tuple(space.shape or ()), 0, 1)
    if isinstance(space, spaces.Discrete):
        return _DiscreteBounds(space)
    if isinstance(space, spaces.Text):
        return _TextBounds(space)
    if isinstance(space, spaces.Sequence):
        return _SequenceBounds(space)
    if isinstance(space, spaces.Graph):
        return _GraphBounds(space)
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return SpaceBounds(space)
    return _OneOfBounds(space)


class SpaceBounds:
    """Tells whether values lie in a space, leaf by leaf of its Dicts and Tuples.

    Not by ``space.contains``: that also asks for the dtype, and a float64 for a float32 is cast on the way.

    Args:
        space: Any nesting of Gymnasium's spaces.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        parts: list[tuple[Any, spaces.Space[Any]]] = []
        if isinstance(space, spaces.Dict):
            parts = list(space.spaces.items())
        elif isinstance(space, spaces.Tuple):
            parts = list(enumerate(space.spaces))
        self._parts = [(key, _leaf_of(part)) for key, part in parts]
        #: ``look(value) -> Faults``: what is wrong with a value.
        self.look = self._look if isinstance(space, (spaces.Dict, spaces.Tuple)) else _leaf_of(space).look

    def _look(self, value: Any) -> Faults:
        outside = infinite = ""
        for key, leaf in self._parts:
            one, other = leaf.look(value[key])
            outside = outside or (one and f"{key!r}: {one}")
            infinite = infinite or (other and f"{key!r}: {other}")
        return outside, infinite


def array_leaves(space: spaces.Space[Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], LeafBounds]]:
    """The leaves of a space, with the keys that lead to them.

    Raises:
        TypeError: One of them has no arrays of a fixed shape.
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for key, part in space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces):
            yield from array_leaves(part, (*path, key))
    elif isinstance(space, spaces.Discrete):
        yield path, LeafBounds(np.dtype(np.int64), (), int(space.start), int(space.start) + int(space.n) - 1)
    else:
        leaf = _leaf_of(space)
        if not isinstance(leaf, LeafBounds):
            raise TypeError(f"{space} has no arrays of a fixed shape")
        yield path, leaf


def described(space: spaces.Space[Any], path: tuple[Any, ...]) -> list[Any] | None:
    """The bounds of the leaf at a path as JSON: the least and the greatest value, each one number or a list of them; `None` is unbounded.

    Returns:
        `None` where a kept value can't be looked at: it is no array, or has bounds that would take much room.
    """
    for key in path:
        space = space[key]  # type: ignore[index]
    try:
        ((_, leaf),) = array_leaves(space)
    except TypeError:
        return None
    bounds = [leaf.low, leaf.high]
    if any(bound.size > _WRITTEN and not _is_uniform(bound) for bound in bounds):
        return None
    return [_number(bound.flat[0]) if _is_uniform(bound) else [_number(one) for one in bound.ravel()] for bound in bounds]


def _is_uniform(bound: npt.NDArray[Any]) -> bool:
    return bool(bound.size) and bool((bound == bound.flat[0]).all())


def _number(one: Any) -> int | float | None:
    number: int | float = int(one) if one.dtype.kind == "b" else one.item()
    return None if math.isinf(number) else number


def bounds_of_leaf(written: list[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> LeafBounds:
    """What `described` wrote, for kept values of a layout.

    Raises:
        ValueError: It does not fit the layout.
    """
    arrays = []
    for bound, unbounded in zip(written, (-np.inf, np.inf), strict=True):
        if bound is None or isinstance(bound, (int, float)):
            array = np.asarray(unbounded if bound is None else bound)
        else:
            array = np.asarray([unbounded if one is None else one for one in bound]).reshape(shape)
        if array.dtype.kind not in "fiu":  # integers that no dtype holds
            raise ValueError("these are no bounds")
        arrays.append(array)
    return LeafBounds(dtype, shape, *arrays)
