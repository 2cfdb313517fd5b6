"""The report as one HTML file that opens offline, without JavaScript; needs the extra ``report``."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..compare import load
from ..errors import LedgerError
from ..format import JOURNAL, SEALED
from ..ledger import Ledger
from ..pairs import counted, group_of, taps_of
from ..remote import fetched
from ..result import Comparison, Difference, FieldResult, Finding, Hop
from .cards import Budget, cards, cause
from .context import Recorded
from .episodes import episodes_of, summary, unlike
from .info import entries, ranges, state
from .text import line, perhaps, unexplained, verdict, where
from .timeline import WIDTH, timeline
from .titles import title
from .visible import visible

__all__ = ["check", "write"]

#: Differences that have a card of their own, and those that are listed.
_CARDS, _LISTED = 20, 200

#: Sentences of a kind, rows of episodes, and characters of a text.
_SENTENCES, _ROWS, _TEXT = 30, 10, 600

#: Fields in the order in which a person looks for them.
_FIELDS = ("kind", "action", "obs", "reward", "next_obs", "terminated", "truncated", "episode_start")


def check(path: str | os.PathLike[str], force: bool = False) -> None:
    """Refuse early what `write` would refuse.

    Raises:
        LedgerError: The extra is missing, there is a file already, or the name is none of a report.
    """
    name = os.fspath(path)
    if not name:
        raise LedgerError("the HTML report has no name: name a file.")
    if os.path.isdir(path):
        raise LedgerError(f"{name} is a directory: name a file.")
    if Path(path).suffix in (SEALED, JOURNAL, ".json"):  # --force is for a report of before
        raise LedgerError(f"{name} may be a part of a recording: name a file that ends in .html.")
    if os.path.exists(path) and not os.path.isfile(path):
        raise LedgerError(f"{name} is no regular file: name another one.")
    try:
        import jinja2  # noqa: F401 - only whether it is there
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise LedgerError(f'the HTML report takes {error.name or "more packages"}: install the extra (pip install ".[report]").') from None
    if os.path.lexists(path) and not force:
        raise LedgerError(f"{name} is there already: name another file, or write over it with --force.")


def write(
    comparison: Comparison,
    ledgers: Recorded | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    command: str = "",
    names: Mapping[str, str] | None = None,
    force: bool = False,
) -> None:
    """Write a comparison with the steps around its differences into an HTML file.

    Args:
        comparison: The result.
        ledgers: What was compared: the run directory, or the environments' directory and the trainer's file; or the ledgers themselves.
            Where they can't be read any more, the report says so in place of what they would show.
        path: The file to write.
        command: The command that makes this report, which it shows.
        names: Local directory -> what a person knows it by, where ledgers were fetched from a URI.
        force: Write over a file that is there.

    Raises:
        LedgerError: The extra ``report`` is missing, the file is there already, or it can't be written.
    """
    check(path, force)
    recorded = ledgers if isinstance(ledgers, Recorded) else _read(ledgers)
    text = page(comparison, recorded, command, names or {})
    path = Path(path)
    # Beside it and renamed: whoever looks at the old one meanwhile sees all of it.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            part.write_text(text, encoding="utf-8")
            _rename(part, path, force)
        finally:
            with contextlib.suppress(FileNotFoundError):
                part.unlink()
    except FileExistsError:
        raise LedgerError(f"{path} is there already: name another file, or write over it with --force.") from None
    except OSError as error:
        raise LedgerError(f"{path} can't be written ({error.strerror or error}): name another file.") from None


def _rename(part: Path, path: Path, force: bool) -> None:
    """Give a file its name; without ``force`` not if it has come to be another's meanwhile."""
    if not force:
        try:
            os.link(part, path)
            return
        except FileExistsError:
            raise
        except OSError:  # not every file system has links
            if os.path.lexists(path):
                raise FileExistsError from None
    os.replace(part, path)


