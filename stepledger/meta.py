"""The meta of a ledger, which may come from anywhere: whether it is what `stepledger.format` says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .errors import LedgerError
from .format import FIRST, FORMAT, REWARD_BITS, WINDOWED, Meta, event_dtype, window_of

__all__ = ["checked_meta", "is_space"]


def checked_meta(meta: Any) -> Meta:
    """The meta of a ledger, as far as reading depends on it.

    Raises:
        LedgerError: It is not one, or of another version.
    """
    if not isinstance(meta, dict) or "format" not in meta:
        raise LedgerError("this is not a ledger of stepledger: name the files that were recorded.")
    if type(meta["format"]) is not int or meta["format"] not in (FORMAT, WINDOWED):
        known = f"{FIRST}, {FORMAT} or {WINDOWED}"
        raise LedgerError(f"format {meta['format']!r} is not the {known} that this version reads: read it with the version that wrote it.")
    try:
        ok = _is_meta(meta)
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError):
        ok = False
    if not ok:
        raise LedgerError("its meta is damaged: record again.")
    return meta


#: Entries that reading and comparing depend on, besides those that `_is_meta` looks into.
_ENTRIES: Meta = {"id": str, "tap": str, "digest": str, "closed": bool, "keep_values": int, "versions": dict}
_OPTIONAL_ENTRIES: Meta = {
    "run": str,
    "stopped": str,
    "conflicts_with": str,
    "in_flight": bool,
    "exited": bool,
    "flags": str,
    "group": str,
    "each_step": str,
    "capacity": int,
    "gamma": (int, float),
    "replays": bool,
    "whole_episodes": bool,
    "ended": (int, float),
    "notes": list,
    "taps": list,
    "runners": list,
    "begins": list,
    "horizon": int,
    "raised": list,
    "strays": list,
    "checkpoints": list,
    "handed_space": dict,
    "time_limit": int,
    "resets": list,
    "checks": dict,
    "bounds": dict,
}


def _is_meta(meta: Meta) -> bool:
    """Whether the entries are what they must be; may raise almost anything where they are not."""
    keys, columns, values, fields = meta["stream_keys"], meta["columns"], meta["values"], meta.get("fields", {})
    if not all(isinstance(part, dict) for part in (columns, values, fields)):
        return False
    own = event_dtype("<f4", {}).names or ()
    return (
        all(isinstance(meta.get(name), kind) for name, kind in _ENTRIES.items())
        and all(isinstance(meta[name], kind) for name, kind in _OPTIONAL_ENTRIES.items() if name in meta)
        and all(isinstance(one, str) for name in ("notes", "taps") for one in meta.get(name, []))
        and all(isinstance(one, int) for name in ("raised", "runners") for one in meta.get(name, []))
        and all(_is_stray(stray) for stray in meta.get("strays", []))
        and all(len(row) == len(keys) and all(type(number) is int and number >= 0 for number in row) for row in meta.get("checkpoints", []))
        and all(isinstance(path, list) for which in ("obs", "act") for path in meta["leaves"][which])
        and (isinstance(meta["keep_values"], bool) if meta["format"] == FORMAT else 1 < window_of(meta) < 1 << 62)
        and meta["reward_dtype"] in REWARD_BITS
        and 0 <= meta["created"] < 1e11
        and all(is_space(meta[name]) for name in ("observation_space", "action_space"))
        and all(name.isidentifier() and name not in own and descr in ("<u8", "<i8") for name, descr in columns.items())
        and (meta["tap"] != "learner" or {"h_next", "h_id", "t"} <= columns.keys())
        and isinstance(keys, list)
        and all(_is_key(key) for key in keys)
        and len({tuple(key) for key in keys}) == len(keys)
        and len(meta.get("begins", keys)) == len(keys)
        and all(_is_begin(begin) for begin in meta.get("begins", []))
        and all(_is_layouts(values.get(which)) for which in ("obs", "act"))
        and _is_looked_at(meta)
        and all(_is_said_of_field(said, {*own, *columns}) for said in fields.values())
    )


def _is_looked_at(meta: Meta) -> bool:
    """Whether the entries that `stepledger.lints` reads are what they must be."""
    checks, bounds = meta.get("checks", {"calls": 0, "made": [], "found": []}), meta.get("bounds")
    return (
        all(type(number) is int and number >= 0 for number in [meta.get("time_limit", 0), *meta.get("resets", [])])
        and len(meta.get("resets", [0] * 5)) == 5
        and type(checks["calls"]) is int
        and all(isinstance(code, str) for code in checks["made"])
        and all([type(part) for part in row] == [str, int, int, int, int, str] for row in checks["found"])
        and all(0 <= row[1] < len(meta["stream_keys"]) and row[4] > 0 for row in checks["found"])
        and (bounds is None or all(_are_bounds(bounds[which], meta["values"][which]) for which in ("obs", "act")))
    )


def _are_bounds(written: Any, layouts: list[Any]) -> bool:
    return len(written) == len(layouts) and all(
        one is None or (layout is not None and all(_is_bound(bound, layout[1]) for bound in one) and len(one) == 2)
        for one, layout in zip(written, layouts)
    )


def _is_bound(bound: Any, shape: list[int]) -> bool:
    numbers = bound if isinstance(bound, list) else [bound]
    return (not isinstance(bound, list) or len(bound) == math.prod(shape)) and all(
        one is None or (type(one) is int and abs(one) < 1 << 64) or (type(one) is float and math.isfinite(one)) for one in numbers
    )


def is_space(description: Any) -> bool:
    """Whether this describes a space; may raise `TypeError`, `ValueError` or `RecursionError` where it doesn't."""
    if not isinstance(description, dict) or not isinstance(description.get("type"), str):
        return False
    return all(isinstance(path, list) and is_space(leaf) for path, leaf in description.get("leaves", []))


def _is_said_of_field(said: Any, columns: set[str]) -> bool:
    return (
        isinstance(said, dict)
        and all(said.values())
        and all(isinstance(text, str) for text in said.values())
        and said.get("column", "kind") in columns
    )


def _is_stray(stray: Any) -> bool:
    return isinstance(stray, list) and [type(part) for part in stray] == [int, int, int, str, str, bool]


def _is_key(key: Any) -> bool:
    return isinstance(key, list) and [type(part) for part in key] == [int, int, str, int]


def _is_begin(begin: Any) -> bool:
    """Whether these are numbers of events and of an episode and a step, the step -1 where no event came before."""
    if not isinstance(begin, list) or [type(part) for part in begin] != [int, int, int]:
        return False
    events, episode, step = begin
    return all(0 <= number < 1 << 62 for number in (events, episode, step + 1))  # columns are int64, and count on from here


def _is_layouts(layouts: Any) -> bool:
    if not isinstance(layouts, list):
        return False
    try:
        for layout in layouts:
            if layout is not None:
                descr, shape = layout
                dtype = np.dtype(descr)
                if (
                    dtype.kind not in "biufcUS"
                    or not dtype.itemsize
                    or len(shape) > 31
                    or not all(type(n) is int and n >= 0 for n in shape)
                ):
                    return False
                if dtype.itemsize * math.prod(max(n, 1) for n in shape) >= 1 << 48:
                    return False
    except (TypeError, ValueError):
        return False
    return True
