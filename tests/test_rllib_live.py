"""RLlib: comparing while training goes on, and what may be dropped then."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from faults import Dose, FaultyEnv  # noqa: E402
from ray import tune  # noqa: E402
from ray.rllib.algorithms.dqn import DQNConfig  # noqa: E402
from ray.rllib.algorithms.impala import IMPALAConfig  # noqa: E402
from ray.rllib.algorithms.ppo import PPO  # noqa: E402
from ray.rllib.callbacks.callbacks import RLlibCallback  # noqa: E402
from ray.rllib.utils import force_list  # noqa: E402
from rllib_common import HOPS, Walk, config  # noqa: E402

from stepledger import LedgerError, compare, read  # noqa: E402
from stepledger_ray import LedgerCallback, attach, finish  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


class FaultsInEnvs(RLlibCallback):
    """Puts faults outside the ledgers of the first environments; listed behind LedgerCallback."""

    def __init__(self, dose: Dose, faults: tuple[str, ...]) -> None:
        self.dose, self.faults = dose, faults

    def on_environment_created(self, *, env_runner: Any, env: Any, **kwargs: Any) -> None:
        envs = env.unwrapped.envs
        for index, fault in enumerate(self.faults):
            envs[index] = FaultyEnv(envs[index], fault, self.dose, index=index)


def with_faults(one: Any, dose: Dose, *faults: str) -> Any:
    return one.callbacks([*one.callbacks_class, functools.partial(FaultsInEnvs, dose, faults)])


def trained(one: Any, iterations: int) -> tuple[Any, list[dict[str, Any]]]:
    algorithm = one.build_algo()
    return algorithm, [algorithm.train() for _ in range(iterations)]


@pytest.mark.parametrize("runners", [0, pytest.param(2, marks=pytest.mark.long)])
def test_each_result_says_what_was_compared_so_far(tmp_path, runners):
    algorithm, results = trained(attach(config(runners), tmp_path, compare_every=2), 5)
    assert ["stepledger" in result for result in results] == [False, True, False, True, False]
    found = [result["stepledger"] for result in results if "stepledger" in result]
    assert [one["differences"] for one in found] == [0, 0]
    assert 0 < found[0]["events_compared"] < found[1]["events_compared"]
    assert all(one[name.replace(" -> ", "_to_")]["events_compared"] > 0 for one in found for name in HOPS)
    algorithm.stop()
    assert compare(tmp_path).exit_status == 0
    assert found[1]["events_compared"] < compare(tmp_path).events


@pytest.mark.parametrize("retain", [pytest.param("all", marks=pytest.mark.long), "differences"])
def test_what_is_found_on_the_way_is_what_is_found_at_the_end(tmp_path, retain, capsys):
    """Also with faults, at any of the hops' ends; and the first of them is told once, in full."""
    one = attach(config(1), tmp_path / "run", compare_every=1, retain=retain)
    algorithm, results = trained(with_faults(one, Dose(0.02), "obs:scale", "step:lost"), 4)
    told = [line for line in capsys.readouterr().out.splitlines() if "env -> vector: runner 1, env " in line]
    assert len(told) == 1
    counts = [result["stepledger"]["differences"] for result in results]
    assert counts == sorted(counts)
    assert counts[-1] > 0
    last = finish(algorithm)
    algorithm.stop()
    report = capsys.readouterr().out
    whole = compare(tmp_path / "run")
    assert f"{sum(hop.differences for hop in last.hops)} differences" in report
    if retain == "all":
        assert [hop.differences for hop in whole.hops] == [hop.differences for hop in last.hops]
        assert whole.differences == last.differences
    assert whole.differences[0] == last.differences[0]
    assert not results[-1].get("done")


@pytest.mark.long
def test_the_values_around_a_difference_are_saved_when_it_is_found(tmp_path):
    """And those of the end; what lies between has none."""
    one = attach(config(1), tmp_path, compare_every=1, keep_values=250)
    algorithm, results = trained(with_faults(one, Dose(at=150), "obs:f16"), 6)
    algorithm.stop()
    assert results[-1]["stepledger"]["differences"] > 0
    whole = compare(tmp_path)
    found = whole.differences[0]
    assert (found.hop, found.env) == (HOPS[0], 0)
    assert [one.code for one in found.explanations] == ["SL104"]
    assert found.first["obs"] != found.second["obs"] != ""
    first, second, other = (read(tmp_path / f"runner-1.0-{name}.npz").streams for name in ("env-0", "vector", "env-1"))
    at = found.position[0]
    for streams in (first, second):
        stream = streams[0]
        assert len(stream) > 600
        assert {*range(at - 15, at + 5)} <= {*stream.kept.tolist()} < {*range(len(stream))}
        assert stream.kept[-250:].tolist() == list(range(len(stream) - 250, len(stream)))
    assert len(other[1].kept) == 250


def test_stop_ends_a_trial_cleanly_at_the_first_difference(tmp_path):
    one = attach(config(1), tmp_path / "run", compare_every=1, on_difference="stop")
    one = with_faults(one, Dose(), "obs:scale", "obs:scale")
    results = tune.Tuner(
        PPO,
        param_space=one,
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), stop={"training_iteration": 50}, verbose=0),
    ).fit()
    assert results[0].error is None
    assert results[0].metrics["training_iteration"] < 5
    assert results[0].metrics["stepledger"]["differences"] > 0
    assert "stepledger/differences" in results.get_dataframe().columns
    (directory,) = (path.parent for path in (tmp_path / "run").glob("*/run.json"))
    assert (directory / "report.json").exists()


