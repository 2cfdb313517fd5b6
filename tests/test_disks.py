"""A disk that is full, broken or not ours costs the ledger, says so once, and leaves the training as it is."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import Walk, drive, environment, run_python, walk, walks
from faulty_disk import ERRORS, FaultyDisk
from gymnasium.vector import SyncVectorEnv

from stepledger import LearnerLedger, LedgerError, LedgerVectorEnv, compare, read

try:
    from stable_baselines3 import A2C
    from stable_baselines3.common.vec_env import DummyVecEnv

    from stepledger.sb3 import LedgerCallback, LedgerVecEnv
except ImportError:  # the tests that need it are skipped
    A2C = None

NEEDS_SB3 = [pytest.mark.sb3, pytest.mark.skipif(A2C is None, reason="needs Stable-Baselines3")]
FLUSH = {"flush_every": 16}


def gymnasium_run(directory: Path) -> list[Any]:
    """Environments, vector env and learner; returns what the trainer was given."""
    envs = LedgerVectorEnv(
        SyncVectorEnv([functools.partial(walk, directory, i, keep_values=5, **FLUSH) for i in range(2)]), directory / "trainer.npz", **FLUSH
    )
    learner = LearnerLedger(directory / "learner.npz", **FLUSH)
    rng = np.random.default_rng(0)
    obs, _ = envs.reset(seed=0)
    fresh, given = np.zeros(2, bool), [obs]
    for step in range(30):
        actions = rng.integers(4, size=2)
        next_obs, *rest, _ = envs.step(actions)
        reward, terminated, truncated = rest
        took = ~fresh
        learner.transitions(obs[took], actions[took], reward[took], next_obs[took], terminated[took], truncated[took])
        obs, fresh = next_obs, terminated | truncated
        given += [next_obs, *rest]
        if step == 20:
            envs.flush()
            envs.call("flush")
    learner.close()
    envs.close()
    return given


def vecenv_run(directory: Path) -> list[Any]:
    makers = [functools.partial(walk, directory, i, keep_values=True, **FLUSH) for i in range(2)]
    envs = LedgerVecEnv(DummyVecEnv(makers), directory / "trainer.npz", keep_values=True, **FLUSH)
    rng = np.random.default_rng(0)
    given = [envs.reset()]
    for _ in range(30):
        given += envs.step(rng.integers(4, size=2))[:3]
    envs.close()
    return given


def callback_run(directory: Path) -> list[Any]:
    envs = DummyVecEnv([functools.partial(walk, directory, i, **FLUSH) for i in range(2)])
    model = A2C("MlpPolicy", envs, n_steps=5, policy_kwargs={"net_arch": [4]}, device="cpu", seed=0)
    callback = LedgerCallback(directory, **FLUSH)
    model.learn(40, callback=callback)
    envs.close()
    callback.close()
    return [value.numpy() for value in model.policy.state_dict().values()]


RUNS: dict[str, tuple[Callable[[Path], list[Any]], int]] = {
    "gymnasium": (gymnasium_run, 4),
    "LedgerVecEnv": (vecenv_run, 3),
    "LedgerCallback": (callback_run, 4),
}
#: How many of the calls of a run fail in CI; all of them with STEPLEDGER_LONG.
PICKED = {"gymnasium": 24, "LedgerVecEnv": 8, "LedgerCallback": 4}


@pytest.mark.parametrize("how", ["once", "torn", "from then on"])
@pytest.mark.parametrize("name", ["gymnasium", *(pytest.param(name, marks=NEEDS_SB3) for name in list(RUNS)[1:])])
def test_whichever_call_fails_training_goes_on_and_the_ledger_says_so(tmp_path: Path, name: str, how: str) -> None:
    run, recorders = RUNS[name]
    clean = FaultyDisk(tmp_path / "clean")
    with clean.mounted():
        expected = run(tmp_path / "clean")
    assert compare(tmp_path / "clean").exit_status == 0
    assert {call.split()[0] for call in clean.calls} >= {"open", "write"}
    long = bool(os.environ.get("STEPLEDGER_LONG"))
    calls = [at for at, call in enumerate(clean.calls) if how != "torn" or call.startswith("write")]
    offset = ["once", "torn", "from then on"].index(how)  # not the same calls in all three
    for at in calls if long else calls[offset :: -(-len(calls) // PICKED[name])]:
        disk = FaultyDisk(directory := tmp_path / f"{at}", at, how, ERRORS[at % len(ERRORS)])
        with warnings.catch_warnings(record=True) as caught, disk.mounted():
            warnings.simplefilter("always")
            given = run(directory)
        where = f"{clean.calls[at]}, call {at}"
        for one, other in zip(given, expected, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=where)
        said = [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]
        stopped = [message for message in said if " stopped, training goes on: " in message]
        assert len(stopped) <= (1 if how != "from then on" else recorders), (where, said)
        # What else is said is of ledgers that have nothing to be compared with.
        assert all(
            stopped and re.search("is not recorded, training goes on|not be compared|nothing was compared|holds no ledger", one)
            for one in set(said) - set(stopped)
        ), (where, said)
        assert len(said) == len(set(said)), (where, said)
        assert_marked(directory, said, where)
        shutil.rmtree(directory, ignore_errors=True)


def assert_marked(directory: Path, said: list[str], where: str) -> None:
    """The ledgers of a run are whole, or it was said which are not and they say so themselves; nothing differs."""
    for path in {path.with_suffix(".npz") for path in directory.glob("*.journal")} | set(directory.glob("*.npz")):
        try:
            ledger = read(path)
        except LedgerError:
            assert any(str(path) in message for message in said), (where, path)
            continue
        told = any(str(path) in message for message in said)
        assert ledger.open_end == told, (where, path, said)
    try:
        comparison = compare(directory)
    except LedgerError:
        assert said, where
        return
    assert not comparison.differences, (where, str(comparison))
    if said:
        assert comparison.exit_status in (2, 3), (where, said, str(comparison))
    else:
        assert comparison.exit_status == 0, (where, str(comparison))


@pytest.mark.parametrize("taken", ["env-0", "trainer", "learner"])
def test_a_device_that_is_full_from_the_first_byte_on(tmp_path: Path, taken: str) -> None:
    expected = gymnasium_run(tmp_path / "clean")
    directory = tmp_path / "full"
    directory.mkdir()
    (directory / f"{taken}.journal").symlink_to("/dev/full")
    with pytest.warns(RuntimeWarning) as caught:
        given = gymnasium_run(directory)
    for one, other in zip(given, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    said = [str(one.message) for one in caught]
    assert re.search(rf"{taken}\.npz stopped, training goes on: OSError: \[Errno 28\] No space left on device$", said[0])
    assert len(said) == (2 if taken == "trainer" else 1)  # without the vector env's ledger the learner's has nothing to look at
    assert_marked(directory, said, taken)


#: Mounts a file system of so many bytes, which goes away with the process, and says what is recorded there.
MOUNTED = """
import json, os, subprocess, sys, warnings
from pathlib import Path
from common import drive, walks
from stepledger import LedgerError, compare
directory, options = Path(sys.argv[1]), sys.argv[2]
subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory], check=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    envs = walks(directory / "run", n=2, flush_every=64)
    drive(envs, 1500)
    envs.close()
