"""The hop into the learner: transitions instead of events.

Each transition that the learner consumed must have left the sampler, with its successor. It is found there by the sampler's own identity,
episode id and time step, or, where a replay buffer gave it another id, by what it holds: observation, action and time step. A reward over
n steps is computed again from the n single rewards. Where the algorithm promises to learn from each step exactly once, each step that was
sampled must be here once, and where it promises at most once, not twice; elsewhere it is counted how often each was.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .chance import AROUND, common
from .crossings import Crossings
from .explain import joined, most_common_first
from .format import Meta, StreamKey
from .ledger import Ledger, Stream
from .origins import Origins
from .pairs import check_settings, counted, taps_of
from .result import KEPT, Counter, Difference, Explanation, Hop, Tally
from .sampled import EPISODE_START, FIELDS, Columns, Ints, Sampled, Window, concatenate
from .values import NO_VALUES

__all__ = ["TransitionHop", "learned_columns"]


class TransitionHop:
    """Compares what left the samplers with what learners consumed. Both may come in parts.

    Sampled steps are kept until they can't be learned from any more: where each is learned from once, to the next round; else as many as
    the learner's ledger says (``meta.horizon``). A learned transition is dropped as soon as its step was found.

    Args:
        name: ``"episode -> learner"``.
    """

    def __init__(self, name: str) -> None:
        self._tally = Tally(name)
        self._tally.coverage = {"sampled": 0, "learned_once": 0, "learned_more_than_once": 0, "never_learned": 0}
        self._differences = _Differences(self._tally)
        self._crossings = Crossings()
        self._windows: dict[StreamKey, Window] = {}
        self._learners: dict[Path, Ledger] = {}
        self._learned: list[Columns] = []
        self._taken: dict[Path, int] = {}
        self._notes: dict[str, str] = {}
        self._arrived: deque[dict[StreamKey, int]] = deque()  # after each round, the number of events of each stream
        self._longest = 1
        self._untold = 0  # steps of which a learner's ledger without an end doesn't tell whether they were learned from
        self._open_coverage: dict[str, int] = {}
        self._unpaired = ""

    def add(self, firsts: Sequence[Ledger], seconds: Sequence[Ledger]) -> None:
        """Take further events of the samplers and further transitions of the learners.

        Raises:
            LedgerError: Two ledgers hold the same stream.
        """
        for ledger in firsts:
            for key, stream in ledger.streams.items():
                window = self._windows.get(key)
                if window is None:
                    self._windows[key] = Window(ledger, stream)
                    self._tally.dropped += stream.begin
                else:
                    window.add(ledger, stream)
        for ledger in seconds:
            if ledger.path not in self._learners:
                self._tally.dropped += sum(stream.begin for stream in ledger.streams.values())
            self._learners[ledger.path] = ledger
            self._learned += [learned_columns(stream) for stream in ledger.streams.values()]
            self._taken[ledger.path] = sum(stream.begin + len(stream) for stream in ledger.streams.values())

    def compare(self, end: bool, counter: Counter) -> None:
        """Compare what has come.

        Args:
            end: Nothing more will come. Otherwise a transition whose step is not there waits for it.
            counter: Counts the sampled steps.

        Raises:
            LedgerError: Two sides were recorded with different settings.
        """
        if not self._windows or not self._learners:
            return
        windows, learners = [self._windows[key] for key in sorted(self._windows)], list(self._learners.values())
        for learner in learners:
            check_settings(windows[0].ledger, learner)
        meta, sampled = learners[0].meta, Sampled(windows)
        learned = concatenate(self._learned)
        if end and not self._tally.events and _from_elsewhere(learned, sampled):
            what = f"none of the {len(learned['t']):,} learned transitions has an observation that the vector env gave"
            self._unpaired = f"{what}: pass observations as they came, before wrappers outside the ledger changed them"
            self._tally.coverage = {}
            counter.add(len(sampled))
            return
        at = sampled.find(learned, meta)
        found, foreign = np.flatnonzero(at >= 0), np.flatnonzero(at < 0)
        if len(found):
            matched = {field: column[found] for field, column in learned.items()} if len(foreign) else learned
            _compare(self._tally, self._differences, self._crossings, matched, sampled, at[found], meta)
            sampled.times += np.bincount(at[found], minlength=len(sampled))
        self._longest = max(self._longest, int(learned["n"].max(initial=1)))
        self._notes = _notes(self._longest, meta)
        self._learned = [{field: column[foreign] for field, column in learned.items()}]
        if end and not self._tally.dropped:  # else the other side of what is left may not be there any more
            self._foreign(foreign, learned, sampled, learners)
        done = np.ones(len(sampled), bool) if end else sampled.past(self._past(meta))
        self._completeness(done, sampled, learners, end)
        counter.add(len(sampled))
        self._tally.streams = len({key for key, window in self._windows.items() if len(window.stream) or window.stream.begin})
        self._differences.count()
        sampled.forget(done)
        self._open_coverage = _coverage(sampled.times[~done])

    def _past(self, meta: Meta) -> dict[StreamKey, int]:
        """For each stream, the number of its events, from the first, that won't be learned from any more."""
        now = {key: window.stream.begin + len(window.stream) for key, window in self._windows.items()}
        self._arrived.append(now)
        if meta.get("each_step") == "once":
            past = list(self._arrived)[:-1]
        else:
            behind = sum(now.values()) - meta.get("horizon", math.inf)
            past = [then for then in self._arrived if sum(then.values()) <= behind]
        for _ in past[:-1]:
            self._arrived.popleft()
        return past[-1] if past else {}

    def _foreign(self, foreign: Ints, learned: Columns, sampled: Sampled, learners: Sequence[Ledger]) -> None:
        """Judge transitions whose step was not found."""
        runners = {runner for ledger in learners for runner in ledger.meta.get("runners", [])}
        missing = runners - {window.stream.key.runner for window in sampled.windows}
        open_end = next((window.ledger for window in sampled.windows if window.ledger.open_end), None)
        if len(foreign) and (missing or open_end):
            # What a sampler gave and its ledger lost with its last block can't be told from what none gave.
            why = f"{open_end.path} has no end" if open_end else f"runner {min(missing)} left no ledger"
            self._tally.unknown.append(f"where {len(foreign):,} learned transitions came from: {why}")
        else:
            self._differences.never_sampled(foreign, learned, sampled)

    def _completeness(self, done: npt.NDArray[np.bool_], sampled: Sampled, learners: Sequence[Ledger], end: bool) -> None:
        """How often the steps that are done with were learned from, and whether that is what the algorithm promises."""
        times, tally = sampled.times, self._tally
        for name, count in _coverage(times[done]).items():
            tally.coverage[name] += count
        never, again = np.flatnonzero(done & (times == 0) & (not tally.dropped)), np.flatnonzero(done & (times > 1))
        open_end = [ledger for ledger in learners if ledger.open_end]
        self._untold += len(never) if open_end else 0
        if end and open_end and self._untold:
            tally.unknown.append(f"whether {self._untold:,} sampled steps were learned from: {open_end[0].path} has no end")
        if end and open_end and not tally.unknown:
            why = open_end[0].meta.get("stopped", "its process was stopped before it closed the ledger")
            tally.unknown.append(f"what came after the end of {open_end[0].path}: {why}")
        undelivered = sampled.undelivered()
        if end and not open_end:
            tally.never_learned = _reasons(tally.coverage, int(undelivered[never].sum()), learners[0].meta)
        promises = {ledger.meta.get("each_step", "") for ledger in learners}
        if promises == {"once"}:
            if undelivered[never].any():
                where = "left their EnvRunners, which were killed" if taps_of(tally.name)[0] == "episode" else "came to be learned from"
                tally.unknown.append(f"whether {int(undelivered[never].sum()):,} steps {where}")
            if not open_end:
                self._differences.ranges("lost", never[~undelivered[never]], sampled)
        if promises <= {"once", "at most once"}:
            self._differences.ranges("extra", again, sampled)

    def compared_equal(self) -> dict[StreamKey, int]:
        """For each stream of the samplers, how many events since the first are not needed any more; none once there is a difference."""
        return {} if self._tally.differences else {key: window.stream.begin for key, window in self._windows.items()}

    def learned_equal(self) -> dict[Path, int]:
        """For each ledger of a learner, how many transitions since the first are not needed any more."""
        return {} if self._tally.differences or any(len(part["t"]) for part in self._learned) else dict(self._taken)

    def _strays(self) -> list[list[Any]]:
        """Calls of the training env that are not its trainer's."""
        return [stray for window in list(self._windows.values())[:1] for stray in window.ledger.meta.get("strays", [])]

    def result(self) -> tuple[Hop, list[Difference]]:
        """What was found so far; steps that may still be learned from are counted as they are now."""
        kept = most_common_first(self._differences.kept)
        hop = self._tally.hop((self._unpaired,) if self._unpaired else (), self._notes)
        told = dict.fromkeys(note for ledger in self._learners.values() for note in ledger.meta.get("notes", []))
        hop = replace(hop, notes=(*hop.notes, *told, *self._crossings.notes(self._strays())))
        if self._tally.dropped:  # how often what is left was learned from can't be told any more
            return replace(hop, coverage={}, never_learned={}), kept
        coverage = {name: count + self._open_coverage.get(name, 0) for name, count in hop.coverage.items()} if self._learners else {}
        return replace(hop, coverage=coverage), kept


