"""The steps around a place, as each tap has them; read again from the ledgers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..format import STEP, StreamKey
from ..ledger import Ledger
from ..pairs import group_of, taps_of
from ..resets import RESETS_OF_ALL
from ..result import Difference
from .learned import Learned
from .pairing import Pairing, Side, Tap

__all__ = ["AROUND", "Context", "Recorded", "Row"]

#: Steps before and after a place that are shown.
AROUND = 3

#: Events of a run of them that are shown at its beginning, and at its end.
_RUN = 3

#: The taps that hold events, in the order in which data passes them.
_ORDER = {"env": 0, "vector": 1, "episode": 2}


@dataclass(frozen=True)
class Row:
    """One step, as each tap has it.

    Attributes:
        episode: On the side nearest to the environment that has it; -1 where only a side behind it has it.
        step: Likewise.
        sides: One for each tap; `None` where it has no such event.
        differ: Fields in which two neighbouring sides disagree.
        here: Whether it is (part of) the place that was asked for.
        left_out: This row stands for so many that are left out.
    """

    episode: int
    step: int
    sides: tuple[Side | None, ...] = ()
    differ: frozenset[str] = frozenset()
    here: bool = False
    left_out: int = 0


@dataclass(frozen=True)
class Context:
    """The steps around a place.

    Attributes:
        key: The stream.
        taps: Those that are shown, in the order in which data passes them.
        rows: The steps; none if they can't be shown.
        missing: Why they can't be, or what of them is missing; a sentence, or empty.
    """

    key: StreamKey
    taps: tuple[str, ...]
    rows: tuple[Row, ...] = ()
    missing: str = ""

    @property
    def here(self) -> Row | None:
        """The first row of the place itself."""
        return next((row for row in self.rows if row.here), None)


@dataclass
class Recorded:
    """The ledgers of one run, to look places up in.

    Attributes:
        ledgers: All of them.
        why_not: Why there are none, a sentence; or empty.
    """

    ledgers: Sequence[Ledger]
    why_not: str = ""
    _pairings: dict[tuple[str, str, str, StreamKey], Pairing] = field(default_factory=dict)
    _index: dict[tuple[str, StreamKey], list[Tap]] = field(default_factory=dict)
    _learned: dict[tuple[str, str], Learned] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for ledger in sorted(self.ledgers, key=lambda one: _ORDER.get(one.meta["tap"], -1)):
            if ledger.meta["tap"] in _ORDER:
                for key, stream in ledger.streams.items():
                    at = (ledger.meta.get("group", ""), key)
                    self._index.setdefault(at, []).append(Tap(ledger.meta["tap"], ledger, stream))

    def taps(self, key: StreamKey, group: str = "") -> list[Tap]:
        """The taps that have a stream, but for learners, in the order in which data passes them."""
        return self._index.get((group, key), [])

    def keys(self, group: str = "") -> list[StreamKey]:
        """The streams of all taps but learners."""
        return sorted(key for where, key in self._index if where == group)

    def groups(self) -> list[str]:
        """The groups of ledgers."""
        return sorted({ledger.meta.get("group", "") for ledger in self.ledgers})

    def around(self, difference: Difference, around: int = AROUND) -> Context:
        """The steps around a difference, on both sides of its hop."""
        key = StreamKey(difference.runner, difference.env, difference.agent, difference.incarnation)
        names = tuple(taps_of(difference.hop))
        group = group_of(difference.hop)
        if self.why_not:
            return Context(key, names, missing=self.why_not)
        if difference.env < 0:
            return Context(key, names, missing="nobody sampled this transition, so that there is no place to show")
        taps = {tap.name: tap for tap in self.taps(key, group)}
        wanted = [name for name in names if name != "learner"]
        if absent := [name for name in wanted if name not in taps]:
            return Context(key, names, missing=f"the ledger of the tap {absent[0]!r} is not there any more")
        if names[1] == "learner":
            return self._transitions(taps[names[0]], group, difference, around)
        first, second = (taps[name] for name in names)
        at = [position - tap.stream.begin if position >= 0 else -1 for position, tap in zip(difference.position, (first, second))]
        if any(index < 0 <= position for index, position in zip(at, difference.position)):
            return Context(key, names, missing="these steps were dropped from the ledgers while the run went on")
        pairing = self._pairing(first, second, group)
        row = pairing.row_of(*at)
        if row < 0:
            return Context(key, names, missing="the ledgers hold no such step any more")
        length = 1 if difference.kind == "changed" or _is_scattered(difference) else difference.events
        before, left_out, behind = _parts(row, length, around)
        parts = [[(pairing.pair(one), row <= one < row + length) for one in part] for part in (before, behind)]
        if difference.kind == "changed" and (
            (difference.events > 1 and not _is_scattered(difference)) or pairing.pair(row) != (at[0], at[1])
        ):
            # Of a range the comparison says which event belongs to which, and not the alignment.
            steps = range(-min(around, *at), around + 1)
            parts = [[((at[0] + step, at[1] + step), 0 <= step < difference.events) for step in steps], []]
        shown = [[_row(pairing, *pair, here) for pair, here in part if pair != (-1, -1) and pairing.has(*pair)] for part in parts]
        return Context(key, names, tuple(_joined(shown[0], left_out, shown[1])))

    def at(self, key: StreamKey, episode: int, step: int, around: int = AROUND, group: str = "") -> Context | None:
        """The steps around a place at all taps; `None` if the tap nearest to the environment has no such place."""
        taps = self.taps(key, group)
        if not taps:
            return None
        columns = taps[0].stream.columns
        found = np.flatnonzero((columns["episode"] == episode) & (columns["step"] == step))
        if not len(found):
            return None
        around = min(around, sum(len(tap.stream) for tap in taps))  # there are no more rows than that
        at = int(found[0])
        names, learned = tuple(tap.name for tap in taps), self._learned_of(taps[-1].name, group)
        rows = [self._chained(taps, chain, group, chain[0] == at) for chain in self._chains(taps, at, around, group)]
        if learned is None:
            return Context(key, names, tuple(row for row, _ in rows))
        with_learner = []
        for row, last in rows:
            side, differ = learned.side(key, last) if last >= 0 else (None, frozenset[str]())
            there = None if side is None else Side("transition", *side)
            with_learner.append(replace(row, sides=(*row.sides, there), differ=row.differ | differ))
        return Context(key, (*names, "learner"), tuple(with_learner))

    def _chained(self, taps: list[Tap], chain: tuple[int, ...], group: str, here: bool) -> tuple[Row, int]:
        """The row of what belongs together at several taps (-1: there is nothing), and its index at the last of them."""
        differ = frozenset[str]()
        for (one, i), (other, j) in itertools.pairwise(zip(taps, chain)):
            if min(i, j) >= 0:
                differ |= self._pairing(one, other, group).differ(i, j)
            elif max(i, j) >= 0:
                differ |= {"event"}
        sides = tuple(tap.side(index) if index >= 0 else None for tap, index in zip(taps, chain))
        place = taps[0].place(chain[0]) if chain[0] >= 0 else (-1, -1)
        return Row(*place, sides, differ, here), chain[-1]

    def _chains(self, taps: list[Tap], at: int, around: int, group: str) -> list[tuple[int, ...]]:
        """For each row around an event of the first tap, its index at each tap, or -1."""
        if len(taps) == 1:
            return [(one,) for one in range(max(0, at - around), min(len(taps[0].stream), at + around + 1))]
        pairing = self._pairing(taps[0], taps[1], group)
        row = pairing.row_of(at, -1)
        if row < 0:  # the other side has lost its beginning
            return [(one, *[-1] * (len(taps) - 1)) for one in range(max(0, at - around), min(len(taps[0].stream), at + around + 1))]
        pairs = [pairing.pair(one) for one in range(max(0, row - around), row + around + 1)]
        chains: list[tuple[int, ...]] = [pair for pair in pairs if pair != (-1, -1)]
        for one, other in itertools.pairwise(taps[1:]):
            pairing, longer = self._pairing(one, other, group), list[tuple[int, ...]]()
            for chain in chains:
                row = pairing.row_of(chain[-1], -1) if chain[-1] >= 0 else -1
                longer.append((*chain, pairing.pair(row)[1] if row >= 0 else -1))
                # What only the tap behind has follows the event before it.
                while row >= 0 and (pair := pairing.pair(row + 1))[0] < 0 <= pair[1]:
                    row += 1
                    longer.append((*[-1] * len(chain), pair[1]))
            chains = longer
        return chains

    def _pairing(self, first: Tap, second: Tap, group: str) -> Pairing:
        at = (group, first.name, second.name, first.stream.key)
        if at not in self._pairings:
            self._pairings[at] = Pairing(first, second)
        return self._pairings[at]

    def _learned_of(self, tap: str, group: str) -> Learned | None:
        """What was learned of what left a tap; `None` where there is no ledger of a learner."""
        at = (group, tap)
        if at not in self._learned:
            ledgers = [ledger for ledger in self.ledgers if ledger.meta.get("group", "") == group]
            samplers = [ledger for ledger in ledgers if ledger.meta["tap"] == tap]
            learners = [ledger for ledger in ledgers if ledger.meta["tap"] == "learner"]
            if not samplers or not learners:
                return None
            self._learned[at] = Learned(samplers, learners)
        return self._learned[at]

    def _transitions(self, tap: Tap, group: str, difference: Difference, around: int) -> Context:
        names = (tap.name, "learner")
        columns = tap.stream.columns
        found = np.flatnonzero((columns["episode"] == difference.episode) & (columns["step"] == difference.step))
        learned = self._learned_of(tap.name, group)
        if not len(found) or learned is None:
            what = "the ledger of the learner is" if learned is None else "these steps are"
            return Context(tap.stream.key, names, missing=f"{what} not there any more")
        at, length = int(found[0]), difference.events
        shown: list[list[Row]] = []
        before, left_out, behind = _parts(at, length, around)
        for part in (before, behind):
            shown.append(rows := [])
            for one in part[: max(0, len(tap.stream) - part.start)]:
                here = at <= one < at + length
                step = bool(columns["kind"][one] == STEP)
                given = Side("transition", learned.given(tap.stream.key, one)) if step else tap.side(one)
                side, differ = learned.side(tap.stream.key, one) if step else (None, frozenset[str]())
                there = None if side is None else Side("transition", *side)
                if there is None and not here:
                    differ = frozenset()
                if here and difference.kind == "extra":  # what should not be there is nobody's step, or one step too often
                    note = difference.second.get("event", "")
                    there, differ = replace(there, note=note) if there is not None else Side("transition", {}, note), differ | {"event"}
                rows.append(Row(*tap.place(one), (given, there), differ, here))
        return Context(tap.stream.key, names, tuple(_joined(shown[0], left_out, shown[1])))


def _row(pairing: Pairing, first: int, second: int, here: bool) -> Row:
    sides = (pairing.first.side(first) if first >= 0 else None, pairing.second.side(second) if second >= 0 else None)
    differ = pairing.differ(first, second) if min(first, second) >= 0 else frozenset({"event"})
    place = pairing.first.place(first) if first >= 0 else (-1, -1)
    return Row(*place, sides, differ, here)


def _is_scattered(difference: Difference) -> bool:
    """Whether its events are not in a row: resets of all environments."""
    return any(one.code == RESETS_OF_ALL for one in difference.explanations)


def _parts(at: int, length: int, around: int) -> tuple[range, int, range]:
    """The places around a run of them that are shown: those before a gap in its middle, how many that leaves out, those behind it.

    A million events may be lost in a row, so that no more is looked up than is shown.
    """
    begin, end = max(0, at - around), at + length + around
    if length <= 2 * _RUN + 1:
        return range(begin, end), 0, range(0)
    return range(begin, at + _RUN), length - 2 * _RUN, range(at + length - _RUN, end)


def _joined(before: list[Row], left_out: int, behind: list[Row]) -> list[Row]:
    return [*before, *([Row(-1, -1, here=True, left_out=left_out)] if left_out else []), *behind]
