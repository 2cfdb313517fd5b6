"""EnvRunners, sub-environments and aggregators that die are no difference, and what takes their place is recorded."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray")

from crash_runs import Witness, columns  # noqa: E402
from ray.rllib.algorithms.impala import IMPALAConfig  # noqa: E402
from ray.rllib.callbacks.callbacks import RLlibCallback  # noqa: E402
from rllib_common import HOPS, Walk, config, hop, record, sampling  # noqa: E402

from stepledger import Comparison, LedgerError, compare, read  # noqa: E402
from stepledger_ray import attach, finish, processes  # noqa: E402
from stepledger_ray.processes import TIMEOUT  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


@pytest.mark.long
def test_an_aggregator_that_was_restarted_gets_its_tap_again(tmp_path):
    one = sampling(IMPALAConfig().training(train_batch_size_per_learner=80), 1)
    one.learners(num_learners=1, num_aggregator_actors_per_learner=2)
    algorithm = attach(one, tmp_path).build_algo()
    algorithm.train()
    manager = algorithm._aggregator_actor_manager
    first = manager.actor_ids()[0]
    (pid,) = [one.get() for one in manager.foreach_actor(lambda actor: os.getpid(), remote_actor_ids=[first])]
    os.kill(pid, signal.SIGKILL)
    again = []
    for _ in range(60):
        with contextlib.suppress(ray.exceptions.RayError):  # RLlib may raise it once, while the actor is away
            algorithm.train()
        again = [path for path in tmp_path.glob("learner-*") if not path.name.startswith(("learner-0.0.", "learner-1.0."))]
        if again:
            break
        time.sleep(0.2)
    algorithm.train()
    algorithm.stop()
    result = compare(tmp_path)
    assert result.equal, str(result)
    assert [path.stem for path in again] == [path.stem for path in again if path.with_suffix(".npz").exists()] != []


def kill_a_runner(tmp_path: Path, mode: str) -> Comparison:
    one = config(2, mode=mode).fault_tolerance(restart_failed_env_runners=True)
    algorithm = attach(one, tmp_path).build_algo()
    pids = algorithm.env_runner_group.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False)
    algorithm.train()
    os.kill(pids[0], signal.SIGKILL)
    for _ in range(60):
        algorithm.train()
        if list(tmp_path.glob("runner-1.1*")):
            break
    algorithm.train()
    algorithm.stop()
    return compare(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_runner_is_no_difference_and_its_successor_is_recorded(tmp_path, mode):
    result = kill_a_runner(tmp_path, mode)
    assert result.equal, str(result)
    assert result.exit_status == 3
    assert list(tmp_path.glob("runner-1.100-vector.npz"))
    assert hop(result, HOPS[0]).streams >= 4


class WitnessedWalk(Walk):
    """Writes down itself what happens, before anybody is told; no two of its processes are alike."""

    def __init__(self, config: Any) -> None:
        super().__init__({"box": False})
        name = f"{config.worker_index}-{uuid.uuid4().hex}.witness"
        self._witness = Witness(Path(config["witnesses"], name), 3)

    def reset(self, **options: Any) -> Any:
        super().reset(seed=int.from_bytes(os.urandom(4), "big"))
        obs = self.np_random.standard_normal(3).astype(np.float32)
        self._witness.write(kind=0, action=0, obs=obs, reward=0, terminated=False, truncated=False)
        return obs, {}

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        self._witness.write(kind=1, action=int(action), obs=obs, reward=reward, terminated=terminated, truncated=truncated)
        return obs, reward, terminated, truncated, info


def lost(directory: Path, witnesses: Path) -> list[int]:
    """For each environment that recorded, how many events its ledger lacks; what it has is a beginning of what happened there."""
    numbers = []
    for path in sorted(directory.glob("runner-*-env-*")):
        ledger = read(path)
        (key,) = ledger.streams
        found = [columns(Witness.read(one, 3), 3) for one in witnesses.glob(f"{key.runner}-*.witness")]
        stream = ledger.streams[key]
        if not len(stream):  # killed before its first block, so that nothing tells which one's it is
            numbers.append(min(len(one["kind"]) for one in found))
            continue
        (happened,) = [one for one in found if len(one["kind"]) and one["h_obs"][0] == stream.columns["h_obs"][0]]
        assert len(stream) <= len(happened["kind"])
        for name in ("kind", "h_obs", "h_act", "terminated", "truncated"):
            np.testing.assert_array_equal(stream.columns[name], happened[name][: len(stream)], err_msg=f"{path} {name}")
        numbers.append(len(happened["kind"]) - len(stream))
    return numbers


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_runners_killed_at_random_moments_cost_no_ledger_and_make_no_difference(tmp_path, kills):
    rng, run = np.random.default_rng(0), tmp_path / "run"
    one = config(2, env=WitnessedWalk, witnesses=str(tmp_path)).fault_tolerance(restart_failed_env_runners=True)
    algorithm = attach(one, run, flush_every=20).build_algo()
    group, killed = algorithm.env_runner_group, 0
    deadline = time.monotonic() + 60 * kills
    while killed < kills and time.monotonic() < deadline:
        pids = group.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False, timeout_seconds=20)
        if len(pids) == 2:  # both are there again
            timer = threading.Timer(rng.uniform(0, 2), os.kill, (pids[int(rng.integers(2))], signal.SIGKILL))
            timer.start()
            while timer.is_alive():
                algorithm.train()
            killed += 1
        algorithm.train()
    assert killed == kills
    began = time.monotonic()
    algorithm.stop()
    assert time.monotonic() - began < 2 * TIMEOUT
    result = compare(run)
    assert result.equal, str(result)
    assert result.exit_status == 3
    assert hop(result, HOPS[1]).events > 240 * kills
    assert list(run.glob("runner-[12].?00-vector.npz")) or list(run.glob("runner-[12].??00-vector.npz"))  # the last ones' successors
    for path in run.glob("*.npz"):
        read(path)
    numbers = lost(run, tmp_path)
    print(f"\n{killed} EnvRunners killed, {hop(result, HOPS[0]).events:,} events compared, {max(numbers)} events of an env lost at most")
    assert len(numbers) >= 2 * (2 + kills) - 2
    assert max(numbers) <= 20


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_a_learner_that_is_killed_makes_no_difference(tmp_path, seed):
    """Training ends with it; what it had written down is a part of what was sampled."""
    one = config(1, env=WitnessedWalk, witnesses=str(tmp_path)).learners(num_learners=1)
    algorithm = attach(one, tmp_path / "run", flush_every=20).build_algo()
    algorithm.train()
    (pid,) = [one.get() for one in algorithm.learner_group.foreach_learner(lambda learner: os.getpid())]
    timer = threading.Timer(np.random.default_rng(seed).uniform(0, 1), os.kill, (pid, signal.SIGKILL))
    timer.start()
    with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
        for _ in range(30):
            algorithm.train()
            if not timer.is_alive():
                algorithm.train()
                break
    with contextlib.suppress(ray.exceptions.RayError):
        algorithm.stop()
    result = compare(tmp_path / "run")
    assert result.equal, str(result)
    assert result.exit_status == 3
    assert hop(result, HOPS[2]).unknown
    assert lost(tmp_path / "run", tmp_path) == [0, 0]


def pids(algorithm: Any) -> list[int]:
    return algorithm.env_runner_group.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False)


class Silent(RLlibCallback):
    """Has an EnvRunner stand still before it can be told where to record."""

    pid = 0

    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        Silent.pid = pids(algorithm)[0]
        os.kill(Silent.pid, signal.SIGSTOP)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for long."""
    monkeypatch.setattr(processes, "TIMEOUT", 2.0)
    monkeypatch.setattr(processes, "_LEAST", 0.5)


