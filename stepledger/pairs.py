"""What the two sides of a hop and numbers of things are called, and whether two sides may be compared."""

from __future__ import annotations

from typing import Any

from .errors import LedgerError
from .format import FIRST, StreamKey
from .ledger import Ledger
from .report.visible import visible

__all__ = ["TAPS", "check_settings", "counted", "group_of", "stream_name", "taps_of"]

#: The taps, in the order in which data passes them.
TAPS = ["env", "vector", "episode", "learner"]


def counted(number: int, noun: str) -> str:
    """``1 event``, ``2,000 events``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def taps_of(hop: str) -> list[str]:
    """The two taps of a hop with this name, which may begin with a group's."""
    return hop.rpartition(": ")[2].split(" -> ")


def group_of(hop: str) -> str:
    """The group of ledgers that a hop with this name is about; empty for those that sample for training."""
    return hop.rpartition(": ")[0]


def stream_name(key: StreamKey) -> str:
    """A stream as a sentence names it."""
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
    if (first.meta["format"] == FIRST) != (second.meta["format"] == FIRST):
        old, new = (first, second) if first.meta["format"] == FIRST else (second, first)
        raise LedgerError(
            f"{old.path} is of the first version of the format and {new.path} is not, and what one digests the other can't: record both "
            "sides with one version of stepledger."
        )
    for setting, words in _SETTINGS.items():
        one, other = first.meta.get(setting), second.meta.get(setting)
        if setting == "observation_space" and second.meta["tap"] == "learner":
            one = first.meta.get("handed_space", one)  # what wrappers around the vector env make of its observations
        if setting == "observation_space" and "skip" in second.meta.get("fields", {}).get("obs", {}):
            continue  # rewritten on purpose before the second tap, and so not compared
        if one != other:
            raise LedgerError(
                f"{first.path} and {second.path} were recorded with different {words} ({_short(one)} and {_short(other)}): record both "
                "sides alike."
            )
    if first.meta.get("run", "") != second.meta.get("run", ""):
        raise LedgerError(f"{first.path} and {second.path} are of different runs: name the two sides of one run.")


def _short(value: Any) -> str:
    text = visible(str(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
