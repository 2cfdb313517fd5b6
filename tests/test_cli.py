"""The command line: its exit status is the contract, and what it can't do is one sentence."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import Walk, assert_refused, drive, environment, rewrite, run_python, run_walks, stepledger, walk, walks
from gymnasium.vector import SyncVectorEnv

from stepledger import LearnerLedger, LedgerEnv, LedgerVectorEnv, compare, read
from stepledger.cli import main
from stepledger.recorder import versions


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("equal")
    run_walks(directory)
    return directory


@pytest.fixture(scope="module")
def different(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("different")
    run_walks(directory)
    with np.load(directory / "trainer.npz") as archive:
        column = archive["h_obs"].copy()
    column[5] ^= 1
    rewrite(directory / "trainer.npz", {"h_obs": column})
    return directory


@pytest.fixture(scope="module")
def incomplete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("incomplete")
    code = """
import os, signal, sys
from pathlib import Path
import stepledger.recorder
from common import drive, walks
stepledger.recorder.FLUSH_EVENTS = 50
envs = walks(Path(sys.argv[1]), n=2)
drive(envs, 200)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_python(code, directory, check=False).returncode == -signal.SIGKILL
    return directory


def test_each_exit_status_and_what_is_said_with_it(equal: Path, different: Path, incomplete: Path, tmp_path: Path) -> None:
    for directory, status, last in [
        (equal, 0, "no difference"),
        (different, 1, "1 of 3 envs differ"),
        (incomplete, 3, "open end"),
    ]:
        arguments = [directory] if status else [directory, directory / "trainer.npz"]
        process = stepledger("compare", *arguments)
        assert process.returncode == status
        assert last in process.stdout.splitlines()[-1]
        assert process.stdout == f"{compare(*arguments)}\n"
        hint = f"stepledger: the steps around each difference, in a browser: stepledger compare {directory} --html report.html\n"
        assert process.stderr == (hint if status == 1 else "")
    process = stepledger("compare", tmp_path / "nowhere")
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == f"stepledger: {tmp_path / 'nowhere'} is not there: name the directory that the ledgers were written to.\n"


