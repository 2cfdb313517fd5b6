"""A hop between two taps that both record resets and steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .align import Edit, align
from .digest import MISSING
from .format import RESET, STEP
from .ledger import Ledger, Stream
from .pairs import check_settings, paired, stream_name, taps_of
from .result import KEPT, Counter, Difference, Hop, Tally

__all__ = ["event_hop"]

#: Fields of an event -> their columns.
FIELDS = {"kind": "kind", "action": "h_act", "obs": "h_obs", "reward": "h_rew", "terminated": "terminated", "truncated": "truncated"}


def event_hop(name: str, firsts: Sequence[Ledger], seconds: Sequence[Ledger], counter: Counter) -> tuple[Hop, list[Difference]]:
    """Compare two taps that both record resets and steps."""
    pairs, unpaired = paired(name, firsts, seconds)
    tally = Tally(name)
    differences: list[Difference] = []
    notes: dict[str, str] = {}
    for first_ledger, first, second_ledger, second in pairs:
        check_settings(first_ledger, second_ledger)
        pair = _Pair(tally, first_ledger, first, second_ledger, second)
        differences += pair.compare()
        notes.update(pair.notes)
        tally.notes += [note for note in second_ledger.meta.get("notes", []) if note not in tally.notes]
        counter.add(len(first))
    return tally.hop(unpaired, notes), differences


class _Pair:
    """The two sides of one stream."""

    def __init__(self, tally: Tally, first_ledger: Ledger, first: Stream, second_ledger: Ledger, second: Stream) -> None:
        self.tally = tally
        self.first, self.second = first, second
        self.first_ledger, self.second_ledger = first_ledger, second_ledger
        # What the second tap's ledger says about its fields: one that is compared in another column, or that can't be compared.
        said = second_ledger.meta.get("fields", {})
        self.notes = {name: one.get("skip") or one["note"] for name, one in said.items() if "skip" in one or "note" in one}
        self.a = {name: first.data[column] for name, column in FIELDS.items()}
        self.b = {name: second.data[said.get(name, {}).get("column", column)] for name, column in FIELDS.items()}
        self.fields = [name for name in FIELDS if "skip" not in said.get(name, {})]
        if second_ledger.meta.get("flags") == "exclusive":
            # Stable-Baselines3 delivers one flag for both: TimeLimit.truncated is "truncated and not terminated".
            self.a["truncated"] = self.a["truncated"] & ~self.a["terminated"]
            self.notes["truncated"] = "where terminated is not set, as Stable-Baselines3 delivers it"
        self.kept: list[Difference] = []
        self.count = 0
        self.unknown = ""

    def compare(self) -> list[Difference]:
        tally, n = self.tally, min(len(self.first), len(self.second))
        tally.streams += 1
        if all(np.array_equal(self.a[name][:n], self.b[name][:n]) for name in self.fields):
            self._count_compared(n, {})
            edits: Iterable[Edit] = _tails(len(self.first), len(self.second))
        else:
            edits = self._align()
        flipped: tuple[int, int] | None = None  # where an event would follow whose flags ended the episode on one side only
        for edit in edits:
            if edit.kind == "changed":
                flipped = self._changed(edit, flipped)
            else:
                self._unmatched(edit, flipped)
                flipped = None
        for ledger, tap in zip((self.first_ledger, self.second_ledger), taps_of(tally.name)):
            if ledger.open_end and not self.unknown:
                self.unknown = f"what came after its last event can't be compared, because the ledger of the tap {tap!r} has no end"
        if self.unknown:
            tally.unknown.append(f"{stream_name(self.first.key)}: {self.unknown}")
        tally.add(self.first.key, self.count)
        return self.kept

    def _align(self) -> list[Edit]:
        same_call = [name for name in ("kind", "action") if name in self.fields]
        like = self._keys(self.a, same_call), self._keys(self.b, same_call)
        edits = list(align(self._keys(self.a, self.fields), self._keys(self.b, self.fields), like))
        equal = len(self.first) - sum(edit.length for edit in edits if edit.kind != "extra")
        self._count_compared(equal, {})
        return edits

    def _count_compared(self, events: int, different: dict[str, int]) -> None:
        self.tally.events += events
        for name in FIELDS:
            self.tally.compared[name] = self.tally.compared.get(name, 0) + (events if name in self.fields else 0)
            if name in different:
                self.tally.different[name] = self.tally.different.get(name, 0) + different[name]

    def _changed(self, edit: Edit, flipped: tuple[int, int] | None) -> tuple[int, int] | None:
        """Count a run of events that both sides have and that are not all equal."""
        here, there = slice(edit.first, edit.first + edit.length), slice(edit.second, edit.second + edit.length)
        a = {name: column[here] for name, column in self.a.items()}
        b = {name: column[there] for name, column in self.b.items()}
        unequal = {name: a[name] != b[name] for name in self.fields}
        # In next-step mode the trainer takes the event after an end for a reset: an end that only one side saw shows once more there, and
        # if the episode ends right there, once more. What differs for this reason alone is not counted again.
        ends = _ends(a) != _ends(b)
        after = np.concatenate([[flipped == (edit.first, edit.second)], ends[:-1]])
        follows = after & unequal["kind"] & ~unequal.get("obs", np.zeros(edit.length, bool))
        for name in ("kind", "action", "reward"):
            if name in unequal:
                unequal[name] = unequal[name] & ~follows
        different = np.logical_or.reduce(list(unequal.values()))
        self._count_compared(int((~follows | different).sum()), {name: int(mask.sum()) for name, mask in unequal.items()})
        positions = np.flatnonzero(different)
        self.count += len(positions)
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
        if not length or self._at_open_end(edit) or self._cut_off(edit) or self._still_to_come(edit):
            return
        self.count += 1
        if lost:
            self.tally.lost += length
        else:
            self.tally.extra += length
        if len(self.kept) < KEPT:
            self.kept.append(self._difference(edit.kind, ("event",), edit.first, edit.second, length))

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
            self.unknown = f"the last {_events(edit.length)} can't be compared, because the ledger of the tap {tap!r} has no end"
            return True
        side, begin = (self.a, edit.first) if edit.kind == "lost" else (self.b, edit.second)
        # In same-step mode a step that ended its episode brought a reset with it.
        one = edit.length == 1 or side["kind"][begin:].tolist() == [STEP, RESET]
        if one and ledger.meta.get("in_flight"):
            self.tally.notes.append(f"{stream_name(self.first.key)}: its last event was still under way when the tap {tap!r} was closed")
            return True
        return False

    def _still_to_come(self, edit: Edit) -> bool:
        """Whether these events are the end of a stream whose other side was written by ``flush()``, and is still recording."""
        if (shorter := self._shorter(edit)) is None or shorter[0].meta.get("closed"):
            return False
        self.unknown = (
            f"the last {_events(edit.length)} can't be compared, because the tap {shorter[1]!r} was flushed before, and not closed"
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
        ended = np.flatnonzero(self.a["terminated"][begin:stop] | self.a["truncated"][begin:stop])
        if len(ended):
            if not self.second_ledger.meta.get("whole_episodes") or ended[0] < stop - begin - 1 or self.a["kind"][begin] != RESET:
                return False
            streams = self.first_ledger.streams.values()  # each row of a vector env has one event of each
            if not all(len(one) == stop or (len(one) > stop and one.data["kind"][stop] == RESET) for one in streams):
                return False
        if stop < len(self.first) and self.a["kind"][stop] != RESET:
            return False
        steps = int((self.a["kind"][begin:stop] == STEP).sum())
        if steps:
            self.tally.notes.append(f"{stream_name(self.first.key)}: {steps:,} steps of an episode that was cut off never left the sampler")
        return True

    def _keys(self, data: dict[str, npt.NDArray[Any]], fields: Iterable[str]) -> npt.NDArray[np.uint64]:
        """One 64-bit key per event: equal events have equal keys, others almost surely not."""
        keys = np.zeros(len(data["kind"]), np.uint64)
        for name in fields:
            # Multiply and shift, so that equal parts in different columns don't cancel (the constant is splitmix64's).
            keys = (keys ^ data[name].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            keys ^= keys >> np.uint64(29)
        return keys

    def _difference(self, kind: str, fields: tuple[str, ...], i: int, j: int, events: int = 1) -> Difference:
        episode, step = self._place(i)
        key = self.first.key
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
            return 0, 0
        return int(columns["episode"][-1]), int(columns["step"][-1]) + 1

    def _texts(self, name: str, i: int, j: int) -> tuple[str, str]:
        """What both sides have in a field; of a value with several parts, those that differ."""
        first, second = self._text(self.first, self.a, name, i), self._text(self.second, self.b, name, j)
        if not (isinstance(first, list) and isinstance(second, list)):
            return (_joined(first), _joined(second))
        paths = self.first_ledger.meta["leaves"]["obs" if name == "obs" else "act"]
        if len(first) != len(second) or len(first) != len(paths) or len(first) < 2:
            return (_joined(first), _joined(second))
        parts = [
            [".".join(map(str, path)) + f" {leaf}" for path, leaf, other in zip(paths, leaves, others) if leaf != other]
            for leaves, others in ((first, second), (second, first))
        ]
        return (_joined(parts[0]), _joined(parts[1]))

    def _text(self, stream: Stream, data: dict[str, npt.NDArray[Any]], name: str, i: int) -> str | list[str]:
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
        leaves = [column[i] for leaf, column in sorted(stream.values.items(), key=_leaf_order) if leaf.startswith(which)]
        return [leaf if isinstance(leaf, str) else _in_one_line(leaf) for leaf in leaves]


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else ", ".join(text)


def _events(number: int) -> str:
    return f"{number:,} event{'s' if number > 1 else ''}"


def _in_one_line(value: npt.NDArray[Any]) -> str:
    """The value with as many digits as tell it from its neighbours, so that the least difference shows."""
    return " ".join(np.array2string(value, separator=", ", threshold=64, floatmode="unique").split())


def _leaf_order(item: tuple[str, Any]) -> int:
    return int(item[0].rsplit("_", 1)[1])


def _ends(data: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
    """Which events end their episode; a reset does not, whatever flags came with it."""
    ended: npt.NDArray[np.bool_] = (data["terminated"] | data["truncated"]) & (data["kind"] == STEP)
    return ended


def _tails(first: int, second: int) -> list[Edit]:
    if first > second:
        return [Edit("lost", second, second, first - second)]
    return [Edit("extra", first, first, second - first)] if second > first else []
