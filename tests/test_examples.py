"""The examples find the faults that are injected into them and nothing else; and what the README shows is what happens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

SB3 = [pytest.mark.sb3]
RAY = [pytest.mark.ray]


def needs(*modules: str) -> None:
    for module in modules:
        pytest.importorskip(module)


def run(*command: Any, cwd: Path, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run a command as a user with this Python first in the path would, in a directory of its own."""
    # More threads than cores make small models many times slower. A cluster that the tests run is not the example's.
    own = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_", "PYTHONPATH"))}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=300,
    )


def example(name: str, cwd: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, EXAMPLES / name, *arguments, cwd=cwd)


GYMNASIUM = {
    "gymnasium_async.py": ["--steps", 300],
    "training_loop.py": ["--updates", 2],
}
#: Fault -> what the report says of it.
FAULTS = {
    "obs:f16": "obs differs",
    "action:stale": "action differs",
    "reward:scale": "reward differs",
    "terminated:as_truncated": "terminated, truncated differ",
    "truncated:spurious": "truncated differs",
    "step:lost": "lost",
    "step:repeated": "added",
    "reset:hidden": "kind, action differ",
}


@pytest.mark.parametrize("name", GYMNASIUM)
def test_without_a_fault_an_example_finds_no_difference(name: str, tmp_path: Path) -> None:
    process = example(name, tmp_path, *GYMNASIUM[name])
    assert process.returncode == 0, process.stdout + process.stderr
    assert "no difference" in process.stdout.splitlines()[-1]
    assert (tmp_path / "ledger" / "trainer.npz").exists()


@pytest.mark.parametrize(
    ("name", "fault"),
    [("gymnasium_async.py", fault) for fault in FAULTS] + [("training_loop.py", fault) for fault in ("obs:f16", "step:lost")],
)
def test_an_example_finds_the_fault_that_it_is_given(name: str, fault: str, tmp_path: Path) -> None:
    # Ends are few, so that a fault of one in ten of them may never happen.
    rate = 1.0 if fault.startswith("terminated") else 0.1
    process = example(name, tmp_path, *GYMNASIUM[name], "--fault", fault, "--rate", rate, "--directory", tmp_path / "run")
    assert process.returncode == 1, process.stdout + process.stderr
    lines = [line for line in process.stdout.splitlines() if line.startswith("env 1, episode ")]
    assert lines, process.stdout
    assert FAULTS[fault] in lines[0]
    assert not re.search(r"^env [^1], ", process.stdout, re.MULTILINE), "only env 1 has the fault"
    assert (tmp_path / "run" / "trainer.npz").exists()


def test_an_unknown_fault_is_refused_with_the_names_of_all(tmp_path: Path) -> None:
    process = example("gymnasium_async.py", tmp_path, "--fault", "obs:nope")
    assert process.returncode == 2
    assert "obs:f16" in process.stderr
    assert not (tmp_path / "ledger").exists()


@pytest.mark.sb3
@pytest.mark.parametrize(
    ("fault", "rate", "found"),
    [
        (None, 0, None),
        ("obs:f16", 0.1, "obs differs (env gave ["),
        ("reward:stale", 0.1, "reward differs (env gave "),
        ("truncated:as_terminated", 1, "terminated, truncated differ"),
    ],
)
def test_sb3_example(fault: str | None, rate: float, found: str | None, tmp_path: Path) -> None:
    needs("stable_baselines3")
    process = example("sb3_pendulum.py", tmp_path, "--steps", 1024, *(["--fault", fault, "--rate", rate] if fault else []))
    assert process.returncode == (1 if fault else 0), process.stdout + process.stderr
    if found is None:
        assert "no difference" in process.stdout.splitlines()[-1]
    else:
        assert any(line.startswith("env 1, episode ") and found in line for line in process.stdout.splitlines()), process.stdout


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize(("name", "size"), [("cleanrl_ppo.py", ["--updates", 3]), ("cleanrl_dqn.py", ["--steps", 300])])
def test_cleanrl_example(name: str, size: list[Any], fault: bool, tmp_path: Path) -> None:
    needs("torch")
    process = example(name, tmp_path, *size, *(["--fault", "reset_row"] if fault else []))
    assert process.returncode == fault, process.stdout + process.stderr
    found = [line for line in process.stdout.splitlines() if "joins the end of episode" in line]
    assert len(found) == (4 if fault else 0)
    assert "obs, action, reward, next_obs, terminated, truncated" in process.stdout


