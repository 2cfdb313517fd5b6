"""Reports for programs: each is valid to its schema, says what the comparison says, and holds nothing that a reader would obey."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import assert_refused, compare_in_parts, drive, rewrite, run_walks, walks

import stepledger
from stepledger import Comparison, Difference, compare
from stepledger.cli import main
from stepledger.report import FORMATS, refusal, render
from stepledger.result import Explanation, FieldResult, Hop, StreamResult

DATA = Path(__file__).parent / "data"

#: Names and values that want to be more than text: markup, an escape sequence, a line of their own, a workflow command, no XML.
HOSTILE = "</td><script>alert(1)</script>\x1b[31mred\n::error::x\u202e\x00\ud800]]>%0A"


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Comparison]:
    """One of each exit status but 2, and one with all there is to say, in words that are hostile."""
    run = tmp_path_factory.mktemp("runs")
    equal = run_walks(run / "equal")
    run_walks(run / "changed")
    with_values = walks(run / "values", keep_values=True)
    drive(with_values, 30)
    with_values.close()
    for name, column in [("changed", "h_obs"), ("values", "h_rew")]:
        with np.load(run / name / "trainer.npz") as archive:
            rewrite(run / name / "trainer.npz", {column: np.roll(archive[column], 3)})
    open_end = replace(equal, hops=tuple(replace(hop, unknown=("env 0: its last events",)) for hop in equal.hops))
    explained = (Explanation("SL101", HOSTILE), Explanation("SL102", "another"))
    differences = tuple(
        Difference("evaluation: env -> vector", env, 0, 1, fields, kind, {"obs": HOSTILE}, {"obs": HOSTILE}, 3, 1, HOSTILE, why, 2, (7, -1))
        for env, fields, kind, why in [
            (0, ("obs", "reward"), "changed", explained),
            (1, ("event",), "lost", ()),
            (-1, ("event",), "extra", ()),
        ]
    )
    fields = {"obs": FieldResult("different", 9, 1, HOSTILE), "action": FieldResult("not compared", 0, 0, HOSTILE)}
    hop = Hop(
        "evaluation: env -> vector", 9, 2, 2, 3, fields, (HOSTILE,), (HOSTILE,), (HOSTILE,), {"sampled": 3}, {HOSTILE: 1}, (), 1, 1, 4
    )
    streams = tuple(StreamResult(1, env, HOSTILE, 1) for env in (-1, 0, 1))
    everything = Comparison((replace(hop, different_streams=streams), *equal.hops), differences)
    nothing = Comparison((Hop("env -> vector"),), ())
    return {
        "equal": equal,
        "changed": compare(run / "changed"),
        "values": compare(run / "values"),
        "in parts": compare_in_parts(run / "changed"),
        "open end": open_end,
        "everything": everything,
        "nothing": nothing,
    }


NAMES = ["equal", "changed", "values", "in parts", "open end", "everything", "nothing"]


def described(schema: Any) -> Any:
    """A schema that refuses members that it doesn't describe."""
    if isinstance(schema, list):
        return [described(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {**closed, **{name: described(part) for name, part in schema.items()}}


@pytest.mark.parametrize("name", NAMES)
def test_json_has_a_schema_that_describes_all_of_it(comparisons: dict[str, Comparison], name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(stepledger.__file__).parent / "report" / "schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    for document in (json.loads(render(comparisons[name], "json")), {"run": {}, **json.loads(json.dumps(comparisons[name].to_dict()))}):
        assert document["schema"] == 1
        jsonschema.validate(document, schema, jsonschema.Draft202012Validator)
        jsonschema.validate(document, described(schema), jsonschema.Draft202012Validator)
    jsonschema.validate(json.loads(refusal("It is not there.", "json")), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "exit_status": 4}, schema)


@pytest.mark.parametrize("name", NAMES)
def test_junit_is_valid_and_fails_where_the_comparison_does(comparisons: dict[str, Comparison], name: str) -> None:
    xmlschema = pytest.importorskip("xmlschema")
    schema = xmlschema.XMLSchema(DATA / "junit-10.xsd")
    comparison = comparisons[name]
    text = render(comparison, "junit", f"runs/{HOSTILE}")
    root = ET.fromstring(text)
    schema.validate(root)
    bad = len(root.findall(".//failure")) + len(root.findall(".//error"))
    assert bool(bad) == bool(comparison.exit_status)
    assert int(root.get("failures", "")) + int(root.get("errors", "")) == bad
    assert int(root.get("tests", "")) == len(root.findall(".//testcase"))
    for hop, suite in zip(comparison.hops, root.findall("testsuite")):
        assert suite.get("name") == hop.name
        for case in suite.findall("testcase"):
            if (result := hop.fields.get(case.get("name", ""))) is not None:  # what was not compared does not pass
                assert (case.find("skipped") is None) == (result.status != "not compared")
                assert (case.find("failure") is not None) == (result.status == "different")
    schema.validate(ET.fromstring(refusal(HOSTILE, "junit")))


@pytest.mark.parametrize("name", NAMES)
def test_sarif_is_valid_and_has_a_result_for_each_difference(comparisons: dict[str, Comparison], name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((DATA / "sarif-2.1.0-rtm.4.json").read_text())
    comparison = comparisons[name]
    for document in (json.loads(render(comparison, "sarif", source)) for source in ("", "s3://bucket/run", f"a run/{'x' * 3}")):
        jsonschema.validate(document, schema, jsonschema.Draft4Validator)
        (run,) = document["runs"]
        assert sum(result["level"] == "error" for result in run["results"]) == len(comparison.differences)
        assert run["invocations"][0]["exitCode"] == comparison.exit_status
        assert {result["ruleId"] for result in run["results"]} == {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    if name == "everything":
        assert "SL101" in {result["ruleId"] for result in run["results"]}
    refused = json.loads(refusal("It is not there.", "sarif"))
    jsonschema.validate(refused, schema, jsonschema.Draft4Validator)
    assert refused["runs"][0]["invocations"][0]["executionSuccessful"] is False


@pytest.mark.parametrize("name", NAMES)
def test_github_gets_one_command_a_line_and_no_more_errors_than_it_shows(comparisons: dict[str, Comparison], name: str) -> None:
    comparison = comparisons[name]
    lines = render(comparison, "github").split("\n")
    assert all(re.fullmatch(r"::(error|warning|notice) title=[^,:]*::.+", line) for line in lines), lines
    kinds = [line.split(" ")[0].strip(":") for line in lines]
    assert kinds[0] == {0: "notice", 1: "error", 2: "error", 3: "warning"}[comparison.exit_status]
    assert ("error" in kinds) == (comparison.exit_status in (1, 2))
    many = replace(comparison, differences=tuple(replace(one, env=env) for one in comparison.differences[:1] for env in range(50)))
    errors = [line for line in render(many, "github").split("\n") if line.startswith("::error")]
    assert len(errors) <= 10 + sum(len(hop.unpaired) for hop in many.hops)
    assert (
        refusal("It is 100% gone: look, again.", "github")
        == "::error title=stepledger%3A can't be compared::It is 100%25 gone: look, again."
    )


@pytest.mark.parametrize("output_format", FORMATS)
def test_nothing_in_a_report_is_more_than_text(comparisons: dict[str, Comparison], output_format: str) -> None:
    text = render(comparisons["everything"], output_format, HOSTILE)
    assert all(one.isprintable() or one == "\n" for one in text)
    assert "\n::error::x" not in text
    assert str(comparisons["everything"]).count("\n") == render(comparisons["everything"], "text").count("\n")


@pytest.mark.parametrize("output_format", FORMATS)
def test_the_command_prints_each_format_with_the_same_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output_format: str
) -> None:
    run_walks(tmp_path, steps=10)
    assert main(["compare", str(tmp_path), "--format", output_format]) == 0
    out, err = capsys.readouterr()
    assert out.startswith({"text": "env -> vector", "json": "{", "junit": "<?xml", "sarif": "{", "github": "::notice"}[output_format])
    assert err == ""
    assert main(["compare", str(tmp_path / "nowhere"), "--format", output_format]) == 2
    out, err = capsys.readouterr()
    assert ("nowhere is not there" in out) == (output_format != "text")
    assert err.startswith("stepledger: ")


def test_an_error_does_not_send_escape_sequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = assert_refused(capsys, "compare", tmp_path / "a\x1b[2Jb\nc")
    assert r"a\x1b[2Jb\nc is not there" in message
