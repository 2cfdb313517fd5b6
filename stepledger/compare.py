"""Comparing ledgers, hop by hop.

A hop is two neighbouring taps. Each stream of the one is aligned with its stream of the other (`stepledger.align`), and where events
disagree the fields that differ are named. The result is data (`Comparison`); the text of a report is in `stepledger.report`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .align import Edit, align
from .digest import MISSING
from .errors import LedgerError
from .format import RESET, StreamKey
from .ledger import Ledger, Stream, find, read

__all__ = ["Comparison", "Difference", "FieldResult", "Hop", "compare"]

#: Differences of one stream that are kept in full; further ones are counted.
KEPT = 100

#: Fields of an event -> their columns.
FIELDS = {"kind": "kind", "action": "h_act", "obs": "h_obs", "reward": "h_rew", "terminated": "terminated", "truncated": "truncated"}

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Difference:
    """One place where the two sides of a hop disagree.

    Attributes:
        hop: The hop's name, ``"env -> vector"``.
        env: Position of the environment in its vector env.
        episode: Counted from 0 at the first reset, on the side of the hop that is nearer to the environment.
        step: 0 is the reset, k the k-th step of the episode.
        fields: Which differ: of ``kind`` (one side has a reset where the other has a step), ``action``, ``obs``, ``reward``,
            ``terminated``, ``truncated``; or ``event`` alone, if one side has no such event.
        kind: ``"changed"``, ``"lost"`` (the event never reached the second side) or ``"extra"`` (the first side never gave it).
        first: What the first side has in these fields, as text; a digest where no values were kept.
        second: What the second side has.
        events: Number of events in a row that this difference covers: 1, but for a run of lost or extra ones.
        runner: The EnvRunner's index; 0 where there are none.
        agent: The agent; empty where there is only one.
        explanations: What may be behind it, best first.
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
    explanations: tuple[str, ...] = ()


