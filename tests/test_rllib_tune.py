"""Tune: each trial has a run of its own, and is compared also if it fails."""

from __future__ import annotations

import json
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from ray import tune  # noqa: E402
from ray.rllib.algorithms.ppo import PPO  # noqa: E402
from ray.rllib.callbacks.callbacks import RLlibCallback  # noqa: E402
from rllib_common import config  # noqa: E402

from stepledger import compare  # noqa: E402
from stepledger_ray import TuneCallback, attach  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


class FailingTrial(RLlibCallback):
    """Fails in the second iteration of the trials of one learning rate; if they are tried again, they go through."""

    def on_train_result(self, *, algorithm: Any, result: dict[str, Any], **kwargs: Any) -> None:
        if algorithm.config.lr == 0.002 and algorithm.iteration == 1 and not algorithm._restored:
            raise RuntimeError("failed on purpose")


def fit(tmp_path: Any, failures: int) -> Any:
    one = config(1).training(lr=tune.grid_search([0.001, 0.002]))
    one = attach(one.callbacks([FailingTrial]), tmp_path / "run")
    return tune.Tuner(
        PPO,
        param_space=one,
        tune_config=tune.TuneConfig(max_concurrent_trials=2),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path / "tune"),
            stop={"training_iteration": 3},
            callbacks=[TuneCallback(tmp_path / "run")],
            failure_config=tune.FailureConfig(max_failures=failures),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
            verbose=0,
        ),
    ).fit()


def test_concurrent_trials_are_compared_each_for_itself_and_one_that_fails_too(tmp_path, capfd):
    fit(tmp_path, failures=0)
    runs = sorted((tmp_path / "run").glob("*/run.json"))
    assert len(runs) == 2
    results = [compare(run.parent) for run in runs]
    assert all(result.equal and result.events > 100 for result in results)
    assert sorted(result.exit_status for result in results)[0] == 0
    assert all(json.loads((run.parent / "report.json").read_text())["equal"] for run in runs)
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("stepledger: PPO_")]
    assert len(said) == 2
    assert all("no difference" in line for line in said)


def test_a_trial_that_tune_starts_again_goes_on_in_its_directory(tmp_path):
    fit(tmp_path, failures=1)
    runs = sorted((tmp_path / "run").glob("*/run.json"))
    assert len(runs) == 2
    results = [compare(run.parent) for run in runs]
    assert all(result.equal for result in results), [str(result) for result in results]
    assert sorted(json.loads(run.read_text())["incarnation"] for run in runs)[1] > 0
