"""RLlib: the callback alone records every tap, changes nothing, and finds what is wrong at the right hop."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

ray = pytest.importorskip("ray")

from common import RLLIB_FAULTS  # noqa: E402
from faults import Dose, FaultyEnv, FaultyVectorEnv, read_log  # noqa: E402
from gymnasium.vector import AsyncVectorEnv  # noqa: E402
from gymnasium.wrappers.vector import DictInfoToList  # noqa: E402
from ray.rllib.algorithms.ppo import PPO, PPOConfig  # noqa: E402
from ray.rllib.callbacks.callbacks import RLlibCallback  # noqa: E402
from rllib_common import HOPS, SAMPLED, Corridor, OwnMode, Walk, WalkVectorEnv, config, hop, record, train  # noqa: E402

from stepledger import LedgerEnv, LedgerError, LedgerVectorEnv, compare, read  # noqa: E402
from stepledger.cli import main  # noqa: E402
from stepledger.codes import CATALOGUE  # noqa: E402
from stepledger.format import STEP  # noqa: E402
from stepledger_ray import LedgerCallback, attach, finish, processes, tasks  # noqa: E402
from stepledger_ray.run import Settings  # noqa: E402
from stepledger_ray.taps import RunnerTaps  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


@pytest.mark.parametrize(
    ("runners", "mode"),
    [
        (0, "sync"),
        (0, "async"),
        (1, "async"),
        (2, "sync"),
        *(pytest.param(*one, marks=pytest.mark.long) for one in [(1, "sync"), (2, "async")]),
    ],
)
def test_a_clean_run_is_equal_and_complete_at_every_hop(tmp_path, runners, mode, capsys):
    one = config(runners, mode=mode).callbacks(functools.partial(LedgerCallback, str(tmp_path / "run")))
    algorithm = one.build_algo()
    for _ in range(2):
        algorithm.train()
    before = finish(algorithm)
    sampled_before = algorithm.metrics.peek(SAMPLED)
    algorithm.train()
    algorithm.stop()
    result = compare(tmp_path / "run")
    for comparison in (before, result):
        assert comparison.equal
        assert comparison.complete
        assert [one.name for one in comparison.hops] == HOPS
        assert all(one.streams == 2 * max(1, runners) for one in comparison.hops)
        assert all(field.status == "equal" for one in comparison.hops for field in one.fields.values())
    assert hop(result, "episode -> learner").events == algorithm.metrics.peek(SAMPLED)
    assert hop(before, "episode -> learner").events == sampled_before
    assert not list((tmp_path / "run").glob("*.journal"))
    assert json.loads((tmp_path / "run" / "report.json").read_text())["equal"] is True
    assert str(result) in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize(
    ("runners", "mode", "box"),
    [(0, "sync", True), (0, "async", False), (1, "sync", False), pytest.param(1, "async", True, marks=pytest.mark.long)],
)
def test_weights_are_the_same_bit_for_bit_with_and_without_ledgers(tmp_path, runners, mode, box):
    def weights(one: PPOConfig) -> dict[str, Any]:
        algorithm = one.build_algo()
        for _ in range(2):
            algorithm.train()
        found = algorithm.learner_group.get_state()["learner"]["rl_module"]["default_policy"]
        algorithm.stop()
        return found

    plain = weights(config(runners, mode=mode, box=box))
    recorded = weights(attach(config(runners, mode=mode, box=box), tmp_path))
    assert plain.keys() == recorded.keys()
    assert all(np.array_equal(plain[name], recorded[name]) for name in plain)
    assert compare(tmp_path).exit_status == 0


#: Fault -> its code.
CODES = {fault: code for code, one in CATALOGUE.items() for fault in one.faults}

#: One fault for each environment of two EnvRunners with three each.
IN_ENVS = [
    ["obs:f16", "obs:stale", "reward:scale", "action:zero", "terminated:spurious", "truncated:drop"],
    ["terminated:as_truncated", "step:lost", "step:repeated", "step:filled", "reset:hidden", "reset:lost"],
    ["reward:nan", "both:as_terminated", "obs:zero", "reset:extra", "truncated:as_terminated", "terminated:drop"],
    ["obs:bf16", "obs:scale", "obs:clip", "obs:nan", "action:f16", "action:scale"],
    ["action:stale", "action:bf16", "action:clip", "action:nan", "reward:zero", "reward:stale"],
    ["reward:f16", "reward:bf16", "reward:clip", "truncated:spurious", "both:as_truncated", "reply:shifted"],
    ["final_obs:zero", "final_obs:stale", "final_obs:f16", "final_obs:bf16", "final_obs:scale", "final_obs:nan"],
]
IN_ENVS_IDS = ["values", "sequences", "ends", "observations", "actions", "rewards", "final observations"]


class EnvFaults(RLlibCallback):
    """Puts a fault outside the ledger of each environment; listed behind LedgerCallback."""

    def __init__(self, faults: list[str], log: str) -> None:
        self.faults, self.log = faults, log

    def on_environment_created(self, *, env_runner: Any, env: Any, **kwargs: Any) -> None:
        first = 3 * (env_runner.worker_index - 1)
        envs = env_runner.env.unwrapped.envs
        for index in range(3):
            log = f"{self.log}-{first + index}"
            fault = self.faults[first + index]
            # One event in eight is the end of an episode, and one in three ends is of each kind.
            at = 1 if fault.startswith(("terminated", "truncated", "both", "reset:extra", "final_obs")) else 7 + index
            # Not every value can be clipped, and an action that lies at a bound is not rounded.
            dose = Dose(0.3) if fault.endswith("clip") or fault in ("action:f16", "action:bf16") else Dose(at=at)
            envs[index] = FaultyEnv(envs[index], fault, dose, index=index, log=log)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(faults, id=name, marks=[] if at < 3 else pytest.mark.long)
        for at, (name, faults) in enumerate(zip(IN_ENVS_IDS, IN_ENVS))
    ],
)
def test_faults_in_environments_are_found_where_they_were_made(tmp_path, faults):
    one = attach(config(2, envs=3), tmp_path, keep_values=True)
    one.callbacks([*one.callbacks_class, functools.partial(EnvFaults, faults, str(tmp_path / "log"))])
    train(one, iterations=3)
    result = compare(tmp_path)
    for env, fault in enumerate(faults):
        made = read_log(tmp_path / f"log-{env}")
        assert made, fault
        found = [one for one in result.differences if (one.runner, one.env) == (1 + env // 3, env % 3)]
        assert [(one.hop, one.episode, one.step, one.kind) for one in found] == [
            (HOPS[0], one.episode, one.step, one.kind) for one in made
        ], fault
        for one, place in zip(found, made):
            # Of a range, the fields that differ anywhere in it; few numbers may be rounded alike by both.
            assert set(place.fields) <= set(one.fields) if fault == "reply:shifted" else one.fields == place.fields, one
            codes = [why.code for why in one.explanations]
            assert CODES[fault] in (codes if fault.endswith("bf16") else codes[:1]), one
    assert hop(result, HOPS[1]).differences == hop(result, HOPS[2]).differences == 0


class VectorFault(RLlibCallback):
    """Puts a fault between the vector env and its ledger; listed in front of LedgerCallback."""

    def __init__(self, fault: str, log: str) -> None:
        self.fault, self.log = fault, log

    def on_environment_created(self, *, env_runner: Any, **kwargs: Any) -> None:
        env_runner.env.env = FaultyVectorEnv(env_runner.env.env, self.fault, Dose(at=20), log=self.log)


VECTOR_FAULTS = ["obs:swap", "action:swap", "reward:swap", "streams:swapped"]


def test_the_faults_made_here_are_those_of_the_table():
    assert {*itertools.chain(*IN_ENVS), *VECTOR_FAULTS} == RLLIB_FAULTS


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("fault", VECTOR_FAULTS)
def test_faults_of_a_vector_env_are_found_where_they_were_made(tmp_path, fault, mode):
    one = config(mode=mode).callbacks([functools.partial(VectorFault, fault, str(tmp_path / "log"))])
    result = record(tmp_path / "run", one)
    made = read_log(tmp_path / "log")
    assert made
    if fault == "streams:swapped":  # two streams, one difference
        assert len(made) == hop(result, HOPS[0]).streams_different == 2
        made = made[:1]
    assert len(result.differences) == len(made)
    for found, place in zip(result.differences, made):
        assert (found.hop, found.env, found.episode, found.step) == (HOPS[0], place.env, place.episode, place.step)
        assert set(place.fields) <= set(found.fields)
        assert found.explanations[0].code == CODES[fault], found


class Sampler(RLlibCallback):
    """Changes what leaves the sampler, at its second call: in front of LedgerCallback it is the vector hop's, behind it the learner's."""

    def __init__(self, fault: str) -> None:
        self.fault, self.calls = fault, 0

    def on_sample_end(self, *, samples: list[Any], **kwargs: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            getattr(self, self.fault)(samples)

    def reward(self, samples: list[Any]) -> None:
        samples[0].rewards.data[samples[0].rewards.lookback + 1] += 1

    def observation(self, samples: list[Any]) -> None:
        samples[0].observations.data[samples[0].observations.lookback + 2] = 0

    def dropped(self, samples: list[Any]) -> None:
        del samples[1]

    def termination(self, samples: list[Any]) -> None:
        one = next(one for one in samples if one.is_terminated and not one.is_truncated)
        one.is_terminated, one.is_truncated = False, True


@pytest.mark.parametrize(
    ("fault", "fields", "kinds"),
    [
        ("reward", {"reward"}, {"changed"}),
        ("termination", {"terminated", "truncated"}, {"changed"}),
    ],
)
def test_changed_rewards_and_flags_between_sampler_and_learner_are_found_at_that_hop(tmp_path, fault, fields, kinds):
    one = attach(config(), tmp_path)
    one.callbacks([*one.callbacks_class, functools.partial(Sampler, fault)])
    train(one)
    result = compare(tmp_path)
    assert {one.hop for one in result.differences} == {HOPS[2]}
    assert {field for one in result.differences for field in one.fields} == fields
    assert {one.kind for one in result.differences} == kinds
    assert hop(result, HOPS[0]).differences == hop(result, HOPS[1]).differences == 0


@pytest.mark.parametrize(
    ("fault", "fields", "kinds"),
    [("reward", {"reward"}, {"changed"}), ("observation", {"obs"}, {"changed"}), ("dropped", {"event"}, {"lost"})],
)
def test_faults_between_vector_env_and_sampler_are_found_at_that_hop(tmp_path, fault, fields, kinds):
    result = record(tmp_path, config().callbacks([functools.partial(Sampler, fault)]))
    assert {one.hop for one in result.differences} == {HOPS[1]}
    assert {field for one in result.differences for field in one.fields} == fields
    assert {one.kind for one in result.differences} == kinds


@pytest.mark.parametrize(("normalize", "clip"), [(True, False), (False, True), (False, False)])
def test_actions_are_compared_after_what_rllib_does_to_them(tmp_path, normalize, clip):
    result = record(tmp_path, config().env_runners(num_envs_per_env_runner=2).environment(normalize_actions=normalize, clip_actions=clip))
    assert result.exit_status == 0
    action = hop(result, HOPS[1]).fields["action"]
    assert action.status == "equal"
    assert action.compared > 240
    assert bool(action.note) == (normalize or clip)


def test_rewritten_observations_are_said_to_be_not_compared_and_still_followed_to_the_learner(tmp_path):
    from ray.rllib.connectors.env_to_module import MeanStdFilter

    result = record(tmp_path, config().env_runners(env_to_module_connector=lambda *args, **kwargs: MeanStdFilter()))
    rewritten = hop(result, HOPS[1]).fields["obs"]
    assert (rewritten.status, rewritten.compared) == ("not compared", 0)
    assert "MeanStdFilter" in rewritten.note
    assert hop(result, HOPS[2]).fields["obs"].status == "equal"
    assert result.exit_status == 0


def test_whole_episodes_that_a_forced_reset_cuts_off_are_no_difference(tmp_path):
    result = record(tmp_path, config().env_runners(batch_mode="complete_episodes"))
    assert result.exit_status == 0
    assert any("cut off" in note for note in hop(result, HOPS[1]).notes)


def evaluated(one: PPOConfig, runners: int) -> PPOConfig:
    return one.evaluation(evaluation_interval=1, evaluation_duration=7, evaluation_num_env_runners=runners)


@pytest.mark.parametrize(
    ("env", "runners"), [(Walk, 1), (Corridor, 0), *(pytest.param(*one, marks=pytest.mark.long) for one in [(Walk, 0), (Corridor, 1)])]
)
def test_a_clean_evaluation_is_compared_apart_and_equal(tmp_path, env, runners):
    result = record(tmp_path, evaluated(config(envs=3, env=env, box=False), runners), iterations=4)
    assert result.exit_status == 0, str(result)
    assert [one.name for one in result.hops] == [*HOPS, *(f"evaluation: {name}" for name in HOPS[:2])]
    assert all(one.streams == 3 and one.events > 90 for one in result.hops)


class EvaluationFault(RLlibCallback):
    """Rounds the rewards of one step of the evaluation."""

    def on_environment_created(self, *, env_runner: Any, **kwargs: Any) -> None:
        if env_runner.config.in_evaluation:
            env_runner.env.env = Rounding(env_runner.env.env)


def test_a_fault_of_the_evaluation_alone_is_found(tmp_path):
    result = record(tmp_path, evaluated(config().callbacks([EvaluationFault]), 1))
    assert {(one.hop, one.fields) for one in result.differences} == {(f"evaluation: {HOPS[0]}", ("reward",))}


@pytest.mark.parametrize(("tap", "unpaired"), [("learner", 1), ("episode", 2), ("vector", 2), ("env", 1)])
def test_a_tap_whose_ledgers_are_missing_is_missed(tmp_path, tap, unpaired):
    record(tmp_path, config(), iterations=1)
    for path in tmp_path.glob(f"*{tap}-*.npz" if tap in ("learner", "env") else f"*-{tap}.npz"):
        path.unlink()
    result = compare(tmp_path)
    assert result.exit_status == 2
    assert sum(bool(one.unpaired) for one in result.hops) == unpaired
    assert f"no ledger of the tap '{tap}'" in str(result)


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_large_run_is_compared_in_tasks_or_here_where_no_task_comes(tmp_path, monkeypatch, late):
    result = record(tmp_path, config(2))
    monkeypatch.setattr(tasks, "_SMALL", 0)
    if late:
        for name in ("TIMEOUT", "_LEAST"):
            monkeypatch.setattr(processes, name, 0.0)
        monkeypatch.setattr(processes, "_PACE", 1 << 50)
    done: list[tuple[int, int]] = []
    assert tasks.compare_run(str(tmp_path), lambda *size: done.append(size)).to_dict() == result.to_dict()
    assert len(done) > 1
    assert done[-1][0] == done[-1][1]


def test_an_algorithm_that_never_trained_has_nothing_to_compare(tmp_path, capsys):
    attach(config(), tmp_path).build_algo().stop()
    assert "nothing was sampled" in capsys.readouterr().out


class Counting(RLlibCallback):
    """Somebody's own callback."""

    created = 0

    def on_environment_created(self, **kwargs: Any) -> None:
        type(self).created += 1


