"""The report as JUnit XML, as Jenkins, GitLab and others show it: a suite for each hop, with a test case for each of its fields."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..pairs import counted
from .text import line, verdict
from .visible import visible

if TYPE_CHECKING:
    from ..result import Comparison, Difference, FieldResult, Hop

__all__ = ["refusal", "report"]

#: Differences that a failure lists.
_LISTED = 20


def report(comparison: Comparison, source: str = "") -> str:
    """The document.

    A field that differs is a failure, one that can't be compared is skipped. Each hop has two cases more: whether every event arrived,
    and whether all of it was there to be compared; if not, that is an error.

    Args:
        comparison: The result.
        source: What was compared.
    """
    root = ET.Element("testsuites", name=_attribute(f"stepledger {source}".strip()))
    suites = [_suite(root, hop, [one for one in comparison.differences if one.hop == hop.name]) for hop in comparison.hops]
    if comparison.exit_status == 2 and comparison.complete:  # nothing was compared, and nothing else says so
        suites.append(_refused(root, verdict(comparison)))
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in suites)))
    return _text(root)


def refusal(sentence: str) -> str:
    """Why there is nothing to report, as an error."""
    root = ET.Element("testsuites", name="stepledger", tests="1", failures="0", errors="1")
    _refused(root, sentence)
    return _text(root)


def _refused(root: ET.Element, sentence: str) -> ET.Element:
    suite = ET.SubElement(root, "testsuite", name="stepledger", tests="1", failures="0", errors="1", skipped="0", time="0")
    case = ET.SubElement(suite, "testcase", name="compare", classname="stepledger", time="0")
    ET.SubElement(case, "error", message=_attribute(sentence), type="can't be compared")
    return suite


def _suite(root: ET.Element, hop: Hop, differences: list[Difference]) -> ET.Element:
    suite = ET.SubElement(root, "testsuite", name=_attribute(hop.name), time="0")
    for name, result in hop.fields.items():
        _field(_case(suite, hop, name), name, result, differences)
    case = _case(suite, hop, "every event arrived")
    unmatched = [one for one in differences if "event" in one.fields]
    if unmatched or hop.lost or hop.extra:
        what = f"{counted(hop.lost, 'event')} lost, {counted(hop.extra, 'event')} added"
        _failure(case, what, "event", unmatched)
    case = _case(suite, hop, "all of it was there")
    if reasons := list(_incomplete(hop)):
        element = ET.SubElement(case, "error", message=_attribute(reasons[0]), type="incomplete")
        element.text = "\n".join(map(visible, reasons))
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(sum(case.find(tag) is not None for case in cases)))
    if notes := [*hop.notes, *_coverage(hop)]:
        ET.SubElement(suite, "system-out").text = "\n".join(map(visible, notes))
    return suite


def _field(case: ET.Element, name: str, result: FieldResult, differences: list[Difference]) -> None:
    if result.status == "not compared":
        ET.SubElement(case, "skipped", message=_attribute(f"not compared: {result.note}" if result.note else "nothing to compare"))
    elif result.differences:
        what = f"{result.differences:,} of {counted(result.compared, 'event')} differ in {name}"
        _failure(case, what, name, [one for one in differences if name in one.fields])


def _failure(case: ET.Element, what: str, kind: str, differences: list[Difference]) -> None:
    first = f"; first: {line(differences[0])}" if differences else ""
    element = ET.SubElement(case, "failure", message=_attribute(what + first), type=kind)
    lines = [visible(line(one)) for one in differences[:_LISTED]]
    more = len(differences) - _LISTED
    element.text = "\n".join([what, *lines, *([f"... and {more:,} more that were kept"] if more > 0 else [])])


def _case(suite: ET.Element, hop: Hop, name: str) -> ET.Element:
    return ET.SubElement(suite, "testcase", name=_attribute(name), classname=_attribute(f"stepledger.{hop.name}"), time="0")


def _incomplete(hop: Hop) -> Iterator[str]:
    yield from (f"not compared: {sentence}" for sentence in hop.unpaired)
    yield from (f"unknown: {sentence}" for sentence in hop.unknown)
    if not hop.events and not hop.dropped and not hop.unpaired:
        yield "nothing was compared"


def _coverage(hop: Hop) -> Iterator[str]:
    yield from (f"{count:,} {name.replace('_', ' ')}" for name, count in hop.coverage.items())


def _attribute(text: str) -> str:
    """Text without characters that XML can't hold."""
    return visible(text)


def _text(root: ET.Element) -> str:
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}'
