"""A hop between two taps that both record resets and steps."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import replace

from .align import RESYNC
from .constants import Constants
from .explain import most_common_first
from .format import StreamKey
from .ledger import Ledger, Stream
from .pairs import counted
from .resets import RESETS_OF_ALL, ResetsOfAll
from .result import KEPT, Counter, Difference, Explanation, Hop, Tally
from .stream_pair import StreamPair
from .tracks import Neighbours, Track

__all__ = ["EventHop"]


class EventHop:
    """Compares two taps that both record resets and steps. Their events may come in parts; what was compared is dropped.

    Args:
        name: ``"env -> vector"``, with a group in front of it where there is one.
        undecided: Events in a row without an agreement between two sides of which more is to come, after which they are taken to differ.
    """

    def __init__(self, name: str, undecided: int) -> None:
        self._name = name
        self.undecided = undecided
        self._tally = Tally(name)
        self._pairs: dict[StreamKey, StreamPair] = {}
        self.ended = False
        self._constants: Constants | None = None
        self._neighbours: dict[StreamKey, Neighbours] = {}
        self._resets: dict[StreamKey, ResetsOfAll] = {}
        self._all_reset: dict[StreamKey, Difference] = {}
        # For each stream, in which calls it was found to have the replies of which others: by which stream, and of which.
        self._exchanged: dict[StreamKey, list[tuple[int, StreamKey, set[int]]]] = {}

    def add(self, firsts: Sequence[Ledger], seconds: Sequence[Ledger]) -> None:
        """Take further events of both taps.

        Raises:
            LedgerError: Two ledgers of a tap have the same stream.
        """
        for side, ledgers in enumerate((firsts, seconds)):
            for ledger in ledgers:
                for key, stream in ledger.streams.items():
                    if key not in self._pairs:
                        self._pairs[key] = StreamPair(self, self._tally, key)
                    self._pairs[key].add(side, ledger, stream)

    def compare(self, end: bool, counter: Counter) -> None:
        """Compare what has come.

        Args:
            end: Nothing more will come. Otherwise what one side has more than the other at its end waits for its counterpart.
            counter: Counts the events of the first side.

        Raises:
            LedgerError: Two sides were recorded with different settings.
        """
        self.ended = end
        pairs = [self._pairs[key] for key in sorted(self._pairs)]
        self._neighbours.clear()  # of a round that failed
        for pair in pairs:  # all before the first: what differs in one may be another's
            pair.open()
        for pair in pairs:
            counter.add(pair.compare(end))
        self._resets_of_all(pairs)
        self._neighbours.clear()
        for pair in pairs:
            pair.forget()

    def waiting(self, key: StreamKey) -> tuple[int, int]:
        """How many events of both sides of a stream wait for their counterparts."""
        return self._pairs[key].waiting() if key in self._pairs else (0, 0)

    def result(self) -> tuple[Hop, list[Difference]]:
        """What was found so far."""
        pairs = [self._pairs[key] for key in sorted(self._pairs)]
        notes = {name: note for pair in pairs for name, note in pair.notes.items()}
        # The taps of one process have the same streams. One that was killed early may not have come to its second tap.
        came = {key._replace(env=0, agent="") for key, pair in self._pairs.items() if pair.received}
        unpaired, unknown = list[str](), list[str]()
        for pair in pairs:
            if self.ended and (sentence := pair.unpaired()):
                open_end = pair.open_end() if pair.key._replace(env=0, agent="") not in came else ""
                (unknown if open_end else unpaired).append(open_end or sentence)
        kept = [[difference for at, difference in enumerate(pair.kept) if at not in pair.withdrawn][:KEPT] for pair in pairs]
        hop = self._tally.hop(tuple(unpaired), notes)
        return replace(hop, unknown=(*hop.unknown, *unknown)), most_common_first([*self._all_reset.values(), *itertools.chain(*kept)])

    def _resets_of_all(self, pairs: list[StreamPair]) -> None:
        """Make one difference of resets that nobody was told of, where all envs are reset when one is done."""
        runners: dict[StreamKey, dict[StreamKey, StreamPair]] = {}
        for pair in pairs:
            runners.setdefault(pair.key._replace(env=0), {})[pair.key] = pair
        for runner, of_runner in runners.items():
            lost = [(reset, key) for key, pair in of_runner.items() for reset in pair.resets]
            seconds = {key: pair.tracks[1] for key, pair in of_runner.items() if pair.tracks}
            if not (found := self._resets.setdefault(runner, ResetsOfAll()).take(lost, seconds)):
                continue
            for reset, key in found:
                pair = of_runner[key]
                pair.withdrawn.add(reset.kept)
                self._tally.add(key, -1)
            begin, key = min(found, key=lambda one: (one[0].call, one[1]))
            if runner not in self._all_reset:
                self._tally.add(key, 1)
                episode, step = begin.place
                what = ("event",) if begin.kind == "lost" else ("kind", "action")
                self._all_reset[runner] = Difference(
                    self._name, key.env, episode, step, what, begin.kind, events=0, runner=key.runner, agent=key.agent,
                    incarnation=key.incarnation, position=begin.position,
                )  # fmt: skip
            one = self._all_reset[runner]
            events = one.events + len(found)
            text = f"since then the envs were reset whenever one of the {len(of_runner)} was done ({counted(events, 'reset')})"
            self._all_reset[runner] = replace(one, events=events, explanations=(Explanation(RESETS_OF_ALL, text),))

    def compared_equal(self) -> dict[StreamKey, int]:
        """For each stream without a difference, how many of its events were compared since the first, on both sides."""
        return {key: number for key, pair in self._pairs.items() if (number := pair.compared_equal())}

    def others(self, key: StreamKey) -> list[tuple[StreamKey, tuple[Track, Track]]]:
        """Both sides of the other streams of the same vector env."""
        return [(other, tracks) for other, tracks in self.neighbours(key).streams if other != key]

    def neighbours(self, key: StreamKey) -> Neighbours:
        """All streams of the same vector env, as far as they are being compared."""
        runner = key._replace(env=0)
        if runner not in self._neighbours:
            alike = [(other, self._pairs[other].tracks) for other in sorted(self._pairs) if other._replace(env=0) == runner]
            self._neighbours[runner] = Neighbours([(other, tracks) for other, tracks in alike if tracks is not None])
        return self._neighbours[runner]

    def constants(self, ledger: Ledger) -> Constants:
        """The digests of values that are known in advance."""
        if self._constants is None:
            self._constants = Constants(ledger.meta)
        return self._constants

    def is_counterpart(self, key: StreamKey, envs: set[int], call: int) -> bool:
        """Whether streams that are exchanged from a call on were found so in another of them; else it is remembered that they are."""
        said = self._exchanged.get(key, [])
        for at, by, among in itertools.islice(said, bisect.bisect_right(said, call - RESYNC, key=_call), None):
            if at >= call + RESYNC:
                break
            if by != key and envs <= among:
                return True
        for env in envs:
            bisect.insort(self._exchanged.setdefault(key._replace(env=env), []), (call, key, envs), key=_call)
        return False

    def rows(self, ledger: Ledger) -> list[Stream]:
        """The open windows of all streams of a ledger of the first side."""
        return [pair.windows[0] for pair in self._pairs.values() if pair.is_of(ledger)]


def _call(said: tuple[int, StreamKey, set[int]]) -> int:
    return said[0]