def test_attach_adds_to_the_callbacks_that_are_there(tmp_path):
    Counting.created = 0
    result = record(tmp_path, config().callbacks(Counting))
    assert Counting.created
    assert result.exit_status == 0


def test_a_directory_that_holds_a_run_is_refused_and_resume_goes_on_in_it(tmp_path):
    first = record(tmp_path, config(), iterations=1)
    with pytest.raises(LedgerError, match=r"holds a run already.*resume=True"):
        attach(config(), tmp_path).build_algo()
    assert compare(tmp_path).events == first.events
    with pytest.raises(LedgerError, match="other options"):
        attach(config(), tmp_path, resume=True, digest="blake2b").build_algo()
    train(attach(config(), tmp_path, resume=True), iterations=2)
    both = compare(tmp_path)
    assert both.exit_status == 0, str(both)
    assert both.hops[0].streams == 2 * first.hops[0].streams
    assert both.events > 2 * first.events


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    algorithm = attach(config(), tmp_path / "run").build_algo()
    sampled = algorithm.train()[SAMPLED[0]][SAMPLED[1]]
    path = algorithm.save(str(tmp_path / "checkpoint")).checkpoint.path
    algorithm.train()
    algorithm.restore(path)
    algorithm.train()
    algorithm.stop()
    before = compare(tmp_path / "run")
    assert before.exit_status == 0, str(before)
    episodes = read(tmp_path / "run" / "runner-0.0-episode.npz")
    ((*saved,),) = episodes.meta["checkpoints"]
    kinds = [stream.data["kind"][:at] for at, stream in zip(saved, episodes.streams.values())]
    assert sum(int((kind == STEP).sum()) for kind in kinds) == sampled
    assert all(0 < at < len(stream) for at, stream in zip(saved, episodes.streams.values()))
    with pytest.raises(LedgerError, match="from_checkpoint"):
        PPO.from_checkpoint(path)
    again = PPO.from_checkpoint(path, config=attach(config(), tmp_path / "run", resume=True))
    again.train()
    again.stop()
    result = compare(tmp_path / "run")
    assert result.exit_status == 0, str(result)
    assert result.events > before.events