def _from_elsewhere(learned: Columns, sampled: Sampled) -> bool:
    """Whether a loop of one's own recorded what wrappers around the vector env made of its observations, and nothing else."""
    if not len(learned["t"]) or (learned["t"] >= 0).any() or any(window.ledger.open_end for window in sampled.windows):
        return False
    given = np.concatenate([window.stream.data["h_obs"] for window in sampled.windows])
    return not any(np.isin(learned[field], given).any() for field in ("obs", "next_obs"))


def _coverage(times: Ints) -> dict[str, int]:
    return {
        "sampled": len(times),
        "learned_once": int((times == 1).sum()),
        "learned_more_than_once": int((times > 1).sum()),
        "never_learned": int((times == 0).sum()),
    }


def _reasons(coverage: dict[str, int], undelivered: int, meta: Meta) -> dict[str, int]:
    """Why steps were never learned from, where it is no difference: reason -> number of steps."""
    if meta.get("each_step") == "once":
        rest = ""  # that is a difference
    elif meta.get("replays") and "capacity" not in meta:  # a loop of one's own
        rest = "not drawn from a replay buffer, or lost where there is none: each_step_once=True says that there is none"
    elif meta.get("replays"):
        all_in = coverage["sampled"] <= meta.get("capacity", 0)
        rest = "still in the replay buffer" if all_in else "still in the replay buffer, or dropped from it before they were drawn"
    elif meta.get("each_step") == "at most once":
        rest = "dropped by the asynchronous learner, or on their way to it at the end"
    else:
        rest = ""
    found = {"left by EnvRunners that were killed": undelivered, rest: coverage["never_learned"] - undelivered}
    return {reason: count for reason, count in found.items() if reason and count}


