"""The command line.

    stepledger compare ENV_DIR TRAINER_FILE     compare the two sides of a boundary
    stepledger compare RUN_DIR                  compare all taps of a run
    stepledger info PATH                        say what a ledger, or a directory of them, holds

Exit status of ``compare``: 0 equal and complete; 1 different; 2 can't be compared; 3 equal as far as recorded, but a ledger is
incomplete.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from .compare import compare
from .errors import LedgerError
from .format import RESET
from .ledger import Ledger, is_directory, read, read_all
from .pairs import counted
from .progress import progress_bar
from .remote import fetched, located

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold what the terminal can't show
    try:
        text, status = options.run(options)
    except LedgerError as error:
        return _refuse(str(error), options)
    except Exception as error:  # Python would end with 1, which says that there is a difference
        return _refuse(f"this failed in a way that nobody expected ({_where(error)}): please report it with this line.", options)
    try:
        _print(text, sys.stdout)
    except OSError as error:
        # What is still in the buffer would be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader of our output (head, a pager) has gone
            return 2
        return _refuse(f"the output can't be written ({error.strerror}): make room, or write it elsewhere.")
    return int(status)


def _refuse(sentence: str, options: argparse.Namespace | None = None) -> int:
    """Say why it can't be done, to whom reads JSON too; returns the exit status."""
    _print(f"stepledger: {sentence}", sys.stderr)
    if getattr(options, "format", "") == "json":
        with contextlib.suppress(OSError):
            _print(json.dumps({"error": sentence, "exit_status": 2}), sys.stdout)
    return 2


def _where(error: Exception) -> str:
    """An error, and where in this package it came from, in one line."""
    place = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == Path(__file__).parent][-1]
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{what}, in {Path(place.filename).name}:{place.lineno}"


def _print(text: str, file: TextIO | None) -> None:
    """Print to a stream that may not be there: a daemon has none. What is wrong with stderr can't be said anywhere."""
    try:
        if file is not None:
            print(text, file=file, flush=True)
    except OSError:
        if file is not sys.stderr:
            raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stepledger", description="Find silent faults between a reinforcement-learning environment and its trainer."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser(
        "compare",
        help="compare the two sides of a boundary, or all taps of a run",
        description="Compare what environments gave with what the trainer received.",
        epilog="Exit status: 0 equal and complete; 1 different; 2 can't be compared; 3 equal as far as recorded, but incomplete.",
    )
    one.add_argument("env_side", metavar="ENV_DIR | RUN_DIR", help="the directory given to LedgerEnv, or that of a whole run, or its URI")
    one.add_argument("trainer_side", metavar="TRAINER_FILE", nargs="?", help="the file given to LedgerVectorEnv or LedgerVecEnv")
    one.add_argument("--format", choices=("text", "json"), default="text", help="what to print (default: text)")
    one.set_defaults(run=_compare)
    one = commands.add_parser("info", help="say what a ledger, or a directory of them, holds", description="Say what was recorded.")
    one.add_argument("path", help="a ledger, or a directory of them, or its URI")
    one.set_defaults(run=_info)
    return parser


def _compare(options: argparse.Namespace) -> tuple[str, int]:
    with progress_bar("comparing") as progress:
        result = compare(options.env_side, options.trainer_side, progress=progress)
    return (json.dumps(result.to_dict(), indent=2) if options.format == "json" else str(result)), result.exit_status


def _info(options: argparse.Namespace) -> tuple[str, int]:
    with fetched(options.path) as path:
        ledgers = read_all(path)[0] if is_directory(path) else [read(path)]
        if not ledgers:
            raise LedgerError(f"{path} holds no ledgers: name the directory that they were written to.")
        names = [str(ledger.path).replace(str(path), str(located(options.path))) for ledger in ledgers]
        return "\n\n".join(map(_describe, ledgers, names)), 0


def _describe(ledger: Ledger, name: str) -> str:
    meta = ledger.meta
    episodes = sum(int((stream.data["kind"] == RESET).sum()) for stream in ledger.streams.values())
    keys = list(ledger.streams)
    if meta["tap"] == "learner":  # a transition says no episode, and no env
        what = {"transitions": f"{ledger.events:,}"}
    else:
        events = f"{ledger.events:,} in {counted(len(keys), 'stream')}, {counted(episodes, 'episode')}"
        what = {"events": events, "envs": _ranges([key.env for key in keys])}
    lines = {
        "tap": meta["tap"],
        **what,
        "observation": _space(meta.get("observation_space")),
        "action": _space(meta.get("action_space")),
        "reward": meta["reward_dtype"],
        "digest": meta["digest"],
        "values": "kept" if meta.get("keep_values") else "not kept",
        "recorded": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(meta.get("created", 0))),
        "versions": ", ".join(f"{name} {version}" for name, version in meta.get("versions", {}).items()),
        "state": _state(ledger),
    }
    if runners := sorted({key.runner for key in keys} - {0}):
        lines["runners"] = _ranges(runners)
    return "\n".join([name, *(f"  {name:12s} {value}" for name, value in lines.items())])


def _state(ledger: Ledger) -> str:
    if stopped := ledger.meta.get("stopped"):
        return f"recording stopped by an error ({stopped}); what came after it is not here"
    if ledger.open_end:
        return "never closed: what came after the last block is lost"
    return "closed" if ledger.meta.get("closed") else "written by flush(), recording goes on"


def _ranges(numbers: list[int]) -> str:
    """``0-3, 7``."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(begin) if begin == end else f"{begin}-{end}" for begin, end in parts)


def _space(description: Any) -> str:
    if not isinstance(description, dict):
        return "unknown"
    if "leaves" in description:
        leaves = ", ".join(f"{'.'.join(map(str, path))}: {_space(leaf)}" for path, leaf in description["leaves"])
        return f"{description['type']}({leaves})"
    details = ", ".join(f"{name}={value}" for name, value in description.items() if name != "type")
    return f"{description['type']}({details})"