def test_a_config_takes_one_ledger_callback(tmp_path):
    one = attach(config(), tmp_path)
    with pytest.raises(LedgerError, match="already"):
        attach(one, tmp_path)
    twice = config().callbacks([functools.partial(LedgerCallback, str(tmp_path)), functools.partial(LedgerCallback, str(tmp_path / "b"))])
    with pytest.raises(LedgerError, match="two LedgerCallbacks"):
        twice.build_algo()


def test_an_algorithm_that_is_built_already_is_refused(tmp_path):
    algorithm = config().build_algo()
    try:
        for built in (algorithm, algorithm.config):
            with pytest.raises(LedgerError, match=r"before config\.build_algo"):
                attach(built, tmp_path)
    finally:
        algorithm.stop()


@pytest.mark.parametrize("runners", [0, 1])
def test_a_directory_that_cannot_be_written_is_refused_before_training(tmp_path, runners):
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match=r"can't be written on .*: name another directory"):
        attach(config(runners), tmp_path / "file" / "run").build_algo()


class Rounding(gym.vector.VectorWrapper):
    """Rounds the rewards of one step: a fault of a wrapper around somebody's vector env."""

    calls = 0

    def step(self, actions: Any) -> Any:
        observations, rewards, *rest = self.env.step(actions)
        self.calls += 1
        return observations, rewards.round() if self.calls == 20 else rewards, *rest


