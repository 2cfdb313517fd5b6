"""Returns and lengths of episodes, as each tap saw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..format import RESET, StreamKey
from ..ledger import Ledger, Stream
from .context import Recorded

__all__ = ["Episodes", "Unlike", "episodes_of", "unlike"]


@dataclass(frozen=True)
class Episodes:
    """The episodes of one tap that are there from their reset to their end.

    Attributes:
        tap: The tap.
        stream: For each the number of its stream in ``keys``, ``(n,)``.
        number: Its number in the stream, ``(n,)``.
        returns: Sum of its rewards, float64.
        lengths: Number of its steps.
        ends: Index of its last event in the stream.
        keys: The streams.
    """

    tap: str
    stream: npt.NDArray[np.int64]
    number: npt.NDArray[np.int64]
    returns: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    keys: tuple[StreamKey, ...]

    def __len__(self) -> int:
        return len(self.returns)


@dataclass(frozen=True)
class Unlike:
    """An episode that two taps saw unlike: return and length on both sides."""

    key: StreamKey
    number: int
    returns: tuple[float, float]
    lengths: tuple[int, int]


def episodes_of(recorded: Recorded, group: str = "") -> list[Episodes]:
    """The episodes of each tap, but for learners: those hold single transitions."""
    keys = tuple(recorded.keys(group))
    found: dict[str, list[tuple[int, dict[str, npt.NDArray[Any]]]]] = {}
    for number, key in enumerate(keys):
        for tap in recorded.taps(key, group):
            found.setdefault(tap.name, []).append((number, _episodes(tap.ledger, tap.stream)))
    made = []
    for name in sorted(found, key=["env", "vector", "episode"].index):
        parts = [part for _, part in found[name]]
        stream = np.concatenate([np.full(len(part["number"]), number) for number, part in found[name]])
        columns = {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
        made.append(Episodes(name, stream, **columns, keys=keys))
    return [one for one in made if len(one)]


def unlike(first: Episodes, second: Episodes, most: int) -> tuple[list[Unlike], int]:
    """The first episodes that two taps saw unlike, and how many there are; an episode is found by its number in its stream."""
    base = 1 + max(int(first.number.max(initial=0)), int(second.number.max(initial=0)))
    one, other = (episodes.stream * base + episodes.number for episodes in (first, second))
    _, at, there = np.intersect1d(one, other, assume_unique=True, return_indices=True)
    different = (first.returns[at].view(np.uint64) != second.returns[there].view(np.uint64)) | (first.lengths[at] != second.lengths[there])
    rows = np.flatnonzero(different)
    shown = [
        Unlike(
            first.keys[int(first.stream[i])],
            int(first.number[i]),
            (float(first.returns[i]), float(second.returns[j])),
            (int(first.lengths[i]), int(second.lengths[j])),
        )
        for i, j in zip(at[rows[:most]], there[rows[:most]])
    ]
    return shown, len(rows)


def _episodes(ledger: Ledger, stream: Stream) -> dict[str, npt.NDArray[Any]]:
    """The whole episodes of a stream: those that begin with a reset and end with a flag."""
    data = stream.data
    rewards = data["h_rew"].view(ledger.meta["reward_dtype"]).astype(np.float64)
    begins = np.flatnonzero(data["kind"] == RESET)
    stops = np.append(begins[1:], len(stream)) - 1
    whole = np.flatnonzero((stops > begins) & (data["terminated"][stops] | data["truncated"][stops])) if len(begins) else begins
    with np.errstate(all="ignore"):
        returns = np.add.reduceat(rewards, begins)[whole] if len(begins) else np.zeros(0)
    number = stream.columns["episode"][begins][whole]
    return {
        "number": number,
        "returns": returns,
        "lengths": (stops - begins)[whole],
        "ends": (stream.begin + stops)[whole],
    }


def summary(episodes: Sequence[Episodes]) -> list[dict[str, str]]:
    """Numbers of each tap, as texts."""
    return [
        {
            "tap": one.tap,
            "episodes": f"{len(one):,}",
            "return": _range(one.returns),
            "length": _range(one.lengths),
        }
        for one in episodes
    ]


def _range(values: npt.NDArray[Any]) -> str:
    with np.errstate(all="ignore"):
        return f"{values.mean():,.6g} ({values.min():,.6g} to {values.max():,.6g})"