def page(comparison: Comparison, recorded: Recorded, command: str = "", names: Mapping[str, str] | None = None) -> str:
    """The report as a text; see `write`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    templates = PackageLoader("stepledger.report", "templates")
    environment = Environment(loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(svg=Markup, visible=_shown, count=lambda number: f"{number:,}", counted=counted, cause=cause)
    budget = Budget()
    first = cards(recorded, comparison.differences, _CARDS, budget)
    groups = sorted({group_of(hop.name) for hop in comparison.hops})
    return environment.get_template("report.html.jinja").render(
        status=_STATUS[comparison.exit_status],
        verdict=_shown(verdict(comparison)),
        comparison=comparison,
        paths=[_path(comparison, group) for group in groups],
        completeness=list(_completeness(comparison)),
        causes=_causes(comparison),
        counted_all=sum(hop.differences for hop in comparison.hops) == len(comparison.differences),
        warnings=_warnings(comparison.warnings),
        timelines=[one for group in groups if (one := timeline(recorded, comparison, group)) is not None],
        width=WIDTH,
        cards=first,
        listed=[(line(one), one.hop) for one in comparison.differences[:_LISTED]],
        not_listed=max(0, len(comparison.differences) - _LISTED),
        episodes=[some for group in groups if (some := _episodes(recorded, group)) is not None],
        ledgers=_ledgers(recorded.ledgers, names or {}),
        why_not=_shown(recorded.why_not),
        command=_shown(command),
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


#: Exit status -> what the page is marked with.
_STATUS = {0: ("good", "Equal"), 1: ("bad", "Different"), 2: ("warn", "Not compared"), 3: ("warn", "Equal as far as recorded")}


def _read(ledgers: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Recorded:
    places = [ledgers] if isinstance(ledgers, (str, os.PathLike)) else ledgers
    try:
        with contextlib.ExitStack() as stack:
            sides = [stack.enter_context(fetched(place)) for place in places]
            return Recorded(load(*sides)[0])
    except LedgerError as error:
        return Recorded((), f"the ledgers can't be read any more: {error}")


def _shown(text: str) -> str:
    """A text of a ledger as the page shows it: all of it visible, and no more than a person reads."""
    return visible(text if len(text) <= _TEXT else f"{text[:_TEXT]}...")


@dataclass(frozen=True)
class _Cell:
    """A field of a hop: how it is marked, what it says, and the number of the note below."""

    mark: str
    text: str
    note: int = 0


def _path(comparison: Comparison, group: str) -> dict[str, Any]:
    """The hops of one group: taps, and a table of fields by hops with its notes."""
    hops = [hop for hop in comparison.hops if group_of(hop.name) == group]
    notes: list[str] = []
    present = [name for name in _FIELDS if any(name in hop.fields for hop in hops)]
    rows: list[tuple[str, list[_Cell]]] = [(name, [_field(hop.fields.get(name), notes) for hop in hops]) for name in present]
    rows.append(("lost or added", [_unmatched(hop) for hop in hops]))
    taps = [taps_of(hop.name) for hop in hops]
    return {"group": group, "hops": hops, "taps": taps, "rows": rows, "notes": [_shown(note) for note in notes]}


def _unmatched(hop: Hop) -> _Cell:
    if hop.lost or hop.extra:
        return _Cell("bad", f"{hop.lost:,} lost, {hop.extra:,} added")
    return _Cell("good", "none") if hop.events else _Cell("none", "not compared")


def _field(result: FieldResult | None, notes: list[str]) -> _Cell:
    if result is None:
        return _Cell("none", "\N{EN DASH}")
    number = 0
    if result.note:
        if result.note not in notes:
            notes.append(result.note)
        number = notes.index(result.note) + 1
    if result.status == "not compared":
        return _Cell("warn" if result.note else "none", "not compared" if result.note else "nothing to compare", number)
    if result.differences:
        return _Cell("bad", counted(result.differences, "difference") + ", recomputed" * result.recomputed, number)
    return _Cell("good", "recomputed, equal" if result.recomputed else "equal", number)


def _completeness(comparison: Comparison) -> Iterator[dict[str, Any]]:
    for hop in comparison.hops:
        coverage = [(name.replace("_", " "), f"{count:,}") for name, count in hop.coverage.items()]
        reasons = [f"never learned: {count:,} {reason}" for reason, count in hop.never_learned.items()]
        dropped = [f"{counted(hop.dropped, 'earlier event')} compared while the run went on, and dropped"] if hop.dropped else []
        notes = (*reasons, *dropped, *hop.notes)
        kinds = [("bad", "not compared", hop.unpaired), ("warn", "unknown", hop.unknown), ("note", "note", notes)]
        sentences = [(mark, word, _shown(one)) for mark, word, some in kinds for one in some[:_SENTENCES]]
        more = sum(max(0, len(some) - _SENTENCES) for _, _, some in kinds)
        yield {"hop": hop, "coverage": coverage, "sentences": sentences, "more": more}


def _causes(comparison: Comparison) -> list[dict[str, Any]]:
    """The differences that were kept, by cause; the most frequent first."""
    found: dict[tuple[str, str, str], list[Difference]] = {}
    for one in comparison.differences:
        code, what = cause(one)
        found.setdefault((code, "" if code else what, one.hop), []).append(one)
    made = []
    for (code, _, hop), some in found.items():
        what = ", ".join(dict.fromkeys(part for one in some for part in cause(one)[1].split(", ")))
        text = perhaps(some) + title(code, some[0].explanations[0].text) if code else unexplained(some[0])
        envs = len({(one.runner, one.env, one.agent) for one in some})
        entry = {"code": code, "what": what, "hop": hop, "count": len(some), "envs": envs}
        made.append({**entry, "text": _shown(text), "since": _shown(where(some[0]))})
    return sorted(made, key=lambda entry: -int(entry["count"]))


def _warnings(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Findings in single ledgers; what is said of several environments alike is one."""
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for one in findings:
        alike.setdefault((one.code, one.group, one.tap, one.text), []).append(one)
    made = []
    for (code, _, tap, text), some in alike.items():
        first, envs = some[0], sum(one.envs for one in some)
        place = (f"runner {first.runner}, " if first.runner else "") + f"env {first.env}" if first.env >= 0 else counted(envs, "env")
        if first.step >= 0:
            place += f", episode {first.episode}, step {first.step}"
        if len(some) > 1:
            place += f", and {counted(envs - 1, 'env')} more"
        texts = {"code": code, "tap": tap, "text": text, "place": place}
        made.append({**{name: _shown(text) for name, text in texts.items()}, "count": sum(one.count for one in some)})
    return made


