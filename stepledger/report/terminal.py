"""Colours for a terminal; a pipe or a file gets the text as it is."""

from __future__ import annotations

import shutil
import sys

__all__ = ["coloured", "width"]

#: What is highlighted in a report -> how; the last that fits a place wins.
_STYLES = {
    r"^note: .*": "dim",
    r"^(unknown|not compared|warning): .*": "yellow",
    r"\bequal: ": "green",
    r"\b(different|events lost|events added): ": "bold red",
    r"\bnot compared: ": "yellow",
    r"^(runner \d+, )?env \d+.*?, episode \d+, step \d+(?=:)": "bold",
    r"(?<=: )[a-z_, ]+ (differs?)\b": "red",
    r"(?<= )\*[^ ].*?(?=  |$)": "bold red",
    r"^> episode \d+ step \d+": "bold",
    r"\[SL\d+\]": "cyan",
}
#: The verdict, by how it begins.
_VERDICTS = {r"^no difference: .*": "bold green", r"^no difference .*": "bold yellow", r"^\d[\d,]* of [\d,]+ envs? differs? .*": "bold red"}


def width() -> int:
    """Characters in a line of the terminal; where there is none, what is read well in a file."""
    return shutil.get_terminal_size((120, 24)).columns


def coloured(text: str) -> str:
    """A report in colours where standard output is a terminal and rich is installed; else as it is."""
    if sys.stdout is None or not sys.stdout.isatty():
        return text
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:  # it comes with the extras
        return text
    console = Console()
    with console.capture() as capture:
        lines = text.split("\n")
        for number, line in enumerate(lines):
            shown = Text(line)  # no markup: brackets mean themselves
            for pattern, style in {**_STYLES, **(_VERDICTS if number == len(lines) - 1 else {})}.items():
                shown.highlight_regex(pattern, style)
            console.print(shown, soft_wrap=True, highlight=False)
    return capture.get().removesuffix("\n")