@pytest.mark.long
@pytest.mark.parametrize("again", [True, False])
def test_a_runner_that_gives_no_answer_when_it_is_told_is_named_and_heard_later(tmp_path, impatient, caplog, again):
    algorithm = attach(config(2).callbacks(Silent), tmp_path).build_algo()
    assert "EnvRunner 1 gave no answer in time, and will not be recorded until there is one" in caplog.text
    if again:
        os.kill(Silent.pid, signal.SIGCONT)
        algorithm.train()
        result = finish(algorithm)
        assert result.exit_status == 0, str(result)
        assert result.hops[0].streams == 4
    else:
        with pytest.raises(LedgerError):
            finish(algorithm)
        os.kill(Silent.pid, signal.SIGKILL)
    algorithm.stop()


def test_a_build_where_no_runner_answers_is_refused(tmp_path, impatient):
    with pytest.raises(LedgerError, match="EnvRunner 1 gave no answer in time: see why, and build again"):
        attach(config(1).callbacks(Silent), tmp_path).build_algo()
    os.kill(Silent.pid, signal.SIGKILL)
    assert not (tmp_path / "run.json").exists()


@pytest.mark.long
def test_processes_that_give_no_answer_at_the_end_are_named_and_waited_for_once(tmp_path, impatient):
    one = config(3).learners(num_learners=2)
    algorithm = attach(one, tmp_path).build_algo()
    algorithm.train()
    learners = [one.get() for one in algorithm.learner_group.foreach_learner(lambda learner: os.getpid())]
    stopped = [*pids(algorithm)[:2], *learners]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    result = finish(algorithm)
    assert time.monotonic() - began < 10
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert result.equal
    assert result.exit_status == 3
    for name in ("EnvRunner 1", "EnvRunner 2", "Learner 0", "Learner 1"):
        assert f"what {name} recorded last, which gave no answer in time" in result.hops[0].unknown
    assert not any("EnvRunner 3" in sentence for sentence in result.hops[0].unknown)
    algorithm.stop()
    assert compare(tmp_path).exit_status == 0


class Failing(Walk):
    """One of these fails once."""

    steps = 0

    def step(self, action: Any) -> Any:
        Failing.steps += 1
        if Failing.steps == 61:
            raise RuntimeError("failed on purpose")
        return super().step(action)


def test_a_vector_env_that_is_made_again_after_a_failure_is_recorded_on(tmp_path):
    Failing.steps = 0
    one = config(env=Failing).fault_tolerance(restart_failed_sub_environments=True)
    result = record(tmp_path, one)
    assert result.equal, str(result)
    assert len(list(tmp_path.glob("runner-0.*-vector.npz"))) > 1
    assert hop(result, HOPS[0]).streams > 2
