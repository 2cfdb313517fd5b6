"""A space made again from what a ledger says of it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from .digest import SpaceDigest
from .errors import LedgerError

__all__ = ["space_of"]


def space_of(description: dict[str, Any]) -> gymnasium.Space[Any]:
    """A space of this description, whatever its bounds were.

    Raises:
        LedgerError: It has parts that a description does not tell.
    """
    space = _tree(description["leaves"]) if "leaves" in description else _leaf(description)
    if SpaceDigest(space).description != description:
        raise LedgerError(
            f"transitions with a space of the type {description['type']} can't be recorded: use Box, Discrete, or Dicts of them."
        )
    return space


def _leaf(one: dict[str, Any]) -> gymnasium.Space[Any]:
    kind = one["type"]
    if kind == "Box":
        dtype = np.dtype(one["dtype"])
        low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (0, 1) if dtype.kind == "b" else (-np.inf, np.inf)
        return spaces.Box(low, high, one["shape"], dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(one["n"], start=one["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.array(one["nvec"]), dtype=np.dtype(one["dtype"]).type)
    if kind == "MultiBinary":
        return spaces.MultiBinary(one["shape"])
    if kind == "Text":
        return spaces.Text(one["max_length"])
    raise LedgerError(f"transitions with a space of the type {kind} can't be recorded: use Box, Discrete, or Dicts of them.")


def _tree(leaves: list[Any]) -> gymnasium.Space[Any]:
    """A Dict or Tuple of leaves, each with the keys that lead to it."""
    if len(leaves) == 1 and not leaves[0][0]:
        return _leaf(leaves[0][1])
    parts: dict[Any, list[Any]] = {}
    for (key, *path), one in leaves:
        parts.setdefault(key, []).append([path, one])
    made = {key: _tree(part) for key, part in parts.items()}
    return spaces.Tuple(list(made.values())) if list(made) == list(range(len(made))) else spaces.Dict(made)
