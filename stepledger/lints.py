"""What is suspicious in the ledger of one tap, without a partner to compare it with.

Lints look at the taps ``env`` and ``vector``; of a stream that both have, at ``env``, since what becomes of it on the way is for comparing
to find. They are warnings: each is true of what was recorded, and may be meant. What takes more than digests was looked at while recording
(`stepledger.checks`), or is looked at here where values were kept; where neither was done, nothing is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .checks import ACTION_OUTSIDE, CHANGED, OBS_NOT_FINITE, OBS_OUTSIDE
from .course import AFTER_END, EPISODES, EQUAL_LENGTH, IN_THE_MIDDLE, REWARD, SAID, TOO_LONG, Course, Found
from .format import Meta, StreamKey, window_of
from .ledger import Ledger
from .pairs import counted
from .result import Finding
from .strays import UNSEEN

__all__ = ["LINTED", "LINTS", "Linter"]

#: The taps that are looked at, the nearest to the environment first.
LINTED = ("env", "vector")

#: Findings of one code that are listed, one for each stream; the rest is summed up.
LISTED = 20

SAME, OPTIONS, SEEDS = "SL609", "SL611", "SL612"


class Lint(NamedTuple):
    """One lint.

    Attributes:
        title: What it is called.
        meaning: What a finding says.
        check: What to look at then.
    """

    title: str
    meaning: str
    check: str


#: Code -> what it means.
LINTS: dict[str, Lint] = {
    ACTION_OUTSIDE: Lint(
        "action outside the space",
        "The environment was given an action that its action space does not hold. Most environments clip it, wrap it round or "
        "index with it, and the policy then learns about another action than the one that was taken. A float action may lie "
        "beyond a bound by rounding.",
        "Look at how actions are clipped or rescaled between the policy and env.step(), and at the bounds that the environment declares.",
    ),
    OBS_OUTSIDE: Lint(
        "observation outside the space",
        "An observation, after the cast to the dtype of the space, lies beyond the declared bounds or has another shape. "
        "Normalisation and buffers that rely on the bounds are then wrong. Some environments declare the bounds at which an "
        "episode ends, and go beyond them in its last observation.",
        "Declare wider bounds, or look for the units, the scale or the component that is wrong.",
    ),
    OBS_NOT_FINITE: Lint(
        "observation not finite",
        "The environment itself gave NaN or an infinity. One NaN in a batch makes all weights NaN.",
        "Look at what the environment divides by or takes the root of at that step.",
    ),
    REWARD: Lint(
        "reward not finite",
        "The environment itself gave a reward that is NaN or infinite in the dtype that it was recorded in.",
        "Look at how the reward of that step is computed; one that is too large for float32 can be recorded with reward_dtype=np.float64.",
    ),
    AFTER_END: Lint(
        "step after the episode's end",
        "A step terminated or truncated the episode, and another step followed where a reset should have been. What an "
        "environment does then is undefined.",
        "Look at who resets: the loop, or the vector env by its autoreset mode. With AutoresetMode.DISABLED it is the loop.",
    ),
    IN_THE_MIDDLE: Lint(
        "reset in the middle of an episode",
        "An episode was cut off by a reset, without being terminated or truncated. Unless whoever samples knows of the "
        "reset, its last step is learned from as if the episode went on in the next one's first observation. Samplers that "
        "collect a number of episodes do this on purpose; in the evaluation of RLlib, which does, it is not looked for.",
        "Look at who calls reset(): an evaluation or a video that uses the training env, a wrapper, a second call of learn().",
    ),
    TOO_LONG: Lint(
        "episode longer than the time limit",
        "A TimeLimit wrapper in the environment, or its spec, says after how many steps an episode is truncated, and one went on.",
        "Look for a wrapper outside of TimeLimit that loses its flag or makes several episodes one, and for who ignores truncated.",
    ),
    EQUAL_LENGTH: Lint(
        "every terminated episode of equal length",
        f"All terminated episodes of a stream, {EPISODES} or more, have the same number of steps, which is more than one. That "
        "is what a time limit looks like that is delivered as a termination: the value of the last state is then taken to be "
        "zero. Tasks that end after a fixed number of moves by their own rules do so too.",
        "If it is a time limit, return it as truncated=True.",
    ),
    SAME: Lint(
        "two environments with identical streams",
        "Two environments gave the same events from the beginning, or their resets the same observations, more often than by "
        "chance: they have the same seed, or nothing in them is random. They bring the data of one.",
        "Give each environment a seed of its own: reset(seed=number) of a vector env does. With several processes, see that "
        "their ranges of seeds do not overlap.",
    ),
    CHANGED: Lint(
        "environment changes what it has handed out",
        "An observation that was returned by one call held something else after the next one: the environment fills the same "
        "array, or dict, again. Whoever keeps it without a copy keeps the wrong one: a list of observations, or the final "
        "observation of a same-step reset.",
        "Return a copy, or see that everything that keeps observations makes one.",
    ),
    OPTIONS: Lint(
        "reset options reach no later reset",
        "Some reset was given options, and those behind it were not: vector envs reset environments at the end of an episode by "
        "themselves, without the options of the first reset.",
        "Set what is to hold for all episodes when the environment is made, or by set_attr.",
    ),
    SEEDS: Lint(
        "reset seeds reach no automatic reset",
        "Several resets were given seeds, each another one, and those in between were given none: vector envs reset "
        "environments at the end of an episode by themselves, without a seed. Only the episodes after a seeded reset begin as "
        "the seeds say.",
        "To choose each episode's seed, reset by hand with AutoresetMode.DISABLED, or derive seeds in the environment.",
    ),
}

#: Events, and resets, of which a stream must have so many to be called the same as another one.
_ENOUGH, _FIRST = 32, 4
#: Probability by chance, over all pairs of streams, below which equal resets are no chance.
_CHANCE = 1e-6


#: Entries of a ledger's meta that are used here.
_LOOKED_AT = ("keep_values", "stream_keys", "time_limit", "checks", "resets", "bounds")


class _Source(NamedTuple):
    """A ledger, or the same in a later part."""

    run: str
    group: str
    tap: str
    path: str


class Linter:
    """Looks for what is suspicious in ledgers, whose events may come in parts."""

    def __init__(self) -> None:
        self._courses: dict[tuple[_Source, StreamKey], Course] = {}
        self._metas: dict[_Source, Meta] = {}

    def add(self, ledgers: Iterable[Ledger]) -> None:
        """Look at ledgers, or at further events of them: parts of one ledger have the same path."""
        for ledger in ledgers:
            meta = ledger.meta
            if meta["tap"] not in LINTED:
                continue
            source = _Source(meta.get("run", ""), meta.get("group", ""), meta["tap"], str(ledger.path.with_suffix("")))
            self._metas[source] = {name: meta[name] for name in _LOOKED_AT if name in meta}
            for key, stream in ledger.streams.items():
                self._courses.setdefault((source, key), Course()).take(stream, meta)

    def merge(self, other: Linter) -> None:
        """Take what another one has found in other ledgers."""
        self._courses.update(other._courses)
        self._metas.update(other._metas)

    @property
    def made(self) -> dict[str, int]:
        """Code -> number of events that it was looked for in; 0 where that could not be done."""
        made = dict.fromkeys(LINTS, 0)
        for (source, key), course in self._courses.items():
            meta = self._metas[source]
            looked = meta.get("checks", {"calls": 0, "made": []})
            for code in LINTS:
                if code in SAID:
                    kept = "bounds" in meta and code != CHANGED
                    first = min(looked["calls"], course.events) if code in looked["made"] else 0
                    made[code] += first if not kept else first + course.looked if window_of(meta) else course.events
                elif code in (OPTIONS, SEEDS):
                    made[code] += meta.get("resets", [0])[0] if key == StreamKey(*meta["stream_keys"][0]) else 0
                elif code != TOO_LONG or "time_limit" in meta:
                    made[code] += course.events
        return made

    def findings(self) -> tuple[Finding, ...]:
        """What was found, by code; the first `LISTED` streams of each, and a sum of the others."""
        found: dict[tuple[str, str, str], list[Finding]] = {}
        for code, source, key, one in self._all():
            finding = Finding(code, source.tap, one.text, one.count, source.group, *key[:3], key.incarnation, *one.place)
            found.setdefault((code, source.group, source.tap), []).append(finding)
        listed: list[Finding] = []
        for (code, group, tap), some in sorted(found.items()):
            some.sort(key=lambda one: (one.runner, one.incarnation, one.env, one.agent))
            listed += some[:LISTED]
            if rest := some[LISTED:]:
                text = f"{counted(len(rest), 'more env')}"
                listed.append(Finding(code, tap, text, sum(one.count for one in rest), group, env=-1, envs=len(rest)))
        return tuple(listed)

    def _all(self) -> Iterator[tuple[str, _Source, StreamKey, Found]]:
        of_env = {(source.run, source.group, key): one for (source, key), one in self._courses.items() if source.tap == "env"}
        watched = {(source.run, source.group, key) for (source, key), one in self._courses.items() if one.watched}
        for source, meta in self._metas.items():
            for number, key in enumerate(map(StreamKey._make, meta["stream_keys"])):
                course = self._courses.get((source, key))
                if course is None:
                    continue
                at = (source.run, source.group, key)
                nearer = of_env.get(at)
                # The trainer's side may be ahead by a call that was under way.
                doubled = source.tap != "env" and nearer is not None and nearer.events + 2 >= course.events
                found = course.findings(meta.get("time_limit", 0))
                if number == 0:
                    found |= _of_resets(meta.get("resets", [0] * 5))
                for code, stream, episode, step, count, detail in meta["checks"]["found"] if "checks" in meta else ():
                    if stream != number or code not in SAID:
                        continue
                    if code not in found:
                        found[code] = _checked(code, (episode, step), count, detail)
                    elif window_of(meta):  # what is found in kept values comes behind what was looked at while recording
                        found[code] = _checked(code, (episode, step), count + found[code].count, detail)
                if at in watched and not course.watched:
                    found.pop(IN_THE_MIDDLE, None)  # the other tap knows which resets are those of a new learn()
                for code, one in found.items():
                    if not doubled or code == CHANGED or (code == IN_THE_MIDDLE and course.watched):
                        yield code, source, key, one
        yield from self._same(of_env)

    def _same(self, of_env: dict[tuple[str, str, StreamKey], Course]) -> Iterator[tuple[str, _Source, StreamKey, Found]]:
        """Streams that are the same."""
        by_place: dict[tuple[str, str, str], list[tuple[_Source, StreamKey, Course]]] = {}
        for (source, key), course in sorted(self._courses.items(), key=lambda item: (item[0][0], item[0][1])):
            if source.tap == "env" or (source.run, source.group, key) not in of_env:
                by_place.setdefault((source.run, source.group, source.tap), []).append((source, key, course))
        for some in by_place.values():
            twins = _Twins(len(some))
            for source, key, course in some:
                if text := twins.of(key, course):
                    yield SAME, source, key, Found(1, (-1, -1), text)


class _Twins:
    """Finds streams that begin as an earlier one did."""

    def __init__(self, streams: int) -> None:
        self._pairs = max(1, streams * (streams - 1) // 2)
        self._heads: dict[bytes, StreamKey] = {}
        self._resets: dict[bytes, list[tuple[StreamKey, Course]]] = {}

    def of(self, key: StreamKey, course: Course) -> str:
        """In words, of which earlier stream this one is the same; empty where it is of none."""
        if len(course.head) >= _ENOUGH:
            other = self._heads.setdefault(course.head.tobytes(), key)
            if other != key:
                return f"its first {len(course.head):,} events are those of {_env(other, key)}"
        if len(course.resets) < _FIRST or (course.resets == UNSEEN).any():
            return ""
        known = self._resets.setdefault(course.resets[:_FIRST].tobytes(), [])
        for other, one in known:
            n = min(len(one.resets), len(course.resets))
            if np.array_equal(one.resets[:n], course.resets[:n]) and self._is_no_chance(one.resets[:n]):
                return f"the observations of its first {n:,} resets are those of {_env(other, key)}"
        if len(known) < LISTED:  # else a few start states are common to all
            known.append((key, course))
        return ""

    def _is_no_chance(self, resets: npt.NDArray[np.uint64]) -> bool:
        """Whether two environments that begin in states as often as these do would hardly begin in the same ones so many times."""
        counts = np.unique(resets, return_counts=True)[1]
        chance = float(((counts / len(resets)) ** 2).sum())
        return len(resets) * math.log(chance) + math.log(self._pairs) < math.log(_CHANCE)


def _env(other: StreamKey, key: StreamKey) -> str:
    restarted = ", before it was restarted" if other[:3] == key[:3] and other.incarnation != key.incarnation else ""
    return (f"runner {other.runner}, " if other.runner != key.runner else "") + f"env {other.env}{restarted}"


def _checked(code: str, place: tuple[int, int], count: int, detail: str) -> Found:
    """What was found while recording; a detail is written by whoever wrote the file."""
    detail = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in detail[:200])
    if place[0] < 0:
        place, detail = (-1, -1), f"call {place[1]:,}: {detail}"
    return Found(count, place, f"{SAID[code]} ({detail})")


def _of_resets(counts: Sequence[int]) -> dict[str, Found]:
    """What resets were given."""
    resets, seeded, seeds, with_options, without = counts
    found = {}
    if with_options and without:
        text = f"options were given to {with_options:,} of {counted(resets, 'reset')}, and to none of the last {without:,}"
        found[OPTIONS] = Found(without, (-1, -1), text)
    if seeds > 1 and seeded < resets:
        text = f"seeds were given to {seeded:,} of {counted(resets, 'reset')}, and not to the others"
        found[SEEDS] = Found(resets - seeded, (-1, -1), text)
    return found