@pytest.mark.parametrize("runners", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_vector_env_that_steps_its_environments_itself_is_the_env_side(tmp_path, runners):
    result = record(tmp_path, config(runners, mode="vector_entry_point", env=WalkVectorEnv))
    assert result.exit_status == 0, str(result)
    assert [(one.name, one.streams) for one in result.hops] == [(name, 2 * max(1, runners)) for name in HOPS[1:]]
    assert result.events > 240


class Around(RLlibCallback):
    """Puts a wrapper around the vector env, in front of LedgerCallback."""

    def on_environment_created(self, *, env_runner: Any, **kwargs: Any) -> None:
        env_runner.env.env = Rounding(env_runner.env.env)


def test_a_fault_around_such_a_vector_env_is_found(tmp_path):
    result = record(tmp_path, config(mode="vector_entry_point", env=WalkVectorEnv).callbacks([Around]))
    assert {(one.hop, one.fields) for one in result.differences} == {(HOPS[0], ("reward",))}
    assert sorted(one.env for one in result.differences) == [0, 1]


class Leveled(Walk):
    """Its rewards are the level that somebody sets, and how often it was told."""

    level, told = 0, 0

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, float(10 * self.told + self.level), *rest

    def tell(self, level: int) -> None:
        self.level, self.told = level, self.told + 1


def curriculum(*, env: Any, **kwargs: Any) -> None:
    """Sets what environments hold, by the vector env as RLlib hands it to every callback."""
    assert env.call("tell", 0) == (None, None)
    env.set_attr("level", [3, 4])


class Curriculum(RLlibCallback):
    on_environment_created = staticmethod(curriculum)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("others", ["before", "behind", "around", "function"])
def test_what_other_callbacks_set_in_environments_stays_wherever_they_come(tmp_path, mode, others):
    one = config(mode=mode, env=Leveled)
    if others in ("before", "around"):
        one.callbacks(Curriculum)
    attach(one, tmp_path)
    if others in ("behind", "around"):
        one.callbacks([*one.callbacks_class, Curriculum])
    if others == "function":
        one.callbacks(one.callbacks_class, on_environment_created=curriculum)
    train(one)
    assert compare(tmp_path).exit_status == 0
    for env, level in ((0, 3.0), (1, 4.0)):
        (stream,) = read(tmp_path / f"runner-0.0-env-{env}.npz").streams.values()
        rewards = stream.columns["h_rew"][stream.columns["kind"] == 1].view(np.float64)
        assert set(rewards) == {level + 10 * (1 + (others == "around"))}


class Ours(AsyncVectorEnv):
    """Has workers of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, worker=_worker, **kwargs)


def _worker(index: int, env_fn: Any, pipe: Any, *args: Any) -> None:
    hidden = env_fn()

    def serve(environment_of_mine: Any) -> None:
        while True:
            command, data = pipe.recv()
            if command == "_call":
                pipe.send((environment_of_mine.get_wrapper_attr(data[0])(*data[1]), True))
            else:
                pipe.send((None if command == "close" else (True, True), True))
            if command == "close":
                return

    serve(hidden)


def test_workers_that_let_no_ledger_in_are_said_so_and_go_on(tmp_path):
    env = DictInfoToList(Ours([Walk, Walk]))
    with pytest.raises(LedgerError, match=r"let no ledger in: return stepledger\.LedgerEnv"):
        RunnerTaps(SimpleNamespace(env=env), Settings())
    assert not env.unwrapped.closed
    assert env.unwrapped.call("has_wrapper_attr", "ledger_place") == (False, False)
    assert not isinstance(env.env, LedgerVectorEnv)
    env.close()


class WithLedger(gym.Wrapper):
    """An environment whose creator gave it a ledger, with settings of its own, and something around it."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(LedgerEnv(Walk(config), config["directory"], config.get("index")))


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("index", [None, 0])
def test_environments_that_come_with_a_ledger_keep_it(tmp_path, mode, index):
    result = record(tmp_path / "run", config(mode=mode, env=WithLedger, directory=str(tmp_path / "theirs"), index=index))
    assert result.exit_status == 0, str(result)
    assert result.hops[0].streams == 2
    assert not (tmp_path / "theirs").exists()


def test_the_old_api_stack_is_refused_in_one_sentence(tmp_path):
    one = config(env="CartPole-v1").api_stack(enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False)
    one.callbacks(functools.partial(LedgerCallback, str(tmp_path)))
    with pytest.raises(LedgerError, match="new API stack"):
        one.build_algo()
    with pytest.raises(LedgerError, match="new API stack"):
        attach(one, tmp_path)


class Strange(gym.Space):
    """A space that is not one of Gymnasium's."""

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return 0

    def contains(self, x: Any) -> bool:
        return True


class StrangeEnv(Walk):
    observation_space = Strange((), np.float32)


def test_a_space_that_cannot_be_recorded_is_refused_before_training(tmp_path):
    with pytest.raises((LedgerError, ValueError, NotImplementedError)):
        attach(config(env=StrangeEnv), tmp_path).build_algo()


@pytest.mark.parametrize("runners", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_build_that_was_refused_leaves_no_run_behind(tmp_path, runners):
    first = record(tmp_path / "theirs", config(runners), iterations=1)
    for directory, resume in ((tmp_path / "ours", False), (tmp_path / "theirs", True)):
        with pytest.raises(LedgerError, match="has the autoreset mode"):
            attach(config(runners, mode="vector_entry_point", env=OwnMode), directory, resume=resume).build_algo()
        assert (directory / "run.json").exists() == resume
    assert record(tmp_path / "ours", config(runners), iterations=1).exit_status == 0
    assert compare(tmp_path / "theirs").events == first.events
    with pytest.raises(LedgerError, match="holds a run already"):
        attach(config(runners), tmp_path / "theirs").build_algo()


def test_finish_without_a_callback_says_what_to_add():
    algorithm = config().build_algo()
    try:
        with pytest.raises(LedgerError, match="attach"):
            finish(algorithm)
    finally:
        algorithm.stop()


def test_what_the_callback_hooks_is_put_back(tmp_path):
    algorithm = train(attach(config(), tmp_path), 1)
    assert not {"cleanup", "save_to_path"} & set(vars(algorithm))
    assert algorithm.cleanup.__func__ is PPO.cleanup


SCRIPT = """
import functools, sys, time
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from stepledger_ray import LedgerCallback
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
config = (PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=1, num_envs_per_env_runner=2)
          .training(train_batch_size=400, minibatch_size=200, num_epochs=1).callbacks(functools.partial(LedgerCallback, "run")))
algorithm = config.build_algo()
algorithm.train()
"""


def test_a_script_that_never_stops_its_algorithm_is_compared_at_its_end(tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "no difference" in done.stdout
    assert compare(tmp_path / "run").exit_status == 0


def test_a_driver_that_is_killed_leaves_what_can_be_compared_as_far_as_it_goes(tmp_path):
    script = SCRIPT + textwrap.dedent(
        """
        for _ in range(200):
            algorithm.train()
            print("trained", flush=True)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        while "trained" not in process.stdout.readline():
            assert process.poll() is None
        time.sleep(6)  # so that blocks were flushed by time
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for _ in range(100):  # the workers notice that their driver is gone, and die too
        if not subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True).stdout:
            break
        time.sleep(0.1)
    result = compare(tmp_path / "run")
    assert result.equal
    assert not result.complete
    assert result.exit_status == 3
    assert main(["compare", str(tmp_path / "run")]) == 3


@pytest.mark.long
@pytest.mark.parametrize("retain", ["all", "differences"])
def test_what_is_suspicious_in_all_runners_together_is_found_in_parts_and_on_the_way(tmp_path, monkeypatch, retain):
    # RLlib seeds env k of runner r with seed + r + k (ray 2.60): env 1 of runner 1 and env 0 of runner 2 are the same.
    monkeypatch.setattr(tasks, "_SMALL", 0)
    algorithm = attach(config(2), tmp_path, compare_every=1, retain=retain).build_algo()
    for _ in range(2):
        algorithm.train()
    before = finish(algorithm)
    algorithm.stop()
    report = json.loads((tmp_path / "report.json").read_text())
    found = [(one["code"], one["tap"], one["runner"], one["env"], one["text"].split("are ")[1]) for one in report["warnings"]]
    assert found == [("SL609", "env", 2, 0, "those of runner 1, env 1")]
    assert [one.code for one in before.warnings] == ["SL609"]
    assert report["exit_status"] == 0
