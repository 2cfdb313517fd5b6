"""A difference as a card of the HTML report: the steps around it, unequal elements, plots and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..result import Difference, Explanation
from . import pictures
from .beside import MARK, cell
from .context import Context, Recorded, Row
from .text import unexplained, what, where
from .values import Unequal, Value, unequal_elements, unequal_leaves

__all__ = ["Budget", "Card", "Pictures", "Plot", "cards", "cause"]

#: Elements, components and pictures that a card has at most.
_ELEMENTS, _COMPONENTS, _IMAGES = 8, 4, 2

#: Elements up to which a leaf is one of components, and not of pixels.
_FEW = 1024

#: Characters of a sentence.
_SENTENCE = 600


@dataclass
class Budget:
    """What may still be drawn, so that a report stays small.

    Attributes:
        plots: Number of plots.
        pictures: Characters of pictures.
    """

    plots: int = 45
    pictures: int = 700_000


@dataclass(frozen=True)
class Plot:
    """A component over the steps: its name, and the plot."""

    name: str
    svg: str


@dataclass(frozen=True)
class Pictures:
    """An image on both sides and their difference.

    Attributes:
        name: ``obs["camera"]``.
        shown: A caption and a URI for each picture.
        width: Of each in pixels.
        note: What else there is to say.
    """

    name: str
    shown: tuple[tuple[str, str], ...]
    width: int
    note: str


@dataclass(frozen=True)
class Card:
    """One difference.

    Attributes:
        number: From 1.
        difference: The difference.
        place: Where it is.
        sentence: What it is.
        explanations: What may be behind it.
        unexplained: What is said where there are none.
        context: The steps around it.
        cells: For each row of the context and each tap, the texts of its fields and whether they differ.
        unequal: The first elements that differ.
        unequal_more: Number of further ones.
        plots: Components over the steps.
        images: Image observations.
        left_out: What is not drawn, and why; or empty.
    """

    number: int
    difference: Difference
    place: str
    sentence: str
    explanations: tuple[Explanation, ...]
    unexplained: str
    context: Context
    cells: tuple[tuple[tuple[tuple[str, bool], ...], ...], ...]
    unequal: tuple[Unequal, ...]
    unequal_more: int
    plots: tuple[Plot, ...]
    images: tuple[Pictures, ...]
    left_out: str


def cause(difference: Difference) -> tuple[str, str]:
    """What differences are grouped by: the code of the first explanation, or empty, and what differs."""
    code = difference.explanations[0].code if difference.explanations else ""
    what = {"lost": "events lost", "extra": "events added"}.get(difference.kind, ", ".join(difference.fields))
    return code, what


def cards(recorded: Recorded, differences: Sequence[Difference], most: int, budget: Budget) -> list[Card]:
    """Cards of the first differences: of each cause, then of each environment, then of all."""
    return [_card(number, recorded, one, budget) for number, one in enumerate(_chosen(differences, most), 1)]


def _chosen(differences: Sequence[Difference], most: int) -> list[Difference]:
    causes: dict[Any, int] = {}
    envs: dict[Any, int] = {}
    for number, one in enumerate(differences):
        causes.setdefault((one.hop, *cause(one)), number)
        envs.setdefault((one.hop, one.runner, one.env, one.agent), number)
    order = dict.fromkeys([*causes.values(), *envs.values(), *range(min(most, len(differences)))])
    return [differences[number] for number in sorted(list(order)[:most])]


def _card(number: int, recorded: Recorded, difference: Difference, budget: Budget) -> Card:
    context = recorded.around(difference)
    here, unequal, more, images, drawn, left_out = context.here, list[Unequal](), 0, list[Pictures](), list[Plot](), ""
    if here is not None and None not in here.sides:
        for name, first, second in _differing(here):
            found, count, _ = unequal_leaves(name, first, second, _ELEMENTS - len(unequal))
            unequal, more = unequal + found, more + count - len(found)
        images, left_out = _images(here, context, budget)
        drawn, undrawn = _plots(context, budget)
        left_out = "; ".join(filter(None, [left_out, undrawn]))
    cells = tuple(tuple(_cell(row, tap) for tap in range(len(context.taps))) for row in context.rows)
    sentence = what(difference)
    if here is not None and difference.kind == "changed":  # the table has the values
        sentence = f"{', '.join(difference.fields)} differ{'s' if len(difference.fields) == 1 else ''}"
    return Card(
        number,
        difference,
        where(difference),
        sentence if len(sentence) <= _SENTENCE else f"{sentence[:_SENTENCE]}...",
        difference.explanations,
        unexplained(difference),
        context,
        cells,
        tuple(unequal),
        more,
        tuple(drawn),
        tuple(images),
        left_out,
    )


def _cell(row: Row, tap: int) -> tuple[tuple[str, bool], ...]:
    return () if row.left_out else tuple((text.removeprefix(MARK), text.startswith(MARK)) for text in cell(row, tap))


def _differing(row: Row) -> Iterator[tuple[str, Value, Value]]:
    """The fields of a row that differ, with both values."""
    first, second = row.sides[:2]
    assert first is not None
    assert second is not None
    for name in first.values:
        if name in row.differ and name in second.values:
            yield name, first.values[name], second.values[name]


def _images(here: Row, context: Context, budget: Budget) -> tuple[list[Pictures], str]:
    found, left_out = list[Pictures](), 0
    for name, first, second in _differing(here):
        for one, other in zip(first.leaves, second.leaves):
            before, after = one.value, other.value
            if not pictures.is_image(before) or not pictures.is_image(after) or before.shape != after.shape:
                continue
            unequal = unequal_elements(before, after)
            if not unequal.any():
                continue
            (shown, apart), (shown_after, _) = pictures.picture(before), pictures.picture(after)
            uris = [pictures.data_uri(pixels) for pixels in (shown, shown_after, pictures.difference(before, after))]
            if len(found) == _IMAGES or (size := sum(map(len, uris))) > budget.pictures:
                left_out += 1
                continue
            budget.pictures -= size
            captions = (context.taps[0], context.taps[1], "where they differ")
            note = f"{int(unequal.sum()):,} of {unequal.size:,} elements differ"
            note += f"; one pixel in {apart} is shown, both ways" if apart > 1 else ""
            found.append(Pictures(f"{name}{one.path}", tuple(zip(captions, uris)), shown.shape[1], note))
    return found, f"{left_out} more image{'s' * (left_out > 1)} of it, to keep this file small" if left_out else ""


def _plots(context: Context, budget: Budget) -> tuple[list[Plot], str]:
    """Components that differ at the place, over the steps around it."""
    from . import plots  # matplotlib, which an extra brings

    here = context.here
    assert here is not None
    rows = [row for row in context.rows if not row.left_out]
    drawn, left_out = list[Plot](), 0
    for name, first, second in _differing(here):
        components = [("reward", -1, ())] if name == "reward" else list(_components(name, first, second))
        for label, leaf, element in components:
            if len(drawn) == _COMPONENTS or not budget.plots:
                left_out += 1
                continue
            budget.plots -= 1
            one, other = (_series(rows, side, name, leaf, element) for side in (0, 1))
            labels = [f"{row.step}" if row.episode >= 0 else "" for row in rows]
            svg = plots.component(labels, one, other, [row.here for row in rows], (context.taps[0], context.taps[1]))
            drawn.append(Plot(label, svg))
    return drawn, f"plots of {left_out:,} more component{'s' * (left_out > 1)} that differ{'s' * (left_out == 1)}" if left_out else ""


def _components(name: str, first: Value, second: Value) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    for number, (one, other) in enumerate(zip(first.leaves, second.leaves)):
        a, b = one.value, other.value
        if isinstance(a, str) or isinstance(b, str) or a.shape != b.shape or a.dtype != b.dtype or pictures.is_image(a) or a.size > _FEW:
            continue
        for place in np.argwhere(unequal_elements(a, b)).tolist():
            element = f"[{', '.join(map(str, place))}]" if place else ""
            yield f"{name}{one.path}{element}", number, tuple(place)


def _series(rows: Sequence[Row], side: int, name: str, leaf: int, element: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """One component of one side over the rows; NaN where that side has none."""
    series = np.full(len(rows), np.nan)
    for number, row in enumerate(rows):
        there = row.sides[side]
        value = there.values.get(name) if there is not None else None
        if value is None:
            continue
        if leaf < 0:
            series[number] = float(value.text)
        elif leaf < len(value.leaves) and not isinstance(array := value.leaves[leaf].value, str):
            series[number] = float(array[element])
    return series
