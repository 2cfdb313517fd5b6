"""One run: its directory, its identity, and how its taps record."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gymnasium
import numpy as np
import numpy.typing as npt

from stepledger.digest import SpaceDigest
from stepledger.errors import LedgerError
from stepledger.flush import Flush
from stepledger.recorder import describe
from stepledger.recording import OnError, check_on_error
from stepledger.remote import Remote, located
from stepledger.window import keeping

__all__ = ["REMAKES", "Run", "Settings", "check_writable", "place_of", "trial_of"]

_FILE = "run.json"

#: Algorithms whose Learners are given batches that their own replay buffer made, and no episodes (ray 2.60).
_LEARN_FROM_BATCHES = {"DreamerV3"}

#: Restarts of a runner's process are this far apart in the numbering of its incarnations; between them its vector env may be made again.
REMAKES = 100
#: Likewise what goes on in the run directory of an earlier run.
RESUMES = 10_000


@dataclass(frozen=True)
class Settings:
    """How the taps record, the same at all of them; see `stepledger.LedgerEnv`. The reward dtype becomes its name.

    Raises:
        LedgerError: There is no such setting.
    """

    reward_dtype: npt.DTypeLike = "float64"
    keep_values: bool | int = False
    digest: str = "xxh3_64"
    on_error: OnError = "warn"
    flush_every: int | None = None
    flush_seconds: float | None = None

    def __post_init__(self) -> None:
        # As a tap would refuse it: that is in another process, where RLlib makes of an error a restart without end.
        any_space = SpaceDigest(gymnasium.spaces.Discrete(2), str(self.digest))
        describe("env", any_space, any_space, [], reward_dtype=self.reward_dtype, digest=self.digest)
        check_on_error(self.on_error)
        object.__setattr__(self, "reward_dtype", np.dtype(self.reward_dtype).name)
        object.__setattr__(self, "keep_values", keeping(self.keep_values))
        for name, value in zip(("flush_every", "flush_seconds"), self.flush):
            object.__setattr__(self, name, value)

    @property
    def flush(self) -> Flush:
        """When the taps write blocks."""
        return Flush.of(self.flush_every, self.flush_seconds)

    def options(self) -> dict[str, Any]:
        """The settings as arguments of `stepledger.LedgerEnv` and `stepledger.LedgerVectorEnv`."""
        return asdict(self)


@dataclass(frozen=True)
class Run:
    """A training job that is recorded.

    Attributes:
        directory: Absolute path of the run directory on the driver's node, and on others that don't share its file system.
        id: Identity of the run, in the meta of all its ledgers.
        algorithm: Name of RLlib's class that the algorithm is of, or derived from.
        trial: Tune's directories of the experiment and the trial; empty outside of Tune.
        settings: How its taps record.
        gamma: The algorithm's discount factor.
        replays: Whether what it learns from comes out of a replay buffer.
        capacity: Number of steps that it holds.
        horizon: Number of sampled steps after which one won't be learned from any more.
        offline: Whether it learns from a dataset, so that only its evaluation samples.
        incarnation: Number of the first incarnation of its runners: 0, or more where it goes on after an earlier one.
        uri: Where the run directory is stored in the end; empty where it stays as it is.
    """

    directory: str
    id: str
    algorithm: str
    trial: str
    settings: Settings
    gamma: float
    replays: bool
    capacity: int
    horizon: int
    offline: bool
    incarnation: int
    uri: str = ""

    @classmethod
    def begin(cls, directory: str | os.PathLike[str], algorithm: Any, settings: Settings, *, resume: bool = False) -> Run:
        """Make the run directory of an algorithm, on the driver.

        A relative directory is one of the driver's: Tune moves its trials into directories of their own, and each of them gets a run
        directory of its own below this one. A trial that Tune starts again goes on in its directory.

        Raises:
            LedgerError: The directory or the URI holds a run already, or the directory can't be written.
        """
        place = located(directory)
        trial = trial_of(algorithm._storage)  # not trial_name, which an AlgorithmConfig loses on its way (ray 2.60)
        name, remote = Path(trial).name, Remote(place) if isinstance(place, str) else None
        if remote is not None and name:
            remote = remote.below(name)
        run = cls(
            directory="" if remote else str(Path(os.environ.get("TUNE_ORIG_WORKING_DIR", "."), place, name).absolute()),
            id=uuid.uuid4().hex,
            algorithm=_of_rllib(type(algorithm)),
            trial=trial,
            settings=settings,
            gamma=float(algorithm.config.gamma),
            replays=algorithm.local_replay_buffer is not None,
            capacity=int(getattr(algorithm.local_replay_buffer, "capacity", 0)),
            horizon=_horizon(algorithm),
            offline=bool(algorithm.config.is_offline),
            incarnation=0,
            uri=remote.uri if remote else "",
        )
        if remote is None:
            file = Path(run.directory, _FILE)
            earlier = _read(file) if file.exists() else None
        else:
            text = remote.read_text(_FILE)
            earlier = None if text is None else _parsed(text, run.uri)
        if earlier is not None:
            run = run._after(earlier, resume)
        if remote is not None:
            # After the run's identity: what an earlier process of it recorded here and could not store is found again.
            run = replace(run, directory=os.path.join(tempfile.gettempdir(), f"stepledger-{run.id}"))
        run._write()
        if remote is not None and earlier is not None:
            remote.fetch(Path(run.directory))
        return run

    @classmethod
    def of(cls, written: dict[str, Any]) -> Run:
        """The run that was written down.

        Raises:
            LedgerError: This is none, or one of another version.
        """
        try:
            return cls(**{**written, "settings": Settings(**written["settings"])})
        except (TypeError, KeyError) as error:
            raise LedgerError(f"{_FILE} is none of this version's ({error!r}): look at the run with the version that wrote it.") from None

    def withdraw(self) -> None:
        """Take back that the run was begun, for the algorithm could not be built; not where it goes on after an earlier one."""
        if not self.incarnation:
            Path(self.directory, _FILE).unlink(missing_ok=True)
            if self.uri:
                shutil.rmtree(self.directory, ignore_errors=True)

    def publish(self) -> None:
        """Say at the URI of the run that there is one now; last, since it can't be taken back.

        Raises:
            LedgerError: It can't be written.
        """
        if self.uri:
            Remote(self.uri).store(Path(self.directory), [_FILE])

    def _write(self) -> None:
        """Make the run directory, and write down whose it is."""
        check_writable(self.directory)
        Path(self.directory, _FILE).write_text(json.dumps(asdict(self), indent=2))

    def _after(self, earlier: dict[str, Any], resume: bool) -> Run:
        """This run as it goes on after an earlier one in its directory."""
        same_trial = self.trial and earlier.get("trial") == self.trial
        if not (resume or same_trial):
            raise LedgerError(
                f"{self.place} holds a run already: name another directory, remove this one, or pass resume=True to go on with the run "
                "in it (after a checkpoint: Algorithm.from_checkpoint(path, config=attach(config, directory, resume=True)))."
            )
        if _compared(earlier.get("settings")) != _compared(asdict(self.settings)):
            raise LedgerError(f"the run in {self.place} was recorded with other options ({earlier.get('settings')}): pass the same ones.")
        # Not from the files: those of a dead runner may be on another node. A hundred restarts of each runner fit in between.
        return replace(self, id=uuid.UUID(str(earlier["id"])).hex, incarnation=int(earlier["incarnation"]) + RESUMES)

    @property
    def place(self) -> str:
        """Where a person finds the run in the end."""
        return self.uri or self.directory

    @property
    def held(self) -> str:
        """Where its ledgers are now, on the driver: in the run directory, until it is over and stored."""
        return self.directory if os.path.isdir(self.directory) else self.place

    @property
    def has_learner_tap(self) -> bool:
        """Whether its Learners get the episodes that were sampled, so that they can be recorded there."""
        return not self.offline and self.algorithm not in _LEARN_FROM_BATCHES

    @property
    def notes(self) -> list[str]:
        """What a report says about all of the run."""
        if self.offline:
            return [f"nothing was sampled for training: {self.algorithm} learns from a dataset"]
        if not self.has_learner_tap:
            return [f"what it learned from is not compared: the Learners of {self.algorithm} are given batches, and no episodes"]
        return []

    def is_here(self) -> bool:
        """Whether the run directory is this process's too: the same node, or a shared file system."""
        try:
            return bool(_read(Path(self.directory) / _FILE)["id"] == self.id)
        except (LedgerError, KeyError):
            return False


