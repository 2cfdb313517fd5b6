"""What each algorithm learns from is found again among what was sampled, through replay buffers, aggregators and restarts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

ray = pytest.importorskip("ray")

from ray.rllib.algorithms.appo import APPOConfig  # noqa: E402
from ray.rllib.algorithms.bc import BCConfig  # noqa: E402
from ray.rllib.algorithms.cql import CQLConfig  # noqa: E402
from ray.rllib.algorithms.dqn import DQNConfig  # noqa: E402
from ray.rllib.algorithms.impala import IMPALAConfig  # noqa: E402
from ray.rllib.algorithms.iql import IQLConfig  # noqa: E402
from ray.rllib.algorithms.marwil import MARWILConfig  # noqa: E402
from ray.rllib.algorithms.sac import SACConfig  # noqa: E402
from ray.rllib.env.single_agent_episode import SingleAgentEpisode  # noqa: E402
from test_rllib import HOPS, Corridor, Walk, config, hop, record  # noqa: E402

from stepledger import Comparison, LedgerError, compare, read  # noqa: E402
from stepledger_ray import attach  # noqa: E402
from stepledger_ray.nodes import TIMEOUT  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

PRIORITIZED, UNIFORM = "PrioritizedEpisodeReplayBuffer", "EpisodeReplayBuffer"


def sampling(one: Any, runners: int = 0, mode: str = "sync", **env_config: Any) -> Any:
    return (
        one.environment(Walk, env_config=env_config)
        .env_runners(
            num_env_runners=runners, num_envs_per_env_runner=2, rollout_fragment_length=20, gym_env_vectorize_mode=gym.VectorizeMode(mode)
        )
        .rl_module(model_config={"fcnet_hiddens": [8]})
        .reporting(min_sample_timesteps_per_iteration=100, min_time_s_per_iteration=0)
        .debugging(seed=0)
    )


def replaying(one: Any, buffer: Any, n_step: Any = 1) -> Any:
    return one.training(
        n_step=n_step,
        train_batch_size_per_learner=32,
        num_steps_sampled_before_learning_starts=50,
        replay_buffer_config={"type": buffer, "capacity": 1000},
    )


CASES: dict[str, Callable[[], Any]] = {
    "DQN, prioritized, 1 step": lambda: sampling(replaying(DQNConfig(), PRIORITIZED), box=False),
    "DQN, prioritized, 3 steps": lambda: sampling(replaying(DQNConfig(), PRIORITIZED, 3), mode="async", box=False),
    "DQN, prioritized, 1 to 4 steps": lambda: sampling(replaying(DQNConfig(), PRIORITIZED, (1, 5)), box=False).env_runners(
        rollout_fragment_length="auto"
    ),
    "DQN, observations that repeat": lambda: sampling(replaying(DQNConfig(), PRIORITIZED)).environment(Corridor),
    "DQN, observations that repeat, 3 steps": lambda: sampling(replaying(DQNConfig(), PRIORITIZED, 3)).environment(Corridor),
    "DQN, uniform": lambda: sampling(replaying(DQNConfig(), UNIFORM), 1, box=False),
    "SAC, uniform": lambda: sampling(replaying(SACConfig(), UNIFORM), mode="async"),
    "TQC, uniform": lambda: sampling(replaying(pytest.importorskip("ray.rllib.algorithms.tqc").TQCConfig(), UNIFORM)),
    "APPO": lambda: sampling(APPOConfig().training(train_batch_size_per_learner=80), 1),
    "IMPALA, no aggregator": lambda: sampling(
        IMPALAConfig().learners(num_aggregator_actors_per_learner=0).training(train_batch_size_per_learner=80), 1
    ),
    "IMPALA, two aggregators": lambda: sampling(
        IMPALAConfig().learners(num_learners=1, num_aggregator_actors_per_learner=2).training(train_batch_size_per_learner=80), 1
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_clean_run_is_silent_and_its_coverage_adds_up(tmp_path, case):
    result = record(tmp_path, CASES[case](), iterations=2)
    assert result.exit_status == 0, str(result)
    learner = hop(result, HOPS[2])
    coverage = learner.coverage
    assert learner.events > 50
    assert coverage["sampled"] == coverage["learned_once"] + coverage["learned_more_than_once"] + coverage["never_learned"]
    if not case.startswith(("DQN", "SAC", "TQC")):
        assert coverage["learned_more_than_once"] == 0


def test_two_learners_share_what_was_sampled(tmp_path):
    result = record(tmp_path, config().learners(num_learners=2))
    assert result.exit_status == 0, str(result)
    coverage = hop(result, HOPS[2]).coverage
    assert coverage["learned_once"] == coverage["sampled"] > 0
    assert len(list(tmp_path.glob("learner-*.npz"))) == 2


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Episodes as RLlib's offline algorithms read them."""
    msgpack, numpy_ = pytest.importorskip("msgpack"), pytest.importorskip("msgpack_numpy")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows, env = [], Walk()
    for seed in range(20):
        episode = SingleAgentEpisode(observation_space=env.observation_space, action_space=env.action_space)
        episode.add_env_reset(*env.reset(seed=seed))
        while not episode.is_done:
            action = env.action_space.sample()
            obs, reward, terminated, truncated, info = env.step(action)
            more = {"action_logp": np.float32(-1)}
            episode.add_env_step(obs, action, reward, info, terminated=terminated, truncated=truncated, extra_model_outputs=more)
        rows.append(msgpack.packb(episode.to_numpy().get_state(), default=numpy_.encode))
    path = tmp_path_factory.mktemp("dataset")
    parquet.write_table(arrow.table({"item": rows}), path / "episodes.parquet")
    return str(path)


