"""The report as SARIF 2.1.0, the format of static analysis results that code hosts take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..recorder import versions
from .text import line, verdict
from .titles import title
from .visible import visible

if TYPE_CHECKING:
    from ..result import Comparison, Difference, Hop

__all__ = ["refusal", "report"]

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"

#: Rules of results that no explanation fits -> what they say.
_RULES = {
    "changed": "The two sides of a hop disagree in a field of an event.",
    "lost": "An event never reached the second side of a hop.",
    "extra": "An event reached the second side of a hop that the first side never gave.",
    "incomplete": "Not all of both sides was there to be compared.",
}


def report(comparison: Comparison, source: str = "") -> str:
    """The document: a result for each difference that was kept, with the code of its first explanation as the rule.

    Args:
        comparison: The result.
        source: The path or URI of what was compared; it is the location of each result.
    """
    results = [_result(one, source) for one in comparison.differences]
    results += [_incomplete(hop, sentence, source) for hop in comparison.hops for sentence in (*hop.unpaired, *hop.unknown)]
    results += [_warning(one, source) for one in comparison.warnings]
    titles = {one.explanations[0].code: one.explanations[0].text for one in reversed(comparison.differences) if one.explanations}
    titles.update({one.code: one.text for one in comparison.warnings})
    used = sorted({result["ruleId"] for result in results})
    rules = [{"id": rule, "shortDescription": {"text": visible(_RULES.get(rule) or title(rule, titles[rule]))}} for rule in used]
    invocation = {"executionSuccessful": True, "exitCode": comparison.exit_status, "exitCodeDescription": visible(verdict(comparison))}
    return _document(results, rules, invocation)


def refusal(sentence: str) -> str:
    """Why there is nothing to report: an invocation that did not succeed."""
    notification = {"level": "error", "message": {"text": visible(sentence)}}
    return _document([], [], {"executionSuccessful": False, "exitCode": 2, "toolExecutionNotifications": [notification]})


def _document(results: list[dict[str, Any]], rules: list[dict[str, Any]], invocation: dict[str, Any]) -> str:
    driver = {"name": "stepledger", "version": versions()["stepledger"], "rules": rules}
    run = {"tool": {"driver": driver}, "invocations": [invocation], "results": results}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _result(difference: Difference, source: str) -> dict[str, Any]:
    stream = f"runner {difference.runner}/env {difference.env}" + (f"/agent {difference.agent}" if difference.agent else "")
    where = visible(f"{difference.hop}/{stream}/episode {difference.episode}/step {difference.step}")
    return {
        "ruleId": difference.explanations[0].code if difference.explanations else difference.kind,
        "level": "error",
        "message": {"text": visible(line(difference))},
        "locations": [_location(source, where)],
        "partialFingerprints": {"place/v1": f"{where}/{','.join(difference.fields)}"},
        "properties": {"fields": list(difference.fields), "kind": difference.kind, "events": difference.events},
    }


def _incomplete(hop: Hop, sentence: str, source: str) -> dict[str, Any]:
    message = {"text": visible(f"{hop.name}: {sentence}")}
    return {"ruleId": "incomplete", "level": "warning", "message": message, "locations": [_location(source, visible(hop.name))]}


def _warning(finding: Any, source: str) -> dict[str, Any]:
    where = visible(f"{finding.tap}/runner {finding.runner}/env {finding.env}/episode {finding.episode}/step {finding.step}")
    return {"ruleId": finding.code, "level": "note", "message": {"text": visible(finding.text)}, "locations": [_location(source, where)]}


def _location(source: str, where: str) -> dict[str, Any]:
    location: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": where}]}
    if source:
        uri = (
            quote(source, safe=":/?&=%#+@~", errors="backslashreplace")
            if "://" in source
            else quote(Path(source).as_posix(), errors="backslashreplace")
        )
        location["physicalLocation"] = {"artifactLocation": {"uri": uri}}
    return location