@dataclass(frozen=True)
class FieldResult:
    """What became of one field of a hop.

    Attributes:
        status: ``"equal"``, ``"different"``, or ``"not compared"``.
        compared: Number of events in which it was compared.
        differences: Number of those in which it differs.
        note: Why it was not compared, or by which known function one side was taken before it was.
    """

    status: str
    compared: int = 0
    differences: int = 0
    note: str = ""


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
        unpaired: Streams that only one side has, a sentence each; they were not compared.
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
    """

    hops: tuple[Hop, ...]
    differences: tuple[Difference, ...]

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
        """The result as JSON can hold it."""
        return {"equal": self.equal, "complete": self.complete, "exit_status": self.exit_status, "events": self.events, **asdict(self)}

    def __str__(self) -> str:
        from .report.text import report

        return report(self)


def compare(
    env_side: str | os.PathLike[str], trainer_side: str | os.PathLike[str] | None = None, *, progress: Progress | None = None
) -> Comparison:
    """Compare what the environments gave with what the trainer received.

    Args:
        env_side: The directory with the ledgers of `LedgerEnv`, or one such file; or, alone, a run directory that holds both sides.
        trainer_side: The file that `LedgerVectorEnv` or `stepledger.sb3.LedgerVecEnv` wrote.
        progress: Called with the number of events done and the number of all.

    Returns:
        The result. It is never equal because there was nothing to compare: that is an error.

    Raises:
        LedgerError: There is nothing to compare, a ledger can't be read, or the two sides were recorded with different settings.
    """
    ledgers = _load(Path(env_side), None if trainer_side is None else Path(trainer_side))
    return compare_ledgers(ledgers, progress)


def _load(env_side: Path, trainer_side: Path | None) -> list[Ledger]:
    if not env_side.exists() and trainer_side is None:
        raise LedgerError(f"{env_side} is not there: name the directory that the ledgers were written to.")
    if env_side.is_dir():
        trainer = None if trainer_side is None else trainer_side.with_suffix("").resolve()
        paths = [path for path in find(env_side) if path.with_suffix("").resolve() != trainer]
        if not paths and trainer_side is None:
            raise LedgerError(f"{env_side} holds no ledgers: name the directory that they were written to.")
    elif trainer_side is None:
        raise LedgerError(f"{env_side} is one ledger, and comparing takes two sides: name the directory, or the other side's file too.")
    else:
        paths = [env_side]
    ledgers = [read(path) for path in paths]
    if trainer_side is not None:
        # With the trainer's side named, other vector envs' ledgers in the directory are not meant.
        ledgers = [ledger for ledger in ledgers if ledger.meta["tap"] == "env"]
        if not ledgers:
            raise LedgerError(f"{env_side} holds no ledger of an environment: name the directory that was given to LedgerEnv.")
        trainer_ledger = read(trainer_side)
        if trainer_ledger.meta["tap"] != "vector":
            raise LedgerError(
                f"{trainer_side} is a ledger of the tap {trainer_ledger.meta['tap']!r}: name the file that was given to LedgerVectorEnv "
                "or LedgerVecEnv."
            )
        ledgers.append(trainer_ledger)
    return ledgers


def compare_ledgers(ledgers: Sequence[Ledger], progress: Progress | None = None) -> Comparison:
    """Compare the ledgers of one run, whatever taps they are of."""
    ledgers = _without_conflicts(ledgers)
    by_tap: dict[str, list[Ledger]] = {}
    for ledger in ledgers:
        by_tap.setdefault(ledger.meta["tap"], []).append(ledger)
    present = [tap for tap in TAPS if tap in by_tap]
    if len(present) < 2:
        what = f"only ledgers of the tap {present[0]!r}" if present else "no ledgers of a known tap"
        raise LedgerError(f"there are {what}, and comparing takes two sides: record the other side too, or name its file.")
    total = sum(ledger.events for first in present[:-1] for ledger in by_tap[first])
    counter = _Counter(total, progress)
    hops: list[Hop] = []
    differences: list[Difference] = []
    for first, second in itertools.pairwise(present):
        hop, found = HOPS[first, second](by_tap[first], by_tap[second], counter)
        hops.append(hop)
        differences += found
    if not any(hop.streams for hop in hops):
        raise LedgerError(f"{hops[0].unpaired[0]}; nothing was compared.")
    return Comparison(tuple(hops), tuple(differences))


class _Counter:
    """Tells how far a comparison is."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, events: int) -> None:
        self._done += events
        if self._progress is not None:
            self._progress(self._done, self._total)


def _without_conflicts(ledgers: Sequence[Ledger]) -> list[Ledger]:
    """Refuse ledgers of two environments with one index; leave out what an earlier run left of such a mistake."""
    ids = {ledger.meta["id"]: ledger for ledger in ledgers if "conflicts_with" not in ledger.meta}
    kept = []
    for ledger in ledgers:
        other = ledger.meta.get("conflicts_with")
        if other is None:
            kept.append(ledger)
        elif other == "" or other in ids:
            what = "ledger" if other == "" else str(ids[other].path)
            raise LedgerError(
                f"{ledger.path} and {what} were recorded at the same time under one name: give each environment an index, and each vector "
                "env a path, of its own, and record again."
            )
    return kept


def _paired(
    name: str, firsts: Sequence[Ledger], seconds: Sequence[Ledger]
) -> tuple[list[tuple[Ledger, Stream, Ledger, Stream]], tuple[str, ...]]:
    """The streams that both sides have, and a sentence for each that only one has."""
    sides = []
    for ledgers in (firsts, seconds):
        streams: dict[StreamKey, tuple[Ledger, Stream]] = {}
        for ledger in ledgers:
            for key, stream in ledger.streams.items():
                if key in streams:
                    raise LedgerError(
                        f"{ledger.path} and {streams[key][0].path} both hold {_name(key)}: name a directory with the ledgers of one run."
                    )
                streams[key] = (ledger, stream)
        sides.append(streams)
    pairs, unpaired = [], []
    for key in sorted({**sides[0], **sides[1]}):
        if key in sides[0] and key in sides[1]:
            pairs.append((*sides[0][key], *sides[1][key]))
        else:
            there, missing = (0, 1) if key in sides[0] else (1, 0)
            ledger, stream = sides[there][key]
            if len(stream):
                tap = name.split(" -> ")[missing]
                unpaired.append(f"{_name(key)} has {len(stream):,} events in {ledger.path} and no ledger at the tap {tap!r}")
    return pairs, tuple(unpaired)


