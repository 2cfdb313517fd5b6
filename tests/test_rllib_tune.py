"""Tune: each trial has a run of its own, and is compared also if it fails."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from common import run_walks  # noqa: E402
from ray import tune  # noqa: E402
from ray.rllib.algorithms.ppo import PPO  # noqa: E402
from ray.rllib.callbacks.callbacks import RLlibCallback  # noqa: E402
from rllib_common import config  # noqa: E402

from stepledger import compare  # noqa: E402
from stepledger.remote import Remote  # noqa: E402
from stepledger_ray import TuneCallback, attach  # noqa: E402
from stepledger_ray.run import Run, Settings, trial_of  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


class FailingTrial(RLlibCallback):
    """Fails in the second iteration of the trials of one learning rate; if they are tried again, they go through."""

    def on_train_result(self, *, algorithm: Any, result: dict[str, Any], **kwargs: Any) -> None:
        if algorithm.config.lr == 0.002 and algorithm.iteration == 1 and not algorithm._restored:
            raise RuntimeError("failed on purpose")


def fit(tmp_path: Path, place: str, failures: int) -> list[str]:
    """Run two trials; their places."""
    one = config(1).training(lr=tune.grid_search([0.001, 0.002]))
    one = attach(one.callbacks([FailingTrial]), place)
    results = tune.Tuner(
        PPO,
        param_space=one,
        tune_config=tune.TuneConfig(max_concurrent_trials=2),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path / "tune"),
            stop={"training_iteration": 3},
            callbacks=[TuneCallback(place)],
            failure_config=tune.FailureConfig(max_failures=failures),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
            verbose=0,
        ),
    ).fit()
    assert len(results.errors) == 1 or failures
    names = sorted(Path(result.path).name for result in results)
    return [str(Path(place, name)) if place.startswith("/") else Remote(place).below(name).uri for name in names]


def written(place: str, name: str) -> Any:
    return json.loads(Path(place, name).read_text() if place.startswith("/") else Remote(place).read_text(name) or "")


@pytest.fixture(params=["directory", pytest.param("uri", marks=pytest.mark.long)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "directory" else request.getfixturevalue("uri")


def test_concurrent_trials_are_compared_each_for_itself_and_one_that_fails_too(tmp_path, place, capfd):
    runs = fit(tmp_path, place, failures=0)
    assert len(runs) == 2
    results = [compare(run) for run in runs]
    assert all(result.equal and result.events > 100 for result in results)
    assert sorted(result.exit_status for result in results)[0] == 0
    for run in runs:
        report = written(run, "report.json")
        assert report["equal"] is True
        assert report["run"] == written(run, "run.json")
        assert place.startswith("/") or not Path(report["run"]["directory"]).exists()
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("stepledger: PPO_")]
    assert len(said) == 2
    assert all("no difference" in line for line in said)


def test_what_goes_wrong_with_the_report_of_a_trial_does_not_end_the_experiment(tmp_path, capsys, caplog):
    """Tune raises what a callback raises, in place of the results."""
    trials = [SimpleNamespace(storage=SimpleNamespace(trial_dir_name=name, experiment_dir_name="exp")) for name in ("one", "two")]
    callback = TuneCallback(tmp_path)
    for trial in trials:
        directory = tmp_path / trial.storage.trial_dir_name
        run_walks(directory)
        run = Run(str(directory), "0" * 32, "PPO", trial_of(trial.storage), Settings(), 0.99, False, 0, 1 << 20, False, 0)
        (directory / "run.json").write_text(json.dumps(asdict(run)))
        callback.on_trial_error(1, trials, trial)
    (tmp_path / "one" / "report.json").mkdir()  # as a full disk, nothing can be written to it
    callback.on_step_end(1, trials)
    callback.on_experiment_end(trials)
    assert [record.getMessage() for record in caplog.records if "exp/one has recorded could not be" in record.getMessage()]
    assert json.loads((tmp_path / "two" / "report.json").read_text())["equal"] is True
    assert "stepledger: two: no difference" in capsys.readouterr().out


@pytest.mark.long
def test_a_trial_that_tune_starts_again_goes_on_in_its_directory(tmp_path, place):
    runs = fit(tmp_path, place, failures=1)
    assert len(runs) == 2
    results = [compare(run) for run in runs]
    assert all(result.equal for result in results), [str(result) for result in results]
    assert sorted(written(run, "run.json")["incarnation"] for run in runs)[1] > 0
    assert all(written(run, "report.json")["run"] == written(run, "run.json") for run in runs)
