"""Which stored transitions a stray call of the training env has cut, for the hop into the learner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .format import StreamKey
from .result import Explanation
from .sampled import Ints, Sampled
from .strays import Stray, crossed, joins, overwritten

__all__ = ["Crossings"]

#: Stray calls that a report names one by one.
_NAMED = 20

Place = tuple[StreamKey, int, int]


class Crossings:
    """Collects, for each stray call, the transitions that cross it."""

    def __init__(self) -> None:
        self._strays: dict[int, Stray] = {}
        self._rows: dict[int, int] = {}
        self._first: dict[int, str] = {}
        self._shown: set[tuple[int, StreamKey]] = set()

    def cut(self, sampled: Sampled, row: int, place: Place) -> tuple[Explanation, ...]:
        """Why a transition differs, if a stray call came before it, or behind it and before it was stored."""
        if not sampled.has_strays:
            return ()
        number, later = int(sampled.columns["stray"][row]), int(sampled.columns["stray_after"][row])
        if not number and not later:
            return ()
        sentence = joins(place[0].env, sampled.place_before_stray(row), place[1:]) if number else overwritten(place[0].env, place[1:])
        number = number or later
        self._rows[number] = self._rows.get(number, 0) + 1
        self._first.setdefault(number, sentence)
        self._shown.add((number, place[0]))
        return Explanation("SL501", str(self._stray(sampled, number))), Explanation("SL501", sentence)

    def uncut(self, sampled: Sampled, at: Ints, different: Ints, marked: npt.NDArray[np.bool_]) -> Iterator[tuple[Place, str]]:
        """The stray calls that don't show in the transitions around them, and after which the trainer was not told either.

        Args:
            sampled: What the transitions are found in.
            at: Their rows there.
            different: Which of them differ.
            marked: Which say whether they begin an episode, so that an equal one says that the trainer was told.
        """
        if not sampled.has_strays:
            return
        rest = ~marked
        rest[different] = False
        for row in at[rest & (sampled.columns["stray"][at] > 0)].tolist():
            number = int(sampled.columns["stray"][row])
            stray, (key, episode, step) = self._stray(sampled, number), sampled.place(row)
            if stray.handed_over or (number, key) in self._shown:
                continue
            self._rows.setdefault(number, 0)
            yield (key, episode, step - 1), f"{stray}, and nobody told the trainer"

    def _stray(self, sampled: Sampled, number: int) -> Stray:
        if number not in self._strays:
            known = sampled.windows[0].ledger.meta.get("strays", [])
            # A journal whose recorder was killed does not say.
            unknown = Stray(0, 0, 0, "a call from outside of the trainer", "an unknown place", True)
            self._strays[number] = Stray(*known[number - 1]) if number <= len(known) and known[number - 1] else unknown
        return self._strays[number]

    def notes(self, known: Sequence[Sequence[Any]]) -> list[str]:
        """A sentence for each stray call that is a difference, and one about those that are none.

        Args:
            known: All stray calls, as the ledger of the vector tap has them.
        """
        sentences = []
        for number in sorted(self._rows)[:_NAMED]:
            stray, rows = self._strays[number], self._rows[number]
            sentences.append("; ".join([str(stray), *([self._first[number]] if number in self._first else []), crossed(rows, stray)]))
        more = len(self._rows) - _NAMED
        harmless = [Stray(*one) for number, one in enumerate(known, 1) if one and number not in self._rows]
        return [
            *sentences,
            *([f"... and {more:,} more such calls"] if more > 0 else []),
            *([f"{harmless[0]}{_others(len(harmless) - 1)}; no stored transition crosses it"] if harmless else []),
        ]


def _others(number: int) -> str:
    return f", and {number:,} such calls more" if number else ""
