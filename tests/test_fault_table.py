"""The table of faults in the docs: each one is made here once more, and the page says what is reported of it.

``pytest tests/test_fault_table.py --write`` writes the page; `test_faults` makes each fault at each place and dose.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from common import MODES, RLLIB_FAULTS
from faults import FAULTS
from test_explain import LEARNED, codes, rollout
from test_faults import CODES, Boundary, impossible, spaces_for

from stepledger import Comparison, Difference

DOCS = Path(__file__).parents[1] / "docs" / "faults.md"

HEAD = """# Faults, and what is reported of each

Made by the tests (`pytest tests/test_fault_table.py --write`), which inject each fault and want exactly the injections back: place, fields,
and the right explanation first. n stands for a number. The marks say with which of them the tests make it; with Gymnasium that is in each
autoreset mode in which it can happen, in the environment's process and in the trainer's, at one event, at one in a hundred, at one in ten
and at every event. `stepledger explain CODE`, or [explanations.md](explanations.md), says what a code means. With RLlib the last hop is
called episode -> learner.

| fault | what it is | hop | what is reported first | Gymnasium | Stable-Baselines3 | RLlib |
|---|---|---|---|---|---|---|
"""
TAIL = """
Events of one kind that are lost or added in a row are one difference, which says how many. Where one event can't tell two faults apart,
both are listed, and the wrong one may come first: float16 and bfloat16, for few numbers that both round alike; zeros, for a reward that is
a reset's, which has none; the step filled in and the step repeated, after a step without a reward; with next-step autoreset, actions that
were sent where an environment was being reset, which are not recorded; and, with Stable-Baselines3, both flags delivered as truncated
alone where the environment gave both.
"""

#: Those that tests of their own make, and where.
MEMORY = {
    "obs:aliased": ("the array handed out is written to before it is learned from", "vector -> learner", "obs differs"),
    "action:aliased": ("likewise, an array of actions", "vector -> learner", "action differs"),
    "info:aliased": ("an environment's own array in info is written to by its reset", "env -> vector", "obs differs"),
}
LEARNER = {
    "transition:crosses_reset": "the next observation is that of the next episode's reset",
    "transition:stale_obs": "the observation is that of the step before",
    "transition:wrong_successor": "the next observation is another step's",
    "transition:duplicated": "a transition is learned from twice, though each step is to be once",
    "transition:never_sampled": "a transition is learned from that no environment gave",
    "chunk:dropped": "several steps in a row are never learned from",
    "chunk:repeated": "several steps in a row are learned from twice",
}


def reported(comparison: Comparison) -> str:
    """The first difference, with every number an n: places and values depend on versions."""
    one: Difference = comparison.differences[0]
    what = {"lost": "event lost", "extra": "event added"}.get(one.kind) or f"{', '.join(one.fields)} differ{'s' * (len(one.fields) == 1)}"
    why = re.sub(r"(?<![a-zA-Z\d])-?\d+(?:[,.]\d+)*(?! bits)", "n", one.explanations[0].text)
    return f"{what}; {why} [{one.explanations[0].code}]"


def where_possible(fault: str) -> tuple[str, str]:
    """Level and mode of Gymnasium in which a fault is made here."""
    return next((level, mode) for level in ("env", "vector") for mode in MODES[:2] if not impossible(mode, fault, level, "sync"))


def row_between(directory: Path, fault: str) -> str:
    level, mode = where_possible(fault)
    boundary = Boundary(directory / "gymnasium", fault, level, "one", *spaces_for(fault))
    comparison = boundary.run("sync", mode)
    boundary.check(comparison)
    in_sb3 = [level for level in ("env", "vector") if not impossible("sb3", fault, level)]
    if in_sb3:
        again = Boundary(directory / "sb3", fault, in_sb3[0], "one", *spaces_for(fault))
        again.check(again.run_sb3("dummy"))
    return row(fault, FAULTS[fault], comparison.differences[0].hop, reported(comparison), in_sb3=bool(in_sb3))


def row(fault: str, does: str, hop: str, report: str, *, in_gymnasium: bool = True, in_sb3: bool = False, in_rllib: bool = False) -> str:
    marks = ["x" if there else "" for there in (in_gymnasium, in_sb3, in_rllib or fault in RLLIB_FAULTS)]
    return f"| `{fault}` | {does} | {hop} | {report.replace('|', '/')} | {' | '.join(marks)} |"


def table(directory: Path) -> str:
    rows = [row_between(directory / fault.replace(":", "-"), fault) for fault in FAULTS]
    for fault, does in LEARNER.items():
        comparison = rollout(directory / fault.replace(":", "-"), LEARNED[fault][0])
        assert codes(comparison)[0][0] == CODES[fault]
        rows.append(row(fault, does, "vector -> learner", reported(comparison), in_rllib=True))
    for fault, (does, hop, what) in MEMORY.items():
        rows.append(row(fault, does, hop, f"{what} [{CODES[fault]}]", in_gymnasium=hop != "env -> vector", in_sb3=hop == "env -> vector"))
    return HEAD + "".join(f"{one}\n" for one in rows) + TAIL


@pytest.mark.sb3
@pytest.mark.skipif(len(MODES) < 3, reason="this Gymnasium has one autoreset mode")
def test_the_page_of_the_docs_is_what_is_reported(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    made = table(tmp_path)
    if request.config.getoption("--write"):
        DOCS.write_text(made, encoding="utf-8")
    assert DOCS.read_text(encoding="utf-8") == made, "docs/faults.md is old: pytest tests/test_fault_table.py --write"