def test_json_says_the_same(equal: Path, different: Path, incomplete: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for directory, status in [(equal, 0), (different, 1), (incomplete, 3)]:
        assert main(["compare", str(directory), "--format", "json"]) == status
        result = json.loads(capsys.readouterr().out)
        assert result == json.loads(json.dumps(compare(directory).to_dict()))
        assert (result["exit_status"], result["equal"], result["complete"]) == (status, status != 1, status != 3)
    assert_refused(capsys, "compare", tmp_path / "nowhere", "--format", "json")


@pytest.mark.parametrize("arguments", [["compare", ""], ["compare", "", "trainer.npz"], ["compare", ".", ""], ["info", ""]])
def test_an_empty_path_is_not_the_current_directory(equal: Path, arguments: list[str], monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(equal)
    assert "an empty path was given" in assert_refused(capsys, *arguments)


def test_info_of_a_learner_tells_of_its_transitions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    envs, ledger = walks(tmp_path, n=2), LearnerLedger(tmp_path / "learner.npz")
    obs, _ = envs.reset(seed=0)
    following, *row = envs.step(np.zeros(2, np.int64))
    ledger.transitions(obs, np.zeros(2), row[0], following, *row[1:3])
    for one in (envs, ledger):
        one.close()
    assert main(["info", str(tmp_path / "learner.npz")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\n  transitions +2\n", out)
    assert "episodes" not in out
    assert "envs" not in out


def test_one_of_a_thing_is_said_in_the_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    envs = walks(tmp_path, n=1)
    envs.reset(seed=0)
    envs.close()
    assert main(["compare", str(tmp_path)]) == main(["info", str(tmp_path / "trainer.npz")]) == 0
    rewrite(tmp_path / "trainer.npz", {"h_obs": np.ones(1, np.uint64)})
    assert main(["compare", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "1 event of 1 env compared" in out
    assert "1 in 1 stream, 1 episode\n" in out
    assert "1 of 1 env differs between env -> vector (1 difference)" in out
    assert not re.search(r"\b1 (events|envs|streams|episodes|differences)\b", out)


def test_the_installed_command_is_the_same(equal: Path) -> None:
    command = Path(sysconfig.get_path("scripts")) / ("stepledger.exe" if os.name == "nt" else "stepledger")
    if not command.exists():
        pytest.skip("it is not installed here")
    process = subprocess.run([command, "compare", equal], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stdout) == (0, stepledger("compare", equal).stdout)


@pytest.mark.parametrize(
    "arguments", [[], ["compare"], ["compare", "a", "b", "c"], ["compare", "a", "--format", "xml"], ["look"], ["info"]]
)
def test_a_call_that_makes_no_sense_shows_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: stepledger")


def test_help_tells_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["compare", "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "0 equal and complete; 1 different; 2 can't be compared; 3 equal as far as recorded" in text


def test_what_cannot_be_compared_is_one_sentence(equal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "evaluations.npz").write_bytes(b"PK no zip")
    alone = walk(tmp_path / "alone", 0)
    alone.reset()
    alone.close()
    assert "is not there" in assert_refused(capsys, "compare", tmp_path / "no")
    assert "holds no ledgers" in assert_refused(capsys, "compare", tmp_path / "empty")
    assert "holds no ledger of an environment" in assert_refused(capsys, "compare", tmp_path / "empty", equal / "trainer.npz")
    assert "evaluations.npz is no ledger" in assert_refused(capsys, "compare", tmp_path / "foreign")
    assert "only ledgers of the tap 'env'" in assert_refused(capsys, "compare", tmp_path / "alone")
    assert "is not there" in assert_refused(capsys, "compare", tmp_path / "alone", tmp_path / "alone" / "trainer.npz")
    assert "is a directory" in assert_refused(capsys, "compare", equal, ".")
    assert "different runs" in assert_refused(
        capsys, "compare", tmp_path / "other" if run_walks(tmp_path / "other") else "", equal / "trainer.npz"
    )


def test_one_index_for_two_environments_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    envs = LedgerVectorEnv(SyncVectorEnv([lambda: walk(tmp_path, 0)] * 2), tmp_path / "trainer.npz")
    with pytest.warns(RuntimeWarning, match="give each environment an index"):
        drive(envs, 5)
    envs.close()
    assert "were recorded at the same time under one name" in assert_refused(capsys, "compare", tmp_path)


def test_another_version_of_the_format_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_walks(tmp_path, n=1)
    rewrite(tmp_path / "env-0.npz", format=99)
    message = assert_refused(capsys, "compare", tmp_path)
    assert "env-0.npz: format 99 is not the 1, 2 or 3 that this version reads" in message
    assert message == assert_refused(capsys, "info", tmp_path / "env-0.npz")


def closed_pipe(*arguments: Any, unbuffered: str) -> tuple[int, str]:
    """Run the command with a reader that has gone before anything was written."""
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-m", "stepledger", *map(str, arguments)],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env={**environment(), "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writing)
    return process.returncode, process.stderr


@pytest.mark.skipif(os.name != "posix", reason="pipes are other things elsewhere")
def test_a_reader_that_has_gone_is_no_error_to_tell_of(equal: Path, tmp_path: Path) -> None:
    for arguments, unbuffered in [(["compare", equal], ""), (["compare", equal, "--format", "json"], "1"), (["info", equal], "")]:
        status, err = closed_pipe(*arguments, unbuffered=unbuffered)
        assert err == ""
        assert status == 2  # 1 would say that there is a difference
    run_walks(tmp_path, n=40, steps=3)  # more than a buffer holds
    assert closed_pipe("info", tmp_path, unbuffered="") == (2, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device here")
def test_output_that_cannot_be_written_is_one_sentence(equal: Path) -> None:
    with open("/dev/full", "w") as full:
        for unbuffered in ("", "1"):
            process = subprocess.run(
                [sys.executable, "-m", "stepledger", "compare", str(equal)],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
                env={**environment(), "PYTHONUNBUFFERED": unbuffered},
            )
            assert process.returncode == 2
            assert process.stderr.startswith("stepledger: the output can't be written (No space left on device): ")
            assert process.stderr.count("\n") == 1


def test_names_that_the_terminal_cannot_show_are_no_error(equal: Path, tmp_path: Path) -> None:
    directory = tmp_path / "läufe 漢字"
    directory.mkdir()
    for path in equal.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    for arguments, status in [(["info", directory], 0), (["compare", directory], 0), (["compare", directory, directory / "no"], 2)]:
        process = subprocess.run(
            [sys.executable, "-m", "stepledger", *map(str, arguments)],
            capture_output=True,
            timeout=60,
            env={**environment(), "PYTHONIOENCODING": "ascii"},
        )
        assert process.returncode == status
        assert b"Traceback" not in process.stderr


def test_info_says_what_a_ledger_holds(equal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(equal / "trainer.npz")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    first, *lines = out.splitlines()
    assert first == str(equal / "trainer.npz")
    told = dict(re.match(r"  (\S+) +(.*)", line).groups() for line in lines)  # type: ignore[union-attr]
    assert told["tap"] == "vector"
    assert re.fullmatch(r"\d+ in 3 streams, \d+ episodes", told["events"])
    assert told["envs"] == "0-2"
    assert told["observation"] == "Box(dtype=float32, shape=[3])"
    assert told["action"] == "Discrete(n=4, start=0)"
    assert told["reward"] == "float32"
    assert told["digest"] == "xxh3_64"
    assert told["values"] == "not kept"
    assert re.match(r"stepledger \S+, gymnasium \S+, numpy \S+", told["versions"])
    assert told["state"] == "closed"


def test_info_of_a_directory_tells_of_each_ledger(equal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(equal)]) == 0
    paragraphs = capsys.readouterr().out.split("\n\n")
    assert [Path(one.splitlines()[0]).name for one in paragraphs] == ["env-0.npz", "env-1.npz", "env-2.npz", "trainer.npz"]


def test_info_tells_the_state_of_a_recording(incomplete: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def state(path: Path) -> str:
        assert main(["info", str(path)]) == 0
        return capsys.readouterr().out.splitlines()[-1].removeprefix("  state").strip()

    assert state(incomplete / "env-0.npz") == "never closed: what came after the last block is lost"
    envs = walks(tmp_path, n=1)
    drive(envs, 5)
    envs.flush()
    assert state(tmp_path / "trainer.npz") == "written by flush(), recording goes on"
    envs.close()
    assert state(tmp_path / "trainer.npz") == "closed"
    rewrite(tmp_path / "trainer.npz", stopped="OSError: no space", closed=False)
    assert state(tmp_path / "trainer.npz").startswith("recording was stopped (OSError: no space)")


def test_a_recovered_journal_does_not_speak_of_an_error(incomplete: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(incomplete, tmp_path, dirs_exist_ok=True)
    assert main(["recover", str(tmp_path)]) == 0
    assert main(["info", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("recording was stopped (its process was stopped before it closed the ledger") == 3
    assert "error" not in out


def test_a_damaged_ledger_hides_no_other_from_info(equal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(equal, tmp_path, dirs_exist_ok=True)
    (tmp_path / "env-1.npz").write_bytes((tmp_path / "env-1.npz").read_bytes()[:200])
    (tmp_path / "env-3.journal").touch()
    assert main(["info", str(tmp_path)]) == 2
    found = {Path(one.splitlines()[0]).name: one.splitlines()[1].split()[0] for one in capsys.readouterr().out.split("\n\n")}
    assert found == {"env-0.npz": "tap", "env-1.npz": "unreadable", "env-2.npz": "tap", "env-3.npz": "empty", "trainer.npz": "tap"}
    (tmp_path / "env-1.npz").unlink()
    assert main(["info", str(tmp_path)]) == 0  # what is empty can be read


def test_info_as_json_says_the_same(equal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(equal, tmp_path, dirs_exist_ok=True)
    (tmp_path / "env-1.npz").write_text("no")
    assert main(["info", str(tmp_path), "--format", "json"]) == 2
    ledgers = {Path(one["path"]).name: one for one in json.loads(capsys.readouterr().out)["ledgers"]}
    assert "is no ledger" in ledgers["env-1.npz"]["error"]
    told, there = ledgers["trainer.npz"], read(tmp_path / "trainer.npz")
    assert (told["tap"], told["events"], told["closed"], told["open_end"]) == ("vector", there.events, True, False)
    assert [(one["env"], one["events"]) for one in told["streams"]] == [(key.env, len(one)) for key, one in there.streams.items()]
    assert told["observation_space"] == there.meta["observation_space"]
    assert told["warnings"] == []
    assert_refused(capsys, "info", tmp_path / "nowhere", "--format", "json")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"stepledger {versions()['stepledger']}\n"


def test_ledgers_are_read_once_however_much_is_reported(equal: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a run that goes on, a second look would see another state than what was compared."""
    names = []
    monkeypatch.setattr(sys.modules["stepledger.compare"], "read", lambda path: names.append(path) or read(path))
    html = (
        ["--html", str(tmp_path / "report.html")] if importlib.util.find_spec("jinja2") and importlib.util.find_spec("matplotlib") else []
    )
    assert main(["compare", str(equal), "-v", *html]) == 0
    assert len(names) == len(set(names)) == 4


def test_info_of_what_is_no_ledger_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no ledgers" in assert_refused(capsys, "info", tmp_path)
    assert "is not there" in assert_refused(capsys, "info", tmp_path / "env-0.npz")
    (tmp_path / "env-0.npz").write_text("no")
    assert "is no ledger" in assert_refused(capsys, "info", tmp_path / "env-0.npz")


def test_info_describes_nested_spaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gymnasium import spaces

    space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Tuple((spaces.MultiBinary(2), spaces.Text(4)))})
    env = LedgerEnv(Walk(observation_space=space), tmp_path, 0, keep_values=True)
    env.reset()
    env.close()
    assert main(["info", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "Dict(a: Discrete(n=3, start=0), b.0: MultiBinary(dtype=int8, shape=[2]), b.1: Text(max_length=4))" in out
    assert re.search(r"values +kept", out)


class Terminal:
    """A standard error that says it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("rich", ["with", "without"])
@pytest.mark.parametrize("slow", [False, True])
def test_a_terminal_gets_a_progress_bar_only_if_it_takes_long_and_rich_is_there(
    equal: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rich: str, slow: bool
) -> None:
    if rich == "with":
        pytest.importorskip("rich.progress")
    else:
        for name in ("rich", "rich.console", "rich.progress"):
            monkeypatch.setitem(sys.modules, name, None)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    if slow:
        clock = iter(range(0, 10_000, 2))
        monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    assert main(["compare", str(equal)]) == 0
    assert capsys.readouterr().out == f"{compare(equal)}\n"
    assert ("comparing" in terminal.text) == (slow and rich == "with")


@pytest.mark.parametrize(
    ("redirect", "what", "status"),
    [
        (">&-", "equal", 0),
        ("2>&-", "equal", 0),
        (">&- 2>&-", "equal", 0),
        ("2>&-", "nowhere", 2),
        ("2>/dev/full", "nowhere", 2),
        (">/dev/full", "equal", 2),
        (">/dev/full 2>&-", "equal", 2),
    ],
)
def test_the_status_is_right_whatever_the_output_streams_are(tmp_path: Path, redirect: str, what: str, status: int) -> None:
    """A daemon may have none, a disk may be full."""
    run_walks(tmp_path / "equal")
    command = f"{shlex.quote(sys.executable)} -m stepledger compare {shlex.quote(str(tmp_path / what))} {redirect}"
    process = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment())
    assert process.returncode == status, process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("command", ["compare", "info"])
def test_a_path_that_can_not_be_one_is_named(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert "File name too long" in assert_refused(capsys, command, "a" * 5000)


def test_what_is_no_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_walks(tmp_path)
    os.mkfifo(tmp_path / "pipe.npz")
    assert compare(tmp_path).exit_status == 0
    assert "is no file" in assert_refused(capsys, "info", tmp_path / "pipe.npz")
    assert "is no file" in assert_refused(capsys, "info", "/dev/zero")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a directory that is in use can't be removed")
def test_an_error_that_nobody_expected_is_one_sentence_and_not_the_status_of_a_difference(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    command = f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && {sys.executable} -m stepledger compare . trainer.npz"
    process = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment(), timeout=60)
    assert (process.returncode, process.stdout) == (2, "")
    assert re.fullmatch(r"stepledger: this failed .*FileNotFoundError: .*, in compare\.py:\d+\): please report .*\.\n", process.stderr)