try:
    status, text = (comparison := compare(directory / "run")).exit_status, str(comparison)
except LedgerError as error:
    status, text = 2, str(error)
print(json.dumps([status, text, [str(one.message) for one in caught]]))
"""
UNSHARE = ["unshare", "--map-root-user", "--mount"]


@pytest.fixture(scope="session")
def can_mount() -> None:
    """Whether a file system can be mounted, in a namespace of its own."""
    with tempfile.TemporaryDirectory() as directory:
        command = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", directory]
        if shutil.which("unshare") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("no file system can be mounted here")


@pytest.mark.parametrize(
    ("options", "error"),
    [*((f"size={size}k", "No space left on device") for size in (8, 40, 100, 140)), ("nr_inodes=4", "No space left"), ("ro", "Read-only")],
)
def test_a_real_file_system_that_is_full_or_read_only(tmp_path: Path, can_mount: None, options: str, error: str) -> None:
    process = subprocess.run(
        [*UNSHARE, sys.executable, "-c", MOUNTED, str(tmp_path), options], capture_output=True, text=True, env=environment(), timeout=120
    )
    assert process.returncode == 0, process.stderr
    status, text, said = json.loads(process.stdout)
    assert 1 <= len(said) == len(set(said)) <= 3
    assert all(" stopped, training goes on: OSError" in message and error in message for message in said), said
    assert status in (2, 3), text


UNPRIVILEGED = """
import json, os, sys, warnings
from pathlib import Path
from common import drive, walks
if os.geteuid() == 0:
    os.seteuid(65534)  # root may write everywhere
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    envs = walks(Path(sys.argv[1]), n=2)
    drive(envs, 50)
    envs.close()
