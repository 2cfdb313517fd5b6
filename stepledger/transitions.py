"""The hop into the learner: transitions instead of events.

Each transition that the learner consumed must have left the sampler, with its successor. It is found there by the sampler's own identity,
episode id and time step, or, where a replay buffer gave it another id, by what it holds: observation, action and time step. A reward over
n steps is computed again from the n single rewards. Where the algorithm promises to learn from each step exactly once, each step that was
sampled must be here once; elsewhere it is counted how often each was.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import LedgerError
from .format import STEP, Meta, StreamKey
from .ledger import Ledger, Stream
from .pairs import check_settings, stream_name
from .result import KEPT, Counter, Difference, Hop, Tally

__all__ = ["TransitionHop"]

#: Fields of a transition.
FIELDS = ("obs", "action", "reward", "next_obs", "terminated", "truncated")

#: Sampled steps that hold the same and are tried for one learned transition.
_CANDIDATES = 16

Columns = dict[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int64]


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
        self._windows: dict[StreamKey, _Window] = {}
        self._learners: dict[Path, Ledger] = {}
        self._learned: list[Columns] = []
        self._taken: dict[Path, int] = {}
        self._notes: dict[str, str] = {}
        self._arrived: deque[dict[StreamKey, int]] = deque()  # after each round, the number of events of each stream
        self._longest = 1
        self._untold = 0  # steps of which a learner's ledger without an end doesn't tell whether they were learned from
        self._open_coverage: dict[str, int] = {}

    def add(self, firsts: Sequence[Ledger], seconds: Sequence[Ledger]) -> None:
        """Take further events of the samplers and further transitions of the learners.

        Raises:
            LedgerError: Two ledgers hold the same stream.
        """
        for ledger in firsts:
            for key, stream in ledger.streams.items():
                window = self._windows.get(key)
                if window is None:
                    self._windows[key] = _Window(ledger, stream)
                    self._tally.dropped += stream.begin
                else:
                    window.add(ledger, stream)
        for ledger in seconds:
            if ledger.path not in self._learners:
                self._tally.dropped += sum(stream.begin for stream in ledger.streams.values())
            self._learners[ledger.path] = ledger
            self._learned += [_learned(stream) for stream in ledger.streams.values()]
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
        meta, sampled = learners[0].meta, _Sampled(windows)
        learned = _concatenate(self._learned)
        at = sampled.find(learned, meta)
        found, foreign = np.flatnonzero(at >= 0), np.flatnonzero(at < 0)
        if len(found):
            matched = {field: column[found] for field, column in learned.items()} if len(foreign) else learned
            _compare(self._tally, self._differences, matched, sampled, at[found], meta)
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
        if meta.get("each_step_once"):
            past = list(self._arrived)[:-1]
        else:
            behind = sum(now.values()) - meta.get("horizon", math.inf)
            past = [then for then in self._arrived if sum(then.values()) <= behind]
        for _ in past[:-1]:
            self._arrived.popleft()
        return past[-1] if past else {}

    def _foreign(self, foreign: Ints, learned: Columns, sampled: _Sampled, learners: Sequence[Ledger]) -> None:
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

    def _completeness(self, done: npt.NDArray[np.bool_], sampled: _Sampled, learners: Sequence[Ledger], end: bool) -> None:
        """How often the steps that are done with were learned from, and whether that is what the algorithm promises."""
        times, tally = sampled.times, self._tally
        for name, count in _coverage(times[done]).items():
            tally.coverage[name] += count
        never, again = np.flatnonzero(done & (times == 0) & (not tally.dropped)), np.flatnonzero(done & (times > 1))
        open_end = [ledger for ledger in learners if ledger.open_end]
        self._untold += len(never) if open_end else 0
        if end and open_end and self._untold:
            tally.unknown.append(f"whether {self._untold:,} sampled steps were learned from: {open_end[0].path} has no end")
        if all(ledger.meta.get("each_step_once") for ledger in learners):
            undelivered = sampled.undelivered()
            if undelivered[never].any():
                tally.unknown.append(f"whether {int(undelivered[never].sum()):,} steps left their EnvRunners, which were killed")
            if not open_end:
                self._differences.ranges("lost", never[~undelivered[never]], sampled)
            self._differences.ranges("extra", again, sampled)

    def compared_equal(self) -> dict[StreamKey, int]:
        """For each stream of the samplers, how many events since the first are not needed any more; none once there is a difference."""
        return {} if self._tally.differences else {key: window.stream.begin for key, window in self._windows.items()}

    def learned_equal(self) -> dict[Path, int]:
        """For each ledger of a learner, how many transitions since the first are not needed any more."""
        return {} if self._tally.differences or any(len(part["t"]) for part in self._learned) else dict(self._taken)

    def result(self) -> tuple[Hop, list[Difference]]:
        """What was found so far; steps that may still be learned from are counted as they are now."""
        hop = self._tally.hop((), self._notes)
        if self._tally.dropped:  # how often what is left was learned from can't be told any more
            return replace(hop, coverage={}), self._differences.kept
        coverage = {name: count + self._open_coverage.get(name, 0) for name, count in hop.coverage.items()} if self._learners else {}
        return replace(hop, coverage=coverage), self._differences.kept


def _coverage(times: Ints) -> dict[str, int]:
    return {
        "sampled": len(times),
        "learned_once": int((times == 1).sum()),
        "learned_more_than_once": int((times > 1).sum()),
        "never_learned": int((times == 0).sum()),
    }


class _Window:
    """The events of a sampler's stream that may still be learned from.

    Attributes:
        ledger: Whose they are.
        stream: The events; the first of them may only be there as the one before the next.
        times: For each event, how often it was learned from.
        settled: Number of events at the beginning that are done with.
    """

    def __init__(self, ledger: Ledger, stream: Stream) -> None:
        self.ledger = ledger
        self.stream = stream
        self.times = np.zeros(len(stream), np.int64)
        self.settled = 0

    def add(self, ledger: Ledger, stream: Stream) -> None:
        if ledger.path != self.ledger.path:
            raise LedgerError(
                f"{ledger.path} and {self.ledger.path} both hold {stream_name(stream.key)}: name a directory with the ledgers of one run."
            )
        self.ledger = ledger
        self.stream = self.stream + stream
        self.times = np.concatenate([self.times, np.zeros(len(stream), np.int64)])

    def forget(self, events: int) -> None:
        """Drop the first events but for the last of them, from which the next one's transition begins."""
        drop = max(0, events - 1)
        self.stream = self.stream.after(drop)
        self.times = self.times[drop:]
        self.settled = events - drop


