"""What ledgers say of themselves, as text: what ``stepledger info`` prints."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from ..archive import ForeignFileError
from ..directory import find, is_directory
from ..errors import LedgerError
from ..format import RESET
from ..ledger import Ledger, read
from ..lints import LINTED, Linter
from ..pairs import counted
from ..scan import EmptyFileError
from .visible import visible

__all__ = ["as_data", "describe", "entries", "ranges", "state", "told"]


def told(path: Path) -> dict[Path, Ledger | LedgerError]:
    """The ledger that is there, or those of a directory; in the place of one that can't be read, or is empty, why.

    Raises:
        LedgerError: The one that was named, or the directory, can't be read.
    """
    if not is_directory(path):
        ledger = read(path)
        return {ledger.path: ledger}
    found: dict[Path, Ledger | LedgerError] = {}
    for name in find(path):
        try:
            ledger = read(name)
            found[ledger.path] = ledger
        except ForeignFileError:
            continue
        except LedgerError as error:  # the others are no less worth reading
            found[name] = error
    return found


def describe(ledger: Ledger | LedgerError, name: str) -> str:
    """What a ledger holds, an entry a line, under its name; or why it can't be read."""
    if isinstance(ledger, LedgerError):
        said = {"empty" if isinstance(ledger, EmptyFileError) else "unreadable": str(ledger)}
    else:
        said = {**entries(ledger), "warnings": _warnings(ledger), "state": state(ledger)}
    return "\n".join(map(visible, [name, *(f"  {entry:12s} {value}" for entry, value in said.items() if value)]))


def as_data(ledger: Ledger | LedgerError, name: str) -> dict[str, Any]:
    """The same as JSON can hold it."""
    if isinstance(ledger, LedgerError):
        return {"path": name, "error": str(ledger)}
    meta = ledger.meta
    said = ("tap", "observation_space", "action_space", "reward_dtype", "digest", "keep_values", "created", "versions")
    return {
        "path": name,
        "group": meta.get("group", ""),
        **{entry: meta[entry] for entry in said},
        "events": ledger.events,
        "streams": [{**key._asdict(), "events": len(stream), "begin": stream.begin} for key, stream in ledger.streams.items()],
        "closed": meta["closed"],
        "open_end": ledger.open_end,
        "state": state(ledger),
        "warnings": _codes(ledger),
    }


def entries(ledger: Ledger) -> dict[str, str]:
    """What a ledger holds."""
    meta = ledger.meta
    episodes = sum(int((stream.data["kind"] == RESET).sum()) for stream in ledger.streams.values())
    keys = list(ledger.streams)
    if meta["tap"] == "learner":  # a transition says no episode, and no env
        what = {"transitions": f"{ledger.events:,}"}
    else:
        events = f"{ledger.events:,} in {counted(len(keys), 'stream')}, {counted(episodes, 'episode')}"
        what = {"events": events, "envs": ranges([key.env for key in keys])}
    return {
        "tap": meta["tap"],
        **what,
        "runners": ranges(sorted({key.runner for key in keys} - {0})),
        "observation": space(meta.get("observation_space")),
        "action": space(meta.get("action_space")),
        "reward": np.dtype(meta["reward_dtype"]).name,
        "digest": meta["digest"],
        "values": _values(meta.get("keep_values")),
        "recorded": _time(meta["created"]),
        "versions": ", ".join(f"{name} {version}" for name, version in meta.get("versions", {}).items()),
    }


def _time(seconds: float) -> str:
    """When a ledger was begun; those of the first version don't say."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "at a time that it does not say"


def _values(kept: Any) -> str:
    if isinstance(kept, bool) or not kept:
        return "kept" if kept else "not kept"
    return f"kept of the last {kept:,} events of each env, and where differences were found"


def _warnings(ledger: Ledger) -> str:
    codes = _codes(ledger)
    return "not looked for at this tap" if codes is None else ", ".join(codes) or "none in what was looked at"


def _codes(ledger: Ledger) -> list[str] | None:
    """The codes of what is suspicious in it; `None` at a tap where nothing is looked for."""
    if ledger.meta["tap"] not in LINTED:
        return None
    linter = Linter()
    linter.add([ledger])
    return sorted({one.code for one in linter.findings()})


def state(ledger: Ledger) -> str:
    """How its recording ended."""
    if stopped := ledger.meta.get("stopped"):
        return f"recording was stopped ({stopped}); what came after that is not here"
    if ledger.open_end:
        return "never closed: what came after the last block is lost"
    return "closed" if ledger.meta.get("closed") else "written by flush(), recording goes on"


def ranges(numbers: list[int]) -> str:
    """Numbers as a text: ``0-3, 7``."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(begin) if begin == end else f"{begin}-{end}" for begin, end in parts)


def space(description: Any) -> str:
    """A space as the meta describes it."""
    if not isinstance(description, dict):
        return "unknown"
    if "leaves" in description:
        leaves = ", ".join(f"{'.'.join(map(str, path))}: {space(leaf)}" for path, leaf in description["leaves"])
        return f"{description['type']}({leaves})"
    said = {**description, **({"dtype": np.dtype(description["dtype"]).name} if "dtype" in description else {})}
    details = ", ".join(f"{name}={value}" for name, value in said.items() if name != "type")
    return f"{description['type']}({details})"
