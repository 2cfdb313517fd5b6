"""The package as a whole: what it imports, and what it offers."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from common import run_python

import stepledger

PUBLIC = [
    "Comparison",
    "Difference",
    "FieldResult",
    "Finding",
    "Hop",
    "LearnerLedger",
    "Ledger",
    "LedgerEnv",
    "LedgerError",
    "LedgerVectorEnv",
    "Stream",
    "StreamKey",
    "compare",
    "read",
]

#: The only modules, and packages, that import something optional.
OPTIONAL = {
    "stepledger.progress": {"rich"},
    "stepledger.remote": {"pyarrow"},
    "stepledger.report": {"rich", "matplotlib", "jinja2", "markupsafe"},
    "stepledger.sb3": {"stable_baselines3", "torch"},
}

ROOT = Path(stepledger.__file__).parent
MODULES = sorted(info.name for info in pkgutil.walk_packages([str(ROOT)], "stepledger."))


def test_importing_it_imports_nothing_heavy() -> None:
    code = """
import sys
import stepledger, stepledger.cli, stepledger.report.text
for name in ("ray", "stable_baselines3", "torch", "rich", "pandas", "pyarrow", "matplotlib", "jinja2", "stepledger_ray", "stepledger.sb3"):
    assert name not in sys.modules, name
"""
    run_python(code)


def test_it_works_where_nothing_else_is_installed(tmp_path: Path) -> None:
    code = """
import sys
for name in ("ray", "stable_baselines3", "torch", "rich", "pyarrow", "matplotlib", "jinja2"):
    sys.modules[name] = None  # importing it fails
from pathlib import Path
from common import run_walks
from stepledger.cli import main
assert run_walks(Path(sys.argv[1])).exit_status == 0
assert main(["compare", sys.argv[1]]) == 0
assert main(["compare", sys.argv[1], "-v", "--format", "sarif"]) == 0
assert main(["show", sys.argv[1], "--env", "0", "--episode", "0", "--step", "1"]) == 0
assert main(["compare", sys.argv[1], "--html", sys.argv[1] + "/report.html"]) == 2
"""
    run_python(code, tmp_path)


def test_no_module_but_its_own_mentions_an_optional_package() -> None:
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        imported = set()
        for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add((node.module or "").split(".")[0])
        allowed = {*sys.stdlib_module_names, "numpy", "gymnasium", "xxhash"}
        allowed |= OPTIONAL.get(".".join(name.split(".")[:2]), set())
        assert imported <= allowed, (name, imported - allowed)


def test_the_public_names_are_these() -> None:
    assert sorted(set(stepledger.__all__) - {"__version__"}) == PUBLIC
    assert all(hasattr(stepledger, name) for name in stepledger.__all__)
    namespace: dict[str, object] = {}
    exec("from stepledger import *", namespace)
    assert set(PUBLIC) <= namespace.keys()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_says_what_it_is(name: str) -> None:
    thing = getattr(stepledger, name)
    assert inspect.getdoc(thing)
    members = vars(thing).items() if inspect.isclass(thing) else ()
    for member, value in members:
        if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            assert inspect.getdoc(value), f"{name}.{member}"


@pytest.mark.parametrize("name", [name for name in MODULES if name != "stepledger.__main__" and not name.startswith("stepledger.sb3")])
def test_every_module_names_what_it_offers(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    assert all(hasattr(module, one) for one in getattr(module, "__all__", []))


def test_its_error_is_a_value_error() -> None:
    assert issubclass(stepledger.LedgerError, ValueError)


def test_it_carries_its_types() -> None:
    assert (ROOT / "py.typed").exists()


def test_its_version_is_that_of_the_distribution() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", version("stepledger-ray"))
