"""What left the samplers, as transitions, and how a learned one is found among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .align import mixed
from .errors import LedgerError
from .format import RESET, STEP, Meta, StreamKey
from .ledger import Ledger, Stream
from .pairs import stream_name

__all__ = ["EPISODE_START", "FIELDS", "Columns", "Ints", "Sampled", "Window", "concatenate"]

#: Fields of a transition.
FIELDS = ("obs", "action", "reward", "next_obs", "terminated", "truncated")

#: A further one, where the learner's ledger has it: whether the transition is the first of its episode.
EPISODE_START = "episode_start"

#: Sampled steps that hold the same and are tried for one learned transition.
_CANDIDATES = 16

Columns = dict[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int64]


def concatenate(parts: list[Columns]) -> Columns:
    """The columns of several parts behind each other."""
    if len(parts) == 1:
        return parts[0]
    return {field: np.concatenate([part[field] for part in parts]) for field in parts[0]}


def _with_identity(stream: Stream) -> Columns:
    """The columns of a stream; its events are numbered where its tap did not."""
    data = dict(stream.data)
    if "h_id" not in data:
        data["h_id"] = np.full(len(stream), stream.key.env + 1, np.uint64)
        data["t"] = stream.begin + np.arange(len(stream))
    return data


def _skipped(meta: Meta) -> list[str]:
    """The fields that the learner's ledger says can't be compared."""
    return [name for name, said in meta.get("fields", {}).items() if "skip" in said]


def _stray_after(kind: npt.NDArray[np.uint8], by: Ints, at: Ints) -> Ints:
    """The number of the stray call that came behind each step, behind the reset that belongs to it, or 0."""
    last = len(kind) - 1
    after = np.minimum(at + 1, last)
    after = np.where((kind[after] == RESET) & (by[after] == 0), np.minimum(after + 1, last), after)
    return np.where(after > at, np.maximum(by[after], 0), 0)


class Window:
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
        """Take further events.

        Raises:
            LedgerError: They are another ledger's.
        """
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

    def spread(self, keys: npt.NDArray[np.uint64]) -> Ints:
        """For each key its row, or -1; equal keys get the rows of that key in turn, as far as there are."""
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        turn = np.empty(len(keys), np.int64)
        turn[order] = np.arange(len(keys)) - np.searchsorted(ordered, ordered)
        first, end = np.searchsorted(self._sorted, keys), np.searchsorted(self._sorted, keys, side="right")
        at = np.minimum(first + turn, end - 1)
        return np.where(end > first, self._order[at] if len(self._order) else -1, -1)


class Sampled:
    """The transitions in the windows: each step of a stream with the observation before it, in the order of the streams.

    Attributes:
        windows: The streams.
        columns: The transitions, a row each.
        times: How often each was learned from.
    """

    def __init__(self, windows: Sequence[Window]) -> None:
        self.windows = windows
        self._open_streams = [window.ledger.open_end for window in windows]
        self.reward_dtype: str = windows[0].ledger.meta["reward_dtype"]
        # Whose ledgers say who made each event: those of a tap that sees calls that are not the trainer's.
        self.has_strays = any("by" in window.stream.data for window in windows)
        parts = [self._part(window.stream, window.settled) for window in windows]
        self._starts = np.cumsum([0, *(len(part["t"]) for part in parts)])
        self.columns = concatenate(parts)
        self.times: Ints = np.concatenate([window.times[part["event"]] for window, part in zip(windows, parts)])
        t, h_id = self.columns["t"], self.columns["h_id"]
        # chained[i]: row i + 1 is the next step of the same episode.
        self.chained = np.zeros(len(t), bool)
        self.chained[:-1] = (h_id[1:] == h_id[:-1]) & (t[1:] == t[:-1] + 1)

    def _part(self, stream: Stream, settled: int) -> Columns:
        data = _with_identity(stream)
        by = data.get("by", np.zeros(len(stream), np.int64)) if self.has_strays else None
        own = data["kind"] == STEP
        at = np.flatnonzero(own if by is None else own & (by == 0))  # those of somebody else are not for the learner
        at = at[np.searchsorted(at, settled) :]
        before = np.maximum(at - 1, 0)
        # Where the event before a step is not its predecessor (its chunk was lost), the observation it began from is not known.
        follows = (at > 0) & (data["h_id"][before] == data["h_id"][at]) & (data["t"][before] == data["t"][at] - 1)
        # What wrappers around the vector env made of it, where that was recorded.
        obs = data.get("h_out", data["h_obs"])
        reward = data["r_out"].astype(data["h_rew"].dtype) if "r_out" in data else data["h_rew"]
        strays: Columns = {}
        if by is not None:
            strays = {
                # It does not go on from the transition before either where somebody else stepped in between.
                EPISODE_START: (data["kind"][before] == RESET) | (by[before] > 0),
                "stray": np.where(follows, np.maximum(by[before], 0), 0),
                "stray_after": _stray_after(data["kind"], by, at),
            }
        return {
            **strays,
            "obs": obs[before],
            "obs_known": follows,
            "action": data["h_act"][at],
            "reward": reward[at],
            "next_obs": obs[at],
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
        timed = ["t"] if (learned["t"] >= 0).any() else []  # a loop of one's own doesn't say
        everything = [*FIELDS, *timed] if timed else [field for field in FIELDS if field not in _skipped(meta)]
        for n in np.unique(learned["n"][at < 0]):
            rows = np.flatnonzero((at < 0) & (learned["n"] == n))
            expected, found = self.sides(known, {field: column[rows] for field, column in learned.items()}, meta, int(n))
            own_keys, keys = (mixed(*(side[field] for field in everything)) for side in (expected, found))
            hits = _Index(own_keys).find(keys) if timed else _Index(own_keys).spread(keys)
            at[rows[hits >= 0]] = known[hits[hits >= 0]]
        # If one part was changed, the others lead to its step, and the comparison names the part; not where that step may be lost with an
        # open end. A part may lead to another step by chance, so that all are tried.
        whole = [("obs", "action", "t"), ("obs", "action")]
        parts = [] if any(self._open_streams) else [("action", "next_obs", "t"), ("obs", "next_obs")]
        # Where time steps are known, they tell a transition that was changed from one that never was.
        joint = np.zeros(len(at), bool) if timed else self.joints(learned)[0] >= 0
        open_, fewest = (at < 0) & ~joint, np.full(len(at), len(FIELDS) + 3)
        for fields in whole + parts:
            fields = tuple(field for field in fields if field != "t" or timed)
            rows = np.flatnonzero(open_ & (fewest > 0) & ((learned["n"] == 1) | ("next_obs" not in fields)))
            if not len(rows):
                continue
            known = np.flatnonzero(own["obs_known"]) if "obs" in fields else np.arange(len(self))
            index = _Index(mixed(*(own[field][known] for field in fields)))
            keys = mixed(*(learned[field][rows] for field in fields))
            chosen, unequal = self._closest(index, known, keys, {field: column[rows] for field, column in learned.items()}, meta, timed)
            closer = unequal < fewest[rows]
            at[rows[closer]], fewest[rows[closer]] = chosen[closer], unequal[closer]
        return at

    def joints(self, learned: Columns) -> tuple[Ints, Ints]:
        """For each learned transition from an episode's last observation to the next one's reset: window and event of that, or -1."""
        keys, places = [], []
        for number, window in enumerate(self.windows):
            resets = np.flatnonzero(window.stream.data["kind"] == RESET)
            resets = resets[resets > 0]
            obs = window.stream.data["h_obs"]
            keys.append(mixed(obs[resets - 1], obs[resets]))
            places.append(np.stack([np.full(len(resets), number), resets]))
        at = _Index(np.concatenate(keys)).find(mixed(learned["obs"], learned["next_obs"]))
        windows, events = np.concatenate(places, axis=1)
        if not len(events):
            return np.full(len(at), -1), np.full(len(at), -1)
        return np.where(at >= 0, windows[at], -1), np.where(at >= 0, events[at], -1)

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
            at[wrong] = _Index(mixed(own["h_id"], own["t"])).find(mixed(h_id[wrong], t[wrong]))
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

    def _closest(
        self, index: _Index, known: Ints, keys: npt.NDArray[np.uint64], learned: Columns, meta: Meta, timed: list[str]
    ) -> tuple[Ints, Ints]:
        """Of the rows with each key, the one that differs in the fewest fields, -1 where there is none; and in how many it does."""
        chosen, fewest = np.full(len(keys), -1), np.full(len(keys), len(FIELDS) + 3)
        open_ = np.arange(len(keys))
        for rank in range(_CANDIDATES):
            hits = index.find(keys[open_], rank)
            open_, hits = open_[hits >= 0], known[hits[hits >= 0]]
            if not len(open_):
                break
            candidates = {field: column[open_] for field, column in learned.items()}
            unequal = np.sum(list(self.unequal(hits, candidates, meta).values()), axis=0)
            for field in timed:
                unequal += candidates[field] != self.columns[field][hits]
            closer = unequal < fewest[open_]
            chosen[open_[closer]], fewest[open_[closer]] = hits[closer], unequal[closer]
            open_ = open_[fewest[open_] > 0]
        return chosen, fewest

    def unequal(self, at: Ints, learned: Columns, meta: Meta) -> dict[str, npt.NDArray[np.bool_]]:
        """For each field, where learned transitions differ from the sampled ones that begin in these rows."""
        expected, found = self.sides(at, learned, meta, learned["n"])
        skipped = _skipped(meta)
        unequal = {field: found[field] != expected[field] for field in (*FIELDS, EPISODE_START) if field in found and field not in skipped}
        for field in ("obs", EPISODE_START):
            if field in unequal:
                unequal[field] &= self.columns["obs_known"][at]
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
        if EPISODE_START in learned and EPISODE_START in own:
            found[EPISODE_START] = learned[EPISODE_START]
            expected[EPISODE_START] = np.where(found[EPISODE_START] < 0, found[EPISODE_START], own[EPISODE_START][at])
        if meta.get("flags") == "done":
            expected["terminated"] = expected["terminated"] | expected["truncated"]
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
        """For each row, the number of its window."""
        return np.searchsorted(self._starts, rows, side="right") - 1

    def place(self, row: int) -> tuple[StreamKey, int, int]:
        """Stream, episode and step of a transition."""
        stream = self.windows[int(self.stream_of(np.array(row)))].stream
        event = int(self.columns["event"][row])
        return stream.key, int(stream.columns["episode"][event]), int(stream.columns["step"][event])

    def place_before_stray(self, row: int) -> tuple[int, int]:
        """Episode and step of the last event before the stray calls that came before a transition."""
        stream = self.windows[int(self.stream_of(np.array(row)))].stream
        event, by = int(self.columns["event"][row]) - 1, stream.data["by"]
        while event > 0 and by[event] > 0:
            event -= 1
        return int(stream.columns["episode"][event]), int(stream.columns["step"][event])

    def place_in_episode(self, h_id: int, t: int) -> tuple[StreamKey, int, int]:
        """Where a step would be that nobody sampled: in its episode, if that is known."""
        same = np.flatnonzero(self.columns["h_id"] == h_id)
        if not len(same):
            return StreamKey(0, -1), -1, -1
        key, episode, _ = self.place(int(same[0]))
        return key, episode, t
