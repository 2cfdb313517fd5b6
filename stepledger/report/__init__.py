"""Reports of a comparison, one module per output format: `text`, `json`, `junit`, `sarif`, `github`; and `html`, which is a file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..result import Comparison

__all__ = ["FORMATS", "refusal", "render"]

#: What ``stepledger compare --format`` takes.
FORMATS = ("text", "json", "junit", "sarif", "github")


def render(comparison: Comparison, output_format: str, source: str = "") -> str:
    """A comparison in one of the formats.

    Args:
        comparison: The result.
        output_format: One of `FORMATS`.
        source: The path or URI of what was compared, for formats that say so.
    """
    module = import_module(f".{output_format}", __name__)
    return str(module.report(comparison, source) if output_format in ("junit", "sarif") else module.report(comparison))


def refusal(sentence: str, output_format: str) -> str:
    """Why there is nothing to report, in one of the formats; empty for text, where standard error says it."""
    return "" if output_format == "text" else str(import_module(f".{output_format}", __name__).refusal(sentence))