def _notes(longest: int, meta: Meta) -> dict[str, str]:
    """By which known functions a side was taken before it was compared."""
    notes = {}
    if longest > 1:
        notes["reward"] = f"summed over up to {longest} steps with gamma {meta.get('gamma')}"
    if meta.get("flags") == "exclusive":
        notes["truncated"] = "where terminated is not set, as RLlib's replay buffers keep it"
    return notes


def _learned(stream: Stream) -> Columns:
    data = stream.data
    names = {"obs": "h_obs", "action": "h_act", "reward": "h_rew", "next_obs": "h_next"}
    columns = {field: data[names.get(field, field)] for field in FIELDS}
    steps = data["n"] if "n" in data else np.ones(len(stream), np.int64)
    return {**columns, "h_id": data["h_id"], "t": data["t"], "n": np.maximum(steps, 1)}


def _mixed(*columns: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Several columns in 64 bits."""
    keys = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        keys = (keys ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    return keys


def _concatenate(parts: list[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    return {field: np.concatenate([part[field] for part in parts]) for field in parts[0]}


class _Index:
    """Finds rows by a 64-bit key."""

    def __init__(self, keys: npt.NDArray[np.uint64]) -> None:
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]

    def find(self, keys: npt.NDArray[np.uint64], rank: int = 0) -> Ints:
        """For each key its row, or -1; of several rows with one key, the one of this rank."""
        if not len(self._sorted):
            return np.full(len(keys), -1)
        at = np.minimum(np.searchsorted(self._sorted, keys) + rank, len(self._sorted) - 1)
        return np.where(self._sorted[at] == keys, self._order[at], -1)


class _Sampled:
    """The transitions in the windows: each step of a stream with the observation before it, in the order of the streams.

    Attributes:
        windows: The streams.
        columns: The transitions, a row each.
        times: How often each was learned from.
    """

    def __init__(self, windows: Sequence[_Window]) -> None:
        self.windows = windows
        self._open_streams = [window.ledger.open_end for window in windows]
        self.reward_dtype: str = windows[0].ledger.meta["reward_dtype"]
        parts = [self._part(window.stream, window.settled) for window in windows]
        self._starts = np.cumsum([0, *(len(part["t"]) for part in parts)])
        self.columns = _concatenate(parts)
        self.times: Ints = np.concatenate([window.times[part["event"]] for window, part in zip(windows, parts)])
        t, h_id = self.columns["t"], self.columns["h_id"]
        # chained[i]: row i + 1 is the next step of the same episode.
        self.chained = np.zeros(len(t), bool)
        self.chained[:-1] = (h_id[1:] == h_id[:-1]) & (t[1:] == t[:-1] + 1)

    @staticmethod
    def _part(stream: Stream, settled: int) -> Columns:
        data = stream.data
        at = np.flatnonzero(data["kind"] == STEP)
        at = at[np.searchsorted(at, settled) :]
        before = np.maximum(at - 1, 0)
        # Where the event before a step is not its predecessor (its chunk was lost), the observation it began from is not known.
        follows = (at > 0) & (data["h_id"][before] == data["h_id"][at]) & (data["t"][before] == data["t"][at] - 1)
        return {
            "obs": data["h_obs"][before],
            "obs_known": follows,
            "action": data["h_act"][at],
            "reward": data["h_rew"][at],
            "next_obs": data["h_obs"][at],
            "terminated": data["terminated"][at],
            "truncated": data["truncated"][at],
            "h_id": data["h_id"][at],
            "t": data["t"][at],
            "event": at,
        }

    def __len__(self) -> int:
        return int(self._starts[-1])

    def find(self, learned: Columns, meta: Meta) -> Ints:
        """For each learned transition the row of the step it begins with, or -1."""
        own = self.columns
        at = self._by_identity(learned)
        if not meta.get("replays"):
            return at
        # A replay buffer may have put another id in place of the sampler's. Then the transition is found by what it holds: all of it,
        # as it should be over so many steps. Observations may repeat, so that a part of it leads to many steps.
        known = np.flatnonzero(own["obs_known"])
        for n in np.unique(learned["n"][at < 0]):
            rows = np.flatnonzero((at < 0) & (learned["n"] == n))
            expected, found = self.sides(known, {field: column[rows] for field, column in learned.items()}, meta, int(n))
            own_keys, keys = (_mixed(*(side[field] for field in (*FIELDS, "t"))) for side in (expected, found))
            hits = _Index(own_keys).find(keys)
            at[rows[hits >= 0]] = known[hits[hits >= 0]]
        # If one part was changed, the others lead to its step, and the comparison names the part; not where that step may be lost with an
        # open end.
        whole = [("obs", "action", "t"), ("obs", "action")]
        parts = [] if any(self._open_streams) else [("action", "next_obs", "t"), ("obs", "next_obs")]
        for fields in whole + parts:
            rows = np.flatnonzero((at < 0) & ((learned["n"] == 1) | ("next_obs" not in fields)))
            if not len(rows):
                continue
            known = np.flatnonzero(own["obs_known"]) if "obs" in fields else np.arange(len(self))
            index = _Index(_mixed(*(own[field][known] for field in fields)))
            keys = _mixed(*(learned[field][rows] for field in fields))
            at[rows] = self._best(index, known, keys, {field: column[rows] for field, column in learned.items()}, meta)
        return at

    def _by_identity(self, learned: Columns) -> Ints:
        """For each learned transition the row of its episode and time step, or -1."""
        own, h_id, t = self.columns, learned["h_id"], learned["t"]
        # Learners get chunks of episodes: where a transition follows the one before, so does its row, mostly.
        first = np.ones(len(t), bool)
        first[1:] = (h_id[1:] != h_id[:-1]) | (t[1:] != t[:-1] + 1)
        heads = np.flatnonzero(first)
        rows = self._in_chains(h_id[heads], t[heads])
        lengths = np.diff([*heads, len(t)])
        at = np.repeat(rows - heads, lengths) + np.arange(len(t))
        at[np.repeat(rows < 0, lengths) | (at >= len(self))] = -1
        wrong = np.flatnonzero((at < 0) | (own["h_id"][at] != h_id) | (own["t"][at] != t)) if len(self) else np.arange(len(t))
        if len(wrong):
            at[wrong] = _Index(_mixed(own["h_id"], own["t"])).find(_mixed(h_id[wrong], t[wrong]))
        return at

    def _in_chains(self, h_id: npt.NDArray[np.uint64], t: Ints) -> Ints:
        """The rows of steps, found by the chains of steps that they are in; -1 where there is none."""
        if not len(self):
            return np.full(len(t), -1)
        begins = np.flatnonzero(np.concatenate([[True], ~self.chained[:-1]]))
        begins = begins[np.lexsort((self.columns["t"][begins], self.columns["h_id"][begins]))]
        ids, since = self.columns["h_id"][begins], self.columns["t"][begins]
        at, end = np.searchsorted(ids, h_id, side="left"), np.searchsorted(ids, h_id, side="right")
        found = at < end
        at = np.minimum(at, len(ids) - 1)
        while (later := (at + 1 < end) & (since[np.minimum(at + 1, len(ids) - 1)] <= t)).any():
            at[later] += 1
        rows = np.minimum(begins[at] + np.maximum(t - since[at], 0), len(self) - 1)
        found &= (self.columns["h_id"][rows] == h_id) & (self.columns["t"][rows] == t)
        return np.where(found, rows, -1)

    def _best(self, index: _Index, known: Ints, keys: npt.NDArray[np.uint64], learned: Columns, meta: Meta) -> Ints:
        """Of the rows with these keys, those that agree in everything; else the first; -1 where there is none."""
        chosen = np.full(len(keys), -1)
        open_ = np.arange(len(keys))
        for rank in range(_CANDIDATES):
            hits = index.find(keys[open_], rank)
            open_, hits = open_[hits >= 0], known[hits[hits >= 0]]
            if not len(open_):
                break
            if rank == 0:
                chosen[open_] = hits
            unequal = self.unequal(hits, {field: column[open_] for field, column in learned.items()}, meta)
            agree = ~np.logical_or.reduce(list(unequal.values()))
            chosen[open_[agree]] = hits[agree]
            open_ = open_[~agree]
        return chosen

    def unequal(self, at: Ints, learned: Columns, meta: Meta) -> dict[str, npt.NDArray[np.bool_]]:
        """For each field, where learned transitions differ from the sampled ones that begin in these rows."""
        expected, found = self.sides(at, learned, meta, learned["n"])
        unequal = {field: found[field] != expected[field] for field in FIELDS}
        unequal["obs"] &= self.columns["obs_known"][at]
        return unequal

    def sides(self, at: Ints, learned: Columns, meta: Meta, n: Ints | int) -> tuple[Columns, Columns]:
        """The transitions over n steps that begin in these rows, and the learned ones, as they are compared."""
        own, end = self.columns, self.ends(at, np.broadcast_to(n, len(at)))
        expected = {
            "obs": own["obs"][at],
            "action": own["action"][at],
            "reward": self.rewards(at, end, float(meta.get("gamma", 1.0))),
            "next_obs": own["next_obs"][end],
            "terminated": own["terminated"][end],
            "truncated": own["truncated"][end],
            "t": own["t"][at],
        }
        found = {field: learned[field] for field in expected}
        if meta.get("flags") == "exclusive":
            for side in (expected, found):
                side["truncated"] = side["truncated"] & ~side["terminated"]
        return expected, found

    def ends(self, at: Ints, n: Ints) -> Ints:
        """The rows of the last steps of transitions over n steps that begin in these rows, or where their episodes end before."""
        end = at.copy()
        for _ in range(int(n.max(initial=1)) - 1):
            longer = (end - at < n - 1) & self.chained[end]
            end[longer] += 1
        return end

    def rewards(self, at: Ints, end: Ints, gamma: float) -> npt.NDArray[Any]:
        """The bits of the discounted sums of rewards from row to row, in the arithmetic of RLlib's replay buffers: float64, last first."""
        bits = self.columns["reward"]
        single = at == end
        if single.all():
            rewards: npt.NDArray[Any] = bits[at]
            return rewards
        total = bits.view(self.reward_dtype)[end].astype(np.float64)
        for back in range(1, int((end - at).max(initial=0)) + 1):
            more = end - at >= back
            total[more] = bits.view(self.reward_dtype)[end[more] - back] + gamma * total[more]
        summed = total.astype(self.reward_dtype)
        summed[np.isnan(summed)] = np.nan
        return np.where(single, bits[end], summed.view(bits.dtype))

    def undelivered(self) -> npt.NDArray[np.bool_]:
        """The steps of killed EnvRunners behind the last that was learned from: their sample() may never have come back."""
        rows = np.zeros(len(self), bool)
        for stream, begin, end in zip(self._open_streams, self._starts, self._starts[1:]):
            if stream:
                learned = np.flatnonzero(self.times[begin:end])
                rows[begin + (learned[-1] + 1 if len(learned) else 0) : end] = True
        return rows

    def past(self, arrived: dict[StreamKey, int]) -> npt.NDArray[np.bool_]:
        """The steps among so many events of each stream, from its first; those of killed EnvRunners are judged at the end."""
        rows = np.zeros(len(self), bool)
        for window, begin, end in zip(self.windows, self._starts, self._starts[1:]):
            if not window.ledger.open_end:
                stop = arrived.get(window.stream.key, 0) - window.stream.begin
                rows[begin:end] = self.columns["event"][begin:end] < stop
        return rows

    def forget(self, done: npt.NDArray[np.bool_]) -> None:
        """Drop the steps that are done with."""
        for window, begin, end in zip(self.windows, self._starts, self._starts[1:]):
            events = self.columns["event"][begin:end]
            window.times[events] = self.times[begin:end]
            if done[begin:end].any():
                window.forget(int(events[done[begin:end]][-1]) + 1)

    def stream_of(self, rows: Ints) -> Ints:
        return np.searchsorted(self._starts, rows, side="right") - 1

    def place(self, row: int) -> tuple[StreamKey, int, int]:
        """Stream, episode and step of a transition."""
        stream = self.windows[int(self.stream_of(np.array(row)))].stream
        event = int(self.columns["event"][row])
        return stream.key, int(stream.columns["episode"][event]), int(stream.columns["step"][event])

    def place_in_episode(self, h_id: int, t: int) -> tuple[StreamKey, int, int]:
        """Where a step would be that nobody sampled: in its episode, if that is known."""
        same = np.flatnonzero(self.columns["h_id"] == h_id)
        if not len(same):
            return StreamKey(0, -1), -1, -1
        key, episode, _ = self.place(int(same[0]))
        return key, episode, t


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
    ) -> None:
        key, episode, step = place
        self._streams[key] = self._streams.get(key, 0) + 1
        self._tally.lost += events if kind == "lost" else 0
        self._tally.extra += events if kind == "extra" else 0
        if self._streams[key] <= KEPT:
            name, runner, agent = self._tally.name, key.runner, key.agent
            self.kept.append(Difference(name, key.env, episode, step, fields, kind, first or {}, second or {}, events, runner, agent))

    def never_sampled(self, rows: Ints, learned: Columns, sampled: _Sampled) -> None:
        """Transitions that the learner got and no sampler gave."""
        for row in rows.tolist():
            place = sampled.place_in_episode(int(learned["h_id"][row]), int(learned["t"][row]))
            self.keep(place, ("event",), "extra", second={"event": "it was never sampled"})

    def ranges(self, kind: str, rows: Ints, sampled: _Sampled) -> None:
        """Steps that were learned from too often or never; several in a row of one stream are one difference."""
        streams = sampled.stream_of(rows)
        for run in np.split(rows, np.flatnonzero((np.diff(rows) != 1) | (np.diff(streams) != 0)) + 1):
            if len(run):
                note = {"event": f"it was learned from {int(sampled.times[run[0]])} times"} if kind == "extra" else {}
                self.keep(sampled.place(int(run[0])), ("event",), kind, len(run), second=note)


