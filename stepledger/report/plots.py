"""Plots as SVG that takes the colours of the page it is put into; drawn by matplotlib (extra ``report``)."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
import matplotlib.figure
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

__all__ = ["BINS", "bins", "component", "progress"]

#: Points of a line; more are means over parts.
BINS = 60

Floats = npt.NDArray[np.float64]

#: Colours that are replaced by those of the page, so that one plot is for light and dark.
_INK, _FAINT, _BAD, _SIDES = "#010203", "#040506", "#070809", ("#0a0b0c", "#0d0e0f", "#101112", "#131415")
_VARIABLES = {_INK: "--ink", _FAINT: "--line", _BAD: "--bad", **{colour: f"--side-{number}" for number, colour in enumerate(_SIDES)}}

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters stay letters: small, sharp, and read by screen readers
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.formatter.useoffset": False,
}

_numbers = itertools.count()


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """Our style, and nothing of a person's own, whose ``text.usetex`` takes a LaTeX that may not be here."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def component(labels: Sequence[str], first: Floats, second: Floats, here: Sequence[bool], names: tuple[str, str]) -> str:
    """One component on both sides over some steps, and the difference of the second from the first below.

    Args:
        labels: Of the steps, n.
        first: ``(n,)``; NaN where a side has no value.
        second: ``(n,)``.
        here: Which steps are the place that the plot is about.
        names: Of the sides.

    Returns:
        An ``<svg>`` element.
    """
    with _style():
        figure = matplotlib.figure.Figure(figsize=(3.5, 2.3))
        above, below = figure.subplots(2, 1, height_ratios=[3, 1.3])
        at = np.arange(len(labels))
        for axes in (above, below):
            for number in np.flatnonzero(here):
                axes.axvspan(number - 0.5, number + 0.5, color=_FAINT, alpha=0.5, linewidth=0)
        with np.errstate(all="ignore"):
            above.plot(at, _finite(first), color=_SIDES[0], linewidth=2.5, marker="o", markersize=4, label=names[0])
            above.plot(at, _finite(second), color=_SIDES[1], linewidth=1.2, marker="x", markersize=5, label=names[1])
            difference = _finite(second) - _finite(first)
        below.axhline(0, color=_FAINT, linewidth=0.8)
        below.bar(at, np.nan_to_num(difference), width=0.5, color=_BAD)
        most = float(np.max(np.abs(np.nan_to_num(difference)), initial=0.0)) or 1.0
        below.set_ylim(-1.15 * most, 1.15 * most)
        below.set_yticks([-most, most], [f"{-most:.2g}", f"+{most:.2g}"])
        below.set_xticks(at, labels)
        above.set_xticks([])
        for axes in (above, below):
            axes.set_xlim(-0.6, len(labels) - 0.4)
        above.locator_params(axis="y", nbins=4)
        above.tick_params(length=0)
        below.tick_params(length=0)
        figure.subplots_adjust(left=0.25, right=0.98, top=0.97, bottom=0.12, hspace=0.15)
        return _svg(figure, f"{names[0]} and {names[1]} over the steps {labels[0]} to {labels[-1]}, and their difference")


def progress(title: str, sides: Sequence[tuple[str, Floats, Floats]]) -> str:
    """A quantity of episodes over a run, as each tap saw it: a point for each episode, or a line of means where there are many.

    Args:
        title: What it is.
        sides: For each tap its name, where episodes ended, and the quantity.

    Returns:
        An ``<svg>`` element.
    """
    with _style():
        figure = matplotlib.figure.Figure(figsize=(5.6, 2.6))
        axes: Axes = figure.subplots()
        for number, (name, ends, values) in enumerate(sides):
            # The first is broad, those behind it are thin and on top of it: equal lines are both seen.
            single = len(ends) <= BINS  # episodes of several envs: a line from one to the other means nothing
            axes.plot(
                ends,
                _finite(values),
                color=_SIDES[number % len(_SIDES)],
                linestyle="none" if single else "-",
                linewidth=max(1.0, 5.0 - 2.5 * number),
                marker="o" if single else None,
                markersize=max(2.0, 7.0 - 3.0 * number),
                label=name,
                alpha=0.5 if number == 0 and len(sides) > 1 else 1.0,
            )
        axes.set_title(title, loc="left")
        axes.set_xlabel("step of the env")
        axes.locator_params(nbins=5)
        axes.tick_params(length=0)
        axes.grid(axis="y", color=_FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
        figure.subplots_adjust(left=0.12, right=0.98, top=0.88, bottom=0.19)
        return _svg(figure, f"{title} over the run, as the taps {', '.join(name for name, _, _ in sides)} saw it")


def bins(ends: Floats, values: Floats, most: int = BINS) -> tuple[Floats, Floats]:
    """Means over at most so many equal parts of a run; points as they are where there are no more."""
    order = np.argsort(ends, kind="stable")
    ends, values = ends[order], values[order]
    if len(ends) <= most:
        return ends, values
    edges = np.linspace(ends[0], ends[-1], most + 1)
    part = np.clip(np.searchsorted(edges, ends, side="right") - 1, 0, most - 1)
    count = np.bincount(part, minlength=most)
    there = count > 0
    with np.errstate(all="ignore"):
        means = np.bincount(part, weights=values, minlength=most)[there] / count[there]
    return (edges[:-1] + np.diff(edges) / 2)[there], means


def _finite(values: Floats) -> Floats:
    """Without what no axis can show."""
    return np.where(np.abs(values) < 1e30, values, np.nan)


def _svg(figure: matplotlib.figure.Figure, label: str) -> str:
    """The figure as an element: without what only a file needs, with names that no other plot of the page has."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": f"stepledger-{next(_numbers)}"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg)([^>]*?) (?:width|height)="[^"]*"([^>]*?) (?:width|height)="[^"]*"', r"\1\2\3", text, count=1)
    text = re.sub(r"<[^>]*>", lambda tag: _short_tag(tag[0]), text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    text = re.sub(r">\s+<", "><", re.sub(r"\s*\n\s*", " ", text))
    return text.replace("<svg", f'<svg class="plot" role="img" aria-label="{_attribute(label)}"', 1)


def _short_tag(tag: str) -> str:
    """A tag without what the page knows better, with as many digits as a screen shows."""
    tag = re.sub(r' id="[\w.]*_\d+"| xmlns(:xlink)?="[^"]*"| version="[^"]*"| transform="rotate\(-?0 [^"]*"', "", tag)
    tag = re.sub(r"font-family: [^;\"]*;? ?|; font-family: [^;\"]*|font: [^;\"]*;? ?", "", tag)
    return re.sub(r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), tag)


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