def _name(key: StreamKey) -> str:
    runner = f"runner {key.runner}, " if key.runner else ""
    agent = f", agent {key.agent}" if key.agent else ""
    return f"{runner}env {key.env}{agent}"


_SETTINGS = {
    "observation_space": "observation spaces",
    "action_space": "action spaces",
    "reward_dtype": "reward dtypes",
    "digest": "digests",
}


def check_settings(first: Ledger, second: Ledger) -> None:
    """Refuse to compare two ledgers whose values were not digested alike.

    Raises:
        LedgerError: They differ in a setting, or are of different runs.
    """
    for setting, words in _SETTINGS.items():
        one, other = first.meta.get(setting), second.meta.get(setting)
        if one != other:
            raise LedgerError(
                f"{first.path} and {second.path} were recorded with different {words} ({_short(one)} and {_short(other)}): record both "
                "sides alike."
            )
    one, other = first.meta.get("run"), second.meta.get("run")
    if one and other and one != other:
        raise LedgerError(f"{first.path} and {second.path} are of different runs: name the two sides of one run.")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _env_to_vector(firsts: Sequence[Ledger], seconds: Sequence[Ledger], counter: _Counter) -> tuple[Hop, list[Difference]]:
    return event_hop("env -> vector", firsts, seconds, counter)


#: The taps in the order in which data passes them, and how the hop between two of them is compared.
TAPS = ["env", "vector"]
HOPS: dict[tuple[str, str], Callable[[Sequence[Ledger], Sequence[Ledger], _Counter], tuple[Hop, list[Difference]]]] = {
    ("env", "vector"): _env_to_vector
}


@dataclass
class _Tally:
    """What the streams of one hop add up to."""

    name: str
    events: int = 0
    streams: int = 0
    streams_different: int = 0
    differences: int = 0
    compared: dict[str, int] = field(default_factory=dict)
    different: dict[str, int] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def hop(self, unpaired: tuple[str, ...], notes: dict[str, str]) -> Hop:
        fields = {}
        for name, compared in self.compared.items():
            differences = self.different.get(name, 0)
            status = "not compared" if not compared else "different" if differences else "equal"
            fields[name] = FieldResult(status, compared, differences, notes.get(name, ""))
        return Hop(
            self.name,
            self.events,
            self.streams,
            self.streams_different,
            self.differences,
            fields,
            tuple(self.unknown),
            tuple(self.notes),
            unpaired,
        )


def event_hop(name: str, firsts: Sequence[Ledger], seconds: Sequence[Ledger], counter: _Counter) -> tuple[Hop, list[Difference]]:
    """Compare two taps that both record resets and steps."""
    pairs, unpaired = _paired(name, firsts, seconds)
    tally = _Tally(name)
    differences: list[Difference] = []
    notes: dict[str, str] = {}
    for first_ledger, first, second_ledger, second in pairs:
        check_settings(first_ledger, second_ledger)
        pair = _Pair(tally, first_ledger, first, second_ledger, second)
        differences += pair.compare()
        notes.update(pair.field_notes)
        counter.add(len(first))
    return tally.hop(unpaired, notes), differences


