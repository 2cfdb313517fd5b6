"""The catalogue of explanations: what codes there are, and the pages that are made of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from common import assert_refused
from faults import FAULTS

import stepledger
from stepledger.cli import main
from stepledger.codes import CATALOGUE
from stepledger.pages import listing, markdown, page

DOCS = Path(__file__).parents[1] / "docs" / "explanations.md"

#: The ids of the fault catalogue that are no fault between an environment and its trainer.
MEMORY = {"obs:aliased", "action:aliased", "info:aliased"}
LEARNER = {
    *(f"transition:{name}" for name in ("crosses_reset", "stale_obs", "wrong_successor", "duplicated", "never_sampled")),
    *(f"chunk:{name}" for name in ("dropped", "repeated")),
}


def test_each_fault_has_one_code() -> None:
    named = [fault for code in CATALOGUE.values() for fault in code.faults]
    assert sorted(named) == sorted({*FAULTS, *MEMORY, *LEARNER})


def test_codes_and_titles_are_distinct_and_in_order() -> None:
    assert list(CATALOGUE) == sorted(CATALOGUE)
    assert all(re.fullmatch(r"SL[12356]\d\d", code) for code in CATALOGUE)
    assert len({one.title for one in CATALOGUE.values()}) == len(CATALOGUE)
    for one in CATALOGUE.values():
        assert one.meaning.endswith(".")
        assert one.check.endswith(".")
        assert not one.title.endswith(".")


def test_every_code_that_rules_give_is_in_the_catalogue() -> None:
    package = Path(stepledger.__file__).parent
    modules = [path for path in package.glob("*.py") if path.name != "codes.py"]
    given = {code for path in modules for code in re.findall(r'"(SL\d{3})"', path.read_text(encoding="utf-8"))}
    assert given == set(CATALOGUE)


@pytest.mark.parametrize("code", CATALOGUE)
def test_each_code_has_a_page(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", code.lower()]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{code}  {CATALOGUE[code].title}\n\n")
    assert "\n\nCheck: " in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert text == page(code) + "\n"


def test_without_a_code_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    assert capsys.readouterr().out == listing() + "\n"
    assert re.findall(r"SL\d{3}", listing()) == list(CATALOGUE)


@pytest.mark.parametrize("code", ["SL999", "", "102", "\x1b[31m"])
def test_a_code_that_there_is_not_is_refused(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not code:
        assert main(["explain", ""]) == 0  # as if there were none
        return
    sentence = assert_refused(capsys, "explain", code)
    assert "\x1b" not in sentence
    assert "stepledger explain lists all" in sentence


def test_the_page_of_the_docs_is_that_of_the_catalogue(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write"):
        DOCS.write_text(markdown(), encoding="utf-8")
    assert DOCS.read_text(encoding="utf-8") == markdown(), "docs/explanations.md is old: pytest tests/test_codes.py --write"
