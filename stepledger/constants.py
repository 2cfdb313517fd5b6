"""The digests of values that are known in advance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .described import space_of
from .digest import SpaceDigest
from .errors import LedgerError
from .format import Meta

__all__ = ["Constants"]

#: Elements of a space of which the digests of constants are computed.
_LARGEST = 1 << 26


class Constants:
    """The digests of values that are known in advance.

    Args:
        meta: Of a ledger: which spaces, and which digest.
    """

    def __init__(self, meta: Meta) -> None:
        self._meta = meta
        self._found: dict[tuple[str, str], int | None] = {}

    def digest(self, field: str, value: float) -> int | None:
        """The digest of an observation or action that is this number everywhere; `None` where its space has no such value.

        Args:
            field: ``"obs"`` or ``"action"``.
            value: The number.
        """
        name = field, str(value)
        if name not in self._found:
            description = self._meta["observation_space" if field == "obs" else "action_space"]
            try:
                self._found[name] = self._digest(description, value)
            except (LedgerError, LookupError, TypeError, ValueError, OverflowError, AssertionError):  # ledgers are not trusted
                self._found[name] = None
        return self._found[name]

    def _digest(self, description: dict[str, Any], value: float) -> int | None:
        leaves = [leaf for _, leaf in description.get("leaves", [([], description)])]
        if sum(math.prod(leaf.get("shape", [])) for leaf in leaves) > _LARGEST:
            return None
        digest = SpaceDigest(space_of(description), self._meta["digest"])
        filled: Any = {}
        for path, layout in zip(digest.paths, digest.layouts):
            if layout is None or (math.isnan(value) and layout[0].kind != "f"):
                return None
            leaf = np.full(layout[1], value, layout[0])
            if not path:
                filled = leaf
                continue
            at = filled
            for key in path[:-1]:
                at = at.setdefault(key, {})
            at[path[-1]] = leaf
        return int.from_bytes(digest.one(filled), "big")
