"""The processes of an algorithm, and how long they are waited for."""

from __future__ import annotations

import time

__all__ = ["TIMEOUT", "Deadline"]

#: Seconds in which processes and nodes have to answer; one that takes longer is left out, and that is said.
TIMEOUT = 120.0

#: Bytes that are moved or compared in a second at the very least: more of them have longer.
_PACE = 1 << 20

#: Seconds that are left to whoever is asked behind one that took all of the time: its answer may be there already.
_LEAST = 5.0


class Deadline:
    """When waiting for Ray ends: one for all that is waited for together, so that what doesn't come is not waited for again and again.

    Args:
        size: Bytes that are moved or compared meanwhile.
    """

    def __init__(self, size: int = 0) -> None:
        self._until = time.monotonic() + TIMEOUT + size / _PACE

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return max(_LEAST, self._until - time.monotonic())