def _notes(longest: int, meta: Meta) -> dict[str, str]:
    """By which known functions a side was taken before it was compared."""
    notes = {}
    if longest > 1:
        notes["reward"] = f"summed over up to {longest} steps with gamma {meta.get('gamma')}"
    if meta.get("flags") == "exclusive":
        whose = "RLlib's replay buffers keep it" if meta.get("replays") else "Stable-Baselines3 delivers it"
        notes["truncated"] = f"where terminated is not set, as {whose}"
    said = meta.get("fields", {})
    return {**notes, **{name: one.get("skip") or one["note"] for name, one in said.items() if "skip" in one or "note" in one}}


def learned_columns(stream: Stream) -> Columns:
    """The columns of learned transitions, by field."""
    data = stream.data
    names = {"obs": "h_obs", "action": "h_act", "reward": "h_rew", "next_obs": "h_next"}
    columns = {field: data[names.get(field, field)] for field in FIELDS}
    if "start" in data:
        columns[EPISODE_START] = data["start"]
    steps = data["n"] if "n" in data else np.ones(len(stream), np.int64)
    return {**columns, "h_id": data["h_id"], "t": data["t"], "n": np.maximum(steps, 1)}


class _Differences:
    """Keeps the first differences of each stream and counts all."""

    def __init__(self, tally: Tally) -> None:
        self.kept: list[Difference] = []
        self._streams: dict[StreamKey, int] = {}
        self._counted: dict[StreamKey, int] = {}
        self._tally = tally

    def count(self) -> None:
        """Add to the tally what was found since the last time."""
        for key, count in self._streams.items():
            self._tally.add(key, count - self._counted.get(key, 0))
        self._counted = dict(self._streams)

    def keep(
        self,
        place: tuple[StreamKey, int, int],
        fields: tuple[str, ...],
        kind: str,
        events: int = 1,
        first: dict[str, str] | None = None,
        second: dict[str, str] | None = None,
        why: tuple[Explanation, ...] = (),
        more: Callable[[], list[Explanation]] = list,
    ) -> None:
        """Count a difference, and keep it where it is one of the first; ``more`` tells then what else may be behind it."""
        key, episode, step = place
        self._streams[key] = self._streams.get(key, 0) + 1
        self._tally.lost += events if kind == "lost" else 0
        self._tally.extra += events if kind == "extra" else 0
        if self._streams[key] <= KEPT:
            name, runner, agent = self._tally.name, key.runner, key.agent
            sides = first or {}, second or {}
            why = tuple(dict.fromkeys((*why, *joined(more()))))
            if kind == "changed" and {"obs", "next_obs", "action"} & set(fields) and not any(one.sure for one in why):
                self._tally.unkept.setdefault(NO_VALUES.format("learner"))
            self.kept.append(Difference(name, key.env, episode, step, fields, kind, *sides, events, runner, agent, why, key.incarnation))

    def never_sampled(self, rows: Ints, learned: Columns, sampled: Sampled) -> None:
        """Transitions that the learner got and no sampler gave."""
        if not len(rows):
            return
        unknown = Explanation("SL506", "no environment of this run gave it")
        joints = sampled.joints({field: learned[field][rows] for field in ("obs", "next_obs")})
        for row, window, event in zip(rows.tolist(), *(part.tolist() for part in joints)):
            if window >= 0:
                stream = sampled.windows[window].stream
                episode = int(stream.columns["episode"][event])
                near = stream.data["h_obs"][max(0, event - AROUND) : event + AROUND]
                sure = not common(near, int(learned["obs"][row]))  # else a wrong transition may look like one by chance
                joins = f"{'joins' if sure else 'may join'} the end of episode {episode - 1} to the reset of episode {episode}"
                what = f"it {joins}, which is no step of the environment"
                reset = Explanation("SL509", f"the reset {'was' if sure else 'may be'} stored as if it were a step")
                why = (reset,) if sure else (reset, unknown)
                self.keep((stream.key, episode, 0), ("event",), "extra", second={"event": what}, why=why)
                continue
            place = sampled.place_in_episode(int(learned["h_id"][row]), int(learned["t"][row]))
            self.keep(place, ("event",), "extra", second={"event": "it was never sampled"}, why=(unknown,))

    def ranges(self, kind: str, rows: Ints, sampled: Sampled) -> None:
        """Steps that were learned from too often or never; several in a row of one stream are one difference."""
        streams = sampled.stream_of(rows)
        for run in np.split(rows, np.flatnonzero((np.diff(rows) != 1) | (np.diff(streams) != 0)) + 1):
            if len(run):
                note = {"event": f"it was learned from {int(sampled.times[run[0]])} times"} if kind == "extra" else {}
                self.keep(sampled.place(int(run[0])), ("event",), kind, len(run), second=note, why=_of_range(kind, len(run)))