def _episodes(recorded: Recorded, group: str) -> dict[str, Any] | None:
    from . import plots

    found = episodes_of(recorded, group)
    if not found:
        return None
    drawn = [
        plots.progress(title, [(one.tap, *plots.bins(one.ends.astype(float), getattr(one, name).astype(float))) for one in found])
        for title, name in (("Return of an episode", "returns"), ("Length of an episode", "lengths"))
    ]
    pairs = []
    for first, second in itertools.pairwise(found):
        shown, number = unlike(first, second, _ROWS)
        if number:
            pairs.append({"taps": (first.tap, second.tap), "shown": shown, "more": number - len(shown)})
    binned = max(len(one) for one in found) > plots.BINS
    taps = [one.tap for one in found]
    return {"group": group, "summary": summary(found), "plots": drawn, "unlike": pairs, "binned": binned, "taps": taps}


def _ledgers(ledgers: Sequence[Ledger], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """What was recorded where; ledgers that say the same of themselves are together."""
    groups: dict[tuple[str, ...], list[tuple[Ledger, str]]] = {}
    told = ("tap", "observation", "action", "reward", "digest", "values", "versions", "state")
    for ledger in ledgers:
        said = {**entries(ledger), "state": state(ledger)}
        groups.setdefault(tuple(said[name] for name in told), []).append((ledger, said["recorded"]))
    made = []
    for texts, found in groups.items():
        some = [ledger for ledger, _ in found]
        paths = [str(ledger.path) for ledger in some]
        for local, name in names.items():
            paths = [path.replace(local, name, 1) for path in paths]
        what = paths[0] if len(some) == 1 else f"{paths[0]} to {os.path.basename(paths[-1])} ({len(some):,} ledgers)"
        keys = [key for ledger in some for key in ledger.streams]
        envs = "" if some[0].meta["tap"] == "learner" else ranges([key.env for key in keys])
        began, ended = (pick(when for _, when in found) for pick in (min, max))
        recorded = began if began == ended else f"{began} to {ended}"
        entry = {name: _shown(text) for name, text in zip(told, texts)}
        rest = {"files": _shown(what), "envs": envs, "events": f"{sum(ledger.events for ledger in some):,}", "recorded": recorded}
        made.append({**entry, **rest})
    return made
