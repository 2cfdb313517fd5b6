"""The report as JSON, of the schema in ``schema.json`` beside this module."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..result import Comparison

__all__ = ["refusal", "report"]


def report(comparison: Comparison) -> str:
    """`Comparison.to_dict`; only ASCII, so that nothing in it can reach a terminal but as an escape."""
    return json.dumps(comparison.to_dict(), indent=2)


def refusal(sentence: str) -> str:
    """Why there is nothing to report."""
    return json.dumps({"error": sentence, "exit_status": 2})
