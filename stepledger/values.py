"""What a side has in a field: the kept value of each leaf, and what a report prints of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .digest import MISSING_NUMBER
from .format import RESET, Meta, window_of
from .ledger import Stream

__all__ = ["NO_VALUES", "LeafPair", "differing", "kept", "leaf_name", "texts", "unequal", "why_unkept"]

#: Elements from which on an array is long, and elements that differ of which a report prints so many.
_LONG, _SHOWN = 64, 4

#: Characters of a text that a report prints, of those before the first one that differs, and of the name of a leaf.
_TEXT, _BEFORE, _NAME = 300, 20, 80

#: Why it can't be told how values differ, of a tap that never keeps them.
NO_VALUES = "how observations or actions differ can't be told: the tap {!r} keeps no values"

Columns = dict[str, npt.NDArray[Any]]


class LeafPair(NamedTuple):
    """The kept values of both sides in one leaf of an observation or an action.

    Attributes:
        number: Of the leaf.
        name: How it is reached from the value's name; empty where there is no other one.
        first: On the first side, an array or a text.
        second: On the second.
    """

    number: int
    name: str
    first: Any
    second: Any


def kept(stream: Stream, field: str, i: int) -> list[Any]:
    """The kept value of each leaf of an observation or an action, an array or a text; nothing where it was not kept."""
    which = {"obs": "values_obs_", "action": "values_act_"}[field]
    row = stream.row(i)
    if row is None:
        return []
    return [column[row] for leaf, column in sorted(stream.values.items(), key=_leaf_order) if leaf.startswith(which)]


def differing(first: list[Any], second: list[Any]) -> list[int]:
    """The leaves in which two kept values differ in any bit, as their digests do."""
    return [at for at, (one, other) in enumerate(zip(first, second)) if _differ(one, other)]


def unequal(field: str, sides: tuple[tuple[Stream, int], tuple[Stream, int]], meta: Meta) -> tuple[list[LeafPair], bool] | None:
    """The leaves in which the kept values of two events differ, and whether there are others; `None` where a side has kept none.

    Args:
        field: ``"obs"`` or ``"action"``.
        sides: Of both, the stream and the index of the event.
        meta: Of the first side's ledger.
    """
    first, second = (kept(stream, field, i) for stream, i in sides)
    if not first or len(first) != len(second):
        return None
    differ, names = differing(first, second), _leaf_names(field, meta, len(first))
    return [LeafPair(at, names[at], first[at], second[at]) for at in differ], len(differ) < len(first)


def why_unkept(first: Meta, second: Meta) -> str:
    """Why the values of both sides are not there to tell how they differ, and what to do; from the metas of their ledgers."""
    lacking = [meta for meta in (first, second) if not meta["keep_values"]]
    if not lacking:
        windows = [window for meta in (first, second) if (window := window_of(meta))]
        last = f"the last {min(windows):,} events alone" if windows else "some events"
        return f"how some observations or actions differ can't be told: values of {last} were there when they were compared"
    for meta in lacking:
        if meta["tap"] not in ("env", "vector"):
            return NO_VALUES.format(meta["tap"])
        if "handed_space" in meta:
            return f"{NO_VALUES.format(meta['tap'])} with Stable-Baselines3's LedgerCallback"
    where = "both sides" if len(lacking) == 2 else f"the tap {lacking[0]['tap']!r} too"
    return f"how observations or actions differ can't be told: record {where} with keep_values=True"


def _leaf_names(field: str, meta: Meta, leaves: int) -> list[str]:
    paths = meta["leaves"]["obs" if field == "obs" else "act"]
    return [leaf_name(path) for path in paths] if len(paths) == leaves > 1 else [""] * leaves


def texts(field: str, sides: tuple[tuple[Stream, Columns, int], tuple[Stream, Columns, int]], meta: Meta) -> tuple[str, str]:
    """What both sides have in a field; of a value with several parts, those that differ.

    Args:
        field: Its name.
        sides: Of both, the stream, its columns as they are compared, and the index of the event.
        meta: Of the first side's ledger.
    """
    first, second = (_text(*side, field, meta) for side in sides)
    if first == [] or second == []:  # nothing can be said of what one side alone has kept
        return (first if isinstance(first, str) else ""), (second if isinstance(second, str) else "")
    if isinstance(first, str) or isinstance(second, str) or len(first) != len(second):
        return _joined(first), _joined(second)
    differ = differing(first, second)
    if first and not differ:  # kept values have the shape of the space
        return _joined(first), "the same values in another shape or number"
    labels = [f"{field}{name} = " if name else "" for name in _leaf_names(field, meta, len(first))]
    found = [[labels[at] + text for text in _both(first[at], second[at])] for at in differ]
    return ", ".join(one for one, _ in found), ", ".join(other for _, other in found)


def leaf_name(path: Sequence[Any]) -> str:
    """How a leaf is reached from the value's name: ``["camera"][0]``."""
    name = "".join(f'["{key}"]' if isinstance(key, str) else f"[{key}]" for key in path)
    return name if len(name) <= _NAME else f"{name[:_NAME]}..."


