"""Sealing what killed processes have left."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from common import assert_refused

from stepledger import LedgerError, compare, read
from stepledger.cli import main
from stepledger.recover import recover
from stepledger.sealed import mark_sealed

SCRIPT = """
import os, signal, sys
import gymnasium as gym
from gymnasium.vector import SyncVectorEnv
from stepledger import LedgerEnv, LedgerVectorEnv

directory, keep_values = sys.argv[1], sys.argv[2] == "True"
envs = SyncVectorEnv([lambda i=i: LedgerEnv(gym.make("CartPole-v1"), directory, i, keep_values=keep_values) for i in range(3)])
envs = LedgerVectorEnv(envs, directory + "/trainer.npz", keep_values=keep_values)
envs.reset(seed=0)
for step in range(400):
    if step == 200:
        envs.flush()
    if step == 300:
        envs.write_journal()
        envs.call("write_journal")
    envs.step(envs.action_space.sample())
print("recorded", flush=True)
signal.pause() if sys.argv[3] == "pause" else os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(directory: Path, keep_values: bool = False) -> None:
    process = subprocess.run([sys.executable, "-c", SCRIPT, str(directory), str(keep_values), "kill"], stdout=subprocess.DEVNULL)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("keep_values", [False, True])
def test_what_was_killed_compares_the_same_when_it_is_sealed(tmp_path: Path, keep_values: bool) -> None:
    killed(tmp_path, keep_values)
    before, ledgers = compare(tmp_path), {path.stem: read(path) for path in tmp_path.glob("*.journal")}
    assert before.exit_status == 3
    outcomes = recover(tmp_path)
    assert {(one.path.stem, one.outcome, one.events) for one in outcomes} == {
        (name, "sealed", ledger.events) for name, ledger in ledgers.items()
    }
    assert not list(tmp_path.glob("*.journal"))
    after = compare(tmp_path)
    assert after.exit_status == 3
    assert after.events == before.events
    for name, ledger in ledgers.items():
        sealed = read(tmp_path / f"{name}.npz")
        for key, stream in ledger.streams.items():
            for column, values in stream.columns.items():
                np.testing.assert_array_equal(values, sealed.streams[key].columns[column])
            for column, values in stream.values.items():
                np.testing.assert_array_equal(values, sealed.streams[key].values[column])


def test_what_is_being_recorded_is_left_alone(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), "False", "pause"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "recorded\n"
    try:
        files = {path: path.stat().st_size for path in tmp_path.iterdir()}
        assert {one.outcome for one in recover(tmp_path)} == {"open"}
        assert {path: path.stat().st_size for path in tmp_path.iterdir()} == files
    finally:
        process.kill()
        process.wait()
    assert {one.outcome for one in recover(tmp_path)} == {"sealed"}


def test_one_damaged_journal_does_not_keep_the_others_from_being_sealed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed(tmp_path)
    data = bytearray((tmp_path / "env-1.journal").read_bytes())
    data[:40] = os.urandom(40)
    (tmp_path / "env-1.journal").write_bytes(data)
    (tmp_path / "env-2.journal").write_bytes(b"")
    for path in tmp_path.glob("env-[12].npz"):
        path.unlink()
    assert main(["recover", str(tmp_path)]) == 2
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2].split(",")[0] for line in said] == ["sealed", "damaged", "empty", "sealed"], said
    assert (tmp_path / "env-1.journal").read_bytes() == bytes(data)


def test_where_all_is_sealed_there_is_nothing_to_recover(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed(tmp_path)
    recover(tmp_path)
    for path in (tmp_path, tmp_path / "env-0.npz"):
        assert recover(path) == []
        assert main(["recover", str(path)]) == 0
        assert "nothing to recover" in capsys.readouterr().out


def test_where_there_is_no_ledger_recovering_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("no ledger")
    with pytest.raises(LedgerError, match="holds no ledgers"):
        recover(tmp_path)
    assert main(["recover", str(tmp_path)]) == 2
    assert "holds no ledgers" in capsys.readouterr().err


@pytest.mark.parametrize("closed", [True, False])
def test_a_journal_of_another_recording_beside_a_sealed_ledger_is_named_and_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], closed: bool
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for directory in (one, other):
        killed(directory)
        (directory / "env-0.npz").unlink(missing_ok=True)  # of a flush
    recover(one)
    if closed:
        mark_sealed(one / "env-0.npz", closed=True)
    shutil.copy(other / "env-0.journal", one)
    files = {path: path.read_bytes() for path in one.iterdir()}
    assert "of two recordings" in assert_refused(capsys, "compare", one)
    assert main(["recover", str(one)]) == 2
    assert "of two recordings" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in one.iterdir()} == files
