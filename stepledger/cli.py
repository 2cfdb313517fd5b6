"""The command line.

    stepledger compare ENV_DIR TRAINER_FILE     compare the two sides of a boundary
    stepledger compare RUN_DIR                  compare all taps of a run
    stepledger show RUN_DIR --env 3 --episode 7 --step 12     print what each tap has around a place
    stepledger info PATH                        say what a ledger, or a directory of them, holds
    stepledger explain [CODE]                   say what a code of a report means, and what to check; without one, list all
    stepledger lint PATH                        say what is suspicious in them, without comparing
    stepledger recover DIR                      seal the journals that killed processes have left

Exit status of ``compare``: 0 equal and complete; 1 different; 2 can't be compared; 3 equal as far as recorded, but a ledger is
incomplete. Of ``lint``: 0 no warning; 1 warnings; 2 can't be read. Of the others: 0, or 2 where something can't be read.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from .compare import compare, compare_loaded, load
from .directory import is_directory
from .errors import LedgerError
from .ledger import read, read_all
from .lints import LINTED, LINTS, Linter
from .pages import listing, page
from .pairs import counted
from .progress import progress_bar
from .recorder import versions
from .recover import recover
from .remote import fetched, located
from .report import FORMATS, refusal, render
from .report.context import AROUND, Recorded
from .report.info import as_data, describe, told
from .report.show import show
from .report.terminal import coloured, width
from .report.text import report, warnings
from .report.visible import visible
from .result import Comparison
from .scan import EmptyFileError

__all__ = ["main"]

#: What several commands say of their arguments.
_PATH, _FORMAT = "a ledger, or a directory of them, or its URI", "what to print (default: text)"


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
    """Say why it can't be done, also to whom reads another format than text; returns the exit status."""
    _print(f"stepledger: {visible(sentence)}", sys.stderr)
    if document := refusal(sentence, getattr(options, "format", "text")):
        with contextlib.suppress(OSError):
            _print(document, sys.stdout)
    return 2


def _where(error: Exception) -> str:
    """An error, and where in this package it came from, in one line."""
    place = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(Path(__file__).parent)][-1]
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
    parser.add_argument("--version", action="version", version=f"stepledger {versions()['stepledger']}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], tuple[str, int]], what: str, more: str, **options: Any) -> Any:
        one = commands.add_parser(name, help=what, description=more, **options)
        one.set_defaults(run=run)
        return one

    one = command(
        "compare",
        _compare,
        "compare the two sides of a boundary, or all taps of a run",
        "Compare what environments gave with what the trainer received.",
        epilog="Exit status: 0 equal and complete; 1 different; 2 can't be compared; 3 equal as far as recorded, but incomplete.",
    )
    one.add_argument("env_side", metavar="ENV_DIR | RUN_DIR", help="the directory given to LedgerEnv, or that of a whole run, or its URI")
    one.add_argument("trainer_side", metavar="TRAINER_FILE", nargs="?", help="the file given to LedgerVectorEnv or LedgerVecEnv")
    one.add_argument("--format", choices=FORMATS, default="text", help=_FORMAT)
    one.add_argument("-v", "--verbose", action="store_true", help="print all differences that were kept, with the steps around each")
    one.add_argument("--jobs", type=_positive, default=1, metavar="N", help="compare large ledgers in so many processes (default: 1)")
    one.add_argument("--html", metavar="FILE", help="also write a report with tables, plots and pictures into this file")
    one.add_argument("--force", action="store_true", help="write over a report that is there")
    one = command(
        "show",
        _show,
        "print what each tap has at a place, and around it",
        "Print the sides of a place beside each other. Fields in which they differ are marked with *.",
    )
    one.add_argument("env_side", metavar="RUN_DIR | ENV_DIR", help="the directory with the ledgers, or its URI")
    one.add_argument("--env", type=_count, required=True, help="position of the environment in its vector env")
    one.add_argument("--episode", type=_count, required=True, help="counted from 0 at the first reset")
    one.add_argument("--step", type=_count, required=True, help="0 is the reset, k the k-th step of the episode")
    one.add_argument("--runner", type=_count, help="the EnvRunner's index, where several have such an environment")
    one.add_argument("--agent", help="the agent, where there are several")
    one.add_argument("--around", type=_count, default=AROUND, metavar="K", help=f"steps before and after (default: {AROUND})")
    one.add_argument("--trainer", metavar="FILE", help="the trainer's ledger, where it lies in another directory")
    one = command(
        "info",
        _info,
        "say what a ledger, or a directory of them, holds",
        "Say what was recorded.",
        epilog="Exit status: 0 all could be read; 2 one can't be read, or there is none.",
    )
    one.add_argument("path", help=_PATH)
    one.add_argument("--format", choices=("text", "json"), default="text", help=_FORMAT)
    one = command("explain", _explain, "say what a code of a report means, and what to check", "Say what a code of a report means.")
    one.add_argument("code", metavar="CODE", nargs="?", help="such as SL102; without one, all codes are listed")
    one = command(
        "lint",
        _lint,
        "say what is suspicious in a ledger, or a directory of them",
        "Look at ledgers without comparing them: steps after an episode's end, values outside of their space, equal seeds, ...",
        epilog="Exit status: 0 no warning; 1 warnings; 2 can't be read.",
    )
    one.add_argument("path", help=_PATH)
    one.add_argument("--format", choices=("text", "json"), default="text", help=_FORMAT)
    one = command(
        "recover",
        _recover,
        "seal the journals that killed processes have left",
        "Seal the journals that killed processes have left, as far as they are whole. A ledger without an end stays one.",
        epilog="Exit status: 0 all are sealed, or being recorded; 2 one is damaged, or there is no ledger.",
    )
    one.add_argument("path", metavar="DIR", help="a directory with ledgers, or one journal")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if not (number := _count(text)):
        raise argparse.ArgumentTypeError("0 is no number of processes")
    return number


def _compare(options: argparse.Namespace) -> tuple[str, int]:
    trainer = [] if options.trainer_side is None else [options.trainer_side]
    command = shlex.join(["stepledger", "compare", options.env_side, *trainer])
    with contextlib.ExitStack() as stack:
        if options.html is not None:
            from .report import html

            html.check(options.html, options.force)
        sides = [stack.enter_context(fetched(side)) for side in (options.env_side, *trainer)]
        loaded = load(*sides) if options.html is not None or options.verbose else None
        with progress_bar("comparing") as progress:
            # The steps around differences are looked up in the same ledgers.
            result = compare_loaded(loaded, progress) if loaded else compare(*sides, jobs=options.jobs, progress=progress)
        recorded = None if loaded is None else Recorded(loaded[0])
        if options.html is not None and recorded is not None:
            names = {str(side): str(located(name)) for side, name in zip(sides, (options.env_side, *trainer))}
            whole = f"{command} --html {shlex.quote(options.html)}"
            html.write(result, recorded, options.html, command=whole, names=names, force=options.force)
            _print(f"stepledger: the report is in {visible(options.html)}", sys.stderr)
        if options.format == "text":
            text = coloured(report(result, recorded if options.verbose else None, width()))
        else:
            text = render(result, options.format, options.env_side)
    _print_next(result, options, command)
    return text, result.exit_status


def _print_next(result: Comparison, options: argparse.Namespace, command: str) -> None:
    """Say what to run next where there is more to see."""
    if options.format == "text" and not options.html and not result.equal:
        _print(f"stepledger: the steps around each difference, in a browser: {visible(command)} --html report.html", sys.stderr)


def _show(options: argparse.Namespace) -> tuple[str, int]:
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(fetched(side)) for side in (options.env_side, options.trainer) if side is not None]
        recorded = Recorded(load(*sides)[0])
    text = show(
        recorded,
        options.env,
        options.episode,
        options.step,
        runner=options.runner,
        agent=options.agent,
        around=options.around,
        width=width(),
    )
    return coloured(text), 0