def _text(stream: Stream, data: Columns, i: int, field: str, meta: Meta) -> str | list[Any]:
    """What a side has in a field; of an observation or an action the kept value of each leaf."""
    value = data[field][i]
    if field == "kind":
        return "reset" if value == RESET else "step"
    if field in ("terminated", "truncated"):
        return str(bool(value))
    if field == "reward":
        return "" if data["kind"][i] == RESET else str(np.array([value]).view(meta["reward_dtype"])[0])
    if value == MISSING_NUMBER:
        return "nothing"
    return kept(stream, field, i)


def _joined(text: str | list[Any]) -> str:
    return text if isinstance(text, str) else ", ".join(map(_in_one_line, text))


def _differ(one: Any, other: Any) -> bool:
    """Whether two kept values of a leaf are not the same: texts, or arrays of one dtype and shape."""
    return bool(one != other) if isinstance(one, str) else bool(_unequal(one, other).any())


def _unequal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which elements differ in any bit, as their digests do."""
    first, second = (np.ascontiguousarray(value).reshape(-1, 1).view(np.uint8) for value in (one, other))
    unequal: npt.NDArray[np.bool_] = (first != second).any(axis=1).reshape(one.shape)
    return unequal


def _both(one: Any, other: Any) -> tuple[str, str]:
    """Two kept values of a leaf as a report prints them; of a long array the elements that differ, and not its beginning and end."""
    if isinstance(one, str) and isinstance(other, str):
        alike = next((at for at, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))
        begin = max(0, alike - _BEFORE) if max(len(one), len(other)) > _TEXT else 0
        return _cut(one, begin), _cut(other, begin)
    if one.size <= _LONG:
        return _in_one_line(one), _in_one_line(other)
    places = np.argwhere(_unequal(one, other)).tolist()
    changes = [f"{place}: {one[tuple(place)]} -> {other[tuple(place)]}" for place in places[:_SHOWN]]
    more = ["..."] if len(places) > _SHOWN else []
    changed = f"{len(places):,} of {one.size:,} elements changed"
    return f"an array of shape {one.shape}", f"it with {changed}: {', '.join(changes + more)}"


def _in_one_line(value: Any) -> str:
    """The value with as many digits as tell it from its neighbours, so that the least difference shows."""
    if isinstance(value, str):
        return _cut(value)
    return " ".join(np.array2string(value, separator=", ", threshold=_LONG, floatmode="unique").split())


def _cut(text: str, begin: int = 0) -> str:
    """A part of a text, short enough for a report; dots stand for what is left out."""
    return ("..." if begin else "") + text[begin : begin + _TEXT] + ("..." if len(text) > begin + _TEXT else "")


def _leaf_order(item: tuple[str, Any]) -> int:
    return int(item[0].rsplit("_", 1)[1])
