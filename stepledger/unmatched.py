"""Events that only one side of a stream has, and that are no difference: what came after an open end, or was never to arrive."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from .align import Edit, edit_end
from .format import RESET, STEP
from .ledger import Ledger
from .pairs import counted, stream_name, taps_of
from .strays import LEARN

if TYPE_CHECKING:
    from .stream_pair import StreamPair

__all__ = ["Unmatched"]


class Unmatched:
    """Judges the events of a stream that only one side has.

    Args:
        pair: Both sides.

    Attributes:
        unknown: What can't be told of the stream, in words, because a side has no end; or empty.
    """

    def __init__(self, pair: StreamPair) -> None:
        self._pair = pair
        self.unknown = ""
        self._cut_said = ("", 0, 0)  # what was said, of how many steps and episodes

    def is_no_difference(self, edit: Edit) -> bool:
        """Whether these events are missing on the other side for a reason that is no fault, which is noted."""
        return (
            self._before_learning(edit)
            or self._at_open_end(edit)
            or self.of_raised_calls(edit)
            or self._cut_off(edit)
            or self._still_to_come(edit)
        )

    def end(self) -> None:
        """Nothing more will come: say what can't be told."""
        pair = self._pair
        for ledger, tap in zip((pair.first_ledger, pair.second_ledger), taps_of(pair.tally.name)):
            if ledger.open_end and not self.unknown:
                self.unknown = f"what came after its last event can't be compared, because {_no_end(ledger, tap)}"
        if self.unknown:
            pair.tally.unknown.append(f"{stream_name(pair.key)}: {self.unknown}")

    def _before_learning(self, edit: Edit) -> bool:
        """Whether these events came before a ``learn()`` of Stable-Baselines3, while its env was not watched."""
        by = self._pair.second.data.get("by")
        if edit.kind != "lost" or by is None or edit.second >= len(by):
            return False
        if edit.second != 0 and by[edit.second] != LEARN:
            return False
        self._note(f"{counted(edit.length, 'event')} came before learn(), and were not compared")
        return True

    def of_raised_calls(self, edit: Edit) -> bool:
        """Whether these events are what an environment gave in calls of the vector env that raised in another one."""
        pair = self._pair
        if edit.kind != "lost" or pair.tracks is None or not (raised := pair.second_ledger.meta.get("raised")):
            return False
        second, kind = pair.tracks[1], pair.a["kind"]
        begin, stop = edit.first, edit.first + edit.length
        # Where equal events follow each other, any of them may be the one.
        back = ahead = 0
        while back < begin and self._same(begin - back - 1, stop - back - 1):
            back += 1
        while stop + ahead < len(kind) and self._same(begin + ahead, stop + ahead):
            ahead += 1
        first, last = edit.second - back, edit.second + ahead  # before which event of the second side they belong
        at_least = second.call(first - 1) + second.by_event if first > second.begin else 0
        at_most = second.call(last) if last < len(second) else second.call(last - 1) + 1
        calls = sum(at_least <= call <= at_most for call in raised)
        lost = kind[begin:stop]
        # Behind the end of an episode a reset belongs to the step, but where it is a call of its own; and a reset may be what was called.
        of_their_own = edit.length if second.by_event else int((lost == STEP).sum()) or 1
        return of_their_own <= calls and (second.by_event or int((lost == RESET).sum()) <= calls)

    def _same(self, i: int, j: int) -> bool:
        """Whether two events of the first side are equal."""
        return all(self._pair.a[name][i] == self._pair.a[name][j] for name in self._pair.fields)

    def _note(self, sentence: str) -> None:
        self._pair.tally.notes.append(f"{stream_name(self._pair.key)}: {sentence}")

    def shorter(self, edit: Edit) -> tuple[Ledger, str] | None:
        """If these events are the end of a stream: the ledger of the other side, which lacks them, and its tap."""
        pair, (first, second) = self._pair, edit_end(edit)
        if first < len(pair.first) or second < len(pair.second):
            return None
        taps = taps_of(pair.tally.name)
        return (pair.second_ledger, taps[1]) if edit.kind == "lost" else (pair.first_ledger, taps[0])

    def _at_open_end(self, edit: Edit) -> bool:
        """Whether these events are the end of a stream whose other side may have lost its own end."""
        if (shorter := self.shorter(edit)) is None:
            return False
        ledger, tap = shorter
        if ledger.open_end:
            self.unknown = f"the last {counted(edit.length, 'event')} can't be compared, because {_no_end(ledger, tap)}"
            return True
        if ledger.meta.get("exited"):
            self.unknown = (
                f"the last {counted(edit.length, 'event')} can't be compared, because the tap {tap!r} was not closed before the "
                "interpreter ended"
            )
            return True
        side, begin = (self._pair.a, edit.first) if edit.kind == "lost" else (self._pair.b, edit.second)
        # In same-step mode a step that ended its episode brought a reset with it.
        one = edit.length == 1 or side["kind"][begin:].tolist() == [STEP, RESET]
        if one and ledger.meta.get("in_flight"):
            self._note(f"its last event was still under way when the tap {tap!r} was closed")
            return True
        return False

    def _still_to_come(self, edit: Edit) -> bool:
        """Whether these events are the end of a stream whose other side was written by ``flush()``, and is still recording."""
        if (shorter := self.shorter(edit)) is None or shorter[0].meta.get("closed"):
            return False
        self.unknown = (
            f"the last {counted(edit.length, 'event')} can't be compared, because the tap {shorter[1]!r} was flushed before, and not closed"
        )
        return True

    def _cut_off(self, edit: Edit) -> bool:
        """Whether these are episodes that a sampler's forced reset cut off: none of them ended, and a reset follows, or nothing.

        RLlib drops such episodes. What it drops in the middle of one, or an episode that ended, is a difference; but where it samples a
        number of episodes, one that ended in the same step as the last of them is not returned (ray 2.60).
        """
        pair, kind = self._pair, self._pair.a["kind"]
        if edit.kind != "lost" or pair.second_ledger.meta["tap"] != "episode":
            return False
        begin, stop = edit.first, edit.first + edit.length
        # Of a, b, a, c one side may lack "b, a" as well as "a, b": where resets are alike, the run that begins with one is meant.
        while begin and kind[begin] != RESET and self._same(begin - 1, stop - 1):
            begin, stop = begin - 1, stop - 1
        resets = np.flatnonzero(kind[begin + 1 : stop] == RESET) + begin + 1
        if not all(self._never_returned(*episode) for episode in itertools.pairwise([begin, *resets.tolist(), stop])):
            return False
        if stop < len(pair.first) and kind[stop] != RESET:
            return False
        steps = int((kind[begin:stop] == STEP).sum())
        if steps:
            self._note_cut_off(steps, 1 + len(resets))
        return True

    def _note_cut_off(self, steps: int, episodes: int) -> None:
        """Say it in one sentence for this stream: each evaluation may cut off one more."""
        notes, (said, steps_before, episodes_before) = self._pair.tally.notes, self._cut_said
        if said in notes:
            notes.remove(said)
        steps, episodes = steps + steps_before, episodes + episodes_before
        what = "an episode that was" if episodes == 1 else f"{episodes:,} episodes that were"
        sentence = f"{stream_name(self._pair.key)}: {counted(steps, 'step')} of {what} cut off never left the sampler"
        notes.append(sentence)
        self._cut_said = sentence, steps, episodes

    def _never_returned(self, begin: int, stop: int) -> bool:
        """Whether a sampler may have dropped this episode, or part of one: it did not end, or in the same step as the last one wanted."""
        ended = np.flatnonzero(self._pair.a["terminated"][begin:stop] | self._pair.a["truncated"][begin:stop])
        if not len(ended):
            return True
        if not self._pair.second_ledger.meta.get("whole_episodes") or ended[0] < stop - begin - 1 or self._pair.a["kind"][begin] != RESET:
            return False
        # Each row of a vector env has one event of each stream.
        rows = [(one, self._pair.first.begin + stop - one.begin) for one in self._pair.hop.rows(self._pair.first_ledger)]
        return all(len(one) == row or (0 <= row < len(one) and one.data["kind"][row] == RESET) for one, row in rows)


def _no_end(ledger: Ledger, tap: str) -> str:
    """That a ledger has no end, and why if it says so."""
    stopped = ledger.meta.get("stopped")
    return f"the ledger of the tap {tap!r} has no end" + (f": recording was stopped ({stopped})" if stopped else "")
