"""Offline algorithms: what their evaluation samples is recorded, and the report says that nothing was sampled for training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray")

from ray.rllib.algorithms.bc import BCConfig  # noqa: E402
from ray.rllib.algorithms.cql import CQLConfig  # noqa: E402
from ray.rllib.algorithms.iql import IQLConfig  # noqa: E402
from ray.rllib.algorithms.marwil import MARWILConfig  # noqa: E402
from ray.rllib.env.single_agent_episode import SingleAgentEpisode  # noqa: E402
from rllib_common import HOPS, Walk, record  # noqa: E402

from stepledger import LedgerError  # noqa: E402
from stepledger_ray import attach  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


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


@pytest.mark.parametrize(
    "one",
    [BCConfig, *(pytest.param(one, marks=pytest.mark.long) for one in (MARWILConfig, CQLConfig, IQLConfig))],
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
