"""Tune: the comparison of trials whose algorithm never came to its own end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.tune import Callback

from stepledger import compare
from stepledger.errors import LedgerError
from stepledger.journal import is_locked
from stepledger.remote import located

from .run import trial_of

__all__ = ["TuneCallback"]


class TuneCallback(Callback):
    """Compares the ledgers of each trial that ends, if its algorithm hasn't: one that failed is killed before it could.

        tune.Tuner(PPO, param_space=attach(config, "ledger"), run_config=tune.RunConfig(callbacks=[TuneCallback("ledger")]))

    Each trial has a run directory of its own, named after it, below the one that `LedgerCallback` was given.

    Args:
        directory: As given to `LedgerCallback` or `attach`.

    Raises:
        LedgerError: It is a URI.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        place = located(directory)
        if isinstance(place, str):
            raise LedgerError(
                f"TuneCallback can't look into {place}: leave it out (trials that come to their end are compared and stored without it), "
                "or give it and the config a directory that all nodes share."
            )
        self._directory = place.absolute()
        self._ended: list[str] = []

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial has ended or was stopped; its actors are told so after this."""
        self._ended.append(trial_of(trial.storage))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial has failed for good."""
        self._ended.append(trial_of(trial.storage))

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Say what became of the trials whose algorithm has written its report."""
        self._say(lambda directory: _is_newer(directory / "report.json", directory / "run.json"))

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """Compare what the other ones have left, once nobody writes there any more."""
        until = time.monotonic() + WAIT
        self._say(lambda directory: _is_released(directory, until))

    def _say(self, ready: Callable[[Path], bool]) -> None:
        for file in sorted(self._directory.glob("*/run.json")) if self._ended else []:
            try:
                run = json.loads(file.read_text())
                if run.get("trial") in self._ended and ready(file.parent):
                    self._ended.remove(run["trial"])
                    print(f"stepledger: {file.parent.name}: {_verdict(file.parent, run)}", flush=True)
            except (OSError, ValueError, AttributeError):  # somebody else's file
                continue


#: Seconds that the processes of a trial have to end, at the end of an experiment.
WAIT = 60.0


def _is_newer(file: Path, other: Path) -> bool:
    return file.exists() and file.stat().st_mtime >= other.stat().st_mtime


def _is_released(directory: Path, until: float) -> bool:
    while any(is_locked(path) for path in directory.rglob("*.journal")) and time.monotonic() < until:
        time.sleep(0.2)
    return True


def _verdict(directory: Path, run: dict[str, Any]) -> str:
    """The last line of a run's report, which is written if it isn't there."""
    report = directory / "report.json"
    try:
        comparison = compare(directory)
    except LedgerError as error:
        return str(error)
    if not _is_newer(report, directory / "run.json"):
        report.write_text(json.dumps({"run": run, **comparison.to_dict()}, indent=2))
    return str(comparison).rpartition("\n")[2]
