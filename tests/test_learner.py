"""The learner tap of a training loop of one's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from common import MODES, VECTORS, Walk, assert_equal, run_python, vector_of
from gymnasium import spaces
from gymnasium.wrappers.vector import NormalizeObservation

from stepledger import Comparison, LearnerLedger, LedgerEnv, LedgerError, LedgerVectorEnv, compare, read

DICT = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)})


def envs_of(directory: Path, kind: str = "sync", mode: str = "NextStep", env_side: bool = False, **space: Any) -> LedgerVectorEnv:
    def make(index: int) -> gym.Env:
        env = Walk((3 + index, 5, 1, 4), index, **space)
        return LedgerEnv(env, directory, index) if env_side else env

    return LedgerVectorEnv(vector_of([lambda i=i: make(i) for i in range(3)], kind, mode), directory / "vector.npz")


def at(batch: Any, mask: Any) -> Any:
    return {key: part[mask] for key, part in batch.items()} if isinstance(batch, dict) else batch[mask]


def loop(envs: LedgerVectorEnv, ledger: LearnerLedger, steps: int = 40, *, reset_rows: bool = False, change: Any = None) -> None:
    """A loop for next-step autoreset, which leaves the reset rows out."""
    obs, _ = envs.reset(seed=0)
    envs.action_space.seed(0)
    done = np.zeros(3, bool)
    for step in range(steps):
        actions = envs.action_space.sample()
        following, rewards, terminated, truncated, _ = envs.step(actions)
        real = np.ones(3, bool) if reset_rows else ~done
        row = [at(part, real) for part in (obs, actions, rewards, following, terminated, truncated)]
        if change is not None and step == 10:
            row = change(*row)
        ledger.transitions(*row)
        obs, done = following, terminated | truncated


def compared(directory: Path, envs: LedgerVectorEnv, ledger: LearnerLedger) -> Comparison:
    envs.close()
    ledger.close()
    return compare(directory)


@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("space", [{}, {"observation_space": DICT}, {"action_space": spaces.Box(-1, 1, (2,))}], ids=["", "dict", "box"])
@pytest.mark.parametrize("once", [True, False])
def test_a_loop_without_a_fault_is_equal(tmp_path: Path, kind: str, space: dict[str, Any], once: bool) -> None:
    envs, ledger = envs_of(tmp_path, kind, env_side=True, **space), LearnerLedger(tmp_path / "learner.npz", each_step_once=once)
    loop(envs, ledger)
    comparison = compared(tmp_path, envs, ledger)
    assert_equal(comparison)
    assert [hop.name for hop in comparison.hops] == ["env -> vector", "vector -> learner"]
    assert comparison.hops[1].events == read(tmp_path / "learner.npz").events > 80


@pytest.mark.parametrize("once", [True, False])
def test_the_reset_row_is_found_at_every_reset(tmp_path: Path, once: bool) -> None:
    envs, ledger = envs_of(tmp_path), LearnerLedger(tmp_path / "learner.npz", each_step_once=once)
    loop(envs, ledger, reset_rows=True)
    comparison = compared(tmp_path, envs, ledger)
    assert comparison.exit_status == 1
    resets = {
        (env, episode, 0)
        for env, stream in enumerate(read(tmp_path / "vector.npz").streams.values())
        for episode in stream.columns["episode"][stream.data["kind"] == 0].tolist()
        if episode
    }
    assert {(one.env, one.episode, one.step) for one in comparison.differences} == resets
    assert all("joins the end of episode" in one.second["event"] for one in comparison.differences)


CHANGES = {
    "obs": lambda o, a, r, n, t, u: [o + np.float32(1e-6) + o * np.float32(1e-6), a, r, n, t, u],
    "action": lambda o, a, r, n, t, u: [o, (a + 1) % 4, r, n, t, u],
    "reward": lambda o, a, r, n, t, u: [o, a, r + 1, n, t, u],
    "next_obs": lambda o, a, r, n, t, u: [o, a, r, o, t, u],
    "terminated": lambda o, a, r, n, t, u: [o, a, r, n, ~t, u],
    "truncated": lambda o, a, r, n, t, u: [o, a, r, n, t, ~u],
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_field_is_named(tmp_path: Path, field: str) -> None:
    envs, ledger = envs_of(tmp_path), LearnerLedger(tmp_path / "learner.npz")
    loop(envs, ledger, change=CHANGES[field])
    comparison = compared(tmp_path, envs, ledger)
    assert {one.fields for one in comparison.differences} == {(field,)}
    assert 1 <= len(comparison.differences) <= 3


@pytest.mark.parametrize("exchanged", [(0,), (3,)], ids=["obs", "next_obs"])
def test_an_observation_of_another_step_with_the_same_action_is_named_where_it_is(tmp_path: Path, exchanged: tuple[int]) -> None:
    """It leads to that step, as what was not exchanged leads to its own: the one that explains it with fewer changes is meant."""
    envs, ledger = envs_of(tmp_path), LearnerLedger(tmp_path / "learner.npz")
    rows: list[list[Any]] = []

    class Exchange:
        def transitions(self, *row: Any) -> None:
            rows.append([part.copy() for part in row])
            same = [(old, env) for old in rows[:-1] for env in np.flatnonzero(old[1] == row[1][0])]
            if len(rows) == 12:
                (old, env), mine = same[0], [part.copy() for part in row]
                for field in exchanged:
                    mine[field][0] = old[field][env]
                row = tuple(mine)
            ledger.transitions(*row)

    loop(envs, Exchange())  # type: ignore[arg-type]
    comparison = compared(tmp_path, envs, ledger)
    (one,) = comparison.differences
    assert one.fields == (("obs",) if exchanged == (0,) else ("next_obs",))
    sent = read(tmp_path / "vector.npz")
    key = next(key for key in sent.streams if key.env == one.env)
    stream = sent.streams[key]
    at = (stream.columns["episode"] == one.episode) & (stream.columns["step"] == one.step)
    reward = np.asarray(rows[11][2][0], sent.meta["reward_dtype"])
    assert stream.data["h_rew"][at].tolist() == [int(reward.view(stream.data["h_rew"].dtype))]


def test_a_sample_of_a_replay_buffer_with_its_shapes(tmp_path: Path) -> None:
    envs, ledger = envs_of(tmp_path), LearnerLedger(tmp_path / "learner.npz")
    kept: list[list[Any]] = []

    class Keep:
        def transitions(self, *row: Any) -> None:
            kept.append(list(row))

    loop(envs, Keep())  # type: ignore[arg-type]
    columns = [np.concatenate(parts) for parts in zip(*kept)]
    rows = np.random.default_rng(0).integers(0, len(columns[0]), 500)
    obs, actions, rewards, following, terminated, truncated = (column[rows] for column in columns)
    flags = (part.astype(np.float32)[:, None] for part in (terminated, truncated))
    ledger.transitions(obs, actions[:, None], rewards[:, None], following, *flags)
    comparison = compared(tmp_path, envs, ledger)
    assert_equal(comparison, 500)
    assert comparison.hops[0].coverage["learned_more_than_once"] > 50


class Same(gym.Env):
    """Every observation and reward is the same, so that transitions can't be told apart."""

    observation_space, action_space = spaces.Discrete(2), spaces.Discrete(1)
    _at = 0

    def reset(self, **options: Any) -> Any:
        self._at = 0
        return 0, {}

    def step(self, action: Any) -> Any:
        self._at += 1
        return 0, 0.0, self._at == 4, False, {}


