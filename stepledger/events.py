"""A hop between two taps that both record resets and steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .align import RESYNC, Edit, align, edit_end, mixed
from .digest import MISSING
from .errors import LedgerError
from .format import RESET, STEP, StreamKey
from .ledger import Ledger, Stream
from .pairs import check_settings, counted, stream_name, taps_of
from .result import KEPT, Counter, Difference, Hop, Tally
from .strays import LEARN, UNSEEN

__all__ = ["EventHop"]

#: Fields of an event -> their columns.
FIELDS = {"kind": "kind", "action": "h_act", "obs": "h_obs", "reward": "h_rew", "terminated": "terminated", "truncated": "truncated"}

#: Events in a row without an agreement between two sides of which more is to come, after which they are taken to differ.
_UNDECIDED = 64

#: Elements from which on an array is long, and elements that differ of which a report prints so many.
_LONG, _SHOWN = 64, 4


class EventHop:
    """Compares two taps that both record resets and steps. Their events may come in parts; what was compared is dropped.

    Args:
        name: ``"env -> vector"``, with a group in front of it where there is one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tally = Tally(name)
        self._pairs: dict[StreamKey, _Pair] = {}
        self._ended = False

    def add(self, firsts: Sequence[Ledger], seconds: Sequence[Ledger]) -> None:
        """Take further events of both taps.

        Raises:
            LedgerError: Two ledgers of a tap have the same stream.
        """
        for side, ledgers in enumerate((firsts, seconds)):
            for ledger in ledgers:
                for key, stream in ledger.streams.items():
                    if key not in self._pairs:
                        self._pairs[key] = _Pair(self, self._tally, key)
                    self._pairs[key].add(side, ledger, stream)

    def compare(self, end: bool, counter: Counter) -> None:
        """Compare what has come.

        Args:
            end: Nothing more will come. Otherwise what one side has more than the other at its end waits for its counterpart.
            counter: Counts the events of the first side.

        Raises:
            LedgerError: Two sides were recorded with different settings.
        """
        self._ended = end
        pairs = [self._pairs[key] for key in sorted(self._pairs)]
        for pair in pairs:
            counter.add(pair.compare(end))
        for pair in pairs:
            pair.forget()

    def result(self) -> tuple[Hop, list[Difference]]:
        """What was found so far."""
        pairs = [self._pairs[key] for key in sorted(self._pairs)]
        notes = {name: note for pair in pairs for name, note in pair.notes.items()}
        unpaired = tuple(sentence for pair in pairs if self._ended and (sentence := pair.unpaired()))
        return self._tally.hop(unpaired, notes), [difference for pair in pairs for difference in pair.kept]

    def compared_equal(self) -> dict[StreamKey, int]:
        """For each stream without a difference, how many of its events were compared since the first, on both sides."""
        return {key: number for key, pair in self._pairs.items() if (number := pair.compared_equal())}

    def rows(self, ledger: Ledger) -> list[Stream]:
        """The open windows of all streams of a ledger of the first side."""
        return [pair.windows[0] for pair in self._pairs.values() if pair.is_of(ledger)]


