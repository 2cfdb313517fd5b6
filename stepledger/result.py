"""What a comparison finds, as data; the text of a report is in `stepledger.report`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from .format import StreamKey

__all__ = [
    "KEPT",
    "SCHEMA",
    "Comparison",
    "Counter",
    "Difference",
    "Explanation",
    "FieldResult",
    "Finding",
    "Hop",
    "Progress",
    "StreamResult",
    "Tally",
]

#: Differences of one stream that are kept in full; further ones are counted.
KEPT = 100

#: Version of what `Comparison.to_dict` returns. Within a version members are only added. 1: the first that was described.
SCHEMA = 1

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Explanation:
    """What may be behind a difference.

    Attributes:
        code: Stable: ``"SL102"``; ``stepledger explain SL102`` prints what it means and what to check.
        text: What fits here, in one sentence without a full stop.
    """

    code: str
    text: str

    @property
    def sure(self) -> bool:
        """Whether it is more than a possibility."""
        return " may be " not in self.text


@dataclass(frozen=True)
class Difference:
    """One place where the two sides of a hop disagree.

    Attributes:
        hop: The hop's name, ``"env -> vector"``.
        env: Position of the environment in its vector env; -1, like episode and step, for a learned transition that nobody sampled.
        episode: Counted from 0 at the first reset, on the side of the hop that is nearer to the environment.
        step: 0 is the reset, k the k-th step of the episode.
        fields: Which differ: of ``kind`` (one side has a reset where the other has a step), ``action``, ``obs``, ``reward``,
            ``terminated``, ``truncated``, and into the learner ``next_obs`` and ``episode_start`` (whether it is the first of its episode);
            or ``event`` alone, if one side has no such event.
        kind: ``"changed"``, ``"lost"`` (the event never reached the second side) or ``"extra"`` (the first side never gave it).
        first: What the first side has in these fields, as text; observations and actions only where values were kept.
        second: What the second side has.
        events: Number of events in a row that this difference covers: 1, but for a run of them. Of a run of changed ones (replies that are
            shifted, streams that are swapped) ``fields`` are those that differ anywhere in it, the texts those of its first event. Of
            resets that come to all environments when one is done (SL309), the number of all these resets, wherever they are.
        runner: The EnvRunner's index; 0 where there are none.
        agent: The agent; empty where there is only one.
        explanations: What may be behind it, best first; none where nothing that is known fits.
        incarnation: Counts the processes that were this runner.
        position: Index of the event in the first side's stream and in the second side's, since their beginnings; -1 where it is in none.
    """

    hop: str
    env: int
    episode: int
    step: int
    fields: tuple[str, ...]
    kind: str = "changed"
    first: dict[str, str] = field(default_factory=dict)
    second: dict[str, str] = field(default_factory=dict)
    events: int = 1
    runner: int = 0
    agent: str = ""
    explanations: tuple[Explanation, ...] = ()
    incarnation: int = 0
    position: tuple[int, int] = (-1, -1)

    def __str__(self) -> str:
        from .report.text import line
        from .report.visible import visible

        return f"{self.hop}: {visible(line(self))}"


@dataclass(frozen=True)
class Finding:
    """What is suspicious in one ledger, without another one to compare it with; see `stepledger.lints`.

    Attributes:
        code: Stable: ``"SL606"``.
        tap: Where it was recorded.
        text: What was found first, in one sentence without a full stop.
        count: How often.
        group: As of the ledger: ``"evaluation"``, or empty.
        runner: As in `Difference`; likewise the next ones.
        env: -1 where this sums up the environments beyond those that are listed.
        agent: As above.
        incarnation: As above.
        episode: Where it was found first; -1 where it is of no one place.
        step: Likewise.
        envs: Number of environments that this covers.
    """

    code: str
    tap: str
    text: str
    count: int = 1
    group: str = ""
    runner: int = 0
    env: int = 0
    agent: str = ""
    incarnation: int = 0
    episode: int = -1
    step: int = -1
    envs: int = 1

    def __str__(self) -> str:
        from .report.text import warnings
        from .report.visible import visible

        return visible(next(warnings([self])))


@dataclass(frozen=True)
class FieldResult:
    """What became of one field of a hop.

    Attributes:
        status: ``"equal"``, ``"different"``, or ``"not compared"``.
        compared: Number of events in which it was compared.
        differences: Number of those in which it differs.
        note: Why it was not compared, or by which known function one side was taken before it was.
        recomputed: Whether one side was taken through that function, so that it is not the recorded values that were compared.
    """

    status: str
    compared: int = 0
    differences: int = 0
    note: str = ""
    recomputed: bool = False


@dataclass(frozen=True)
class StreamResult:
    """How many differences the stream of one environment has; `Comparison.differences` holds the first of them.

    Those of learned transitions that nobody sampled are together under the env -1. None where the environment differs, and all of that is
    told at another one's: streams that are exchanged, and resets of all environments, are one difference.
    """

    runner: int
    env: int
    agent: str
    differences: int


@dataclass(frozen=True)
class Hop:
    """The comparison of two neighbouring taps.

    Attributes:
        name: ``"env -> vector"``.
        events: Number of events compared with their counterpart.
        streams: Number of streams compared.
        streams_different: Number of those with a difference.
        differences: Number of differences, all counted.
        fields: By name.
        unknown: What could not be told because a ledger has an open end, a sentence each.
        notes: What is no difference but worth knowing, a sentence each.
        unpaired: Streams that only one side has, and sides that hold nothing of the same, a sentence each; they were not compared.
        coverage: Into the learner: how many steps were ``sampled``, ``learned_once``, ``learned_more_than_once`` and ``never_learned``.
        never_learned: Why steps were never learned from, where it is known: reason -> number of steps.
        different_streams: Those with a difference, and what is of no known stream.
        lost: Number of events that never reached the second side.
        extra: Number of events that the first side never gave.
        dropped: Number of events that were compared while the run went on, and are not in the ledgers any more.
    """

    name: str
    events: int = 0
    streams: int = 0
    streams_different: int = 0
    differences: int = 0
    fields: dict[str, FieldResult] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unpaired: tuple[str, ...] = ()
    coverage: dict[str, int] = field(default_factory=dict)
    never_learned: dict[str, int] = field(default_factory=dict)
    different_streams: tuple[StreamResult, ...] = ()
    lost: int = 0
    extra: int = 0
    dropped: int = 0

    @property
    def complete(self) -> bool:
        """Whether all of both sides was there to be compared."""
        return not self.unknown and not self.unpaired


@dataclass(frozen=True)
class Comparison:
    """The result; ``str()`` of it is the report.

    Attributes:
        hops: In the order in which data passes them.
        differences: The first `KEPT` of each stream, hop by hop; `Hop.differences` counts all.
        warnings: What is suspicious in one ledger by itself; it changes neither `equal` nor `exit_status`.
    """

    hops: tuple[Hop, ...]
    differences: tuple[Difference, ...]
    warnings: tuple[Finding, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether no difference was found in what was compared."""
        return not any(hop.differences for hop in self.hops)

    @property
    def complete(self) -> bool:
        """Whether all that happened was there to be compared."""
        return all(hop.complete for hop in self.hops)

    @property
    def events(self) -> int:
        """Number of events compared, over all hops."""
        return sum(hop.events for hop in self.hops)

    @property
    def exit_status(self) -> int:
        """0 equal and complete; 1 different; 2 something could not be compared; 3 equal as far as recorded, but with an open end."""
        if not self.equal:
            return 1
        if not self.events or any(hop.unpaired for hop in self.hops):
            return 2
        return 0 if self.complete else 3

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON can hold it; ``stepledger/report/schema.json`` describes it."""
        verdict = {"equal": self.equal, "complete": self.complete, "exit_status": self.exit_status, "events": self.events}
        return {"schema": SCHEMA, **verdict, **asdict(self)}

    def __str__(self) -> str:
        from .report.text import report

        return report(self)


class Counter:
    """Tells how far a comparison is."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, events: int) -> None:
        """Count events as done."""
        self._done += events
        if self._progress is not None:
            self._progress(self._done, self._total)

    def finish(self) -> None:
        """Count what was left out."""
        self.add(self._total - self._done)