def test_transitions_that_cannot_be_told_apart_are_each_learned_once(tmp_path: Path) -> None:
    envs = LedgerVectorEnv(vector_of([Same] * 3), tmp_path / "vector.npz")
    ledger = LearnerLedger(tmp_path / "learner.npz", each_step_once=True)
    loop(envs, ledger)
    assert_equal(compared(tmp_path, envs, ledger))


def test_a_step_that_is_never_learned_from_is_one_where_each_must_be(tmp_path: Path) -> None:
    for once in (True, False):
        directory = tmp_path / str(once)
        envs, ledger = envs_of(directory), LearnerLedger(directory / "learner.npz", each_step_once=once)
        loop(envs, ledger, change=lambda *row: [part[:0] for part in row])
        comparison = compared(directory, envs, ledger)
        assert comparison.exit_status == once
        assert comparison.hops[0].coverage["never_learned"] in (1, 2, 3)


@pytest.mark.skipif("SameStep" not in MODES, reason="this Gymnasium has next-step autoreset only")
def test_same_step_autoreset_with_its_final_observation(tmp_path: Path) -> None:
    for right in (True, False):
        directory = tmp_path / str(right)
        envs, ledger = envs_of(directory, mode="SameStep"), LearnerLedger(directory / "learner.npz", each_step_once=True)
        obs, _ = envs.reset(seed=0)
        for _ in range(30):
            actions = envs.action_space.sample()
            following, rewards, terminated, truncated, infos = envs.step(actions)
            successors = following.copy()
            for env in np.flatnonzero(terminated | truncated):
                successors[env] = infos["final_obs"][env]
            ledger.transitions(obs, actions, rewards, successors if right else following, terminated, truncated)
            obs = following
        comparison = compared(directory, envs, ledger)
        assert comparison.exit_status == (not right)
        assert {one.fields for one in comparison.differences} == (set() if right else {("next_obs",)})


