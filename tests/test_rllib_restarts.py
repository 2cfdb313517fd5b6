"""EnvRunners, sub-environments and aggregators that die are no difference, and what takes their place is recorded."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray")

from ray.rllib.algorithms.impala import IMPALAConfig  # noqa: E402
from rllib_common import HOPS, Walk, config, hop, record, sampling  # noqa: E402

from stepledger import Comparison, compare, read  # noqa: E402
from stepledger_ray import attach  # noqa: E402
from stepledger_ray.processes import TIMEOUT  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


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


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.long), "async"])
def test_a_killed_runner_is_no_difference_and_its_successor_is_recorded(tmp_path, mode):
    result = kill_a_runner(tmp_path, mode)
    assert result.equal, str(result)
    assert result.exit_status == 3
    assert list(tmp_path.glob("runner-1.100-vector.npz"))
    assert hop(result, HOPS[0]).streams >= 4


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_runners_killed_at_random_moments_cost_no_ledger_and_make_no_difference(tmp_path, kills):
    rng = np.random.default_rng(0)
    algorithm = attach(config(2).fault_tolerance(restart_failed_env_runners=True), tmp_path).build_algo()
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
    result = compare(tmp_path)
    assert result.equal, str(result)
    assert result.exit_status == 3
    assert hop(result, HOPS[1]).events > 240 * kills
    for path in tmp_path.glob("*.npz"):
        read(path)


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