def reading(dataset: str) -> dict[str, Any]:
    """Read the episodes, by as few processes as can be."""
    return {
        "input_": [dataset],
        "input_read_episodes": True,
        "dataset_num_iters_per_learner": 2,
        "map_batches_kwargs": {"concurrency": 1},
    }


#: Set by ``make test-long``.
LONG = pytest.mark.skipif(not os.environ.get("STEPLEDGER_LONG"), reason="takes long: make test-long")


@pytest.mark.parametrize(
    "one",
    [BCConfig, *(pytest.param(one, marks=LONG) for one in (MARWILConfig, CQLConfig, IQLConfig))],
    ids=["BC", "MARWIL", "CQL", "IQL"],
)
def test_an_offline_algorithm_is_recorded_in_its_evaluation_and_says_so(tmp_path, dataset, one):
    offline = (
        one()
        .environment(Walk)
        .rl_module(model_config={"fcnet_hiddens": [8]})
        .offline_data(**reading(dataset))
        .training(train_batch_size_per_learner=32)
        .evaluation(evaluation_interval=1, evaluation_duration=4)
    )
    if one in (CQLConfig, IQLConfig):
        offline.lr = None  # they have several
    result = record(tmp_path, offline, iterations=1)
    assert result.exit_status == 0, str(result)
    assert [one.name for one in result.hops] == [f"evaluation: {name}" for name in HOPS[:2]]
    assert "nothing was sampled for training" in str(result)
    assert result.events > 20


def test_an_offline_algorithm_without_an_evaluation_has_nothing_to_record(tmp_path, dataset):
    spaces = {"observation_space": Walk.observation_space, "action_space": Walk().action_space}
    offline = BCConfig().environment(**spaces).offline_data(**reading(dataset))
    with pytest.raises(LedgerError, match="nothing to record: give it an evaluation"):
        attach(offline, tmp_path).build_algo()


def test_an_aggregator_that_was_restarted_gets_its_tap_again(tmp_path):
    algorithm = attach(CASES["IMPALA, two aggregators"](), tmp_path).build_algo()
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


def change_one(samples: list[Any], fault: str) -> list[Any]:
    """Change one transition of what a replay buffer gives."""
    one = samples[5]
    if fault == "stale_obs":
        one.observations.data[0] = samples[6].observations.data[0]
    elif fault == "wrong_successor":
        one.observations.data[1] = samples[6].observations.data[1]
    elif fault == "reward":
        one.rewards.data[0] += 1
    elif fault == "never_sampled":
        one.id_ = "nobody's"
        one.observations.data = [np.asarray(part) + 1 for part in one.observations.data]
        one.actions.data = [np.asarray(part) + 1 for part in one.actions.data]
    return samples


@pytest.mark.parametrize(
    ("fault", "field", "kind"),
    [
        ("stale_obs", "obs", "changed"),
        ("wrong_successor", "next_obs", "changed"),
        ("reward", "reward", "changed"),
        ("never_sampled", "event", "extra"),
    ],
)
def test_faults_of_a_replay_buffer_are_found_at_the_learner(tmp_path, fault, field, kind):
    algorithm = attach(sampling(replaying(SACConfig(), UNIFORM)), tmp_path).build_algo()
    sample = algorithm.local_replay_buffer.sample
    algorithm.local_replay_buffer.sample = lambda *args, **kwargs: change_one(sample(*args, **kwargs), fault)
    algorithm.train()
    algorithm.stop()
    result = compare(tmp_path)
    assert {one.hop for one in result.differences} == {HOPS[2]}
    assert {(one.fields, one.kind) for one in result.differences} == {((field,), kind)}


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


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_runner_is_no_difference_and_its_successor_is_recorded(tmp_path, mode):
    result = kill_a_runner(tmp_path, mode)
    assert result.equal, str(result)
    assert result.exit_status == 3
    assert list(tmp_path.glob("runner-1.100-vector.npz"))
    assert hop(result, HOPS[0]).streams >= 4


#: ``make test-long`` kills more often.
KILLS = int(os.environ.get("STEPLEDGER_KILLS", "3"))


def test_runners_killed_at_random_moments_cost_no_ledger_and_make_no_difference(tmp_path):
    rng = np.random.default_rng(0)
    algorithm = attach(config(2).fault_tolerance(restart_failed_env_runners=True), tmp_path).build_algo()
    group, killed = algorithm.env_runner_group, 0
    deadline = time.monotonic() + 60 * KILLS
    while killed < KILLS and time.monotonic() < deadline:
        pids = group.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False, timeout_seconds=20)
        if len(pids) == 2:  # both are there again
            timer = threading.Timer(rng.uniform(0, 2), os.kill, (pids[int(rng.integers(2))], signal.SIGKILL))
            timer.start()
            while timer.is_alive():
                algorithm.train()
            killed += 1
        algorithm.train()
    assert killed == KILLS
    began = time.monotonic()
    algorithm.stop()
    assert time.monotonic() - began < 2 * TIMEOUT
    result = compare(tmp_path)
    assert result.equal, str(result)
    assert result.exit_status == 3
    assert hop(result, HOPS[1]).events > 240 * KILLS
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


def test_the_uniform_buffer_loses_ends_with_n_step_returns(tmp_path):
    """A fault of RLlib's own (docs/known-differences.md); when it is repaired there, this says so."""
    result = record(tmp_path, sampling(replaying(DQNConfig(), UNIFORM, 3), box=False), iterations=4)
    assert {one.hop for one in result.differences} == {HOPS[2]}
    assert "terminated" in {field for one in result.differences for field in one.fields}


def test_the_script_of_the_known_difference_prints_what_the_page_says():
    page = (Path(__file__).parents[1] / "docs" / "known-differences.md").read_text()
    script, output = page.split("```python\n")[1].split("```")[0], page.split("```text\n")[1].split("```")[0]
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == output