def _explain(options: argparse.Namespace) -> tuple[str, int]:
    return (page(options.code) if options.code else listing()), 0


def _info(options: argparse.Namespace) -> tuple[str, int]:
    with fetched(options.path) as path:
        found = told(path)
        if not found:
            raise LedgerError(_NONE.format(path))
        unreadable = [one for one in found.values() if isinstance(one, LedgerError) and not isinstance(one, EmptyFileError)]
        status, here, there = 2 if unreadable else 0, str(path), str(located(options.path))
        named = {str(name).replace(here, there): one for name, one in found.items()}
        if options.format == "json":
            return json.dumps({"ledgers": [as_data(one, name) for name, one in named.items()]}, indent=2), status
        return "\n\n".join(describe(one, name) for name, one in named.items()), status


#: What is said of a directory, or of what was stored at a URI.
_NONE = "{} holds no ledgers: name the directory that they were written to."


def _lint(options: argparse.Namespace) -> tuple[str, int]:
    with fetched(options.path) as path:
        ledgers = read_all(path, read)[0] if is_directory(path) else [read(path)]
        if not ledgers:
            raise LedgerError(_NONE.format(path))
        linter = Linter()
        linter.add(ledgers)
    if not any(linter.made.values()):
        raise LedgerError(f"{options.path} holds nothing that can be looked at: name ledgers of the taps {' and '.join(LINTED)}.")
    findings, made = linter.findings(), linter.made
    if options.format == "json":
        return json.dumps({"warnings": [asdict(one) for one in findings], "looked_at": made}, indent=2), int(bool(findings))
    lines = list(warnings(findings))
    lines += [f"not looked for: {LINTS[code].title} [{code}]" for code, events in made.items() if not events]
    lines.append(f"{counted(len({one.code for one in findings}), 'kind')} of warnings" if findings else "no warning in what was looked at")
    return "\n".join(map(visible, lines)), int(bool(findings))


def _recover(options: argparse.Namespace) -> tuple[str, int]:
    outcomes = recover(options.path)
    lines = [f"{one.path}: {one.outcome}, {one.note or counted(one.events, 'event')}" for one in outcomes]
    lines = lines or [f"{options.path} holds no journals: nothing was left open here, and there is nothing to recover"]
    return "\n".join(map(visible, lines)), 2 if any(one.outcome == "damaged" for one in outcomes) else 0
