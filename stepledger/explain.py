"""What may be behind a difference between two taps that both record resets and steps.

Each rule looks at the digests around the place: whether the value that was received is one that was given at another step, or in another
environment, or one that is known in advance, such as zeros. What values are made of each other is in `stepledger.changes`. A rule claims
nothing of what is out of reach: when comparing while a run goes on, that is what was dropped, and what has not come yet.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from .format import RESET, STEP
from .pairs import counted
from .received import Context, comes_again, received
from .result import Difference, Explanation
from .tracks import REACH, Track

__all__ = ["explain", "flags_changed", "joined", "most_common_first"]

#: What a value itself shows to have been made of another one, wherever it was taken from.
_MADE = ("SL101", *(f"SL{number}" for number in range(104, 113)), "SL117")


def explain(kind: str, fields: tuple[str, ...], events: int, context: Context) -> tuple[Explanation, ...]:
    """What may be behind a difference, best first.

    Args:
        kind: ``"changed"``, ``"lost"`` or ``"extra"``.
        fields: Which differ.
        events: How many in a row.
        context: What is around it.
    """
    if kind == "lost":
        found = _lost(events, context)
    elif kind == "extra":
        found = _extra(events, context)
    else:
        found = [*_whole(fields, context), *_changed_kind(fields, context), *_flags(fields, context)]
        for field in ("obs", "reward", "action"):
            # A reset has neither action nor reward; and a flag says why the trainer looked for the observation in another place.
            said = "kind" in fields if field != "obs" else bool({"terminated", "truncated"} & set(fields))
            if field in fields:
                found += [one for one in received(field, context) if not (said and found) or (field == "obs" and one.code in _MADE)]
    return tuple(joined(found))


def joined(found: Sequence[Explanation]) -> list[Explanation]:
    """One explanation for each code, with the sentences of all fields that it fits."""
    texts: dict[str, dict[str, None]] = {}
    for one in found:
        texts.setdefault(one.code, {})[one.text] = None
    return [Explanation(code, "; ".join(some)) for code, some in texts.items()]


def most_common_first(differences: list[Difference]) -> list[Difference]:
    """The differences of one hop; where several explanations fit one, those first that fit most of its stream, and then of the hop."""
    found = [(difference, one.code) for difference in differences for one in difference.explanations]
    everywhere = Counter(code for _, code in found)
    in_stream = Counter((*_stream(difference), code) for difference, code in found)

    def rank(difference: Difference, one: Explanation) -> tuple[bool, int, int]:
        # Where a whole event is another's, or somebody else's doing, what is true of a single field is only a part of it.
        return one.code not in _WHOLE or not one.sure, -in_stream[(*_stream(difference), one.code)], -everywhere[one.code]

    return [
        difference
        if len(difference.explanations) < 2
        else replace(difference, explanations=tuple(sorted(difference.explanations, key=functools.partial(rank, difference))))
        for difference in differences
    ]


def _stream(difference: Difference) -> tuple[int, int, str]:
    return difference.runner, difference.env, difference.agent


_WHOLE = ("SL307", "SL308", "SL306", "SL310", "SL501")


def _lost(events: int, context: Context) -> list[Explanation]:
    first, i = context.first, context.i
    kinds = first.slice("kind", i, i + events)
    if events == 1 and kinds[:1] == RESET:
        return [Explanation("SL304", "the environment was reset, and nobody was told")]
    steps = int((kinds == STEP).sum())
    if not steps:
        return [Explanation("SL304", f"the environment was reset {events:,} times, and nobody was told")]
    what = "the environment made a step" if events == 1 else f"the environment made {counted(steps, 'step')} in a row"
    resets = int((kinds == RESET).sum())
    found = [Explanation("SL301", f"{what}{_and_resets(resets)} that never arrived")]
    return [*found, *([Explanation("SL304", "the reset among them never arrived either")] if resets else [])]


def _and_resets(number: int) -> str:
    return f" and {counted(number, 'reset')}" if number else ""


def _extra(events: int, context: Context) -> list[Explanation]:
    second, j = context.second, context.j
    if (second.slice("kind", j, j + events) == RESET).all():
        return [Explanation("SL305", "the environment was not reset here")]
    found = []
    names = ("kind", "obs", "reward", "terminated", "truncated")
    alike = all((second.slice(name, j, j + events) == second.at(name, j)).all() for name in names)
    if alike and _repeats(context, j, events):
        found.append(Explanation("SL302", "it is the reply before it once more" + _times(events)))
    if alike and _filled(context, j, events):
        found.append(Explanation("SL303", "it has the last observation, no reward and no end, as an invented step" + _times(events)))
    return found or [Explanation("SL311", "the environment never made it, and it is not the reply before it")]


def _times(events: int) -> str:
    return "" if events == 1 else f", {events:,} times"


def _repeats(context: Context, j: int, events: int) -> bool:
    names = ("obs", "reward", "terminated", "truncated")
    one = [context.second.at(name, j) for name in names]
    around = [[track.at(name, at) for name in names] for track, at in _around(context, j, events) if track.at("kind", at) == STEP]
    return one in around


def _filled(context: Context, j: int, events: int) -> bool:
    second = context.second
    if second.at("kind", j) != STEP or second.at("reward", j) or second.at("terminated", j) or second.at("truncated", j):
        return False
    return second.at("obs", j) in [track.at("obs", at) for track, at in _around(context, j, events)]


def _around(context: Context, j: int, events: int) -> list[tuple[Track, int]]:
    """The events before extra ones, and behind them: of equal ones, any may be the one that is too many."""
    return [(context.second, j - 1), (context.first, context.i - 1), (context.second, j + events), (context.first, context.i)]


def _whole(fields: tuple[str, ...], context: Context) -> list[Explanation]:
    """Where the whole reply differs, whether it is another one."""
    if not {"obs", "reward"} <= set(fields):
        return []
    names = ("obs", "reward", "terminated", "truncated")
    reply = [context.second.at(name, context.j) for name in names]
    verb = "may be" if all(comes_again(context.first, name, context.i, reply[names.index(name)]) for name in names[:2]) else "is"
    found = []
    for k in range(1, REACH + 1):
        if reply == [context.first.at(name, context.i - k) for name in names]:
            found.append(Explanation("SL307", f"the whole reply {verb} that of {counted(k, 'step')} before"))
            break
    for row in context.others(0, "obs", reply[0]):
        if reply == [row.obs, row.reward, row.terminated, row.truncated]:
            return [*found, Explanation("SL308", f"the whole reply {verb} that of env {row.env} in the same call")]
    return found


def _changed_kind(fields: tuple[str, ...], context: Context) -> list[Explanation]:
    if "kind" not in fields:
        return []
    if context.first.at("kind", context.i) == RESET:
        return [Explanation("SL306", "the environment was reset, and it arrived as a step")]
    return [Explanation("SL310", "the environment made a step, and it arrived as a reset")]


def _flags(fields: tuple[str, ...], context: Context) -> Iterator[Explanation]:
    if "kind" in fields or not {"terminated", "truncated"} & set(fields):
        return iter(())
    # What the environment gave, where both flags were set and the comparison knows only one of them; and what was compared.
    raw = tuple(bool(context.first.stream.data[name][context.i]) for name in ("terminated", "truncated"))
    given, received = ((bool(track.at("terminated", at)), bool(track.at("truncated", at))) for track, at in _both(context))
    return iter([*flags_changed((raw[0], raw[1]), received), *flags_changed(given, received)])


def _both(context: Context) -> list[tuple[Track, int]]:
    return [(context.first, context.i), (context.second, context.j)]


def flags_changed(given: tuple[bool, bool], received: tuple[bool, bool]) -> list[Explanation]:
    """What became of the end flags: of terminated and truncated, as they were given and as they were received."""
    what = {
        ((False, False), (True, False)): [("SL201", "terminated is set where the episode goes on")],
        ((True, False), (False, False)): [("SL202", "terminated was lost")],
        ((True, False), (False, True)): [("SL203", "a termination arrived as a truncation")],
        ((False, False), (False, True)): [("SL204", "truncated is set where the episode goes on")],
        ((False, True), (False, False)): [("SL205", "truncated was lost")],
        ((False, True), (True, False)): [("SL206", "a truncation arrived as a termination")],
        ((True, True), (True, False)): [("SL207", "both flags were set, and only terminated arrived")],
        ((True, True), (False, True)): [("SL208", "both flags were set, and only truncated arrived")],
        ((True, True), (False, False)): [("SL202", "terminated was lost"), ("SL205", "truncated was lost")],
        ((False, False), (True, True)): [
            ("SL201", "terminated is set where the episode goes on"),
            ("SL204", "truncated is set where the episode goes on"),
        ],
        ((True, False), (True, True)): [("SL209", "truncated arrived besides terminated")],
        ((False, True), (True, True)): [("SL209", "terminated arrived besides truncated")],
    }
    return [Explanation(*one) for one in what.get((given, received), [])]
