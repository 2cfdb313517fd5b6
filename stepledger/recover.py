"""Sealing the journals that killed processes have left."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .directory import find, is_directory
from .errors import LedgerError
from .format import JOURNAL, SEALED
from .journal import is_locked
from .ledger import read
from .scan import EmptyFileError, scan
from .sealed import write_sealed

__all__ = ["Recovered", "recover"]

#: What a sealed ledger says of its end, so that it stays an open one.
_STOPPED = "its process was stopped before it closed the ledger, which was sealed afterwards"


@dataclass(frozen=True)
class Recovered:
    """What became of one journal.

    Attributes:
        path: The journal.
        outcome: ``"sealed"``; ``"removed"``: the sealed ledger beside it holds all of it; ``"open"``: it is being recorded; or it was left
            as it is: ``"empty"``, its process was stopped before it could write; or ``"damaged"``, also where the sealed ledger beside
            it is another recording's.
        events: Number of events that it holds.
        note: What is wrong, if anything.
    """

    path: Path
    outcome: str
    events: int = 0
    note: str = ""


def recover(directory: str | os.PathLike[str]) -> list[Recovered]:
    """Seal the journals in a directory and below it, as far as they are whole.

    What is compared is the same before and after: a ledger that has no end stays one.

    Args:
        directory: Or one journal.

    Returns:
        What became of each, in the order of their names; nothing where all ledgers are sealed.

    Raises:
        LedgerError: There is no ledger, or the directory can't be read or written.
    """
    path = Path(directory)
    if not (path.exists() or path.with_suffix(JOURNAL).exists()):
        raise LedgerError(f"{path} does not exist: name a directory with journals, or one of them.")
    names = find(path) if is_directory(path) else [path.with_suffix(SEALED)]
    journals = [journal for name in names if (journal := name.with_suffix(JOURNAL)).is_file()]
    if not (journals or any(name.is_file() for name in names)):
        raise LedgerError(f"{path} holds no ledgers: name the directory that they were written to.")
    try:
        return [_recovered(journal) for journal in journals]
    except OSError as error:
        raise LedgerError(
            f"{error.filename or path} can't be written ({error.strerror or error}): make room, or copy it elsewhere."
        ) from None


def _recovered(journal: Path) -> Recovered:
    if is_locked(journal):
        return Recovered(journal, "open", note="it is being recorded")
    sealed = journal.with_suffix(SEALED)
    try:
        ledger = read(journal)
    except EmptyFileError:  # it stays: comparing says that something is missing
        return Recovered(journal, "empty", note="its process was stopped before it could write")
    except LedgerError as error:
        return Recovered(journal, "damaged", note=str(error))
    if ledger.path == sealed and ledger.meta.get("closed"):  # its process was killed between the two
        journal.unlink()
        return Recovered(journal, "removed", ledger.events, "the sealed ledger beside it holds all of it")
    whole = scan(journal)
    write_sealed(sealed, {**whole.meta, "stopped": _STOPPED}, whole)
    journal.unlink()
    return Recovered(journal, "sealed", ledger.events)
