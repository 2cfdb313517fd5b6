"""What the codes of explanations and warnings are called."""

from __future__ import annotations

from ..codes import CATALOGUE

__all__ = ["title"]


def title(code: str, otherwise: str) -> str:
    """The title of a code; else a text, where the catalogue has no such code (a ledger may be of a later version)."""
    return CATALOGUE[code].title if code in CATALOGUE else otherwise
