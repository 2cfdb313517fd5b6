"""Reading what is added to ledgers while they are being recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .archive import ForeignFileError
from .compare import Comparer
from .directory import find
from .errors import LedgerError
from .format import JOURNAL, SEALED, StreamKey, with_said
from .journal import is_locked
from .ledger import Ledger, Streams, ledger_of, read
from .pairs import group_of
from .result import Comparison, Difference
from .scan import scan

__all__ = ["Follower", "Watcher"]


@dataclass
class _Followed:
    """How far a ledger was read.

    Attributes:
        taken: Number of events of each stream, from the first of all.
        position: In its journal.
        begins: What its journal said had been dropped before: another file has taken its place where that has changed.
        said: What its journal has added to lists of its meta.
        sealed: Size and time of its sealed file, once that was read.
    """

    taken: dict[StreamKey, int] = field(default_factory=dict)
    position: tuple[int, int] | None = None
    begins: Any = None
    said: dict[str, list[Any]] = field(default_factory=dict)
    sealed: tuple[int, float] | None = None


class Follower:
    """Reads the ledgers of a directory bit by bit.

    Args:
        directory: The run directory.
        run: Identity of the run; ledgers of other ones are left alone.
    """

    def __init__(self, directory: Path, run: str) -> None:
        self._directory = directory
        self._run = run
        self._followed: dict[Path, _Followed] = {}

    def news(self) -> list[Ledger]:
        """The ledgers with what has been written since the last time; those that have not changed are left out.

        Raises:
            LedgerError: A file is damaged.
        """
        ledgers = []
        for name in find(self._directory):
            try:
                ledger = self._more(name, self._followed.setdefault(name, _Followed()))
            except (FileNotFoundError, ForeignFileError):  # its recorder has closed it just now, or it is somebody else's
                continue
            if ledger is not None and ledger.meta.get("run", "") == self._run:
                ledgers.append(ledger)
        return ledgers

    def _more(self, name: Path, followed: _Followed) -> Ledger | None:
        journal, sealed = name.with_suffix(JOURNAL), name.with_suffix(SEALED)
        if journal.is_file() and ((alive := is_locked(journal)) or not sealed.exists()):
            return self._from_journal(name, journal, alive, followed)
        stat = sealed.stat()
        if followed.sealed == (stat.st_size, stat.st_mtime):
            return None
        followed.sealed = stat.st_size, stat.st_mtime
        return self._new(read(sealed), followed, name)

    def _from_journal(self, name: Path, journal: Path, alive: bool, followed: _Followed) -> Ledger | None:
        if not journal.stat().st_size:
            return None
        try:
            written = scan(journal, followed.position, followed.begins)
        except LedgerError:
            if alive and followed.position is None:  # its recorder has begun just now
                return None
            raise
        followed.position, followed.begins = written.position, written.meta.get("begins")
        before = followed.said if written.goes_on else {}
        followed.said = with_said(before, written.said)
        taken = [followed.taken[StreamKey(*key)] for key in written.meta["stream_keys"]] if written.goes_on else None
        part = ledger_of(journal, written, taken)
        part = replace(part, meta=with_said(part.meta, before), open_end=not alive)
        return self._new(part, followed, name) if part.events or part.open_end or not written.goes_on else None

    @staticmethod
    def _new(ledger: Ledger, followed: _Followed, name: Path) -> Ledger:
        """The ledger without the events that were taken before."""
        streams = []
        for key, stream in ledger.streams.items():
            taken = followed.taken.get(key, 0)
            new = stream.after(max(0, taken - stream.begin))
            followed.taken[key] = new.begin + len(new)
            streams.append(new)
        return replace(ledger, path=name, streams=Streams(streams))


class Watcher:
    """Compares the ledgers of a run while they are being recorded.

    Args:
        directory: The run directory.
        run: Identity of the run.
    """

    def __init__(self, directory: Path, run: str) -> None:
        self._follower = Follower(directory, run)
        self._comparer = Comparer()
        self._elsewhere: set[Path] = set()
        self._differences: Counter[tuple[str, StreamKey]] = Counter()
        self._differing: set[tuple[str, StreamKey]] = set()

    def compare(self, end: bool, *others: Sequence[Ledger]) -> tuple[Comparison, dict[str, list[int]], str]:
        """Compare what has been written since the last time.

        Args:
            end: Nothing more will come.
            others: What other followers have found.

        Returns:
            What was found so far; for each ledger, how many events of each of its streams may be dropped; why it can't be compared.
        """
        theirs = [ledger for news in others for ledger in news]
        self._elsewhere |= {ledger.path for ledger in theirs}
        try:
            # What is on another node may have been copied to this one.
            ours = [ledger for ledger in self._follower.news() if ledger.path not in self._elsewhere]
            self._comparer.add([*ours, *theirs])
            comparison = self._comparer.compare(end)
        except LedgerError as error:
            return Comparison((), ()), {}, str(error)
        before, self._differences = self._differences, Counter(map(_whose, comparison.differences))
        self._differing = {whose for whose, number in self._differences.items() if number > before[whose]}
        return comparison, self._comparer.done_with(), ""

    def differing(self) -> dict[str, list[int]]:
        """For each ledger, the positions of those of its streams in which the last comparison found a difference that is kept."""
        return self._comparer.positions(self._differing)


def _whose(difference: Difference) -> tuple[str, StreamKey]:
    """The group and the stream of a difference."""
    return group_of(difference.hop), StreamKey(difference.runner, difference.env, difference.agent, difference.incarnation)