def _compared(settings: Any) -> Any:
    """Settings without those in which two ledgers that are compared may differ."""
    return {name: value for name, value in settings.items() if not name.startswith("flush_")} if isinstance(settings, dict) else settings


def _of_rllib(algorithm: type) -> str:
    """What an algorithm promises, and what its Learners are given, it has from RLlib's class that somebody's own one is derived from."""
    return next(one.__name__ for one in algorithm.__mro__ if one.__module__.startswith("ray.rllib."))


#: Steps by which an asynchronous learner may be behind.
_BEHIND = 1 << 20


def _horizon(algorithm: Any) -> int:
    capacity = getattr(algorithm.local_replay_buffer, "capacity", None)
    # A buffer drops whole episodes, so that it may hold a few more steps than it should; and what was sampled is not there at once.
    return _BEHIND if capacity is None else int(1.2 * capacity) + (1 << 16)


def place_of(directory: Any) -> Path | str:
    """The path or the URI that a run directory is given as.

    Raises:
        LedgerError: It is neither, or a URI that holds a password.
    """
    try:
        place = located(directory)
        password = None if isinstance(place, Path) else urlsplit(place).password
    except (TypeError, ValueError) as error:
        raise LedgerError(f"{directory!r} can't be a run directory ({error}): give a path or a URI.") from None
    if password is not None:
        raise LedgerError("the URI holds a password, and would be printed: give credentials where the file system looks for them.")
    return place


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
        return _parsed(file.read_text(), str(file))
    except OSError as error:
        raise LedgerError(f"{file} can't be read ({error}): name another directory.") from None


def _parsed(text: str, place: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise LedgerError(f"the {_FILE} of {place} can't be read ({error}): name another directory.") from None
