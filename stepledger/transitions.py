"""The hop into the learner: transitions instead of events.

What the learner consumed is matched with what left the sampler by the sampler's own identity, episode id and time step. Each transition
must be there upstream, with its successor; where the algorithm promises to learn from each step exactly once, each step must be there
downstream once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .format import STEP, StreamKey
from .ledger import Ledger, Stream
from .pairs import check_settings
from .result import KEPT, Counter, Difference, Hop, Tally

__all__ = ["transition_hop"]

#: Fields of a transition -> columns downstream.
FIELDS = {
    "obs": "h_obs",
    "action": "h_act",
    "reward": "h_rew",
    "next_obs": "h_next",
    "terminated": "terminated",
    "truncated": "truncated",
}

Columns = dict[str, npt.NDArray[Any]]


def transition_hop(name: str, firsts: Sequence[Ledger], seconds: Sequence[Ledger], counter: Counter) -> tuple[Hop, list[Difference]]:
    """Compare the episodes that left the samplers with the transitions that learners consumed."""
    for second in seconds:
        check_settings(firsts[0], second)
    tally = Tally(name)
    sampled = _Sampled([(ledger, stream) for ledger in firsts for stream in ledger.streams.values()])
    learned = _concatenate([_columns(stream) for ledger in seconds for stream in ledger.streams.values()])
    at = sampled.find(learned["identity"])
    found = at >= 0
    differences = _Differences(tally, sampled)
    _compare_fields(tally, differences, {field: column[found] for field, column in learned.items()}, sampled, at[found])
    differences.add("extra", np.flatnonzero(~found), learned)
    times = np.bincount(at[found], minlength=len(sampled))
    open_end = [ledger for ledger in seconds if ledger.open_end]
    never, again = np.flatnonzero(times == 0), np.flatnonzero(times > 1)
    if all(ledger.meta.get("each_step_once") for ledger in seconds):
        if not open_end:
            differences.add_ranges("lost", never)
        differences.add_ranges("extra", again, "was learned from {} times", times)
    elif len(never) and not open_end:
        tally.notes.append(f"{len(never):,} of {len(sampled):,} sampled steps were never learned from")
    if open_end and len(never):
        tally.unknown.append(f"whether {len(never):,} sampled steps were learned from: {open_end[0].path} has no end")
    counter.add(len(sampled))
    tally.streams_different = len(differences.streams)
    return tally.hop((), {}), differences.kept


def _columns(stream: Stream) -> Columns:
    data = {field: stream.data[column] for field, column in FIELDS.items()}
    return {**data, "identity": _identity(stream.data["h_id"], stream.data["t"]), "h_id": stream.data["h_id"], "t": stream.data["t"]}


def _identity(episode: npt.NDArray[np.uint64], t: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Episode and time step in 64 bits."""
    mixed = (episode ^ (t.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xD6E8FEB86659FD93)
    return mixed ^ (mixed >> np.uint64(32))


def _concatenate(parts: list[Columns]) -> Columns:
    return {field: np.concatenate([part[field] for part in parts]) for field in parts[0]}


class _Sampled:
    """All transitions that left the samplers: each step of a stream with the observation before it."""

    def __init__(self, streams: list[tuple[Ledger, Stream]]) -> None:
        self.streams = [stream for _, stream in streams]
        parts, self._starts = [], [0]
        for stream in self.streams:
            parts.append(self._part(stream))
            self._starts.append(self._starts[-1] + len(parts[-1]["t"]))
        self.columns = _concatenate(parts)
        self._order = np.argsort(self.columns["identity"], kind="stable")
        self._sorted = self.columns["identity"][self._order]

    @staticmethod
    def _part(stream: Stream) -> Columns:
        data = stream.data
        at = np.flatnonzero(data["kind"] == STEP)
        before = np.maximum(at - 1, 0)
        # Where the event before a step is not its predecessor (its chunk was lost), the observation it began from is not known.
        follows = (at > 0) & (data["h_id"][before] == data["h_id"][at]) & (data["t"][before] == data["t"][at] - 1)
        return {
            "obs": data["h_obs"][before],
            "action": data["h_act"][at],
            "reward": data["h_rew"][at],
            "next_obs": data["h_obs"][at],
            "terminated": data["terminated"][at],
            "truncated": data["truncated"][at],
            "h_id": data["h_id"][at],
            "t": data["t"][at],
            "event": at,
            "obs_known": follows,
            "identity": _identity(data["h_id"][at], data["t"][at]),
        }

    def __len__(self) -> int:
        return self._starts[-1]

    def find(self, identity: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """For each identity its index here, or -1."""
        if not len(self):
            return np.full(len(identity), -1)
        at = np.minimum(np.searchsorted(self._sorted, identity), len(self) - 1)
        return np.where(self._sorted[at] == identity, self._order[at], -1)

    def stream_of(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def place(self, index: int) -> tuple[StreamKey, int, int]:
        """Stream, episode and step of a transition."""
        stream = self.streams[self.stream_of(index)]
        event = int(self.columns["event"][index])
        return stream.key, int(stream.columns["episode"][event]), int(stream.columns["step"][event])

    def episode(self, h_id: int, t: int) -> tuple[StreamKey, int, int]:
        """Where a step would be that nobody sampled: in its episode, if that is known."""
        same = np.flatnonzero(self.columns["h_id"] == h_id)
        if not len(same):
            return StreamKey(0, -1), -1, -1
        key, episode, _ = self.place(int(same[0]))
        return key, episode, t


class _Differences:
    """Keeps the first differences of a stream and counts all."""

    def __init__(self, tally: Tally, sampled: _Sampled) -> None:
        self.kept: list[Difference] = []
        self.streams: set[StreamKey] = set()
        self._tally = tally
        self._sampled = sampled

    def _keep(self, place: tuple[StreamKey, int, int], fields: tuple[str, ...], kind: str, events: int = 1, note: str = "") -> None:
        key, episode, step = place
        self._tally.differences += 1
        self.streams.add(key)
        if len(self.kept) < KEPT:
            second = {"event": note} if note else {}
            self.kept.append(
                Difference(
                    self._tally.name,
                    key.env,
                    episode,
                    step,
                    fields,
                    kind,
                    events=events,
                    runner=key.runner,
                    agent=key.agent,
                    second=second,
                )
            )

    def changed(self, index: int, fields: tuple[str, ...]) -> None:
        self._keep(self._sampled.place(index), fields, "changed")

    def add(self, kind: str, rows: npt.NDArray[np.int64], learned: Columns) -> None:
        """Transitions that nobody sampled."""
        for row in rows.tolist():
            self._keep(self._sampled.episode(int(learned["h_id"][row]), int(learned["t"][row])), ("event",), kind, note="was never sampled")

    def add_ranges(self, kind: str, indices: npt.NDArray[np.int64], note: str = "", times: npt.NDArray[np.int64] | None = None) -> None:
        """Steps of which several in a row are one difference."""
        for run in np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1):
            if not len(run):
                continue
            streams = [self._sampled.stream_of(int(index)) for index in (run[0], run[-1])]
            pieces = (
                [run] if streams[0] == streams[1] else np.split(run, np.flatnonzero(np.diff([self._sampled.stream_of(i) for i in run])) + 1)
            )
            for piece in pieces:
                text = note.format(int(times[piece[0]])) if times is not None else note
                self._keep(self._sampled.place(int(piece[0])), ("event",), kind, len(piece), text)


def _compare_fields(tally: Tally, differences: _Differences, learned: Columns, sampled: _Sampled, at: npt.NDArray[np.int64]) -> None:
    """Compare transitions with their counterparts, ``learned[i]`` with ``sampled[at[i]]``."""
    upstream = {field: column[at] for field, column in sampled.columns.items()}
    unequal = {field: learned[field] != upstream[field] for field in FIELDS}
    unequal["obs"] &= upstream["obs_known"]
    tally.events += len(at)
    tally.streams = sum(bool(len(stream)) for stream in sampled.streams)
    for field, mask in unequal.items():
        tally.compared[field] = int(upstream["obs_known"].sum()) if field == "obs" else len(at)
        tally.different[field] = int(mask.sum())
    for row in np.flatnonzero(np.logical_or.reduce(list(unequal.values()))).tolist():
        differences.changed(int(at[row]), tuple(field for field in FIELDS if unequal[field][row]))