def _of_range(kind: str, length: int) -> tuple[Explanation, ...]:
    if kind == "lost":
        what = "it was sampled and never learned from" if length == 1 else f"{length:,} steps in a row were sampled and never learned from"
        return (Explanation("SL507", what),)
    one, several = Explanation("SL505", "it came more than once"), Explanation("SL508", f"a chunk of {counted(length, 'step')} came again")
    return (one, several) if length == 1 else (several,)


def _compare(
    tally: Tally, differences: _Differences, crossings: Crossings, learned: Columns, sampled: Sampled, at: Ints, meta: Meta
) -> None:
    """Compare learned transitions with the sampled ones that begin in the rows ``at``."""
    unequal = sampled.unequal(at, learned, meta)
    tally.events += len(at)
    for field, mask in unequal.items():
        compared = len(at)
        if field == "obs":
            compared = int(sampled.columns["obs_known"][at].sum())
        elif field == EPISODE_START:
            compared = int((sampled.columns["obs_known"][at] & (learned[field] >= 0)).sum())
        tally.compared[field] = tally.compared.get(field, 0) + compared
        tally.different[field] = tally.different.get(field, 0) + int(mask.sum())
    rows = np.flatnonzero(np.logical_or.reduce(list(unequal.values())))
    sides = sampled.sides(at[rows], {field: column[rows] for field, column in learned.items()}, meta, learned["n"][rows])
    origins = Origins(sampled)
    for field in (*FIELDS, *([EPISODE_START] if EPISODE_START in learned else [])):
        tally.compared.setdefault(field, 0)
    for which, row in enumerate(rows.tolist()):
        fields = tuple(field for field in unequal if unequal[field][row])
        first, second = (
            {name: text for name in fields if (text := _text(name, side[name][which], sampled.reward_dtype))} for side in sides
        )
        place = sampled.place(int(at[row]))
        why = crossings.cut(sampled, int(at[row]), place)
        more = functools.partial(origins.explain, int(at[row]), fields, sides, which)
        differences.keep(place, fields, "changed", first=first, second=second, why=why, more=more)
    marked = learned[EPISODE_START] >= 0 if EPISODE_START in learned else np.zeros(len(at), bool)
    for place, sentence in crossings.uncut(sampled, at, rows, marked):
        differences.keep(place, ("event",), "extra", second={"event": sentence}, why=(Explanation("SL501", sentence),))


def _text(field: str, value: Any, reward_dtype: str) -> str:
    """A reward or a flag as a report prints it; of the others there are only digests."""
    if field == "reward":
        return str(np.array([value]).view(reward_dtype)[0])
    return str(bool(value)) if field in ("terminated", "truncated") else ""
