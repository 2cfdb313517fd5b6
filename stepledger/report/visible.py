"""Text of which nothing is hidden: what comes from a ledger or a path may hold what a terminal would obey."""

from __future__ import annotations

__all__ = ["visible"]


def visible(text: str) -> str:
    r"""The text in one line, with control characters, escape sequences and invisible characters written as ``\x1b``, ``\n``, ``\u202e``.

    Args:
        text: Any; what a terminal shows as it is stays as it is.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape", "backslashreplace").decode() for one in text)