@pytest.mark.long
def test_without_a_difference_the_space_on_disk_stays_bounded(tmp_path):
    one = attach(config(1, envs=4).training(train_batch_size=2000, minibatch_size=2000), tmp_path, compare_every=1, retain="differences")
    algorithm = one.build_algo()
    sizes = []
    for _ in range(6):
        algorithm.train()
        sizes.append(sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()))
    assert max(sizes) < 3 * sizes[0]  # journals are shortened now and then
    last = finish(algorithm)
    assert last.exit_status == 0
    coverage = last.hops[2].coverage
    assert coverage["sampled"] == coverage["learned_once"] >= 12_000
    algorithm.train()
    algorithm.stop()
    kept = read(next(tmp_path.glob("*-env-0.npz")) if list(tmp_path.glob("*-env-0.npz")) else next(tmp_path.glob("*env-0*")))
    (stream,) = kept.streams.values()
    assert stream.begin > 1_000
    again = compare(tmp_path)
    assert again.exit_status == 0
    assert "compared while it ran, and dropped" in str(again)


@pytest.mark.parametrize(("algorithm", "retain"), [("dqn", "differences"), pytest.param("impala", "all", marks=pytest.mark.long)])
def test_learners_that_come_late_raise_no_alarm(tmp_path, algorithm, retain):
    if algorithm == "dqn":
        one = DQNConfig().environment(Walk, env_config={"box": False}).env_runners(num_envs_per_env_runner=2)
        one.training(train_batch_size=32, num_steps_sampled_before_learning_starts=50, n_step=3)
    else:
        one = IMPALAConfig().environment(Walk, env_config={"box": False}).env_runners(num_env_runners=2, rollout_fragment_length=20)
        one.training(train_batch_size_per_learner=80).learners(num_learners=0)
    one.reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=100, min_train_timesteps_per_iteration=100)
    built, results = trained(attach(one, tmp_path, compare_every=1, retain=retain), 10)
    assert all(result["stepledger"]["differences"] == 0 for result in results)
    built.stop()
    assert compare(tmp_path).equal
    assert compare(tmp_path).complete


@pytest.mark.parametrize("retain", ["all", "differences"])
def test_the_run_goes_on_where_the_comparing_process_is_killed(tmp_path, retain, caplog):
    algorithm, _ = trained(attach(config(), tmp_path, compare_every=1, retain=retain), 1)
    callback = next(one for one in force_list(algorithm.callbacks) if isinstance(one, LedgerCallback))
    ray.kill(callback.job._live._comparing)
    results = [algorithm.train() for _ in range(2)]
    assert not any("stepledger" in result for result in results)
    assert "comparing while it trains has ended" in caplog.text
    last = finish(algorithm)
    algorithm.stop()
    assert last.exit_status == (0 if retain == "all" else 3)
    assert ("the process that compared it has failed" in str(last)) == (retain == "differences")


def test_the_comparing_process_ends_with_the_run(tmp_path):
    algorithm, _ = trained(attach(config(), tmp_path, compare_every=1, retain="differences"), 1)
    callback = next(one for one in force_list(algorithm.callbacks) if isinstance(one, LedgerCallback))
    comparing = callback.job._live._comparing
    pid = ray.get(comparing.__ray_call__.remote(lambda watcher: os.getpid()))
    algorithm.stop()
    until = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{pid}")
    assert finish(algorithm).exit_status == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"reward_dtype": "reward"}, "reward_dtype 'reward' is no dtype"),
        ({"reward_dtype": "float16"}, "reward_dtype float16 can't be recorded"),
        ({"reward_dtype": ["S8"]}, "reward_dtype .* is no dtype"),
        ({"digest": "md5"}, "digest 'md5' is unknown"),
        ({"digest": 64}, "digest '64' is unknown"),
        ({"on_error": "ignore"}, "on_error='ignore' is unknown"),
        ({"directory": None}, "None can't be a run directory"),
        ({"directory": b"run"}, "can't be a run directory"),
        ({"directory": "s3://me:secret@bucket/run"}, "holds a password"),
        ({"directory": "s3://[bucket/run"}, "can't be a run directory"),
        ({"directory": "file://other/run"}, "names a file of the machine 'other'"),
        ({"compare_every": 0}, "compare_every=0 is no number of iterations"),
        ({"compare_every": True}, "compare_every=True is no number of iterations"),
        ({"compare_every": 1, "on_difference": "die"}, "on_difference='die' is unknown"),
        ({"compare_every": 1, "retain": "none"}, "retain='none' is unknown"),
        ({"retain": "differences"}, "pass compare_every="),
        ({"on_difference": "stop"}, "pass compare_every="),
        ({"flush_every": 0}, "flush_every=0 is no number of events"),
        ({"flush_seconds": -1}, "flush_seconds=-1 is no number of seconds"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(tmp_path, options, says):
    for refuses in (functools.partial(attach, config()), LedgerCallback):
        with pytest.raises(LedgerError, match=says) as error:
            refuses(**{"directory": tmp_path, **options})
        assert "secret" not in str(error.value)
