"""Calls of a training env that are not its trainer's, as the ledger of the vector tap keeps them and as reports name them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LEARN", "UNSEEN", "UNSTORED", "UNWATCHED", "Stray", "crossed", "joins", "overwritten"]

#: In the column ``by`` of a vector ledger: 0, the trainer made this event; from 1 on, the stray call of that number; and these two.
#: ``LEARN``: the reset with which ``learn()`` began. ``UNSTORED``: the trainer's last step, behind which learning was stopped.
LEARN, UNSTORED = -1, -2

#: In the place of a digest: nobody saw the value. No value digests to it, nor to `stepledger.digest.MISSING`.
UNSEEN = 1

#: How the place of calls begins that are only known from where the environments are: it can't be told whether they reset or stepped.
UNWATCHED = "a place that nobody watched"


class Stray(NamedTuple):
    """Calls that somebody else made between two calls of the trainer.

    Attributes:
        call: Number of calls that the trainer had made.
        resets: How often envs were reset; all of them at once count once.
        steps: Likewise, stepped.
        who: ``"a callback"``, or what else it is.
        place: File and line of the first of them.
        handed_over: Whether the trainer was given the new observation, so that the cut counts only where it shows in what is stored.
    """

    call: int
    resets: int
    steps: int
    who: str
    place: str
    handed_over: bool = False

    @property
    def cut(self) -> str:
        """What a transition crosses."""
        if self.place.startswith(UNWATCHED):
            return "this"
        return "a reset" if self.resets else "these steps"

    def __str__(self) -> str:
        what = []
        if self.place.startswith(UNWATCHED):
            what.append("reset or stepped the training env")
        elif self.resets:
            what.append("reset the training env" + _times(self.resets))
        if self.steps:
            what.append(f"stepped {'it' if self.resets else 'the training env'}{_times(self.steps)}")
        return f"{self.who} {' and '.join(what)} between call {self.call:,} and {self.call + 1:,} (called from {self.place})"


def _times(number: int) -> str:
    return "" if number == 1 else f" {number:,} times"


def crossed(rows: int, stray: Stray) -> str:
    """How many stored transitions cross stray calls."""
    return f"{rows:,} stored transition{'' if rows == 1 else 's'} cross{'es' if rows == 1 else ''} {stray.cut}"


def joins(env: int, before: tuple[int, int], after: tuple[int, int]) -> str:
    """What a transition joins that was cut: places are episode and step."""
    return f"the next transition of env {env} joins episode {before[0]} step {before[1]} to episode {after[0]} step {after[1]}"


def overwritten(env: int, place: tuple[int, int]) -> str:
    """What a call behind a step and before its transition was stored has done to it: a place is episode and step."""
    return f"the transition of env {env} to episode {place[0]} step {place[1]} was stored with what that call gave"