class _Pair:
    """The two sides of one stream, each a window of events that were not compared yet."""

    def __init__(self, hop: EventHop, tally: Tally, key: StreamKey) -> None:
        self.hop = hop
        self.tally = tally
        self.key = key
        self.windows = [Stream(key, {}), Stream(key, {})]
        self.notes: dict[str, str] = {}
        self.kept: list[Difference] = []
        self._ledgers: list[Ledger | None] = [None, None]
        self._count = 0
        self._unknown = ""
        self._cut_said = ("", 0, 0)  # what was said, of how many steps and episodes
        self._begun = False
        # Whether an event would follow whose flags ended the episode on one side only.
        self._flipped = False
        self._compared = (0, 0)

    def add(self, side: int, ledger: Ledger, stream: Stream) -> None:
        before = self._ledgers[side]
        if before is None:
            self.windows[side] = stream
        elif before.path != ledger.path:
            raise LedgerError(
                f"{ledger.path} and {before.path} both hold {stream_name(self.key)}: name a directory with the ledgers of one run."
            )
        else:
            self.windows[side] = self.windows[side] + stream
        self._ledgers[side] = ledger

    def is_of(self, ledger: Ledger) -> bool:
        return self._ledgers[0] is not None and self._ledgers[0].path == ledger.path

    def unpaired(self) -> str:
        """A sentence if only one side has this stream."""
        for tap, ledger, window in zip(taps_of(self.tally.name)[::-1], self._ledgers, self.windows):
            events = window.begin + len(window)
            if ledger is not None and None in self._ledgers and events:
                return f"{stream_name(self.key)} has {counted(events, 'event')} in {ledger.path} and no ledger at the tap {tap!r}"
        return ""

    def compare(self, end: bool) -> int:
        """Compare the windows; the number of events of the first side that this has dealt with."""
        first_ledger, second_ledger = self._ledgers
        if first_ledger is None or second_ledger is None:
            return len(self.windows[0])
        self._open(first_ledger, second_ledger)
        edits = self._edits()
        self._compared = len(self.first), len(self.second)
        if not end:
            edits, self._compared = self._decided(edits)
        unlike = [slice(edit.first, edit.first + edit.length) for edit in edits if edit.kind != "extra"]
        step = self.a["kind"][: self._compared[0]] == STEP
        self._count_compared(
            len(step) - sum(part.stop - part.start for part in unlike), int(step.sum() - sum(step[part].sum() for part in unlike)), {}
        )
        count = self._count
        flipped = (0, 0) if self._flipped else None
        for edit in edits:
            if edit.kind == "changed":
                flipped = self._changed(edit, flipped)
            else:
                self._unmatched(edit, flipped)
                flipped = None
        self._flipped = flipped == self._compared
        if end:
            self._end()
        self.tally.add(self.key, self._count - count)
        return self._compared[0]

    def _edits(self) -> list[Edit]:
        n = min(len(self.first), len(self.second))
        if all(np.array_equal(self.a[name][:n], self.b[name][:n]) for name in self.fields):
            return _tails(len(self.first), len(self.second))
        same_call = [name for name in ("kind", "action") if name in self.fields]
        like = mixed(*(self.a[name] for name in same_call)), mixed(*(self.b[name] for name in same_call))
        return list(align(mixed(*(self.a[name] for name in self.fields)), mixed(*(self.b[name] for name in self.fields)), like))

    def _decided(self, edits: list[Edit]) -> tuple[list[Edit], tuple[int, int]]:
        """The edits that what is still to come won't change, and where the events that are dealt with end on both sides.

        An edit is decided when the two sides agree again behind it, or disagree for so long that this is what there is to say.
        """
        ends = cut = len(self.first), len(self.second)
        open_ = len(edits)
        while open_:
            stop = edit_end(edits[open_ - 1])
            if min(cut[0] - stop[0], cut[1] - stop[1]) >= RESYNC:
                break
            open_ -= 1
            cut = edits[open_].first, edits[open_].second
        if min(ends[0] - cut[0], ends[1] - cut[1]) <= _UNDECIDED:
            return edits[:open_], cut
        last = edits[-1]
        return (edits, ends) if last.kind == "changed" or self._shorter(last) is None else (edits[:-1], (last.first, last.second))

    def _open(self, first_ledger: Ledger, second_ledger: Ledger) -> None:
        check_settings(first_ledger, second_ledger)
        self.first_ledger, self.second_ledger = first_ledger, second_ledger
        if not self._begun:  # what was dropped from one side's file only
            begin = max(window.begin for window in self.windows)
            self.windows = [window.after(begin - window.begin) for window in self.windows]
        self.first, self.second = self.windows
        # What the second tap's ledger says about its fields: one that is compared in another column, or that can't be compared.
        said = second_ledger.meta.get("fields", {})
        self.notes = {name: one.get("skip") or one["note"] for name, one in said.items() if "skip" in one or "note" in one}
        self._by = self.second.data.get("by")
        self.a = {name: self.first.data[column] for name, column in FIELDS.items()}
        self.b = {name: self.second.data[said.get(name, {}).get("column", column)] for name, column in FIELDS.items()}
        self.fields = [name for name in FIELDS if "skip" not in said.get(name, {})]
        if second_ledger.meta.get("flags") == "exclusive":
            # Stable-Baselines3 delivers one flag for both: TimeLimit.truncated is "truncated and not terminated".
            self.a["truncated"] = self.a["truncated"] & ~self.a["terminated"]
            self.notes["truncated"] = "where terminated is not set, as Stable-Baselines3 delivers it"
        if not self._begun:
            self._begun = True
            self.tally.streams += 1
            if dropped := self.first.begin:
                self.tally.dropped += dropped
            self.tally.notes += [note for note in second_ledger.meta.get("notes", []) if note not in self.tally.notes]

    def compared_equal(self) -> int:
        """How many events were compared since the first, if each is the same on both sides."""
        first, second = (window.begin for window in self.windows)
        return first if self._begun and not self._count and first == second else 0

    def _end(self) -> None:
        for ledger, tap in zip((self.first_ledger, self.second_ledger), taps_of(self.tally.name)):
            if ledger.open_end and not self._unknown:
                self._unknown = f"what came after its last event can't be compared, because {_no_end(ledger, tap)}"
        if self._unknown:
            self.tally.unknown.append(f"{stream_name(self.key)}: {self._unknown}")

    def forget(self) -> None:
        """Drop what was compared."""
        if self._begun:
            self.windows = [window.after(events) for window, events in zip(self.windows, self._compared)]
            self.first, self.second = self.windows
            self.a, self.b, self._compared = {}, {}, (0, 0)

    def _count_compared(self, events: int, steps: int, different: dict[str, int], unseen: int = 0) -> None:
        """Count events that both sides have, of which so many are steps: a reset has no action, reward or end to compare."""
        self.tally.events += events
        for name in FIELDS:
            number = events if name == "kind" else events - unseen if name == "obs" else steps
            compared = number if name in self.fields else 0
            self.tally.compared[name] = self.tally.compared.get(name, 0) + compared
            if name in different:
                self.tally.different[name] = self.tally.different.get(name, 0) + different[name]

    def _changed(self, edit: Edit, flipped: tuple[int, int] | None) -> tuple[int, int] | None:
        """Count a run of events that both sides have and that are not all equal."""
        here, there = slice(edit.first, edit.first + edit.length), slice(edit.second, edit.second + edit.length)
        a = {name: column[here] for name, column in self.a.items()}
        b = {name: column[there] for name, column in self.b.items()}
        unequal = {name: a[name] != b[name] for name in self.fields}
        unseen = 0
        if "obs" in unequal and self._by is not None:
            unequal["obs"] &= b["obs"] != UNSEEN
            unseen = int((b["obs"] == UNSEEN).sum())
        # In next-step mode the trainer takes the event after an end for a reset: an end that only one side saw shows once more there, and
        # if the episode ends right there, once more. What differs for this reason alone is not counted again.
        ends = _ends(a) != _ends(b)
        after = np.concatenate([[flipped == (edit.first, edit.second)], ends[:-1]])
        follows = after & unequal["kind"] & ~unequal.get("obs", np.zeros(edit.length, bool))
        for name in ("kind", "action", "reward"):
            if name in unequal:
                unequal[name] = unequal[name] & ~follows
        different = np.logical_or.reduce(list(unequal.values()))
        known = ~follows | different
        # A reset on both sides of which one has an end, or a reward, counts too.
        odd = [mask for name, mask in unequal.items() if name not in ("kind", "obs")]
        step = np.logical_or.reduce([a["kind"] == STEP, b["kind"] == STEP, *odd])
        differences = {name: int(mask.sum()) for name, mask in unequal.items()}
        self._count_compared(int(known.sum()), int((known & step).sum()), differences, unseen)
        positions = np.flatnonzero(different)
        self._count += len(positions)
        for at in positions[: max(0, KEPT - len(self.kept))].tolist():
            names = tuple(name for name in self.fields if unequal[name][at])
            self.kept.append(self._difference("changed", names, edit.first + at, edit.second + at))
        return (edit.first + edit.length, edit.second + edit.length) if ends[-1] else None

    def _unmatched(self, edit: Edit, flipped: tuple[int, int] | None) -> None:
        """Count a run of events that only one side has."""
        lost = edit.kind == "lost"
        begin, length = (edit.first if lost else edit.second), edit.length
        if flipped == (edit.first, edit.second) and (self.a if lost else self.b)["kind"][begin] == RESET:
            # In same-step mode an end that only one side saw brings a reset that only that side has.
            edit = edit._replace(first=edit.first + lost, second=edit.second + (not lost), length=edit.length - 1)
            begin, length = begin + 1, length - 1
        if not length or self._before_learning(edit) or self._at_open_end(edit) or self._cut_off(edit) or self._still_to_come(edit):
            return
        self._count += 1
        if lost:
            self.tally.lost += length
        else:
            self.tally.extra += length
        if len(self.kept) < KEPT:
            self.kept.append(self._difference(edit.kind, ("event",), edit.first, edit.second, length))

    def _before_learning(self, edit: Edit) -> bool:
        """Whether these events came before a ``learn()`` of Stable-Baselines3, while its env was not watched."""
        if edit.kind != "lost" or self._by is None or edit.second >= len(self._by):
            return False
        if edit.second != 0 and self._by[edit.second] != LEARN:
            return False
        self.tally.notes.append(f"{stream_name(self.key)}: {counted(edit.length, 'event')} came before learn(), and were not compared")
        return True

    def _shorter(self, edit: Edit) -> tuple[Ledger, str] | None:
        """If these events are the end of a stream: the ledger of the other side, which lacks them, and its tap."""
        lost = edit.kind == "lost"
        if edit.first + (edit.length if lost else 0) < len(self.first) or edit.second + (0 if lost else edit.length) < len(self.second):
            return None
        taps = taps_of(self.tally.name)
        return (self.second_ledger, taps[1]) if lost else (self.first_ledger, taps[0])

    def _at_open_end(self, edit: Edit) -> bool:
        """Whether these events are the end of a stream whose other side may have lost its own end."""
        if (shorter := self._shorter(edit)) is None:
            return False
        ledger, tap = shorter
        if ledger.open_end:
            self._unknown = f"the last {counted(edit.length, 'event')} can't be compared, because {_no_end(ledger, tap)}"
            return True
        if ledger.meta.get("exited"):
            self._unknown = (
                f"the last {counted(edit.length, 'event')} can't be compared, because the tap {tap!r} was not closed before the "
                "interpreter ended"
            )
            return True
        side, begin = (self.a, edit.first) if edit.kind == "lost" else (self.b, edit.second)
        # In same-step mode a step that ended its episode brought a reset with it.
        one = edit.length == 1 or side["kind"][begin:].tolist() == [STEP, RESET]
        if one and ledger.meta.get("in_flight"):
            self.tally.notes.append(f"{stream_name(self.key)}: its last event was still under way when the tap {tap!r} was closed")
            return True
        return False

    def _still_to_come(self, edit: Edit) -> bool:
        """Whether these events are the end of a stream whose other side was written by ``flush()``, and is still recording."""
        if (shorter := self._shorter(edit)) is None or shorter[0].meta.get("closed"):
            return False
        self._unknown = (
            f"the last {counted(edit.length, 'event')} can't be compared, because the tap {shorter[1]!r} was flushed before, and not closed"
        )
        return True

    def _cut_off(self, edit: Edit) -> bool:
        """Whether these are episodes that a sampler's forced reset cut off: none of them ended, and a reset follows, or nothing.

        RLlib drops such episodes. What it drops in the middle of one, or an episode that ended, is a difference; but where it samples a
        number of episodes, one that ended in the same step as the last of them is not returned (ray 2.60).
        """
        if edit.kind != "lost" or self.second_ledger.meta["tap"] != "episode":
            return False
        begin, stop = edit.first, edit.first + edit.length
        # Of a, b, a, c one side may lack "b, a" as well as "a, b": where resets are alike, the run that begins with one is meant.
        while begin and self.a["kind"][begin] != RESET and all(self.a[name][begin - 1] == self.a[name][stop - 1] for name in self.fields):
            begin, stop = begin - 1, stop - 1
        resets = np.flatnonzero(self.a["kind"][begin + 1 : stop] == RESET) + begin + 1
        if not all(self._never_returned(*episode) for episode in itertools.pairwise([begin, *resets.tolist(), stop])):
            return False
        if stop < len(self.first) and self.a["kind"][stop] != RESET:
            return False
        steps = int((self.a["kind"][begin:stop] == STEP).sum())
        if steps:
            self._note_cut_off(steps, 1 + len(resets))
        return True

    def _note_cut_off(self, steps: int, episodes: int) -> None:
        """Say it in one sentence for this stream: each evaluation may cut off one more."""
        notes, (said, steps_before, episodes_before) = self.tally.notes, self._cut_said
        if said in notes:
            notes.remove(said)
        steps, episodes = steps + steps_before, episodes + episodes_before
        what = "an episode that was" if episodes == 1 else f"{episodes:,} episodes that were"
        sentence = f"{stream_name(self.key)}: {counted(steps, 'step')} of {what} cut off never left the sampler"
        notes.append(sentence)
        self._cut_said = sentence, steps, episodes

    def _never_returned(self, begin: int, stop: int) -> bool:
        """Whether a sampler may have dropped this episode, or part of one: it did not end, or in the same step as the last one wanted."""
        ended = np.flatnonzero(self.a["terminated"][begin:stop] | self.a["truncated"][begin:stop])
        if not len(ended):
            return True
        if not self.second_ledger.meta.get("whole_episodes") or ended[0] < stop - begin - 1 or self.a["kind"][begin] != RESET:
            return False
        # Each row of a vector env has one event of each stream.
        rows = [(one, self.first.begin + stop - one.begin) for one in self.hop.rows(self.first_ledger)]
        return all(len(one) == row or (0 <= row < len(one) and one.data["kind"][row] == RESET) for one, row in rows)

    def _difference(self, kind: str, fields: tuple[str, ...], i: int, j: int, events: int = 1) -> Difference:
        (episode, step), key = self._place(i), self.key
        difference = Difference(self.tally.name, key.env, episode, step, fields, kind, events=events, runner=key.runner, agent=key.agent)
        if kind != "changed":
            return difference
        texts = {name: self._texts(name, i, j) for name in fields}
        return replace(
            difference,
            first={name: first for name, (first, _) in texts.items() if first},
            second={name: second for name, (_, second) in texts.items() if second},
        )

    def _place(self, i: int) -> tuple[int, int]:
        """Episode and step of an event of the first side; for the place behind the last, as if a step followed."""
        columns = self.first.columns
        if i < len(self.first):
            return int(columns["episode"][i]), int(columns["step"][i])
        if not len(self.first):
            episode, step = self.first.last or (0, -1)
            return episode, step + 1
        return int(columns["episode"][-1]), int(columns["step"][-1]) + 1

    def _texts(self, name: str, i: int, j: int) -> tuple[str, str]:
        """What both sides have in a field; of a value with several parts, those that differ."""
        first, second = self._text(self.first, self.a, name, i), self._text(self.second, self.b, name, j)
        if isinstance(first, str) or isinstance(second, str) or len(first) != len(second):
            return _joined(first), _joined(second)
        differ = [at for at, (one, other) in enumerate(zip(first, second)) if _differ(one, other)]
        if first and not differ:  # kept values have the shape of the space
            return _joined(first), "the same values in another shape or number"
        paths = self.first_ledger.meta["leaves"]["obs" if name == "obs" else "act"]
        labels = [".".join(map(str, path)) + " " for path in paths] if len(paths) == len(first) > 1 else [""] * len(first)
        texts = [[labels[at] + text for text in _both(first[at], second[at])] for at in differ]
        return ", ".join(one for one, _ in texts), ", ".join(other for _, other in texts)

    def _text(self, stream: Stream, data: dict[str, npt.NDArray[Any]], name: str, i: int) -> str | list[Any]:
        """What a side has in a field; of an observation or an action the kept value of each leaf."""
        value = data[name][i]
        if name == "kind":
            return "reset" if value == RESET else "step"
        if name in ("terminated", "truncated"):
            return str(bool(value))
        if name == "reward":
            if data["kind"][i] == RESET:
                return ""
            return str(np.array([value]).view(self.first_ledger.meta["reward_dtype"])[0])
        if value == int.from_bytes(MISSING, "big"):
            return "nothing"
        which = {"obs": "values_obs_", "action": "values_act_"}[name]
        return [column[i] for leaf, column in sorted(stream.values.items(), key=_leaf_order) if leaf.startswith(which)]


