"""What a value may be that was received in the place of the one that was given: another step's, another environment's, or made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .chance import AROUND, common, is_usual
from .changes import Cause, made
from .constants import Constants
from .digest import MISSING_NUMBER
from .format import RESET, STEP
from .pairs import counted
from .parts import Part
from .result import Explanation
from .tracks import REACH, Neighbours, Row, Track
from .values import LeafPair

__all__ = ["Context", "comes_again", "ends", "received", "rewards_made"]


#: Leaves that differ in one value, from which on it is not looked for the place of each; and those that a sentence names.
_LEAVES, _NAMED = 32, 3


@dataclass(frozen=True, eq=False)
class Context:
    """A difference and what is around it.

    Attributes:
        first: The first side of its stream.
        second: The second side.
        i: Index of the event on the first side, or of the one behind the place where it is missing.
        j: Likewise on the second.
        step: Of the event in its episode.
        env: Index of the environment.
        neighbours: All streams of the same vector env.
        known: Digests of constants.
        reward_dtype: In which rewards are recorded.
        actions_come_back: Whether the second side is where actions come from, as they do against the way of observations.
        leaves: Gives for ``"obs"`` or ``"action"`` the leaves that differ, with the kept values of both sides, and whether there are others
            that don't; `None` where values were not kept.
    """

    first: Track
    second: Track
    i: int
    j: int
    step: int
    env: int
    neighbours: Neighbours
    known: Constants
    reward_dtype: str
    actions_come_back: bool
    leaves: Callable[[str], tuple[list[LeafPair], bool] | None]

    def others(self, side: int, field: str | Part, value: int | None) -> list[Row]:
        """What the other environments have in the same call that has this value, on the first side (0) or the second (1)."""
        call = self.second.call(self.j) if side else self.first.call(self.i)
        return [row for row in self.neighbours.having(side, call, field, value) or () if row.env != self.env]


class _Place(NamedTuple):
    """Where a value was given for which another one was received.

    Attributes:
        field: ``"obs"``, ``"action"`` or ``"reward"``.
        given: The side that it comes from.
        at: Index of the event there.
        context: What is around it.
    """

    field: str
    given: Track
    at: int
    context: Context


#: Digests that are looked for, all in one place: that of a value as a whole, or those of some of its leaves.
_Looked = Sequence[tuple[str | Part, int]]
#: A cause, and what it is said of.
_Said = tuple[Cause, str]


def received(field: str, context: Context) -> list[Explanation]:
    """What an observation, an action or a reward may be that is not the one that was given, best first."""
    given, at, other, there = context.first, context.i, context.second, context.j
    if back := field == "action" and context.actions_come_back:
        given, at, other, there = other, there, given, at
    value, noun = other.at(field, there), "final obs" if field == "obs" and ends(context.first, context.i) else field
    if field == "obs" and value == MISSING_NUMBER:
        return [Explanation("SL115", f"the {noun} was not delivered")]
    if value is None:
        return []
    place, the, whole = _Place(field, given, at, context), f"the {noun}", [(field, value)]
    kept = None if field == "reward" else context.leaves(field)
    if kept is None or not kept[0]:
        said = [(cause, the) for cause in _made_of(place, value, kept is not None)]
        said = _best(place, said, whole, the)
    else:
        leaves, some = kept
        named, pairs = _name(noun, leaves, some), [(one.second, one.first) if back else (one.first, one.second) for one in leaves]
        parts = [(Part(field, one.number), other.at(Part(field, one.number), there) or 0) for one in leaves]
        parts = parts if all(digest for _, digest in parts) and len(parts) <= _LEAVES else []
        said = [(cause, named) for cause in made(pairs)]
        said = _best(place, said, whole, the, parts, named)
        if not said and len(parts) > 1:
            of_each = [_best(place, [(cause, "") for cause in made([pair])], [part], "") for part, pair in zip(parts, pairs)]
            said = _of_several(noun, leaves, [[cause for cause, _ in some_said] for some_said in of_each])
    if not said and field == "action":
        said = [(cause, the) for cause in _unrecorded(other, there, context)]
    return [cause.of(name) for cause, name in said]


def ends(track: Track, i: int) -> bool:
    """Whether an event is the last of an episode."""
    return track.at("kind", i) == STEP and bool(track.at("terminated", i) or track.at("truncated", i))


def _made_of(place: _Place, value: int, same: bool) -> list[Cause]:
    """What is known of how a value was made where no unequal leaves were kept; ``same``: because the kept ones are equal."""
    field, given, at, context = place
    if field == "reward":
        before = given.at(field, at)
        return [] if before is None else rewards_made(before, value, context.reward_dtype)
    if same:
        return [Cause("SL112", "the same values in another shape or number")]
    constants = ("SL101", 0.0, "zero"), ("SL109", math.nan, "NaN")
    return [Cause(code, text) for code, constant, text in constants if value == context.known.digest(field, constant)]


def rewards_made(given: int, received: int, dtype: str, usual: bool = False) -> list[Cause]:
    """How a reward was made of another one: both as bits of this dtype; ``usual``: zero is among the rewards there anyway."""
    bits = np.dtype(dtype).str.replace("f", "u")
    one, other = (np.array([value], bits).view(dtype) for value in (given, received))
    return [cause._replace(sure=cause.sure and not (usual and cause.code == "SL101")) for cause in made([(one, other)])]


def _name(noun: str, leaves: Sequence[LeafPair], some: bool) -> str:
    """What a sentence calls these leaves of a value; ``some``: there are others."""
    if not some:
        return f"the {noun}"
    if len(leaves) == 1:
        return f"the {noun}{leaves[0].name}"
    names = [one.name for one in leaves[:_NAMED]]
    last = f"{len(leaves) - _NAMED:,} more" if len(leaves) > _NAMED else names.pop()
    return f"the {noun} in {', '.join(names)} and {last}"


def _of_several(noun: str, leaves: Sequence[LeafPair], causes: Sequence[list[Cause]]) -> list[_Said]:
    """Where leaves differ for several reasons: those that have theirs in common are told of together."""
    groups: dict[tuple[Cause, ...], list[LeafPair]] = {}
    for leaf, of_leaf in zip(leaves, causes):
        if of_leaf:
            groups.setdefault(tuple(of_leaf), []).append(leaf)
    best = sorted(groups.items(), key=lambda item: not item[0][0].sure)[:_NAMED]
    return [(cause, _name(noun, some, True)) for of_leaf, some in best for cause in of_leaf]


def _best(place: _Place, said: list[_Said], whole: _Looked, the: str, parts: _Looked = (), named: str = "") -> list[_Said]:
    """Of how a value was made and of where else it is, what fits best first.

    Args:
        place: Where it was given.
        said: How it was made.
        whole: It itself.
        the: What it is called.
        parts: The leaves of it that differ: they may be those of another place where all of it is not.
        named: What these are called.
    """
    zero = [(_zero(place, cause, parts or whole), name) for cause, name in said if cause.code in ("SL101", "SL109")]
    found = [(cause, the) for cause in _origins(place, whole)] or [(cause, named) for cause in _origins(place, parts)]
    # Where episodes begin alike, it may be anything that such a beginning is.
    first = [one for one in found if one[0].code == "SL114" and one[0].sure]
    ordered = [*first, *zero, *(one for one in found if one not in first), *(one for one in said if one[0].code not in ("SL101", "SL109"))]
    return ordered or [(cause, the) for cause in _later(place, whole)] or [(cause, named) for cause in _later(place, parts)]


def _zero(place: _Place, cause: Cause, looked: _Looked) -> Cause:
    """The cause, less sure where zeros are among what is given anyway."""
    if cause.code != "SL101":
        return cause
    field, given, at, _ = place
    begin, stop = max(at - AROUND, given.begin), at + 1 + AROUND
    others = given.slice("kind", begin, stop) == STEP if field != "obs" else np.ones(len(given.slice("kind", begin, stop)), bool)
    others[at - begin] = False

    return cause._replace(sure=not all(is_usual(given.slice(one, begin, stop)[others], value) for one, value in looked))


def comes_again(track: Track, field: str | Part, at: int, value: int | None) -> bool:
    """Whether a value is near a place by chance; what was taken for it in the place itself does not count."""
    around = [track.slice(field, at - AROUND, at), track.slice(field, at + 1, at + 1 + AROUND)]
    return value is not None and common(np.concatenate(around), value)


def _origins(place: _Place, looked: _Looked) -> list[Cause]:
    """Whether a value is one that was given before, or in another environment, or is the first of the next episode."""
    if not looked:
        return []
    field, given, at, context = place
    often = all(comes_again(given, one, at, value) for one, value in looked)
    found = []
    is_next = all(given.at(one, at + 1) == value for one, value in looked)
    if field == "obs" and is_next and ends(context.first, context.i) and given.at("kind", at + 1) == RESET:
        found.append(Cause("SL114", "the first one of the next episode", not often))
    begin = max(at - REACH, given.begin)
    alike = np.logical_and.reduce([given.slice(one, begin, at) == value for one, value in looked])
    # Of the last one first.
    for k in (at - begin - np.flatnonzero(alike)[::-1]).tolist():
        # A reset has no action, and no reward; but where its reply was taken for one, that is none.
        if field == "obs" or given.at("kind", at - k) == STEP or (field == "reward" and k == 1):
            found.append(Cause("SL102", f"that of {_earlier(context.step, k)}", not often))
            break
    side, (_, first_value) = int(field == "action" and context.actions_come_back), looked[0]
    in_all = [{(row.env, row.kind) for row in context.others(side, one, value)} for one, value in looked]
    envs = sorted(env for env, kind in set.intersection(*in_all) if field == "obs" or kind == STEP or not first_value)
    if envs:
        sure = not (often or any(one.code == "SL102" for one in found) or len(envs) > 1)
        found.append(Cause("SL103", f"that of env {envs[0]} in the same call", sure))
    return found


def _earlier(step: int, k: int) -> str:
    if k == 1:
        return f"the step before (step {step - 1})" if step else "the last step of the episode before"
    return f"{counted(k, 'step')} before (step {step - k})" if step >= k else f"{counted(k, 'step')} before, in the episode before"


def _later(place: _Place, looked: _Looked) -> list[Cause]:
    if not looked:
        return []
    field, given, at, _ = place
    alike = np.logical_and.reduce([given.slice(one, at + 1, at + 1 + REACH) == value for one, value in looked])
    for k in (1 + np.flatnonzero(alike)).tolist():
        if field == "obs" or given.at("kind", at + k) == STEP:
            sure = not all(comes_again(given, one, at, value) for one, value in looked)
            later = f"that of {counted(k, 'step')} later{':' if sure else ', as if'} the array was changed after it was handed over"
            return [Cause("SL113", later, sure)]
    return []


def _unrecorded(other: Track, there: int, context: Context) -> list[Cause]:
    """Actions that are sent where an environment is being reset are no event, so that only their places are known."""
    if not context.first.by_event:  # only next-step autoreset has such calls
        return []
    found = []
    if other.at("kind", there - 1) == RESET:
        found.append(Cause("SL102", "the one that was sent for the reset before, which is not recorded", False))
    for row in context.others(1, "kind", RESET)[:1]:
        why = f"the one that was sent for the reset of env {row.env}, which is not recorded"
        found.append(Cause("SL103", why, False))
    return found