class _Pair:
    """The two sides of one stream."""

    def __init__(self, tally: _Tally, first_ledger: Ledger, first: Stream, second_ledger: Ledger, second: Stream) -> None:
        self.tally = tally
        self.first, self.second = first, second
        self.first_ledger, self.second_ledger = first_ledger, second_ledger
        self.field_notes: dict[str, str] = {}
        self.a = {name: first.data[column] for name, column in FIELDS.items()}
        self.b = {name: second.data[column] for name, column in FIELDS.items()}
        if second_ledger.meta.get("flags") == "exclusive":
            # Stable-Baselines3 delivers one flag for both: TimeLimit.truncated is "truncated and not terminated".
            self.a["truncated"] = self.a["truncated"] & ~self.a["terminated"]
            self.field_notes["truncated"] = "where terminated is not set, as Stable-Baselines3 delivers it"
        self.kept: list[Difference] = []
        self.count = 0

    def compare(self) -> list[Difference]:
        tally, n = self.tally, min(len(self.first), len(self.second))
        tally.streams += 1
        if all(np.array_equal(self.a[name][:n], self.b[name][:n]) for name in FIELDS):
            self._count_compared(n, {})
            edits: Iterable[Edit] = _tails(len(self.first), len(self.second))
        else:
            edits = self._align()
        flipped: tuple[int, int] | None = None  # where an event would follow whose flags ended the episode on one side only
        for edit in edits:
            if edit.kind == "changed":
                flipped = self._changed(edit, flipped)
            else:
                self._unmatched(edit, flipped)
                flipped = None
        tally.differences += self.count
        tally.streams_different += self.count > 0
        return self.kept

    def _align(self) -> list[Edit]:
        edits = list(align(_keys(self.a), _keys(self.b)))
        equal = len(self.first) - sum(edit.length for edit in edits if edit.kind != "extra")
        self._count_compared(equal, {})
        return edits

    def _count_compared(self, events: int, different: dict[str, int]) -> None:
        self.tally.events += events
        for name in FIELDS:
            self.tally.compared[name] = self.tally.compared.get(name, 0) + events
            if name in different:
                self.tally.different[name] = self.tally.different.get(name, 0) + different[name]

    def _changed(self, edit: Edit, flipped: tuple[int, int] | None) -> tuple[int, int] | None:
        """Count a run of events that both sides have and that are not all equal."""
        here, there = slice(edit.first, edit.first + edit.length), slice(edit.second, edit.second + edit.length)
        a = {name: column[here] for name, column in self.a.items()}
        b = {name: column[there] for name, column in self.b.items()}
        unequal = {name: a[name] != b[name] for name in FIELDS}
        # In next-step mode the trainer takes the event after an end for a reset: an end that only one side saw shows once more there.
        ends = (a["terminated"] | a["truncated"]) != (b["terminated"] | b["truncated"])
        after = np.concatenate([[flipped == (edit.first, edit.second)], ends[:-1]])
        folded = after & unequal["kind"] & ~unequal["obs"]
        different = np.logical_or.reduce(list(unequal.values())) & ~folded
        self._count_compared(int((~folded).sum()), {name: int((mask & ~folded).sum()) for name, mask in unequal.items()})
        positions = np.flatnonzero(different)
        self.count += len(positions)
        for at in positions[: max(0, KEPT - len(self.kept))].tolist():
            names = tuple(name for name in FIELDS if unequal[name][at])
            self.kept.append(self._difference("changed", names, edit.first + at, edit.second + at))
        return (edit.first + edit.length, edit.second + edit.length) if ends[-1] else None

    def _unmatched(self, edit: Edit, flipped: tuple[int, int] | None) -> None:
        """Count a run of events that only one side has."""
        lost = edit.kind == "lost"
        begin, length = (edit.first if lost else edit.second), edit.length
        if flipped == (edit.first, edit.second) and (self.a if lost else self.b)["kind"][begin] == RESET:
            # In same-step mode an end that only one side saw brings a reset that only that side has.
            edit = edit._replace(first=edit.first + lost, second=edit.second + (not lost), length=edit.length - 1)
            begin, length = begin + 1, length - 1
        if not length or self._at_open_end(edit):
            return
        self.count += 1
        if len(self.kept) < KEPT:
            self.kept.append(self._difference(edit.kind, ("event",), edit.first, edit.second, length))

    def _at_open_end(self, edit: Edit) -> bool:
        """Whether these events are the end of a stream whose other side may have lost its own end."""
        lost = edit.kind == "lost"
        if edit.first + (edit.length if lost else 0) < len(self.first) or edit.second + (0 if lost else edit.length) < len(self.second):
            return False
        shorter, taps = (self.second_ledger, 1) if lost else (self.first_ledger, 0)
        tap = self.tally.name.split(" -> ")[taps]
        events = f"{edit.length:,} event{'s' if edit.length > 1 else ''}"
        if shorter.open_end:
            self.tally.unknown.append(
                f"{_name(self.first.key)}: the last {events} can't be compared, because the ledger of the tap {tap!r} has no end"
            )
            return True
        if edit.length == 1 and shorter.meta.get("in_flight"):
            self.tally.notes.append(f"{_name(self.first.key)}: its last event was still under way when the tap {tap!r} was closed")
            return True
        return False

    def _difference(self, kind: str, fields: tuple[str, ...], i: int, j: int, events: int = 1) -> Difference:
        episode, step = self._place(i)
        key = self.first.key
        difference = Difference(self.tally.name, key.env, episode, step, fields, kind, events=events, runner=key.runner, agent=key.agent)
        if kind != "changed":
            return difference
        return replace(
            difference,
            first={name: text for name in fields if (text := self._text(self.first, self.a, name, i))},
            second={name: text for name in fields if (text := self._text(self.second, self.b, name, j))},
        )

    def _place(self, i: int) -> tuple[int, int]:
        """Episode and step of an event of the first side; for the place behind the last, as if a step followed."""
        columns = self.first.columns
        if i < len(self.first):
            return int(columns["episode"][i]), int(columns["step"][i])
        if not len(self.first):
            return 0, 0
        return int(columns["episode"][-1]), int(columns["step"][-1]) + 1

    def _text(self, stream: Stream, data: dict[str, npt.NDArray[Any]], name: str, i: int) -> str:
        value = data[name][i]
        if name == "kind":
            return "reset" if value == RESET else "step"
        if name in ("terminated", "truncated"):
            return str(bool(value))
        if name == "reward":
            if data["kind"][i] == RESET:
                return ""
            return str(np.array([value]).view(self.first_ledger.meta["reward_dtype"])[0])
        if value == int.from_bytes(MISSING, "big"):
            return "nothing"
        which = {"obs": "values_obs_", "action": "values_act_"}[name]
        leaves = [column[i] for leaf, column in sorted(stream.values.items(), key=_leaf_order) if leaf.startswith(which)]
        return ", ".join(leaf if isinstance(leaf, str) else np.array2string(leaf, separator=", ", threshold=64) for leaf in leaves)


def _leaf_order(item: tuple[str, Any]) -> int:
    return int(item[0].rsplit("_", 1)[1])


def _tails(first: int, second: int) -> list[Edit]:
    if first > second:
        return [Edit("lost", second, second, first - second)]
    return [Edit("extra", first, first, second - first)] if second > first else []


def _keys(data: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.uint64]:
    """One 64-bit key per event: equal events have equal keys, others almost surely not."""
    flags = (
        data["kind"].astype(np.uint64)
        | data["terminated"].astype(np.uint64) << np.uint64(8)
        | data["truncated"].astype(np.uint64) << np.uint64(9)
    )
    keys = np.zeros(len(flags), np.uint64)
    for column in (data["obs"], data["action"], data["reward"].astype(np.uint64), flags):
        # Multiply and rotate, so that equal parts in different columns don't cancel; the constant is the golden ratio's, as in splitmix64.
        keys = (keys ^ column) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    return keys