RLLIB = {
    "rllib_ppo.py": ("obs:f16", "obs differs (env gave ["),
    "rllib_dqn.py": ("reward:scale", "reward differs"),
    "rllib_impala.py": ("step:lost", "lost"),
}


@pytest.mark.ray
@pytest.mark.parametrize(
    ("name", "faulty"),
    [
        pytest.param(name, faulty, marks=[] if faulty and name in ("rllib_ppo.py", "rllib_tune.py") else pytest.mark.long)
        for name in RLLIB
        for faulty in (False, True)
    ],
)
def test_rllib_example(name: str, faulty: bool, tmp_path: Path) -> None:
    needs("ray", "torch")
    fault, found = RLLIB[name]
    process = example(name, tmp_path, *(["--fault", fault] if faulty else []))
    assert process.returncode == faulty, process.stdout + process.stderr
    report = process.stdout
    assert (tmp_path / "ledger" / "report.json").exists()
    if faulty:
        assert any(line.startswith("runner 1, env 1, episode ") and found in line for line in report.splitlines()), report
        assert "env -> vector" in report
    else:
        assert "no difference" in report
    # Later, from the files alone, in another process.
    later = run("stepledger", "compare", "ledger", cwd=tmp_path)
    assert later.returncode == process.returncode
    assert later.stdout.strip() in report


@pytest.mark.ray
@pytest.mark.long
def test_tune_example(tmp_path: Path) -> None:
    needs("ray", "torch")
    process = example("rllib_tune.py", tmp_path, "--fault", "obs:stale")
    assert process.returncode == 1, process.stdout + process.stderr
    reports = [json.loads(path.read_text()) for path in tmp_path.glob("ledger/*/report.json")]
    assert [report["exit_status"] for report in reports] == [1] * 3
    assert len({report["run"]["trial"] for report in reports}) == 3
    said = [line for line in process.stdout.splitlines() if line.startswith("stepledger: PPO_")]
    assert len(said) == 3
    assert all("1 of 2 envs differ" in line for line in said)


class Section:
    """A section of the README: its fenced blocks in order, each with its language."""

    def __init__(self, title: str, text: str) -> None:
        self.title = title
        self.blocks = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        code = "".join(content for language, content in self.blocks if language in ("python", "console"))
        self.runnable = bool(code)
        # Ray brings everything that Stable-Baselines3 needs but itself; the two never occur together.
        self.ray, self.sb3 = "ray" in code, "stable_baselines3" in code or "sb3" in code

    def param(self) -> Any:
        marks = RAY if self.ray else SB3 if self.sb3 else []
        long = [pytest.mark.long] if self.ray and not self.title.startswith("Quickstart") else []
        return pytest.param(self, id=self.title, marks=[*marks, *long])


def sections() -> list[Section]:
    parts = re.split(r"^##? (.+)$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [section for title, text in zip(parts[1::2], parts[2::2]) if (section := Section(title, text)).runnable]


def shape(text: str) -> list[str]:
    """Output without what differs from run to run: numbers, the directory, blanks in printed arrays."""
    text = re.sub(r"/[^\s]*/(?=ledger\b)", "", text)
    text = re.sub(r"-?\d[\d,]*(\.\d*)?(e[-+]?\d+)?", "0", text)
    return [re.sub(r"\s+", " ", line).strip().replace("[ ", "[").replace(" ]", "]") for line in text.strip().splitlines()]


def test_the_readme_has_the_quickstarts() -> None:
    titles = [section.title for section in sections()]
    for framework in ("RLlib", "Stable-Baselines3", "Gymnasium"):
        assert any(framework in title and "Quickstart" in title for title in titles), titles


@pytest.mark.parametrize("section", [section.param() for section in sections()])
def test_what_the_readme_shows_is_what_happens(section: Section, tmp_path: Path) -> None:
    needs(*(["ray", "torch"] if section.ray else ["stable_baselines3"] if section.sb3 else []))
    (tmp_path / "examples").symlink_to(EXAMPLES)
    output = ""
    for language, content in section.blocks:
        if language == "python":
            (tmp_path / "quickstart.py").write_text(content)
            process = run(sys.executable, "quickstart.py", cwd=tmp_path)
            assert process.returncode == 0, process.stdout + process.stderr
            output = process.stdout
        elif language == "text":
            assert shape(output) == shape(content)
        elif language == "console":
            for command, expected in re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", content, re.MULTILINE):
                process = run("bash", "-c", command, cwd=tmp_path)
                assert shape(process.stdout) == shape(expected), process.stdout + process.stderr
