"""Whether a value that was found at another place says anything: where few values take turns, each is at some place nearby by chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["AROUND", "collisions", "common", "is_usual"]

#: Events before and after a place by which it is judged how often values come again there.
AROUND = 64

#: Of values around a place, the share of those that are there more than once from which on finding one among them says little.
_REPEATED = 0.25


def common(values: npt.NDArray[Any], value: int) -> bool:
    """Whether a value may be among these by chance: it is there several times, or many of them are.

    Args:
        values: Digests or bits of what is around a place.
        value: The one that was found among them.
    """
    if int((values == value).sum()) > 1:
        return True
    return len(values) > 0 and 1 - len(np.unique(values)) / len(values) > _REPEATED


def is_usual(values: npt.NDArray[Any], value: int) -> bool:
    """Whether a value that needs no other place to come from, such as zero, is one of those that take turns here anyway."""
    return bool((values == value).any()) and common(values, value)


def collisions(values: npt.NDArray[Any]) -> float:
    """The share of pairs among these values that are equal: how likely one of them is another one by chance."""
    counts = np.unique(values, return_counts=True)[1]
    pairs = len(values) * (len(values) - 1)
    return float((counts * (counts - 1)).sum() / pairs) if pairs else 0.0
