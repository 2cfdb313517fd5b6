"""One run: its directory, its identity, and how its taps record."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepledger.recording import OnError

__all__ = ["Run", "Settings"]

_FILE = "run.json"


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
        settings: How its taps record.
        gamma: The algorithm's discount factor.
        replays: Whether what it learns from comes out of a replay buffer.
    """

    directory: str
    id: str
    algorithm: str
    settings: Settings
    gamma: float
    replays: bool

    @classmethod
    def begin(cls, directory: str | os.PathLike[str], algorithm: Any, settings: Settings) -> Run:
        """Make the run directory of an algorithm, on the driver.

        A relative directory is one of the driver's: Tune moves its trials into directories of their own, and each of them gets a run
        directory of its own below this one. What an earlier run left here is moved into ``old1``, ``old2``, ...
        """
        path = Path(os.environ.get("TUNE_ORIG_WORKING_DIR", "."), directory).absolute()
        if algorithm.trial_name != "default":
            path /= algorithm.trial_name
        path.mkdir(parents=True, exist_ok=True)
        if (path / _FILE).exists():
            _set_aside(path)
        replays = algorithm.local_replay_buffer is not None
        run = cls(str(path), uuid.uuid4().hex, type(algorithm).__name__, settings, float(algorithm.config.gamma), replays)
        (path / _FILE).write_text(json.dumps(asdict(run), indent=2))
        return run

    def is_here(self) -> bool:
        """Whether the run directory is this process's too: the same node, or a shared file system."""
        try:
            return bool(json.loads((Path(self.directory) / _FILE).read_text())["id"] == self.id)
        except (OSError, ValueError, KeyError):
            return False


def _set_aside(path: Path) -> None:
    number = 1
    while (path / f"old{number}").exists():
        number += 1
    old = path / f"old{number}"
    old.mkdir()
    for file in path.iterdir():
        if file.suffix in (".npz", ".journal", ".json"):
            file.rename(old / file.name)
