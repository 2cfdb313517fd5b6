"""Tune: the comparison of trials whose algorithm never came to its own end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray.tune import Callback

from stepledger import compare
from stepledger.errors import LedgerError
from stepledger.journal import is_locked
from stepledger.remote import Remote, located

from .nodes import collect, discard, holds, ledgers, on_node
from .processes import Deadline
from .run import Run, place_of, trial_of
from .storage import store, write_report
from .tasks import compare_run, with_unknown

__all__ = ["TuneCallback"]

logger = logging.getLogger(__name__)

#: Seconds that the processes of a trial have to end, at the end of an experiment.
WAIT = 60.0


class TuneCallback(Callback):
    """Compares the ledgers of each trial that ends, if its algorithm hasn't: one that failed is killed before it could.

        tune.Tuner(PPO, param_space=attach(config, "ledger"), run_config=tune.RunConfig(callbacks=[TuneCallback("ledger")]))

    Each trial has a run directory of its own, named after it, below the one that `LedgerCallback` was given; or a URI below that one.

    Args:
        directory: As given to `LedgerCallback` or `attach`.

    Raises:
        LedgerError: It can't be a run directory.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        place = place_of(directory)
        self._place = place if isinstance(place, str) else place.absolute()
        self._completed: list[str] = []
        self._failed: list[str] = []

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial has ended or was stopped; its actors are told so after this."""
        self._completed.append(trial_of(trial.storage))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial has failed for good."""
        self._failed.append(trial_of(trial.storage))

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Say what became of the trials whose algorithm has written its report."""
        for trial in list(self._completed):
            with contextlib.suppress(Exception):  # the experiment's end looks again, and says what is wrong
                run = self._run(trial)
                if run is not None and _has_report(run):
                    self._completed.remove(trial)
                    _say(run)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """Compare what the other ones have left, once nobody writes there any more."""
        until = time.monotonic() + WAIT
        for trial in [*self._completed, *self._failed]:
            try:
                run = self._run(trial)
                if run is not None:
                    if not _has_report(run):
                        _finish(run, until)
                    _say(run)
            except Exception as error:  # Tune would raise it in place of the experiment's results
                logger.warning("stepledger: what trial %s has recorded could not be compared: %r", trial, error)
        self._completed, self._failed = [], []

    def _run(self, trial: str) -> Run | None:
        """The run of a trial; `None` if it has not begun one."""
        name = Path(trial).name
        with contextlib.suppress(LedgerError):  # the URI can't be reached, or this is somebody else's
            place = str(self._place / name) if isinstance(self._place, Path) else Remote(self._place).below(name).uri
            found = _read(place, "run.json")
            return None if found is None or found.get("trial") != trial else Run.of(found)
        return None


def _read(place: str, name: str) -> dict[str, Any] | None:
    where = located(place)
    try:
        text = Remote(where).read_text(name) if isinstance(where, str) else (where / name).read_text()
        return None if text is None else dict(json.loads(text))
    except (OSError, ValueError):  # it is not there, or being written
        return None


def _has_report(run: Run) -> bool:
    """Whether the run has come to its own end; a report that an earlier one has left is of another incarnation."""
    return (_read(run.place, "report.json") or {}).get("run") == asdict(run)


def _finish(run: Run, until: float) -> None:
    """Compare what a trial that was killed has left, and write its report; where it has a URI, on the node on which its driver was."""
    if not run.uri:
        _await_release(run.directory, until)
        _report(run)
        return
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    asked = {node: on_node(node, _left).remote(run, until - time.monotonic()) for node in nodes}
    left: dict[str, tuple[str, int]] = {}
    deadline = Deadline()
    for node, reference in asked.items():
        with contextlib.suppress(ray.exceptions.RayError):
            left[node] = ray.get(reference, timeout=deadline.left)
    drivers, workers = ([node for node, (whose, _) in left.items() if whose == one] for one in ("driver", "workers"))
    if drivers:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(on_node(drivers[0], _store).remote(run, workers), timeout=Deadline(2 * sum(size for _, size in left.values())).left)


def _await_release(directory: str, until: float) -> None:
    """Wait until no process writes in a run directory."""
    while any(is_locked(path) for path in Path(directory).rglob("*.journal")) and time.monotonic() < until:
        time.sleep(0.2)


def _report(run: Run, unknown: Sequence[str] = ()) -> None:
    with contextlib.suppress(LedgerError):  # nothing was recorded
        write_report(run, with_unknown(compare_run(run.directory), unknown))


def _left(run: Run, seconds: float) -> tuple[str, int]:
    """On a node: what it has of a run, once nobody writes there any more, as `holds` says; and the bytes of it."""
    _await_release(run.directory, time.monotonic() + seconds)
    return holds(run), sum(path.stat().st_size for path in ledgers(Path(run.directory)))


def _store(run: Run, workers: Sequence[str]) -> None:
    """On the node where the driver of a run was that was killed: do what it would have done at its end."""
    name = Path(run.trial).name
    problems = collect(run, {node: [f"the EnvRunners of {name}"] for node in workers})
    _report(run, list(problems.values()))
    discard(run, set(workers) - problems.keys())
    store(run, last=True)


def _say(run: Run) -> None:
    try:
        text = str(compare(run.held)).rpartition("\n")[2]
    except LedgerError as error:
        text = str(error)
    print(f"stepledger: {Path(run.trial).name}: {text}", flush=True)
