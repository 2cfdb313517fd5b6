"""Runs that are kept at a URI: the run directory is a local one until it is stored there."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

from stepledger import Comparison
from stepledger.format import JOURNAL, SEALED
from stepledger.journal import is_locked
from stepledger.remote import Remote

from .nodes import ledgers
from .run import Run

__all__ = ["store", "write_report"]

logger = logging.getLogger(__name__)


def write_report(run: Run, comparison: Comparison) -> None:
    """Write ``report.json`` into the run directory. It holds the run too, so that one can tell whether it is of its last incarnation."""
    Path(run.directory, "report.json").write_text(json.dumps({"run": asdict(run), **comparison.to_dict()}, indent=2))


def store(run: Run, *, last: bool = False) -> str:
    """Copy the driver's run directory to the URI of the run, if it has one; never raises.

    Args:
        run: The run.
        last: It is over, and needs no directory here any more once it is stored.

    Returns:
        The place that then holds the run, as an argument of ``stepledger compare``: the directory, if storing has failed.
    """
    directory = Path(run.directory)
    if not run.uri:
        return run.directory
    try:
        paths = [path for path in ledgers(directory) if not _goes_on(path)]
        paths += [path for path in (directory / "run.json", directory / "report.json") if path.exists()]
        Remote(run.uri).store(directory, [path.relative_to(directory).as_posix() for path in paths])
    except Exception as error:  # whatever is wrong there, the run is here
        logger.warning("stepledger: the run could not be stored, and is in %s: %s", run.directory, error)
        return run.directory
    if last:
        shutil.rmtree(directory, ignore_errors=True)
    return shlex.quote(run.uri)


def _goes_on(path: Path) -> bool:
    """Whether this is the journal of a ledger that was flushed: what was compared is whole without it."""
    return path.suffix == JOURNAL and path.with_suffix(SEALED).exists() and is_locked(path)
