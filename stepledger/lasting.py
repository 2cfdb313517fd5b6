"""What is said of a range: of which fields it is, whose replies they are, and which environments have each other's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .align import Edit
from .digest import MISSING_NUMBER
from .pairs import counted
from .ranges import Range, Sides, end_of
from .replies import OBS, REWARD
from .result import Explanation

__all__ = ["Lasting", "exchanged", "lasts", "until", "with_its_end"]

#: Calls in which it is looked for whose replies the other environments have.
_CALLS = 4


class Lasting(NamedTuple):
    """A range that may go on in events to come.

    Attributes:
        range: As far as it was compared.
        kept: Where its difference is kept, if it is.
        begun: Episode and step at which it began.
        envs: The environments that have each other's replies, each the next one's; empty where that is not so, or not known.
    """

    range: Range
    kept: int | None
    begun: tuple[int, int]
    envs: tuple[int, ...]

    def is_of(self, edit: Range) -> bool:
        """Whether a range is this one, going on."""
        return (edit.first, edit.second) == (0, 0) and (edit.shift, edit.other) == (self.range.shift, self.range.other)

    def behind(self, events: int, before: int) -> Lasting:
        """This, so many events later, all of which were equal, as those before them were since it was seen last."""
        resume = self.range.resume + events if self.range.resume >= 0 else -1
        return self._replace(range=self.range._replace(tail=before + events, resume=resume))


def exchanged(sides: Sides, env: int, edit: Range) -> tuple[int, ...]:
    """The environments that have each other's replies, if these are such: env has those of the second, that the third's, and so on."""
    if edit.other is None:
        return ()
    field = "reward" if edit.late == (REWARD,) else "obs"
    seconds = {key.env: tracks[1] for key, tracks in sides.neighbours.streams}
    call = sides.first.call(edit.first)
    for at in range(call, call + _CALLS):
        envs = [env, edit.other.env]
        while envs[-1] != env and envs[-1] in seconds and len(envs) <= len(seconds):
            track = seconds[envs[-1]]
            values = {track.at(field, j) for j in track.events_of(at)} - {MISSING_NUMBER}
            found = {row.env for value in values for row in sides.neighbours.having(0, at, field, value) or ()} - {envs[-1]}
            if env not in found and len(found) != 1:
                break
            envs.append(env if env in found else found.pop())
        if envs[-1] == env:
            return tuple(envs[:-1])
    return ()


def lasts(place: str, edit: Range, fields: Sequence[str], env: int, envs: Sequence[int]) -> tuple[Explanation, ...]:
    """What a range is, best first.

    Args:
        place: From where to where it lasts.
        edit: The range.
        fields: Those that differ.
        env: The environment whose it is.
        envs: Those that have each other's replies.
    """
    one = fields[0] if set(fields) in (set(OBS), set(REWARD)) else ""
    if edit.shift:
        late = "the one before" if edit.shift == 1 else f"that of {edit.shift} events before"
        codes, of_one, of_all = ("SL102", "SL307"), f"each {one} is {late}", f"each reply is {late}"
        perhaps = f"the whole reply may be {late}, where nothing else of it changes"
    elif envs:
        names = ", ".join(f"env {each}" for each in sorted(envs)[:-1]) + f" and env {max(envs)}"
        codes, of_one, of_all = ("SL103", "SL308"), f"{names} have each other's {one}", f"{names} have each other's replies"
        perhaps = "the whole replies may be, where nothing else of them differs"
        if len(envs) > 2:
            assert edit.other is not None
            more = f", env {env} that of env {edit.other.env}"
            of_one, of_all = of_one + more, of_all + more
    else:
        assert edit.other is not None
        whose = f"of env {edit.other.env}"
        codes, of_one, of_all = ("SL103", "SL308"), f"each {one} is that {whose}", f"the replies are those {whose}"
        perhaps = f"the whole replies may be those {whose}, where nothing else of them differs"
    if not one:
        return (Explanation(codes[1], f"{place} {of_all}"),)
    found = (Explanation(codes[0], f"{place} {of_one}"),)
    return found if edit.late == ((one,),) else (*found, Explanation(codes[1], perhaps))


def with_its_end(edits: list[Edit | Range], sides: Sides, lasting: Lasting | None) -> list[Edit | Range]:
    """The edits, where the last resets that the first side has more are of a range: their replies would have come in the next call."""
    first, second = sides.first, sides.second
    lost = edits[-1] if edits else None
    if not isinstance(lost, Edit) or lost.kind != "lost" or end_of(lost) != (len(first), len(second)) or first.by_event:
        return edits
    before = edits[-2] if len(edits) > 1 else lasting.range._replace(first=0, second=0, length=0, second_length=0) if lasting else None
    if not isinstance(before, Range) or lost.length > before.shift or first.call(len(first) - 1) != second.call(len(second) - 1):
        return edits
    whole = before._replace(length=len(first) - before.first, second_length=len(second) - before.second)
    return [*edits[: -2 if len(edits) > 1 else -1], whole]


def until(begun: tuple[int, int], last: tuple[int, int], events: int) -> str:
    """From where to where a range lasts."""
    return f"from episode {begun[0]} step {begun[1]} to episode {last[0]} step {last[1]} ({counted(events, 'event')})"