@dataclass
class Tally:
    """What the streams of one hop add up to.

    Attributes:
        unkept: Why some differences could not be explained by values, a sentence each.
    """

    name: str
    events: int = 0
    streams: int = 0
    differences: int = 0
    different_keys: set[StreamKey] = field(default_factory=set)
    compared: dict[str, int] = field(default_factory=dict)
    different: dict[str, int] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    coverage: dict[str, int] = field(default_factory=dict)
    never_learned: dict[str, int] = field(default_factory=dict)
    by_stream: dict[tuple[int, int, str], int] = field(default_factory=dict)
    lost: int = 0
    extra: int = 0
    dropped: int = 0
    unkept: dict[str, None] = field(default_factory=dict)

    def add(self, key: StreamKey, differences: int) -> None:
        """Count differences of a stream; those of all incarnations of its runner together."""
        self.differences += differences
        if differences:
            if key.env >= 0:
                self.different_keys.add(key)
            which = (key.runner, key.env, key.agent)
            self.by_stream[which] = self.by_stream.get(which, 0) + differences

    def hop(self, unpaired: tuple[str, ...], notes: dict[str, str]) -> Hop:
        """The hop, with a note on each field that has one."""
        fields = {}
        for name, compared in self.compared.items():
            differences = self.different.get(name, 0)
            status = "not compared" if not compared else "different" if differences else "equal"
            note = notes.get(name, "")
            fields[name] = FieldResult(status, compared, differences, note, bool(compared and note))
        told_elsewhere = {(key.runner, key.env, key.agent) for key in self.different_keys}
        by_stream = {**dict.fromkeys(told_elsewhere, 0), **self.by_stream}
        return Hop(
            self.name,
            self.events,
            self.streams,
            len(self.different_keys),
            self.differences,
            fields,
            tuple(self.unknown),
            (*self.notes, *filter(None, self.unkept)),
            unpaired,
            dict(self.coverage),
            dict(self.never_learned),
            tuple(StreamResult(*which, count) for which, count in sorted(by_stream.items()) if count or which in told_elsewhere),
            self.lost,
            self.extra,
            self.dropped,
        )
