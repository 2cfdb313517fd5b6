"""Where the environments are: how many events each has had, in which episode and at which step it is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Places", "Position"]

Numbers = npt.NDArray[np.int64]


class Position(NamedTuple):
    """Positions of events in their streams, added up when they are needed.

    Attributes:
        others: Events of each environment besides the steps of all, ``(n,)``.
        steps: Steps of all.
    """

    others: Numbers
    steps: int

    @property
    def values(self) -> Numbers:
        """The positions, ``(n,)`` int64; -1 before the first event."""
        return self.others + self.steps


class Places:
    """Counts the events of each environment. A step of all, which nearly every event is, only counts one number on.

    Args:
        n: Number of environments.

    Attributes:
        begun: Whether a reset, after which episodes are counted on, was seen or is taken for seen.
        steps: Steps of all.
    """

    def __init__(self, n: int) -> None:
        self.begun = False
        self.steps = 0
        self._others = np.full(n, -1)
        # What is to be added to the steps of all, for the step in the episode.
        self._step, self._episode = np.zeros(n, np.int64), np.zeros(n, np.int64)

    @property
    def t(self) -> Position:
        """Position of the last events."""
        return Position(self._others, self.steps)

    @property
    def last(self) -> tuple[Numbers, Numbers]:
        """Episode and step of the last event, ``(n,)`` each."""
        return self._episode.copy(), self._step + self.steps

    def stepped(self) -> None:
        """All have made a step."""
        self.steps += 1

    def stepped_one(self, env: int) -> None:
        """This one has made a step."""
        self._others = self._others.copy()  # positions hold the one before
        self._others[env] += 1
        self._step[env] += 1

    def reset(self, here: npt.NDArray[np.bool_]) -> None:
        """These, ``(n,)``, were reset."""
        self._others = self._others + here
        np.copyto(self._step, -self.steps, where=here)
        if self.begun:
            self._episode += here
        self.begun = True
