"""The one exception of the package."""

from __future__ import annotations

__all__ = ["LedgerError"]


class LedgerError(ValueError):
    """What was asked for can't be done; the message is one sentence that ends with what to do.

    Raised for settings that can't be recorded (an unsupported space, an unknown autoreset mode) and for ledgers that can't be
    read or compared. It is never raised out of ``reset()`` or ``step()`` of a wrapped environment unless ``on_error="raise"``.
    """
