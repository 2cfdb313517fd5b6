"""The hop into the learner: transitions instead of events.

Each transition that the learner consumed must have left the sampler, with its successor. It is found there by the sampler's own identity,
episode id and time step, or, where a replay buffer gave it another id, by what it holds: observation, action and time step. A reward over
n steps is computed again from the n single rewards. Where the algorithm promises to learn from each step exactly once, each step that was
sampled must be here once; elsewhere it is counted how often each was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .format import STEP, Meta, StreamKey
from .ledger import Ledger, Stream
from .pairs import check_settings
from .result import KEPT, Counter, Difference, Hop, Tally

__all__ = ["transition_hop"]

#: Fields of a transition.
FIELDS = ("obs", "action", "reward", "next_obs", "terminated", "truncated")

#: Sampled steps that hold the same and are tried for one learned transition.
_CANDIDATES = 16

Columns = dict[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int64]


def transition_hop(name: str, firsts: Sequence[Ledger], seconds: Sequence[Ledger], counter: Counter) -> tuple[Hop, list[Difference]]:
    """Compare the episodes that left the samplers with the transitions that learners consumed."""
    for second in seconds:
        check_settings(firsts[0], second)
    tally = Tally(name)
    sampled = _Sampled(firsts)
    learned = _concatenate([_learned(stream) for ledger in seconds for stream in ledger.streams.values()])
    at = sampled.find(learned, seconds[0].meta)
    differences = _Differences(tally, sampled)
    times = np.zeros(len(sampled), np.int64)
    found = np.flatnonzero(at >= 0)
    if len(found):
        _compare(tally, differences, {field: column[found] for field, column in learned.items()}, sampled, at[found], seconds[0].meta)
        np.add.at(times, at[found], 1)
    foreign = np.flatnonzero(at < 0)
    missing = {runner for ledger in seconds for runner in ledger.meta.get("runners", [])} - {one.key.runner for one in sampled.streams}
    open_end = next((ledger for ledger in firsts if ledger.open_end), None)
    if len(foreign) and (missing or open_end):
        # What a sampler gave and its ledger lost with its last block can't be told from what none gave.
        why = f"{open_end.path} has no end" if open_end else f"runner {min(missing)} left no ledger"
        tally.unknown.append(f"where {len(foreign):,} learned transitions came from: {why}")
    else:
        differences.never_sampled(foreign, learned)
    _completeness(tally, differences, times, sampled, seconds)
    counter.add(len(sampled))
    tally.streams = sum(bool(len(stream)) for stream in sampled.streams)
    for key, count in differences.streams.items():
        tally.add(key, count)
    return tally.hop((), _notes(learned, seconds[0].meta)), differences.kept


def _notes(learned: Columns, meta: Meta) -> dict[str, str]:
    """By which known functions a side was taken before it was compared."""
    notes = {}
    if (learned["n"] > 1).any():
        notes["reward"] = f"summed over up to {int(learned['n'].max())} steps with gamma {meta.get('gamma')}"
    if meta.get("flags") == "exclusive":
        notes["truncated"] = "where terminated is not set, as RLlib's replay buffers keep it"
    return notes


def _completeness(tally: Tally, differences: _Differences, times: Ints, sampled: _Sampled, seconds: Sequence[Ledger]) -> None:
    """How often each sampled step was learned from, and whether that is what the algorithm promises."""
    never, again = np.flatnonzero(times == 0), np.flatnonzero(times > 1)
    tally.coverage = {
        "sampled": len(times),
        "learned_once": int((times == 1).sum()),
        "learned_more_than_once": len(again),
        "never_learned": len(never),
    }
    open_end = [ledger for ledger in seconds if ledger.open_end]
    if open_end and len(never):
        tally.unknown.append(f"whether {len(never):,} sampled steps were learned from: {open_end[0].path} has no end")
    if all(ledger.meta.get("each_step_once") for ledger in seconds):
        undelivered = sampled.undelivered(times)
        if undelivered.any():
            tally.unknown.append(f"whether {int(undelivered.sum()):,} steps left their EnvRunners, which were killed")
        if not open_end:
            differences.ranges("lost", never[~undelivered[never]], times)
        differences.ranges("extra", again, times)


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
    """All transitions that left the samplers: each step of a stream with the observation before it, in the order of the streams."""

    def __init__(self, ledgers: Sequence[Ledger]) -> None:
        self.streams = [stream for ledger in ledgers for stream in ledger.streams.values()]
        self._open_streams = [ledger.open_end for ledger in ledgers for _ in ledger.streams]
        self.reward_dtype: str = ledgers[0].meta["reward_dtype"]
        parts = [self._part(stream) for stream in self.streams]
        self._starts = np.cumsum([0, *(len(part["t"]) for part in parts)])
        self.columns = _concatenate(parts)
        t, h_id = self.columns["t"], self.columns["h_id"]
        # chained[i]: row i + 1 is the next step of the same episode.
        self.chained = np.zeros(len(t), bool)
        self.chained[:-1] = (h_id[1:] == h_id[:-1]) & (t[1:] == t[:-1] + 1)

    @staticmethod
    def _part(stream: Stream) -> Columns:
        data = stream.data
        at = np.flatnonzero(data["kind"] == STEP)
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
        at = _Index(_mixed(own["h_id"], own["t"])).find(_mixed(learned["h_id"], learned["t"]))
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
        total = bits.view(self.reward_dtype)[end].astype(np.float64)
        for back in range(1, int((end - at).max(initial=0)) + 1):
            more = end - at >= back
            total[more] = bits.view(self.reward_dtype)[end[more] - back] + gamma * total[more]
        summed = total.astype(self.reward_dtype)
        summed[np.isnan(summed)] = np.nan
        return np.where(single, bits[end], summed.view(bits.dtype))

    def undelivered(self, times: Ints) -> npt.NDArray[np.bool_]:
        """The steps of killed EnvRunners behind the last that was learned from: their sample() may never have come back."""
        rows = np.zeros(len(self), bool)
        for stream, begin, end in zip(self._open_streams, self._starts, self._starts[1:]):
            if stream:
                learned = np.flatnonzero(times[begin:end])
                rows[begin + (learned[-1] + 1 if len(learned) else 0) : end] = True
        return rows

    def stream_of(self, rows: Ints) -> Ints:
        return np.searchsorted(self._starts, rows, side="right") - 1

    def place(self, row: int) -> tuple[StreamKey, int, int]:
        """Stream, episode and step of a transition."""
        stream = self.streams[int(self.stream_of(np.array(row)))]
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

    def __init__(self, tally: Tally, sampled: _Sampled) -> None:
        self.kept: list[Difference] = []
        self.streams: dict[StreamKey, int] = {}
        self._tally = tally
        self._sampled = sampled

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
        self.streams[key] = self.streams.get(key, 0) + 1
        self._tally.lost += events if kind == "lost" else 0
        self._tally.extra += events if kind == "extra" else 0
        if self.streams[key] <= KEPT:
            name, runner, agent = self._tally.name, key.runner, key.agent
            self.kept.append(Difference(name, key.env, episode, step, fields, kind, first or {}, second or {}, events, runner, agent))

    def never_sampled(self, rows: Ints, learned: Columns) -> None:
        """Transitions that the learner got and no sampler gave."""
        for row in rows.tolist():
            place = self._sampled.place_in_episode(int(learned["h_id"][row]), int(learned["t"][row]))
            self.keep(place, ("event",), "extra", second={"event": "it was never sampled"})

    def ranges(self, kind: str, rows: Ints, times: Ints) -> None:
        """Steps that were learned from too often or never; several in a row of one stream are one difference."""
        streams = self._sampled.stream_of(rows)
        for run in np.split(rows, np.flatnonzero((np.diff(rows) != 1) | (np.diff(streams) != 0)) + 1):
            if len(run):
                note = {"event": f"it was learned from {int(times[run[0]])} times"} if kind == "extra" else {}
                self.keep(self._sampled.place(int(run[0])), ("event",), kind, len(run), second=note)


def _compare(tally: Tally, differences: _Differences, learned: Columns, sampled: _Sampled, at: Ints, meta: Meta) -> None:
    """Compare learned transitions with the sampled ones that begin in the rows ``at``."""
    unequal = sampled.unequal(at, learned, meta)
    tally.events += len(at)
    for field, mask in unequal.items():
        tally.compared[field] = int(sampled.columns["obs_known"][at].sum()) if field == "obs" else len(at)
        tally.different[field] = int(mask.sum())
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