def test_torch_tensors_are_taken(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    envs, ledger = envs_of(tmp_path), LearnerLedger(tmp_path / "learner.npz")

    class Tensors:
        def transitions(self, *row: Any) -> None:
            ledger.transitions(*map(torch.as_tensor, row))

    loop(envs, Tensors())  # type: ignore[arg-type]
    assert_equal(compared(tmp_path, envs, ledger))


def test_without_a_vector_env_it_says_what_to_do_and_training_goes_on(tmp_path: Path) -> None:
    ledger = LearnerLedger(tmp_path / "learner.npz")
    with pytest.warns(RuntimeWarning, match="holds no ledger of a vector env: put LedgerVectorEnv around it") as caught:
        [ledger.transitions([], [], [], [], [], []) for _ in range(3)]
    assert len(caught) == 1
    ledger.close()
    with pytest.raises(LedgerError, match="holds no ledger of a vector env: put LedgerVectorEnv around it"):
        LearnerLedger(tmp_path / "learner.npz", on_error="raise").transitions([], [], [], [], [], [])


def killed_run(directory: Path, name: str) -> None:
    """What a process leaves that was killed while a vector env of another space was recorded."""
    code = """
import os, sys
import re
from pathlib import Path
from common import Walk, vector_of
from gymnasium import spaces
from gymnasium.wrappers.vector import NormalizeObservation
from stepledger import LedgerVectorEnv
envs = LedgerVectorEnv(vector_of([lambda: Walk(observation_space=spaces.Discrete(3))]), Path(sys.argv[1]))
envs.reset()
os._exit(9)
"""
    assert run_python(code, directory / name, check=False).returncode == 9


@pytest.mark.parametrize("name", ["a.npz", "z.npz"])
@pytest.mark.parametrize("flushed", [True, False])
def test_what_a_killed_run_left_is_no_vector_env_of_this_one(tmp_path: Path, name: str, flushed: bool) -> None:
    killed_run(tmp_path, name)
    envs, ledger = envs_of(tmp_path), LearnerLedger(tmp_path / "learner.npz", on_error="raise")
    envs.reset(seed=0)
    if flushed:
        envs.flush()
    loop(envs, ledger)
    (tmp_path / name).with_suffix(".journal").unlink()
    assert_equal(compared(tmp_path, envs, ledger))


def test_after_all_vector_envs_have_ended_the_last_one_is_meant(tmp_path: Path) -> None:
    killed_run(tmp_path, "z.npz")
    envs = envs_of(tmp_path)
    rows: list[Any] = []

    class Keep:
        def transitions(self, *row: Any) -> None:
            rows.append(row)

    loop(envs, Keep())  # type: ignore[arg-type]
    envs.close()
    ledger = LearnerLedger(tmp_path / "learner.npz", on_error="raise")
    for row in rows:
        ledger.transitions(*row)
    ledger.close()
    (tmp_path / "z.journal").unlink()
    assert_equal(compare(tmp_path))


def test_of_two_vector_envs_that_are_recorded_now_it_is_not_guessed_which_is_meant(tmp_path: Path) -> None:
    envs, other = envs_of(tmp_path), LedgerVectorEnv(vector_of([Walk]), tmp_path / "other.npz")
    other.reset()
    with pytest.warns(RuntimeWarning, match="holds ledgers of 2 vector envs: give each training loop a directory of its own"):
        loop(envs, LearnerLedger(tmp_path / "learner.npz"))
    other.close()
    envs.close()
    assert not (tmp_path / "learner.npz").exists()


def test_a_directory_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="is a directory: name the file to write"):
        LearnerLedger(tmp_path)
    with pytest.raises(LedgerError, match="on_error='no' is unknown"):
        LearnerLedger(tmp_path / "learner.npz", on_error="no")  # type: ignore[arg-type]


def test_batches_of_different_lengths_end_the_recording_and_not_the_run(tmp_path: Path) -> None:
    envs, ledger = envs_of(tmp_path), LearnerLedger(tmp_path / "learner.npz")
    with pytest.warns(RuntimeWarning, match="pass batches of one length"):
        loop(envs, ledger, change=lambda *row: [row[0][:1], *row[1:]], reset_rows=True)
    assert compared(tmp_path, envs, ledger).exit_status != 0