def _compare(tally: Tally, differences: _Differences, learned: Columns, sampled: _Sampled, at: Ints, meta: Meta) -> None:
    """Compare learned transitions with the sampled ones that begin in the rows ``at``."""
    unequal = sampled.unequal(at, learned, meta)
    tally.events += len(at)
    for field, mask in unequal.items():
        compared = int(sampled.columns["obs_known"][at].sum()) if field == "obs" else len(at)
        tally.compared[field] = tally.compared.get(field, 0) + compared
        tally.different[field] = tally.different.get(field, 0) + int(mask.sum())
    rows = np.flatnonzero(np.logical_or.reduce(list(unequal.values())))
    sides = sampled.sides(at[rows], {field: column[rows] for field, column in learned.items()}, meta, learned["n"][rows])
    for which, row in enumerate(rows.tolist()):
        fields = tuple(field for field in FIELDS if unequal[field][row])
        first, second = (
            {name: text for name in fields if (text := _text(name, side[name][which], sampled.reward_dtype))} for side in sides
        )
        differences.keep(sampled.place(int(at[row])), fields, "changed", first=first, second=second)


def _text(field: str, value: Any, reward_dtype: str) -> str:
    """A reward or a flag as a report prints it; of the others there are only digests."""
    if field == "reward":
        return str(np.array([value]).view(reward_dtype)[0])
    return str(bool(value)) if field in ("terminated", "truncated") else ""