print(json.dumps([str(one.message) for one in caught]))
"""


@pytest.mark.parametrize("what", ["directory", "parent", "journal"])
def test_what_may_not_be_written_costs_its_ledger_alone(what: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:  # tmp_path is nobody else's, not even to look at
        parent = Path(temporary)
        parent.chmod(0o755)
        directory = parent / "run"
        if what != "parent":
            directory.mkdir()
            directory.chmod(0o777 if what == "journal" else 0o555)
        else:
            parent.chmod(0o555)
        if what == "journal":
            (directory / "env-0.journal").touch()
            (directory / "env-0.journal").chmod(0o444)
        said = json.loads(run_python(UNPRIVILEGED, directory).stdout)
        parent.chmod(0o755)
        assert len(said) == (1 if what == "journal" else 3)
        assert all(" stopped, training goes on: PermissionError: [Errno 13] Permission denied" in message for message in said), said


def second_learner(directory: Path) -> None:
    envs = walks(directory, n=1)
    obs, _ = envs.reset()
    next_obs, reward, terminated, truncated, _ = envs.step(np.zeros(1, np.int64))
    ledgers = [LearnerLedger(directory / "learner.npz") for _ in range(2)]
    for ledger in ledgers:
        ledger.transitions(obs, np.zeros(1, np.int64), reward, next_obs, terminated, truncated)
    for one in (*ledgers, envs):
        one.close()


def second_env(directory: Path) -> None:
    envs = LedgerVectorEnv(SyncVectorEnv([lambda: walk(directory, 0)]), directory / "trainer.npz")
    other = walk(directory, 0)
    drive(envs, 3)
    other.reset()
    for one in (other, envs):
        one.close()


def second_vector(directory: Path) -> None:
    both = [LedgerVectorEnv(SyncVectorEnv([lambda i=i: walk(directory, i)]), directory / "trainer.npz") for i in range(2)]
    for envs in both:
        drive(envs, 3)
    for envs in both:
        envs.close()


def second_vecenv(directory: Path) -> None:
    both = [LedgerVecEnv(DummyVecEnv([lambda i=i: walk(directory, i)]), directory / "trainer.npz") for i in range(2)]
    for envs in both:
        envs.reset()
    for envs in both:
        envs.close()


def second_callback(directory: Path) -> None:
    other = LedgerVecEnv(DummyVecEnv([Walk]), directory / "vector.npz")
    other.reset()
    model = A2C("MlpPolicy", DummyVecEnv([lambda: walk(directory, 0)]), n_steps=5, policy_kwargs={"net_arch": [4]}, device="cpu")
    callback = LedgerCallback(directory)
    model.learn(10, callback=callback)
    model.env.close()
    callback.close()
    other.close()


SECONDS = {"LedgerEnv": second_env, "LedgerVectorEnv": second_vector, "LearnerLedger": second_learner}
SECONDS_SB3 = {"LedgerVecEnv": second_vecenv, "LedgerCallback": second_callback}


@pytest.mark.parametrize("tap", [*SECONDS, *(pytest.param(tap, marks=NEEDS_SB3) for tap in SECONDS_SB3)])
def test_a_second_writer_of_one_name_is_refused_it_at_once_and_nothing_is_compared(tmp_path: Path, tap: str) -> None:
    with pytest.warns(RuntimeWarning) as told:
        {**SECONDS, **SECONDS_SB3}[tap](tmp_path)
    assert "is being recorded by another process or environment at this moment" in str(told[0].message)
    with pytest.raises(LedgerError, match="were recorded at the same time under one name"):
        compare(tmp_path)
