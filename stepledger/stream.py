"""A stream: the events of one environment, and those of a ledger by their keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .format import EpisodeCounter, StreamKey

__all__ = ["Stream", "Streams"]


@dataclass(frozen=True)
class Stream:
    """The events of one environment, in order.

    Attributes:
        key: Whose they are.
        data: The recorded columns, each of length n.
        values: With ``keep_values``, for each ``values_obs_{j}`` and ``values_act_{j}`` one row per event, or a list of JSON texts.
        begin: Number of events that came before these, and are not here.
        last: Episode and step of the last one of them.
        kept: Where ``keep_values`` is a number: the events that the rows of `values` belong to, counted from the first one here.
    """

    key: StreamKey
    data: Mapping[str, npt.NDArray[Any]] = field(repr=False)
    values: Mapping[str, Any] = field(default_factory=dict, repr=False)
    begin: int = 0
    last: tuple[int, int] | None = None
    kept: npt.NDArray[np.int64] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.data.get("kind", ()))

    def row(self, event: int) -> int | None:
        """In which row of `values` those of an event are; `None` where they were not kept."""
        if self.kept is None:
            return event
        row = int(np.searchsorted(self.kept, event))
        return row if row < len(self.kept) and self.kept[row] == event else None

    def _rows(self, events: int) -> int:
        """How many rows the values of the first events have."""
        return events if self.kept is None else int(np.searchsorted(self.kept, events))

    def place(self, event: int) -> tuple[int, int]:
        """Episode and step of an event, which is quicker than `columns` for a few; for the place behind the last, as if a step followed."""
        counter = EpisodeCounter(self.last)
        counter.skip(self.data["kind"][: event + 1] if len(self) else np.zeros(0, np.uint8))
        episode, step = counter.last or (0, -1)
        return episode, step + (event >= len(self))

    def after(self, events: int) -> Stream:
        """The stream without its first events."""
        if not events:
            return self
        counter = EpisodeCounter(self.last)
        counter.skip(self.data["kind"][:events])
        # Copies: what is left must not keep all of it in memory.
        data = {name: column[events:].copy() for name, column in self.data.items()}
        rows = self._rows(events)
        values = {name: column[rows:] if isinstance(column, list) else column[rows:].copy() for name, column in self.values.items()}
        kept = None if self.kept is None else self.kept[rows:] - events
        return Stream(self.key, data, values, self.begin + events, counter.last, kept)

    def until(self, events: int) -> Stream:
        """The first events of the stream."""
        rows = self._rows(events)
        return replace(
            self,
            data={name: column[:events] for name, column in self.data.items()},
            values={name: column[:rows] for name, column in self.values.items()},
            kept=None if self.kept is None else self.kept[:rows],
        )

    def __add__(self, later: Stream) -> Stream:
        """The stream with what came behind it."""
        if not len(self):
            return replace(later, begin=self.begin, last=self.last)
        if not len(later):
            return self
        return replace(
            self,
            data={name: np.concatenate([column, later.data[name]]) for name, column in self.data.items()},
            values={
                name: [*column, *later.values[name]] if isinstance(column, list) else np.concatenate([column, later.values[name]])
                for name, column in self.values.items()
            },
            kept=None if self.kept is None or later.kept is None else np.concatenate([self.kept, later.kept + len(self)]),
        )

    @cached_property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """All columns of the format: ``kind h_obs h_act h_rew terminated truncated episode step`` and further ones of this ledger.

        ``h_rew`` is uint64 here whatever the reward dtype.
        """
        episode, step = EpisodeCounter(self.last).count(self.data["kind"])
        return {**self.data, "h_rew": self.data["h_rew"].astype(np.uint64), "episode": episode, "step": step}


class Streams(Mapping[StreamKey, Stream]):
    """A ledger's streams by key, in order.

    An environment's index is enough as a key where only one stream has it: ``ledger.streams[3]``.
    """

    def __init__(self, streams: list[Stream]) -> None:
        self._streams = {stream.key: stream for stream in streams}

    def __getitem__(self, key: StreamKey | int) -> Stream:
        if isinstance(key, (int, np.integer)):
            found = [stream for stream in self._streams.values() if stream.key.env == key]
            if len(found) == 1:
                return found[0]
            raise KeyError(f"env {key} has {len(found)} streams: use one of the keys {list(self._streams)}")
        return self._streams[key]

    def __iter__(self) -> Iterator[StreamKey]:
        return iter(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    def __repr__(self) -> str:
        return f"Streams({list(self._streams)})"
