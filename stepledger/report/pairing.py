"""One tap's events of one stream, and which of two neighbouring taps' events belong together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy.typing as npt

from ..align import Edit, align, mixed
from ..format import RESET
from ..ledger import Ledger, Stream
from ..strays import UNSEEN
from ..stream_pair import FIELDS
from .values import Value, flag_value, kept_value, reward_value

__all__ = ["Pairing", "Side", "Tap"]

#: Events behind one that is looked for, up to which its neighbours are found with it.
_AHEAD = 8

Columns = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Side:
    """What one tap has at one step.

    Attributes:
        kind: ``"reset"``, ``"step"`` or ``"transition"``.
        values: Field -> what it holds.
        note: What else there is to say, such as how often a transition was learned from.
    """

    kind: str
    values: dict[str, Value]
    note: str = ""


class _Run(NamedTuple):
    """Rows of one kind: from ``row`` on, ``length`` of them; from event ``first`` of the one side and ``second`` of the other."""

    row: int
    first: int
    second: int
    length: int
    kind: str


@dataclass
class Tap:
    """One tap's events of one stream."""

    name: str
    ledger: Ledger
    stream: Stream

    def side(self, at: int) -> Side:
        """What it has at an event (an index into what is left of the stream)."""
        data = self.stream.data
        kind = "reset" if data["kind"][at] == RESET else "step"
        values = {"obs": kept_value(self.ledger, self.stream, "obs", at)}
        if kind == "step":
            values = {
                "action": kept_value(self.ledger, self.stream, "action", at),
                "reward": reward_value(data["h_rew"][at], self.ledger.meta["reward_dtype"]),
                **values,
                **{name: flag_value(data[name][at]) for name in ("terminated", "truncated")},
            }
        return Side(kind, values)

    def place(self, at: int) -> tuple[int, int]:
        """Episode and step of an event."""
        return int(self.stream.columns["episode"][at]), int(self.stream.columns["step"][at])


class Pairing:
    """Which events of two neighbouring taps belong together; found from their beginning on, as far as it was asked for."""

    def __init__(self, first: Tap, second: Tap) -> None:
        self.first, self.second = first, second
        # What was dropped from one side only has no counterpart any more.
        begin = max(first.stream.begin, second.stream.begin)
        self._from = begin - first.stream.begin, begin - second.stream.begin
        self._a, self._b, self.fields = _compared(first, second)
        a, b = ({name: column[start:] for name, column in side.items()} for side, start in zip((self._a, self._b), self._from))
        names = self.fields
        alike = [name for name in ("kind", "action") if name in names]
        like = mixed(*(a[name] for name in alike)), mixed(*(b[name] for name in alike))
        keys = mixed(*(a[name] for name in names)), mixed(*(b[name] for name in names))
        self._lengths = len(keys[0]), len(keys[1])
        self._edits: Iterator[Edit] = align(*keys, like)
        self._runs: list[_Run] = []
        self._whole = False

    def rows(self) -> int:
        """Number of rows found so far."""
        return self._runs[-1].row + self._runs[-1].length if self._runs else 0

    def row_of(self, first: int, second: int) -> int:
        """The row with an event of the first side, or of the second if the first is negative; -1 where there is none."""
        side, index = (0, first - self._from[0]) if first >= 0 else (1, second - self._from[1])
        if index < 0:
            return -1
        while not self._whole and self._ends()[side] <= index + _AHEAD:
            self._more()
        # Runs that this side has nothing of begin where the one behind them does.
        at = bisect_right(self._runs, index, key=lambda one: one.second if side else one.first) - 1
        if at < 0 or (run := self._runs[at]).kind == ("lost" if side else "extra"):
            return -1
        begin = run.second if side else run.first
        return run.row + index - begin if index < begin + run.length else -1

    def pair(self, row: int) -> tuple[int, int]:
        """The events of a row on both sides; -1 where a side has none, both where there is no such row."""
        while not self._whole and self.rows() <= row:
            self._more()
        if not 0 <= row < self.rows():
            return -1, -1
        run = self._runs[bisect_right(self._runs, row, key=lambda one: one.row) - 1]
        at = row - run.row
        first = -1 if run.kind == "extra" else run.first + at + self._from[0]
        return first, -1 if run.kind == "lost" else run.second + at + self._from[1]

    def has(self, first: int, second: int) -> bool:
        """Whether both sides have these events; a negative one is none."""
        return first < len(self.first.stream) and second < len(self.second.stream)

    def differ(self, first: int, second: int) -> frozenset[str]:
        """The fields in which two events that belong together differ."""
        names = [name for name in self.fields if self._a[name][first] != self._b[name][second]]
        if "obs" in names and "by" in self.second.stream.data and self._b["obs"][second] == UNSEEN:
            names.remove("obs")
        return frozenset(names)

    def _ends(self) -> tuple[int, int]:
        """Where both sides go on behind what was found so far."""
        if not self._runs:
            return 0, 0
        run = self._runs[-1]
        return run.first + run.length * (run.kind != "extra"), run.second + run.length * (run.kind != "lost")

    def _more(self) -> None:
        edit = next(self._edits, None)
        first, second = self._ends()
        equal = (self._lengths[0] if edit is None else edit.first) - first
        if equal > 0:
            self._runs.append(_Run(self.rows(), first, second, equal, "equal"))
        if edit is None:
            self._whole = True
        else:
            self._runs.append(_Run(self.rows(), edit.first, edit.second, edit.length, edit.kind))


def _compared(first: Tap, second: Tap) -> tuple[Columns, Columns, list[str]]:
    """The columns of both sides as the comparison takes them, and the fields that it compares; see `stepledger.events`."""
    said = second.ledger.meta.get("fields", {})
    a = {name: first.stream.data[column] for name, column in FIELDS.items()}
    b = {name: second.stream.data[said.get(name, {}).get("column", column)] for name, column in FIELDS.items()}
    if second.ledger.meta.get("flags") == "exclusive":
        a["truncated"] = a["truncated"] & ~a["terminated"]
    return a, b, [name for name in FIELDS if "skip" not in said.get(name, {})]