def test_a_transition_that_nobody_sampled_is_of_no_env(tmp_path: Path) -> None:
    envs, ledger = envs_of(tmp_path), LearnerLedger(tmp_path / "learner.npz")
    loop(envs, ledger)
    strange = np.full((2, 3), 7, np.float32)
    ledger.transitions(strange, [0, 1], [0.0, 0.0], strange, [False, True], [False, False])
    comparison = compared(tmp_path, envs, ledger)
    assert {(one.env, one.episode, one.step) for one in comparison.differences} == {(-1, -1, -1)}
    assert comparison.hops[0].streams_different == 0
    first, *_, last = str(comparison).splitlines()
    assert (
        first
        == "a learned transition (env unknown): the event should not be there: it was never sampled [SL506], and 1 more of unknown envs"
    )
    assert last == "0 of 3 envs differ between vector -> learner (2 differences, 2 of unknown envs)"


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("env_side", [True, False])
def test_observations_of_a_wrapper_outside_the_ledger_are_said_to_be_that(tmp_path: Path, once: bool, env_side: bool) -> None:
    envs, ledger = envs_of(tmp_path, env_side=env_side), LearnerLedger(tmp_path / "learner.npz", each_step_once=once)
    loop(NormalizeObservation(envs), ledger)
    envs.close()
    ledger.close()
    sentence = r"none of the \d+ learned transitions has an observation that the vector env gave: pass observations as they came"
    if env_side:
        comparison = compare(tmp_path)
        assert (comparison.exit_status, comparison.differences) == (2, ())
        assert re.search(f"not compared: {sentence}", str(comparison))
    else:
        with pytest.raises(LedgerError, match=sentence):
            compare(tmp_path)


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_a_loop_that_does_not_know_truncated_is_compared_without_it(tmp_path: Path, fault: bool, same: bool) -> None:
    if same:
        envs = LedgerVectorEnv(vector_of([lambda: gym.wrappers.TimeLimit(Same(), 3)] * 3), tmp_path / "vector.npz")
    else:
        envs = envs_of(tmp_path)
    ledger = LearnerLedger(tmp_path / "learner.npz", each_step_once=True)

    class Dones:
        def transitions(self, obs: Any, actions: Any, rewards: Any, following: Any, terminated: Any, truncated: Any) -> None:
            dones = terminated | truncated if fault else terminated
            ledger.transitions(obs, actions, rewards, following, dones.astype(np.float32)[:, None], None)

    loop(envs, Dones())  # type: ignore[arg-type]
    comparison = compared(tmp_path, envs, ledger)
    truncated = comparison.hops[0].fields["truncated"]
    assert (truncated.status, truncated.note) == ("not compared", "not known to the training loop")
    assert "not compared: truncated" in str(comparison)
    assert comparison.exit_status == fault
    if not same:
        assert {one.fields for one in comparison.differences} == ({("terminated",)} if fault else set())


def test_truncated_in_some_calls_only_ends_the_recording_and_not_the_run(tmp_path: Path) -> None:
    envs, ledger = envs_of(tmp_path), LearnerLedger(tmp_path / "learner.npz")
    with pytest.warns(RuntimeWarning, match="truncated was passed in some calls only: pass it in all of them, or None in all"):
        loop(envs, ledger, change=lambda *row: [*row[:5], None])
    assert compared(tmp_path, envs, ledger).exit_status == 3


def test_a_successor_of_zeros_is_named_with_its_field(tmp_path: Path) -> None:
    envs, ledger = envs_of(tmp_path), LearnerLedger(tmp_path / "learner.npz")
    loop(envs, ledger, change=lambda obs, actions, rewards, following, *ends: (obs, actions, rewards, 0 * abs(following), *ends))
    comparison = compared(tmp_path, envs, ledger)
    assert {one.explanations[0].text for one in comparison.differences} == {"the next obs is zero"}
    assert " x SL101 next_obs replaced by zeros" in str(comparison)


def test_where_observations_come_again_no_place_is_said_to_be_the_origin_of_one(tmp_path: Path) -> None:
    def change(obs: Any, actions: Any, rewards: Any, following: Any, *ends: Any) -> Any:
        return obs, actions, rewards, 1 - following, *ends

    few = {"observation_space": spaces.MultiBinary(2)}
    envs, ledger = envs_of(tmp_path, **few), LearnerLedger(tmp_path / "learner.npz")
    loop(envs, ledger, change=change)
    comparison = compared(tmp_path, envs, ledger)
    found = [one for difference in comparison.differences for one in difference.explanations]
    elsewhere = [one for one in found if one.code in ("SL502", "SL503", "SL504", "SL509")]
    assert elsewhere
    assert all(" may be " in one.text for one in elsewhere)
    assert " joins " not in str(comparison)