def _joined(text: str | list[Any]) -> str:
    return text if isinstance(text, str) else ", ".join(map(_in_one_line, text))


def _differ(one: Any, other: Any) -> bool:
    """Whether two kept values of a leaf are not the same: texts, or arrays of one dtype and shape."""
    return bool(one != other) if isinstance(one, str) else bool(_unequal(one, other).any())


def _unequal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which elements differ in any bit, as their digests do."""
    first, second = (np.ascontiguousarray(value).reshape(-1, 1).view(np.uint8) for value in (one, other))
    unequal: npt.NDArray[np.bool_] = (first != second).any(axis=1).reshape(one.shape)
    return unequal


def _both(one: Any, other: Any) -> tuple[str, str]:
    """Two kept values of a leaf as a report prints them; of a long array the elements that differ, and not its beginning and end."""
    if isinstance(one, str) or one.size <= _LONG:
        return _in_one_line(one), _in_one_line(other)
    places = np.argwhere(_unequal(one, other)).tolist()
    changes = [f"{place}: {one[tuple(place)]} -> {other[tuple(place)]}" for place in places[:_SHOWN]]
    more = ["..."] if len(places) > _SHOWN else []
    changed = f"{len(places):,} of {one.size:,} elements changed"
    return f"an array of shape {one.shape}", f"one with {changed}: {', '.join(changes + more)}"


def _in_one_line(value: Any) -> str:
    """The value with as many digits as tell it from its neighbours, so that the least difference shows."""
    if isinstance(value, str):
        return value
    return " ".join(np.array2string(value, separator=", ", threshold=_LONG, floatmode="unique").split())


def _leaf_order(item: tuple[str, Any]) -> int:
    return int(item[0].rsplit("_", 1)[1])


def _ends(data: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
    """Which events end their episode; a reset does not, whatever flags came with it."""
    ended: npt.NDArray[np.bool_] = (data["terminated"] | data["truncated"]) & (data["kind"] == STEP)
    return ended


def _no_end(ledger: Ledger, tap: str) -> str:
    """That a ledger has no end, and why if it says so."""
    stopped = ledger.meta.get("stopped")
    return f"the ledger of the tap {tap!r} has no end" + (f": recording was stopped ({stopped})" if stopped else "")


def _tails(first: int, second: int) -> list[Edit]:
    if first > second:
        return [Edit("lost", second, second, first - second)]
    return [Edit("extra", first, first, second - first)] if second > first else []
