"""When a block of events is written: what a process that is killed may lose."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .errors import LedgerError

__all__ = ["Flush"]


class Flush(NamedTuple):
    """When a block of events is written.

    Attributes:
        every: At the latest with so many events of the ledger, or with one row of a vector env that has more environments; `None`: with
            `stepledger.recorder.FLUSH_EVENTS`.
        seconds: And with the first event for which the clock is looked at, once the block is so old; `None`:
            `stepledger.recorder.FLUSH_SECONDS`.
    """

    every: int | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, flush_every: Any, flush_seconds: Any) -> Flush:
        """What was passed as ``flush_every`` and ``flush_seconds``.

        Raises:
            LedgerError: One of them is no such number.
        """
        if flush_every is not None:
            if not isinstance(flush_every, (int, np.integer)) or isinstance(flush_every, bool) or not 0 < flush_every < 1 << 62:
                raise LedgerError(f"flush_every={flush_every!r} is no number of events: use 1 or more, or None for the usual one.")
            flush_every = int(flush_every)
        if flush_seconds is not None:
            number = isinstance(flush_seconds, (int, float, np.integer, np.floating)) and not isinstance(flush_seconds, bool)
            if not number or not 0 <= flush_seconds < math.inf:
                raise LedgerError(f"flush_seconds={flush_seconds!r} is no number of seconds: use 0 or more, or None for the usual one.")
            flush_seconds = float(flush_seconds)
        return cls(flush_every, flush_seconds)
