"""Each fault on the way to the learner is found at that hop, as often as it was made; what no algorithm promises is counted."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray")

from faults_learner import LEARNER_FAULTS, LearnerFaultCallback, read_changes  # noqa: E402
from ray.rllib.algorithms.appo import APPOConfig  # noqa: E402
from ray.rllib.algorithms.dqn import DQNConfig  # noqa: E402
from ray.rllib.algorithms.impala import IMPALAConfig  # noqa: E402
from ray.rllib.algorithms.ppo import PPO, PPOConfig  # noqa: E402
from ray.rllib.algorithms.sac import SACConfig  # noqa: E402
from ray.rllib.connectors.connector_v2 import ConnectorV2  # noqa: E402
from ray.tune.registry import get_trainable_cls  # noqa: E402
from rllib_common import HOPS, PRIORITIZED, UNIFORM, config, hop, replaying, sampling, train  # noqa: E402

from stepledger import Comparison, compare  # noqa: E402
from stepledger_ray import attach  # noqa: E402
from stepledger_ray.run import _of_rllib  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

ALGORITHMS: dict[str, Any] = {
    "PPO": lambda: config(envs=3),
    "DQN, prioritized": lambda: sampling(replaying(DQNConfig(), PRIORITIZED), box=False),
    "SAC": lambda: sampling(replaying(SACConfig(), UNIFORM)),
    "APPO": lambda: sampling(APPOConfig().training(train_batch_size_per_learner=80), 1).learners(num_learners=0),
    "IMPALA": lambda: sampling(IMPALAConfig().training(train_batch_size_per_learner=80), 1).learners(num_learners=0),
}
#: What an algorithm never promised is counted, and no difference.
PROMISES = {"PPO": {"lost", "again"}, "APPO": {"again"}, "IMPALA": {"again"}}
CHUNKS = [name for name in LEARNER_FAULTS if name.startswith("chunk")]
TRANSPORT = [("PPO", fault) for fault in LEARNER_FAULTS] + [
    pytest.param(name, fault, marks=[] if (name, fault) == ("IMPALA", "chunk:dropped") else pytest.mark.long)
    for name in ("APPO", "IMPALA")
    for fault in LEARNER_FAULTS
]
IN_BUFFERS = [name for name in LEARNER_FAULTS if name.startswith("transition") and name != "transition:duplicated"]


class Halves(ConnectorV2):
    """Halves rewards, behind the tap."""

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in episodes:
            episode.set_rewards(new_data=np.asarray(episode.get_rewards()) / 2)
        return batch


def test_a_learner_connector_of_ones_own_is_named_as_not_compared(tmp_path: Path) -> None:
    for name, learner_connector in (("with", lambda *args: Halves()), ("without", None)):
        one = config().training(learner_connector=learner_connector)
        attach(one, tmp_path / name)
        train(one)
        comparison = compare(tmp_path / name)
        assert comparison.equal
        sentence = "what the learner connector Halves makes of the episodes is not compared"
        assert (sentence in hop(comparison, HOPS[2]).notes) == (f"note: {sentence}" in str(comparison)) == (name == "with")


def with_fault(directory: Path, one: Any, fault: str, **dose: Any) -> tuple[Comparison, Counter[Any]]:
    """The comparison of a run with a fault, and the changes that were made."""
    attach(one, directory / "run")
    one.callbacks([*one.callbacks_class, functools.partial(LearnerFaultCallback, fault, log=str(directory / "log"), **dose)])
    train(one, iterations=3)
    return compare(directory / "run"), read_changes(directory / "log")


#: Fault -> codes of which each difference has one. A changed observation is one transition's next one and the following one's own; that
#: of another chunk may be of the same episode or of another, and a chunk may be one step long.
EXPLAINED = {
    "transition:crosses_reset": {"SL502", "SL503", "SL504"},
    "transition:stale_obs": {"SL503", "SL504"},
    "transition:wrong_successor": {"SL503", "SL504"},
    "transition:duplicated": {"SL505"},
    "transition:never_sampled": {"SL506", "SL507"},
    "chunk:dropped": {"SL507"},
    "chunk:repeated": {"SL508", "SL505"},
}


def check(result: Comparison, changes: Counter[Any], promises: set[str], fault: str) -> None:
    learner = hop(result, HOPS[2])
    assert all(one.differences == 0 for one in result.hops if one is not learner)
    made = Counter(kind for _, _, kind in changes.elements())
    found = [one for one in result.differences if one.kind == "changed"]
    if learner.differences == len(result.differences):  # else only the first ones are kept
        expected = {place[:2]: count for place, count in changes.items() if place[2] == "changed"}
        assert Counter((one.step, one.fields) for one in found) == expected
    for one in result.differences:
        codes = {why.code for why in one.explanations}
        assert codes & EXPLAINED[fault], f"{fault}: {one}"
    assert learner.lost == (made["lost"] if "lost" in promises else 0)
    assert learner.extra == made["extra"] + (made["again"] if "again" in promises else 0)


@pytest.mark.parametrize(("name", "fault"), TRANSPORT)
def test_a_fault_of_the_transport_is_found_once_where_it_was_made(tmp_path, name, fault):
    result, changes = with_fault(tmp_path, ALGORITHMS[name](), fault, once=True)
    assert changes
    check(result, changes, PROMISES[name], fault)


class OwnPPO(PPO):
    """Somebody's own algorithm, which promises what RLlib's does."""


@pytest.mark.parametrize("fault", ["chunk:dropped", "chunk:repeated"])
def test_an_algorithm_that_is_derived_from_one_of_rllib_keeps_its_promise(tmp_path, fault):
    one = sampling(PPOConfig(algo_class=OwnPPO).training(train_batch_size=240, minibatch_size=120, num_epochs=1))
    result, changes = with_fault(tmp_path, one, fault, once=True)
    assert changes
    check(result, changes, PROMISES["PPO"], fault)
    assert result.exit_status == 1


@pytest.mark.parametrize("algorithm", ["PPO", "APPO", "IMPALA", "DQN", "SAC", "DreamerV3"])
def test_what_an_algorithm_is_derived_from_is_found_in_rllib(algorithm):
    rllibs = get_trainable_cls(algorithm)
    own = type("PPO" if algorithm == "DQN" else "Own", (rllibs,), {})
    assert [_of_rllib(one) for one in (rllibs, own, type("Own", (own,), {}))] == [algorithm] * 3


@pytest.mark.parametrize("fault", IN_BUFFERS)
@pytest.mark.parametrize("name", ["DQN, prioritized", "SAC"])
def test_a_fault_of_a_replay_buffer_is_found_once_where_it_was_made(tmp_path, name, fault):
    result, changes = with_fault(tmp_path, ALGORITHMS[name](), fault, once=True)
    assert changes
    check(result, changes, set(), fault)


@pytest.mark.parametrize("fault", ["transition:duplicated", *CHUNKS])
def test_what_a_replay_buffer_repeats_or_leaves_out_is_counted_and_no_difference(tmp_path, fault):
    result, changes = with_fault(tmp_path, ALGORITHMS["SAC"](), fault, once=True)
    assert changes
    assert result.exit_status == 0, str(result)


@pytest.mark.parametrize("rate", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("fault", LEARNER_FAULTS)
@pytest.mark.long
def test_a_fault_is_found_at_any_rate(tmp_path, fault, rate):
    result, changes = with_fault(tmp_path, ALGORITHMS["PPO"](), fault, rate=rate)
    check(result, changes, PROMISES["PPO"], fault)
    assert result.exit_status == bool(changes)
