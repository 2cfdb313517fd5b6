"""One run: its directory, its identity, and how its taps record."""

from __future__ import annotations

import json
import os
import platform
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stepledger.errors import LedgerError
from stepledger.recording import OnError

__all__ = ["REMAKES", "Run", "Settings", "check_writable", "trial_of"]

_FILE = "run.json"

#: Restarts of a runner's process are this far apart in the numbering of its incarnations; between them its vector env may be made again.
REMAKES = 100
#: Likewise what goes on in the run directory of an earlier run.
RESUMES = 10_000


@dataclass(frozen=True)
class Settings:
    """How the taps record, the same at all of them; see `stepledger.LedgerEnv`."""

    reward_dtype: str = "float64"
    keep_values: bool = False
    digest: str = "xxh3_64"
    on_error: OnError = "warn"

    def options(self) -> dict[str, Any]:
        """The settings as arguments of `stepledger.LedgerEnv` and `stepledger.LedgerVectorEnv`."""
        return asdict(self)


@dataclass(frozen=True)
class Run:
    """A training job that is recorded.

    Attributes:
        directory: Absolute path of the run directory on the driver's node.
        id: Identity of the run, in the meta of all its ledgers.
        algorithm: Class name of the algorithm.
        trial: Tune's directories of the experiment and the trial; empty outside of Tune.
        settings: How its taps record.
        gamma: The algorithm's discount factor.
        replays: Whether what it learns from comes out of a replay buffer.
        horizon: Number of sampled steps after which one won't be learned from any more.
        offline: Whether it learns from a dataset, so that only its evaluation samples.
        incarnation: Number of the first incarnation of its runners: 0, or more where it goes on after an earlier one.
    """

    directory: str
    id: str
    algorithm: str
    trial: str
    settings: Settings
    gamma: float
    replays: bool
    horizon: int
    offline: bool
    incarnation: int

    @classmethod
    def begin(cls, directory: str | os.PathLike[str], algorithm: Any, settings: Settings, *, resume: bool = False) -> Run:
        """Make the run directory of an algorithm, on the driver.

        A relative directory is one of the driver's: Tune moves its trials into directories of their own, and each of them gets a run
        directory of its own below this one. A trial that Tune starts again goes on in its directory.

        Raises:
            LedgerError: The directory holds a run already, or can't be written.
        """
        path = Path(os.environ.get("TUNE_ORIG_WORKING_DIR", "."), directory).absolute()
        trial = trial_of(algorithm._storage)  # not trial_name, which an AlgorithmConfig loses on its way (ray 2.60)
        if trial:
            path /= Path(trial).name
        run = cls(
            directory=str(path),
            id=uuid.uuid4().hex,
            algorithm=type(algorithm).__name__,
            trial=trial,
            settings=settings,
            gamma=float(algorithm.config.gamma),
            replays=algorithm.local_replay_buffer is not None,
            horizon=_horizon(algorithm),
            offline=bool(algorithm.config.is_offline),
            incarnation=0,
        )
        file = path / _FILE
        if file.exists():
            run = run._after(_read(file), resume)
        check_writable(str(path))
        file.write_text(json.dumps(asdict(run), indent=2))
        return run

    def _after(self, earlier: dict[str, Any], resume: bool) -> Run:
        """This run as it goes on after an earlier one in its directory."""
        same_trial = self.trial and earlier.get("trial") == self.trial
        if not (resume or same_trial):
            raise LedgerError(
                f"{self.directory} holds a run already: name another directory, remove this one, or pass resume=True to go on with the run "
                "in it (after a checkpoint: Algorithm.from_checkpoint(path, config=attach(config, directory, resume=True)))."
            )
        if earlier.get("settings") != asdict(self.settings):
            raise LedgerError(
                f"the run in {self.directory} was recorded with other options ({earlier.get('settings')}): pass the same ones."
            )
        # Not from the files: those of a dead runner may be on another node. A hundred restarts of each runner fit in between.
        return replace(self, id=str(earlier["id"]), incarnation=int(earlier["incarnation"]) + RESUMES)

    @property
    def notes(self) -> list[str]:
        """What a report says about all of the run."""
        return [f"nothing was sampled for training: {self.algorithm} learns from a dataset"] if self.offline else []

    def is_here(self) -> bool:
        """Whether the run directory is this process's too: the same node, or a shared file system."""
        try:
            return bool(_read(Path(self.directory) / _FILE)["id"] == self.id)
        except (LedgerError, KeyError):
            return False


#: Steps by which an asynchronous learner may be behind.
_BEHIND = 1 << 20


def _horizon(algorithm: Any) -> int:
    capacity = getattr(algorithm.local_replay_buffer, "capacity", None)
    # A buffer drops whole episodes, so that it may hold a few more steps than it should; and what was sampled is not there at once.
    return _BEHIND if capacity is None else int(1.2 * capacity) + (1 << 16)


def trial_of(storage: Any) -> str:
    """What tells a trial of Tune from all others, also when it is started again; empty where there is no trial."""
    return "" if storage is None or not storage.trial_dir_name else f"{storage.experiment_dir_name}/{storage.trial_dir_name}"


def check_writable(directory: str) -> None:
    """Make a directory, and see whether files can be written in it.

    Raises:
        LedgerError: They can't.
    """
    probe = Path(directory, f".{uuid.uuid4().hex}")
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise LedgerError(
            f"{directory} can't be written on {platform.node()} ({error.strerror or error}): name another directory."
        ) from None


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise LedgerError(f"{file} can't be read ({error}): name another directory.") from None
