"""The two sides of one stream at a hop between two taps that both record resets and steps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from .align import RESYNC, Edit, common_prefix, joined, mixed, tails
from .anchors import refined
from .errors import LedgerError
from .explain import explain
from .format import RESET, STEP, StreamKey
from .lasting import Lasting, exchanged, lasts, until, with_its_end
from .ledger import Ledger, Stream
from .pairs import check_settings, counted, stream_name, taps_of
from .parts import Part, PartDigests
from .ranges import Range, Sides, end_of, longer, paired, tail, with_ranges
from .received import Context
from .resets import Reset
from .result import KEPT, Difference, Explanation, Tally
from .strays import UNSEEN
from .tracks import Track
from .unmatched import Unmatched
from .values import LeafPair, texts, unequal, why_unkept

if TYPE_CHECKING:
    from .events import EventHop

__all__ = ["StreamPair"]

#: Fields of an event -> their columns.
FIELDS = {"kind": "kind", "action": "h_act", "obs": "h_obs", "reward": "h_rew", "terminated": "terminated", "truncated": "truncated"}

_Columns = dict[str, npt.NDArray[Any]]


class StreamPair:
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
        self._alone = Unmatched(self)
        self._begun = False
        # Whether an event would follow whose flags ended the episode on one side only.
        self._flipped = False
        self._compared = (0, 0)
        self.tracks: tuple[Track, Track] | None = None
        # Of what is being compared, resets that nobody was told of; and which of the differences that were kept are told elsewhere.
        self.resets: list[Reset] = []
        self.withdrawn: set[int] = set()
        self._kept_resets = 0
        self._past: tuple[dict[str, npt.NDArray[Any]], ...] = ({}, {})
        self._past_parts: tuple[dict[Part, npt.NDArray[np.uint64]], ...] = ({}, {})
        # A range that reached the end of what was compared.
        self._lasting: Lasting | None = None

    def add(self, side: int, ledger: Ledger, stream: Stream) -> None:
        """Take further events of a side.

        Raises:
            LedgerError: They are another ledger's.
        """
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

    def waiting(self) -> tuple[int, int]:
        """How many events of both sides wait to be compared."""
        return len(self.windows[0]), len(self.windows[1])

    def is_of(self, ledger: Ledger) -> bool:
        """Whether the first side is this ledger's."""
        return self._ledgers[0] is not None and self._ledgers[0].path == ledger.path

    def unpaired(self) -> str:
        """A sentence if only one side has this stream."""
        for tap, ledger, window in zip(taps_of(self.tally.name)[::-1], self._ledgers, self.windows):
            events = window.begin + len(window)
            if ledger is not None and None in self._ledgers and events:
                return f"{stream_name(self.key)} has {counted(events, 'event')} in {ledger.path} and no ledger at the tap {tap!r}"
        return ""

    def open_end(self) -> str:
        """A sentence if only the first side has this stream, and its process may have been killed before the second one was written."""
        first, second = self._ledgers
        if first is None or second is not None or not first.open_end:
            return ""
        one, other = taps_of(self.tally.name)
        events = counted(self.windows[0].begin + len(self.windows[0]), "event")
        why = f"the ledger of the tap {one!r} has no end, and the tap {other!r} had not written any"
        return f"{stream_name(self.key)}: {events} can't be compared, because {why}"

    @property
    def received(self) -> bool:
        """Whether the second side has this stream."""
        return self._ledgers[1] is not None

    def compare(self, end: bool) -> int:
        """Compare the windows; the number of events of the first side that this has dealt with."""
        if self.tracks is None:
            return len(self.windows[0])
        edits = self._edits()
        self._compared = len(self.first), len(self.second)
        if not end:
            edits, self._compared = self._decided(edits)
        elif edits:
            edits = self._without_undelivered_end(edits)
            edits = with_its_end(edits, self._sides(), self._lasting)
        edits = list(joined(cast("list[Edit]", edits)))  # ranges stay as they are
        unlike = [slice(edit.first, edit.first + edit.length) for edit in edits if edit.kind != "extra"]
        step = self.a["kind"][: self._compared[0]] == STEP
        self._count_compared(
            len(step) - sum(part.stop - part.start for part in unlike), int(step.sum() - sum(step[part].sum() for part in unlike)), {}
        )
        count = self._count
        flipped = (0, 0) if self._flipped else None
        for edit in edits:
            if isinstance(edit, Range):
                self._ranged(edit)
                flipped = None
            elif edit.kind == "changed":
                flipped = self._changed(edit, flipped)
            else:
                self._unmatched(edit, flipped)
                flipped = None
        self._flipped = flipped == self._compared
        self._keep_lasting(edits)
        if end:
            self._alone.end()
        self.tally.add(self.key, self._count - count)
        return self._compared[0]

    def _keep_lasting(self, edits: list[Edit | Range]) -> None:
        """Remember the range that may go on behind what was compared, or forget it."""
        if self._lasting is None or not any(self._compared):
            return
        last, (i, j) = self._lasting.range, end_of(edits[-1]) if edits else (0, 0)
        # Behind it, or where there is no other event, all of them are equal.
        behind, known = self._compared[0] - i, last.tail if edits else tail(self._sides(), last)
        if behind != self._compared[1] - j or behind > known or (edits and not isinstance(edits[-1], Range)):
            self._lasting = None
            return
        self._lasting = self._lasting.behind(behind, 0 if edits else last.tail)

    def _edits(self) -> list[Edit | Range]:
        begin = min(len(self.first), len(self.second))
        for name in self.fields:
            begin = common_prefix(self.a[name][:begin], self.b[name][:begin])
        common, lasting = min(len(self.first), len(self.second)), self._lasting and self._lasting.range
        sides = self._sides() if begin < common or (lasting and common) else None
        if sides is None or (begin == common and not (lasting and longer(sides, lasting))):
            return [*tails(len(self.first), len(self.second))]
        # What is equal before is left out, so that all of it is as if it began there.
        begin = 0 if lasting else begin
        a, b = ({name: side[name][begin:] for name in self.fields} for side in (self.a, self.b))
        same_call = [name for name in ("kind", "action") if name in self.fields]
        like = mixed(*(a[name] for name in same_call)), mixed(*(b[name] for name in same_call))
        keys = mixed(*a.values()), mixed(*b.values())
        columns = [(a[name], b[name]) for name in self.fields]
        edits = refined(with_ranges(keys, like, sides, begin, lasting), keys, like, (a["kind"], b["kind"]), columns)
        return [edit._replace(first=begin + edit.first, second=begin + edit.second) for edit in edits]

    def _without_undelivered_end(self, edits: list[Edit | Range]) -> list[Edit | Range]:
        """Tell a first side that ends soon after what was given in a call that raised: too soon for the two sides to agree again."""
        if not self.first_ledger.open_end or not self.second_ledger.meta.get("raised"):
            return edits
        last = [edit for edit in edits if edit.first >= len(self.first) - RESYNC - 2]
        if all(isinstance(edit, Edit) and (self._alone.shorter(edit) is not None or self._alone.of_raised_calls(edit)) for edit in last):
            return edits
        for behind, length in itertools.product(range(RESYNC + 1), (1, 2)):  # in same-step mode a reset may have come with the step
            at = len(self.first) - behind - length
            before = [edit for edit in edits if end_of(edit)[0] <= at and edit.first < at]
            if at < 0 or any(isinstance(edit, Range) or edit.first < at for edit in edits[len(before) :]):
                continue
            first, second = end_of(before[-1]) if before else (0, 0)
            lost = Edit("lost", at, second + at - first, length)
            stop = lost.second + behind
            alike = all(np.array_equal(self.a[name][at + length :], self.b[name][lost.second : stop]) for name in self.fields)
            if stop <= len(self.second) and alike and self._alone.of_raised_calls(lost):
                return [*before, lost, Edit("extra", len(self.first), stop, len(self.second) - stop)]
        return edits

    def _sides(self) -> Sides:
        assert self.tracks is not None
        others = [(key, tracks[0]) for key, tracks in self.hop.others(self.key)]
        return Sides(*self.tracks, self.fields, others, self.hop.neighbours(self.key), self.hop.ended)

    def _decided(self, edits: list[Edit | Range]) -> tuple[list[Edit | Range], tuple[int, int]]:
        """The edits that what is still to come won't change, and where the events that are dealt with end on both sides.

        An edit is decided when the two sides agree again behind it, or disagree for so long that this is what there is to say. A range is
        at once: it goes on, or ends, in what comes next.
        """
        ends = cut = len(self.first), len(self.second)
        open_ = len(edits)
        while open_:
            last, stop = edits[open_ - 1], end_of(edits[open_ - 1])
            if min(cut[0] - stop[0], cut[1] - stop[1]) >= RESYNC or (isinstance(last, Range) and self._is_sure(last)):
                break
            open_ -= 1
            cut = edits[open_].first, edits[open_].second
        if min(ends[0] - cut[0], ends[1] - cut[1]) <= self.hop.undecided:
            return edits[:open_], cut
        last = edits[-1]
        if not isinstance(last, Edit) or last.kind == "changed" or self._alone.shorter(last) is None:
            return edits, ends
        return edits[:-1], (last.first, last.second)

    def _is_sure(self, last: Range) -> bool:
        """Whether a range is one even if it goes no further."""
        return last.sure or (self._lasting is not None and self._lasting.is_of(last))

    def open(self) -> None:
        """Prepare the windows, if both sides have come."""
        first_ledger, second_ledger = self._ledgers
        if first_ledger is None or second_ledger is None:
            return
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
            self.tally.dropped += self.first.begin
            self.tally.notes += [note for note in second_ledger.meta.get("notes", []) if note not in self.tally.notes]
        by_event = any(ledger.meta.get("autoreset_mode") == "NextStep" for ledger in (first_ledger, second_ledger))
        one, other = map(PartDigests, self.windows, (first_ledger.meta, second_ledger.meta), self._past_parts)
        self.tracks = Track(self.first, self.a, self._past[0], by_event, one), Track(self.second, self.b, self._past[1], by_event, other)

    def compared_equal(self) -> int:
        """How many events were compared since the first, if each is the same on both sides."""
        first, second = (window.begin for window in self.windows)
        return first if self._begun and not self._count and first == second else 0

    def forget(self) -> None:
        """Drop what was compared."""
        if self.tracks is not None:
            ends = list(zip(self.tracks, self._compared))
            self._past = tuple(track.remembered(events) for track, events in ends)
            self._past_parts = tuple(track.parts.remembered(events) if track.parts else {} for track, events in ends)
            self.tracks, self.resets = None, []
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
        unequal, unseen = self._unequal(a, b)
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
        hidden = ((a["kind"] == RESET) & (b["kind"] == STEP))[positions]
        (resets, beyond), others = np.split(positions[hidden], [self._room(of_resets=True)]), positions[~hidden][: self._room()]
        for at in sorted(resets.tolist() + others.tolist()):
            names = tuple(name for name in self.fields if unequal[name][at])
            self.kept.append(self._difference("changed", names, edit.first + at, edit.second + at))
            if at in resets:
                self._note_reset(edit.first + at, edit.second + at, "changed", kept=True)
        for at in beyond.tolist():
            self._note_reset(edit.first + at, edit.second + at, "changed", kept=False)
        return (edit.first + edit.length, edit.second + edit.length) if ends[-1] else None

    def _unequal(self, a: _Columns, b: _Columns) -> tuple[dict[str, npt.NDArray[np.bool_]], int]:
        """For each field, which events differ, one by one; and how many have an observation that the second side did not see."""
        unequal = {name: a[name] != b[name] for name in self.fields}
        if "obs" not in unequal or self._by is None:
            return unequal, 0
        unequal["obs"] &= b["obs"] != UNSEEN
        return unequal, int((b["obs"] == UNSEEN).sum())

    def _ranged(self, edit: Range) -> None:
        """Count events of which each has the reply of another one, as one difference."""
        sides = self._sides()
        here, there, alone = paired(sides, edit)
        a, b = ({name: column[at] for name, column in side.items()} for side, at in ((self.a, here), (self.b, there)))
        unequal, unseen = self._unequal(a, b)
        different = {name: int(mask.sum()) for name, mask in unequal.items()}
        different["kind"] += alone
        step = (a["kind"] == STEP) | (b["kind"] == STEP)
        self._count_compared(len(here), int(step.sum()), different, unseen)
        fields = tuple(name for name in self.fields if different[name])
        lasting = self._lasting
        if lasting is not None and lasting.is_of(edit):
            behind = lasting.range.tail
            lasting = lasting._replace(range=edit, envs=lasting.envs or exchanged(sides, self.key.env, edit))
            if lasting.kept is not None:
                before = self.kept[lasting.kept]
                names = tuple(name for name in self.fields if name in {*before.fields, *fields})
                events = before.events + behind + edit.length
                found = replace(before, fields=names, events=events)
                self.kept[lasting.kept] = replace(found, explanations=self._lasts(lasting, names, events))
        else:
            lasting = Lasting(edit, None, self.first.place(edit.first), exchanged(sides, self.key.env, edit))
            if not self._is_counterpart(lasting):
                self._count += 1
                if self._room():
                    lasting = lasting._replace(kept=len(self.kept))
                    # The texts are those of its first event.
                    names = tuple(name for name in fields if self.a[name][edit.first] != self.b[name][edit.second])
                    found = self._difference("changed", names, edit.first, edit.second, edit.length)
                    self.kept.append(replace(found, fields=fields, explanations=self._lasts(lasting, fields, edit.length)))
        self._lasting = lasting

    def _is_counterpart(self, lasting: Lasting) -> bool:
        """Whether these are the replies of a stream that has this one's, and that is said there."""
        edit = lasting.range
        if edit.other is None or self.tracks is None:
            return False
        envs = {*lasting.envs, self.key.env, edit.other.env}
        found = self.hop.is_counterpart(self.key, envs, self.tracks[1].call(edit.second))
        if found:
            self.tally.different_keys.add(self.key)
        return found

    def _lasts(self, lasting: Lasting, fields: tuple[str, ...], events: int) -> tuple[Explanation, ...]:
        edit = lasting.range
        place = until(lasting.begun, self.first.place(edit.first + edit.length - 1), events)
        return lasts(place, edit, fields, self.key.env, lasting.envs)

    def _unmatched(self, edit: Edit, flipped: tuple[int, int] | None) -> None:
        """Count a run of events that only one side has."""
        lost = edit.kind == "lost"
        begin, length = (edit.first if lost else edit.second), edit.length
        if flipped == (edit.first, edit.second) and (self.a if lost else self.b)["kind"][begin] == RESET:
            # In same-step mode an end that only one side saw brings a reset that only that side has.
            edit = edit._replace(first=edit.first + lost, second=edit.second + (not lost), length=edit.length - 1)
            begin, length = begin + 1, length - 1
        if not length or self._alone.is_no_difference(edit):
            return
        self._count += 1
        if lost:
            self.tally.lost += length
        else:
            self.tally.extra += length
        reset = lost and length == 1 and self.a["kind"][begin] == RESET
        if room := self._room(of_resets=reset):
            self.kept.append(self._difference(edit.kind, ("event",), edit.first, edit.second, length))
        if reset:
            self._note_reset(edit.first, edit.second, "lost", room > 0)

    def _room(self, of_resets: bool = False) -> int:
        """How many further differences are kept; resets that may be told elsewhere take no room from the others."""
        return max(0, KEPT - (self._kept_resets if of_resets else len(self.kept) - self._kept_resets))

    def _note_reset(self, i: int, j: int, kind: str, kept: bool) -> None:
        """Remember a reset that nobody was told of, whose difference was kept last, if it was; it may be one of all environments."""
        assert self.tracks is not None
        second = self.tracks[1]
        call = second.call(j) if j < len(self.second) else second.call(len(self.second) - 1) + 1
        position = self.first.begin + i, self.second.begin + j if kind == "changed" else -1
        self.resets.append(Reset(call, kind, self.first.place(i), position, len(self.kept) - 1 if kept else -1))
        self._kept_resets += kept

    def _difference(self, kind: str, fields: tuple[str, ...], i: int, j: int, events: int = 1) -> Difference:
        (episode, step), key = self.first.place(i), self.key
        at = (-1 if kind == "extra" else self.first.begin + i, -1 if kind == "lost" else self.second.begin + j)
        context = self._context(i, j, step)
        why = explain(kind, fields, events, context)
        difference = Difference(
            self.tally.name, key.env, episode, step, fields, kind, {}, {}, events, key.runner, key.agent, why, key.incarnation, at
        )
        if kind != "changed":
            return difference
        unsure = events == 1 and not any(one.sure for one in why)  # what a range is, is said without values
        if unsure and any(name in fields and context.leaves(name) is None for name in ("obs", "action")):
            self.tally.unkept.setdefault(why_unkept(self.first_ledger.meta, self.second_ledger.meta))
        sides = (self.first, self.a, i), (self.second, self.b, j)
        both = {name: texts(name, sides, self.first_ledger.meta) for name in fields}
        return replace(
            difference,
            first={name: first for name, (first, _) in both.items() if first},
            second={name: second for name, (_, second) in both.items() if second},
        )

    def _context(self, i: int, j: int, step: int) -> Context:
        assert self.tracks is not None

        def leaves(field: str) -> tuple[list[LeafPair], bool] | None:
            return unequal(field, ((self.first, i), (self.second, j)), self.first_ledger.meta)

        known, dtype = self.hop.constants(self.first_ledger), self.first_ledger.meta["reward_dtype"]
        back = taps_of(self.tally.name)[0] == "env"
        return Context(*self.tracks, i, j, step, self.key.env, self.hop.neighbours(self.key), known, dtype, back, leaves)


def _ends(data: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
    """Which events end their episode; a reset does not, whatever flags came with it."""
    ended: npt.NDArray[np.bool_] = (data["terminated"] | data["truncated"]) & (data["kind"] == STEP)
    return ended
