"""Comparing: where two sides disagree, whether all of it was there, and when it can't be said."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from common import MODES, Walk, assert_equal, drive, rewrite, run_walks, vector_of, walk, walks
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from stepledger import Comparison, Difference, LedgerEnv, LedgerError, LedgerVectorEnv, compare, read
from stepledger.digest import SpaceDigest
from stepledger.format import StreamKey
from stepledger.recorder import BatchRecorder, describe
from stepledger.result import KEPT

COLUMNS = ["kind", "terminated", "truncated", "h_obs", "h_act", "h_rew", "episode", "step"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both sides of a run without a fault; nobody changes it."""
    directory = tmp_path_factory.mktemp("recorded")
    run_walks(directory, steps=60)
    return directory


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it to be changed."""
    for path in recorded.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def edit(path: Path, env: int, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Change the columns of one stream, which may become longer or shorter."""
    streams = read(path).streams
    with np.load(path) as archive:
        offsets = archive["stream_offsets"]
        parts = [{name: archive[name][begin:end].copy() for name in COLUMNS} for begin, end in zip(offsets.tolist(), offsets[1:].tolist())]
    at = [key.env for key in streams].index(env)
    parts[at] = change(parts[at]) or parts[at]
    lengths = [len(part["kind"]) for part in parts]
    members = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
    rewrite(path, {**members, "stream_offsets": np.cumsum([0, *lengths])})


def rows(part: dict[str, np.ndarray], order: Any) -> dict[str, np.ndarray]:
    return {name: column[order] for name, column in part.items()}


def steps_in(path: Path) -> int:
    return sum(int((stream.data["kind"] == 1).sum()) for stream in read(path).streams.values())


def steps_of(part: dict[str, np.ndarray]) -> np.ndarray:
    return np.flatnonzero(part["kind"] == 1)


def place(recorded: Path, env: int, row: int) -> tuple[int, int, int]:
    columns = read(recorded / f"env-{env}.npz").streams[env].columns
    return env, int(columns["episode"][row]), int(columns["step"][row])


def where(difference: Difference) -> tuple[int, int, int]:
    return difference.env, difference.episode, difference.step


@pytest.mark.parametrize(
    ("column", "field"),
    [
        ("h_obs", "obs"),
        ("h_act", "action"),
        ("h_rew", "reward"),
    ],
)
@pytest.mark.parametrize("row", [0, 1, 17, -1])
def test_one_value_that_differs_is_one_difference_at_its_place(run: Path, recorded: Path, column: str, field: str, row: int) -> None:
    row = row % len(read(run / "env-1.npz").streams[1])
    if column != "h_obs" and read(run / "env-1.npz").streams[1].data["kind"][row] == 0:
        row += 1  # a reset has neither action nor reward

    def change(part: dict[str, np.ndarray]) -> None:
        part[column][row] ^= 1

    edit(run / "trainer.npz", 1, change)
    comparison = compare(run)
    assert comparison.exit_status == 1
    assert comparison.complete
    (difference,) = comparison.differences
    assert difference.fields == (field,)
    assert difference.kind == "changed"
    assert where(difference) == place(recorded, 1, row)
    (hop,) = comparison.hops
    assert (hop.name, hop.streams, hop.streams_different, hop.differences) == ("env -> vector", 3, 1, 1)
    assert hop.events == read(run / "trainer.npz").events
    for name, result in hop.fields.items():
        assert result.compared == (hop.events if name in ("kind", "obs") else steps_in(run / "trainer.npz"))
        assert (result.status, result.differences) == (("different", 1) if name == field else ("equal", 0))


@pytest.mark.parametrize("flags", [("terminated",), ("truncated",), ("terminated", "truncated")], ids="+".join)
def test_flags_that_differ_are_named(run: Path, recorded: Path, flags: tuple[str, ...]) -> None:
    ends = read(run / "env-0.npz").streams[0].data
    row = int(np.flatnonzero(ends["terminated"] & ~ends["truncated"])[2])

    def change(part: dict[str, np.ndarray]) -> None:
        for flag in flags:
            part[flag][row] ^= True

    edit(run / "trainer.npz", 0, change)
    (difference,) = compare(run).differences
    assert difference.fields == flags
    assert where(difference) == place(recorded, 0, row)
    assert difference.first == {flag: str(bool(ends[flag][row])) for flag in flags}
    assert difference.second == {flag: str(not ends[flag][row]) for flag in flags}


def test_several_fields_of_one_event_are_one_difference(run: Path) -> None:
    def change(part: dict[str, np.ndarray]) -> None:
        at = steps_of(part)[4]
        for column in ("h_obs", "h_act", "h_rew"):
            part[column][at] ^= 1

    edit(run / "trainer.npz", 2, change)
    (difference,) = compare(run).differences
    assert difference.fields == ("action", "obs", "reward")


def test_differences_far_apart_are_all_found_in_all_environments(run: Path, recorded: Path) -> None:
    places = {(env, row) for env in range(3) for row in range(3 + env, 60, 9)}
    for env in range(3):

        def change(part: dict[str, np.ndarray], env: int = env) -> None:
            for one, row in places:
                if one == env:
                    part["h_obs"][row] ^= 1

        edit(run / "trainer.npz", env, change)
    comparison = compare(run)
    assert sorted(map(where, comparison.differences)) == sorted(place(recorded, env, row) for env, row in places)
    assert comparison.hops[0].streams_different == 3


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("row", [1, 20, 40])
def test_lost_events_are_one_difference_not_everything_after_them(run: Path, recorded: Path, length: int, row: int) -> None:
    edit(run / "trainer.npz", 1, lambda part: rows(part, np.delete(np.arange(len(part["kind"])), np.arange(row, row + length))))
    comparison = compare(run)
    (difference,) = comparison.differences
    assert (difference.kind, difference.fields, difference.events) == ("lost", ("event",), length)
    assert where(difference) == place(recorded, 1, row)
    assert comparison.hops[0].events == comparison.hops[0].fields["obs"].compared == read(run / "trainer.npz").events
    assert comparison.complete


def test_repeated_events_are_one_difference(run: Path) -> None:
    edit(run / "trainer.npz", 1, lambda part: rows(part, np.insert(np.arange(len(part["kind"])), 21, [20, 20])))
    (difference,) = compare(run).differences
    assert (difference.kind, difference.fields, difference.events) == ("extra", ("event",), 2)


@pytest.mark.parametrize(("side", "kind"), [("trainer.npz", "lost"), ("env-1.npz", "extra")])
def test_an_end_that_one_side_lacks_is_a_difference_if_both_were_closed(run: Path, side: str, kind: str) -> None:
    edit(run / side, 1, lambda part: rows(part, np.arange(len(part["kind"]) - 4)))
    comparison = compare(run)
    (difference,) = comparison.differences
    assert (difference.kind, difference.events) == (kind, 4)
    assert comparison.exit_status == 1


@pytest.mark.parametrize("side", ["trainer.npz", "env-1.npz"])
@pytest.mark.parametrize("cut", [0, 4, 1000])
def test_an_end_that_one_side_lacks_is_unknown_if_its_recording_was_stopped(run: Path, side: str, cut: int) -> None:
    edit(run / side, 1, lambda part: rows(part, np.arange(max(0, len(part["kind"]) - cut))))
    rewrite(run / side, stopped="OSError: No space left on device", closed=False)
    comparison = compare(run)
    assert comparison.equal
    assert not comparison.complete
    assert comparison.exit_status == 3
    assert len(comparison.hops[0].unknown) == (3 if side == "trainer.npz" else 1)


def test_a_difference_before_an_open_end_is_still_a_difference(run: Path) -> None:
    def change(part: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        part["h_rew"][7] ^= 1
        return rows(part, np.arange(len(part["kind"]) - 9))

    edit(run / "trainer.npz", 1, change)
    rewrite(run / "trainer.npz", stopped="OSError", closed=False)
    comparison = compare(run)
    assert comparison.exit_status == 1
    assert comparison.hops[0].differences == 1
    assert any("env 1: the last 9 events" in sentence for sentence in comparison.hops[0].unknown)


def test_streams_of_two_environments_that_were_swapped_differ_from_there_on(run: Path) -> None:
    path = run / "trainer.npz"
    streams = [read(path).streams[env].data for env in (0, 1)]
    edit(path, 0, lambda part: {name: np.concatenate([part[name][:20], streams[1].get(name, part[name])[20:61]]) for name in part})
    edit(path, 1, lambda part: {name: np.concatenate([part[name][:20], streams[0].get(name, part[name])[20:61]]) for name in part})
    comparison = compare(run)
    assert comparison.exit_status == 1
    assert comparison.hops[0].streams_different == 2
    (one,) = comparison.differences
    assert (one.env, one.events, [why.code for why in one.explanations]) == (0, len(streams[0]["kind"]) - 20, ["SL308"])


def test_more_differences_than_are_kept_are_counted(tmp_path: Path) -> None:
    run_walks(tmp_path, steps=500)

    def change(part: dict[str, np.ndarray]) -> None:
        part["h_obs"][:] ^= 1

    edit(tmp_path / "trainer.npz", 0, change)
    edit(tmp_path / "trainer.npz", 2, change)
    comparison = compare(tmp_path)
    n = len(read(tmp_path / "trainer.npz").streams[0])
    assert comparison.hops[0].differences == 2 * n
    assert comparison.hops[0].fields["obs"].differences == 2 * n
    assert comparison.hops[0].fields["reward"].status == "equal"
    assert [one.env for one in comparison.differences] == [0] * KEPT + [2] * KEPT
    assert len(str(comparison).splitlines()) < 10


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "reward dtype": ({"reward_dtype": np.float64}, {}, "different reward dtypes (<f8 and <f4)"),
    "digest": ({"digest": "blake2b"}, {}, "different digests (blake2b and xxh3_64)"),
    "observation shape": ({"observation_space": spaces.Box(-np.inf, np.inf, (3,))}, {"observation_space": (2,)}, "observation spaces"),
    "observation dtype": ({"observation_space": spaces.Box(-9, 9, (3,))}, {"observation_space": np.float64}, "observation spaces"),
    "actions": ({"action_space": spaces.Discrete(4)}, {"action_space": 5}, "different action spaces"),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_sides_that_were_recorded_differently_are_not_compared(tmp_path: Path, what: str) -> None:
    options, other, match = SETTINGS[what]
    walk_options = {name: options[name] for name in ("observation_space", "action_space") if name in options}
    ledger_options = {name: value for name, value in options.items() if name not in walk_options}
    vector_env = SyncVectorEnv([lambda: LedgerEnv(Walk(**walk_options), tmp_path, 0, **ledger_options)])
    if "observation_space" in other:  # a vector env that declares another space than its environments have
        shape, dtype = ((2,), np.float32) if isinstance(other["observation_space"], tuple) else ((3,), np.float64)
        vector_env.single_observation_space = spaces.Box(-9, 9, shape, dtype)
    if "action_space" in other:
        vector_env.single_action_space = spaces.Discrete(other["action_space"])
    envs = LedgerVectorEnv(vector_env, tmp_path / "trainer.npz")
    envs.reset()
    envs.step([0])
    envs.close()
    with pytest.raises(LedgerError) as caught:
        compare(tmp_path)
    assert match in str(caught.value)
    assert str(caught.value).endswith("record both sides alike.")


def test_values_kept_on_one_side_only_are_no_reason_to_refuse(tmp_path: Path) -> None:
    makers = [lambda i=i: walk(tmp_path, i, keep_values=bool(i)) for i in range(2)]
    envs = LedgerVectorEnv(SyncVectorEnv(makers), tmp_path / "trainer.npz", keep_values=False)
    drive(envs, 20)
    envs.close()
    assert_equal(compare(tmp_path))


def test_bounds_of_a_box_may_differ_between_environments(tmp_path: Path) -> None:
    boxes = [spaces.Box(-high, high, (3,)) for high in (10, 20)]
    envs = LedgerVectorEnv(
        SyncVectorEnv(
            [lambda i=i: LedgerEnv(Walk(seed=i, observation_space=boxes[i]), tmp_path, i) for i in range(2)], observation_mode="different"
        ),
        tmp_path / "trainer.npz",
    )
    drive(envs, 20)
    envs.close()
    assert_equal(compare(tmp_path))


def test_two_runs_are_not_compared_with_each_other(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run_walks(other, steps=60)  # the very same values
    with pytest.raises(LedgerError, match="are of different runs: name the two sides of one run"):
        compare(other, run / "trainer.npz")


def test_what_earlier_runs_left_in_the_directory_is_left_out_and_said(tmp_path: Path) -> None:
    run_walks(tmp_path, n=4)  # two of these are not overwritten
    fewer = run_walks(tmp_path, n=2)
    assert fewer.exit_status == 0
    assert fewer.hops[0].streams == 2
    assert any("left out: 2 ledgers of earlier runs (env-2.npz, env-3.npz)" in note for note in fewer.hops[0].notes)


@pytest.mark.parametrize("side", ["env", "vector"])
def test_a_side_that_an_earlier_run_left_is_no_partner(tmp_path: Path, side: str) -> None:
    run_walks(tmp_path, n=1)
    if side == "env":
        (envs := SyncVectorEnv([lambda: walk(tmp_path, 0)])).reset(seed=0)
    else:
        (envs := LedgerVectorEnv(SyncVectorEnv([Walk]), tmp_path / "trainer.npz")).reset(seed=0)
    envs.close()
    with pytest.raises(LedgerError, match="are of different runs"):
        compare(tmp_path)


def test_an_environment_without_a_partner_is_named_and_not_compared(run: Path) -> None:
    (run / "env-1.npz").unlink()
    comparison = compare(run)
    assert comparison.equal
    assert not comparison.complete
    assert comparison.exit_status == 2
    assert comparison.hops[0].streams == 2
    (sentence,) = comparison.hops[0].unpaired
    assert sentence.startswith("env 1 has ")
    assert sentence.endswith("and no ledger at the tap 'env'")
    assert "not compared: env 1 has " in str(comparison)


def test_an_environment_that_the_trainer_does_not_have_is_named_too(run: Path) -> None:
    env = walk(run, 7)
    env.reset()
    env.close()
    comparison = compare(run)
    assert comparison.exit_status == 2
    (sentence,) = comparison.hops[0].unpaired
    assert sentence.startswith("env 7 has 1 event")
    assert sentence.endswith("and no ledger at the tap 'vector'")


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("other", ["nothing", "one env"])
def test_a_process_that_was_killed_before_its_second_tap_wrote_leaves_what_is_unknown(tmp_path: Path, killed: bool, other: str) -> None:
    box, discrete = SpaceDigest(spaces.Box(-1, 1, (2,))), SpaceDigest(spaces.Discrete(2))

    def write(name: str, tap: str, runner: int, envs: int = 2) -> BatchRecorder:
        keys = [StreamKey(runner, env) for env in range(envs)]
        recorder = BatchRecorder(tmp_path / name, describe(tap, box, discrete, keys, reward_dtype="<f4", digest="xxh3_64"))
        events = np.zeros(3 * envs, recorder.dtype)
        events["stream"], events["kind"] = np.repeat(np.arange(envs), 3), np.tile([0, 1, 1], envs)
        recorder.append(events)
        recorder.write()
        return recorder

    for tap in ("vector", "episode"):
        write(f"runner-1-{tap}.npz", tap, 1).close()
    vector = write("runner-2-vector.npz", "vector", 2)
    if other == "one env":  # then the tap was there, and has lost an environment
        write("runner-2-episode.npz", "episode", 2, envs=1).close()
    if not killed:
        vector.close()
    comparison = compare(tmp_path)
    (hop,) = comparison.hops
    assert comparison.equal
    unknown = killed and other == "nothing"
    assert (comparison.exit_status, bool(hop.unpaired)) == ((3, False) if unknown else (2, True))
    assert any("runner 2, env 1: 3 events can't be compared" in one for one in hop.unknown) == unknown


def test_a_difference_weighs_more_than_what_was_not_compared(run: Path) -> None:
    (run / "env-1.npz").unlink()

    def change(part: dict[str, np.ndarray]) -> None:
        part["h_obs"][3] ^= 1

    edit(run / "trainer.npz", 0, change)
    assert compare(run).exit_status == 1


def test_environments_of_which_none_has_a_partner_are_an_error(run: Path) -> None:
    for index in (0, 1):
        (run / f"env-{index}.npz").unlink()
    rewrite(run / "env-2.npz", stream_keys=[[0, 5, "", 0]])
    with pytest.raises(LedgerError, match=r"env 0 has .* nothing was compared\.$"):
        compare(run)


def test_sides_with_no_event_and_no_stream_in_common_are_an_error(tmp_path: Path) -> None:
    for index in (0, 4):
        env = walk(tmp_path, index)
        env.reset()
        env.close()
    for name, tap in [("env-0", "env"), ("env-4", "vector")]:
        path = tmp_path / f"{name}.npz"
        key = 0 if tap == "env" else 4
        edit(path, key, lambda part: rows(part, np.arange(0)))
        rewrite(path, tap=tap)
    with pytest.raises(LedgerError, match="nothing was compared"):
        compare(tmp_path)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", [False, True])
def test_what_only_steps_have_is_compared_in_steps_alone(tmp_path: Path, mode: str, fault: bool) -> None:
    envs = walks(tmp_path, n=2, mode=mode)
    envs.reset(seed=0)
    envs.close()
    if fault:
        edit(tmp_path / "trainer.npz", 0, lambda part: part["h_obs"].__setitem__(0, 1))
    comparison = compare(tmp_path)
    fields = comparison.hops[0].fields
    assert {name: (one.status, one.compared) for name, one in fields.items()} == {
        "kind": ("equal", 2),
        "obs": ("different" if fault else "equal", 2),
        **dict.fromkeys(("action", "reward", "terminated", "truncated"), ("not compared", 0)),
    }
    assert "not compared: action" in str(comparison)
    assert comparison.exit_status == fault


def test_an_end_at_a_reset_is_compared(run: Path) -> None:
    edit(run / "trainer.npz", 0, lambda part: part["terminated"].__setitem__(0, True))
    comparison = compare(run)
    assert comparison.differences[0].fields == ("terminated",)
    assert comparison.hops[0].fields["terminated"].compared == steps_in(run / "trainer.npz") + 1


def test_nothing_compared_is_never_equal(tmp_path: Path) -> None:
    run_walks(tmp_path, steps=3, n=1)
    for name in ("env-0.npz", "trainer.npz"):
        edit(tmp_path / name, 0, lambda part: rows(part, np.arange(0)))
    comparison = compare(tmp_path)
    assert comparison.events == 0
    assert comparison.exit_status == 2
    assert {one.status for one in comparison.hops[0].fields.values()} == {"not compared"}


@pytest.mark.parametrize(
    ("names", "match"),
    [
        ([], "holds no ledgers: name the directory that they were written to"),
        (["env-0.npz", "env-1.npz"], "only ledgers of the tap 'env', and comparing takes two sides"),
        (["trainer.npz"], "only ledgers of the tap 'vector', and comparing takes two sides"),
    ],
    ids=["nothing", "the environments alone", "the trainer alone"],
)
def test_one_side_alone_is_an_error(recorded: Path, tmp_path: Path, names: list[str], match: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes((recorded / name).read_bytes())
    with pytest.raises(LedgerError, match=match):
        compare(tmp_path)


def test_what_was_named_wrongly_is_said(recorded: Path, tmp_path: Path) -> None:
    trainer = recorded / "trainer.npz"
    cases: list[tuple[Any, Any, str]] = [
        (tmp_path / "no", None, "is not there"),
        (tmp_path / "no", trainer, "is not there"),
        (recorded, recorded / "no.npz", "is not there"),
        (recorded, recorded, "is a directory"),
        (recorded, ".", "is a directory"),
        (recorded, "/", "is a directory"),
        (recorded, "..", "is a directory"),
        (trainer, None, "is one file, and comparing takes two sides"),
        (tmp_path, trainer, "holds no ledger of an environment"),
        (trainer, trainer, "holds no ledger of an environment"),
        (recorded, recorded / "env-0.npz", "is a ledger of the tap 'env': name the file that was given to LedgerVectorEnv"),
    ]
    for env_side, trainer_side, match in cases:
        with pytest.raises(LedgerError, match=match) as caught:
            compare(env_side, trainer_side)
        assert str(caught.value).endswith(".")


def test_sides_are_named_in_every_way(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compare(recorded).to_dict()
    monkeypatch.chdir(recorded)
    for env_side, trainer_side in [
        (str(recorded), None),
        (recorded, recorded / "trainer.npz"),
        (".", "trainer.npz"),
        (".", "./trainer.npz"),
        ("../" + recorded.name, "trainer.journal"),
    ]:
        assert compare(env_side, trainer_side).to_dict() == expected
    one = compare("env-1.npz", "trainer.npz")
    assert one.equal
    assert one.hops[0].streams == 1
    assert len(one.hops[0].unpaired) == 2
    assert one.exit_status == 2


def test_a_trainer_elsewhere_and_environments_below_are_found(run: Path, tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for path in list(run.glob("env-*.npz")):
        path.rename(tmp_path / "a" / "b" / path.name)
    (run / "trainer.npz").rename(tmp_path / "elsewhere.npz")
    assert_equal(compare(tmp_path / "a", tmp_path / "elsewhere.npz"))
    assert_equal(compare(tmp_path))


def test_two_trainers_in_one_directory_need_to_be_told_apart(run: Path) -> None:
    (run / "evaluation.npz").write_bytes((run / "trainer.npz").read_bytes())
    with pytest.raises(LedgerError, match=r"both hold env 0: name a directory with the ledgers of one run"):
        compare(run)
    assert_equal(compare(run, run / "trainer.npz"))


def test_progress_is_told_up_to_the_end(recorded: Path) -> None:
    told: list[tuple[int, int]] = []
    compare(recorded, progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len({total for _, total in told}) == 1
    assert told[-1][0] == told[-1][1] > 0


def test_the_result_is_data(run: Path) -> None:
    def change(part: dict[str, np.ndarray]) -> None:
        part["h_rew"][5] ^= 1

    edit(run / "trainer.npz", 0, change)
    comparison = compare(run, run / "trainer.npz")
    assert isinstance(comparison, Comparison)
    with pytest.raises(dataclasses.FrozenInstanceError):
        comparison.hops = ()  # type: ignore[misc]
    as_dict = comparison.to_dict()
    assert json.loads(json.dumps(as_dict)) == json.loads(json.dumps(as_dict, allow_nan=False))
    assert as_dict["equal"] is False
    assert as_dict["complete"] is True
    assert as_dict["exit_status"] == 1
    assert as_dict["events"] == comparison.events
    assert as_dict["differences"][0]["fields"] == ("reward",)
    assert as_dict["hops"][0]["fields"]["reward"]["differences"] == 1
    assert compare(run).to_dict() == as_dict  # and the same each time


def test_a_report_names_the_first_difference_of_each_environment(run: Path) -> None:
    for env, wrong in [(0, [9, 20]), (2, [30])]:

        def change(part: dict[str, np.ndarray], wrong: list[int] = wrong) -> None:
            part["h_obs"][wrong] ^= 1

        edit(run / "trainer.npz", env, change)
    comparison = compare(run)
    first, second, *_, last = str(comparison).splitlines()
    assert first.startswith(f"env 0, episode {comparison.differences[0].episode}, step {comparison.differences[0].step}: obs differs")
    assert "1 more in this env" in first
    assert second.startswith(f"env 2, episode {comparison.differences[2].episode}, ")
    assert "2 of 3 envs differ between env -> vector (3 differences)" in last


def test_a_report_of_a_run_without_a_fault_says_how_much_was_compared(recorded: Path) -> None:
    comparison = compare(recorded)
    text = str(comparison)
    assert f"{comparison.events:,} events" in text
    assert "no difference" in text.splitlines()[-1]
    assert "differ:" not in text


def test_a_reward_is_printed_on_both_sides_as_it_was(tmp_path: Path) -> None:
    for dtype, step in [(np.float32, 1), (np.float64, 1)]:
        directory = tmp_path / np.dtype(dtype).name
        run_walks(directory, steps=20, n=1, reward_dtype=dtype)
        given = read(directory / "env-0.npz").streams[0].data["h_rew"]

        def change(part: dict[str, np.ndarray], step: int = step) -> None:
            part["h_rew"][2] += np.array(step, part["h_rew"].dtype)

        edit(directory / "trainer.npz", 0, change)
        (difference,) = compare(directory).differences
        assert difference.first["reward"] == str(given[2:3].view(dtype)[0])
        assert difference.first["reward"] != difference.second["reward"]
        assert dtype(difference.second["reward"]) == (given[2:3] + given.dtype.type(1)).view(dtype)[0]


class Perturbs(SyncVectorEnv):
    """Changes one observation on the way, by the least that there is."""

    def step(self, actions: Any) -> Any:
        observations, *rest = super().step(actions)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 5:
            observations = observations.copy()
            observations[0, 1] = np.nextafter(observations[0, 1], observations.dtype.type(np.inf))
        return (observations, *rest)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_are_printed_so_that_the_difference_shows(tmp_path: Path, dtype: Any) -> None:
    space = spaces.Box(-10, 10, (3,), dtype)
    makers = [lambda i=i: LedgerEnv(Walk((30,), i, observation_space=space), tmp_path, i, keep_values=True) for i in range(2)]
    envs = LedgerVectorEnv(Perturbs(makers), tmp_path / "trainer.npz", keep_values=True)
    drive(envs, 12)
    envs.close()
    (difference,) = compare(tmp_path).differences
    assert (difference.env, difference.step, difference.fields) == (0, 5, ("obs",))
    given, received = (np.array(json.loads(side["obs"]), dtype) for side in (difference.first, difference.second))
    np.testing.assert_array_equal(given, read(tmp_path / "env-0.npz").streams[0].values["values_obs_0"][5])
    assert (given != received).tolist() == [False, True, False]


def test_of_a_value_with_parts_a_report_names_those_that_differ(tmp_path: Path) -> None:
    state = spaces.Dict(goal=spaces.Discrete(9), speed=spaces.Box(-1, 1, (2,)))
    space = spaces.Dict(camera=spaces.Box(0, 255, (4,), np.uint8), state=state)

    class Other(gym.ObservationWrapper):
        def observation(self, observation: Any) -> Any:
            inner = observation["state"]
            return {**observation, "state": {**inner, "goal": (inner["goal"] + 1) % 9}}

    env = LedgerEnv(Walk(observation_space=space), tmp_path, 0, keep_values=True)
    envs = LedgerVectorEnv(SyncVectorEnv([lambda: Other(env)]), tmp_path / "trainer.npz", keep_values=True)
    drive(envs, 5)
    envs.close()
    first = compare(tmp_path).differences[0]
    assert re.fullmatch(r'obs\["state"\]\["goal"\] = \d', first.first["obs"])
    assert re.fullmatch(r'obs\["state"\]\["goal"\] = \d', first.second["obs"])


def test_a_large_value_takes_one_line_of_a_report(tmp_path: Path) -> None:
    makers = [
        lambda i=i: LedgerEnv(Walk((30,), i, observation_space=spaces.Box(-10, 10, (9, 9, 3))), tmp_path, i, keep_values=True)
        for i in range(2)
    ]
    envs = LedgerVectorEnv(Perturbs(makers), tmp_path / "trainer.npz", keep_values=True)
    drive(envs, 12)
    envs.close()
    comparison = compare(tmp_path)
    assert comparison.hops[0].differences == 1
    assert len(str(comparison).splitlines()) == 3


@pytest.mark.parametrize(("dtype", "given", "received"), [(np.uint8, "0", "9"), (np.float32, "0.0", "9.0")])
@pytest.mark.parametrize("where", ["obs", "action"])
def test_of_a_long_array_a_report_shows_the_elements_that_differ(tmp_path: Path, dtype: Any, given: str, received: str, where: str) -> None:
    space = spaces.Box(0, 255, (84, 84, 3), dtype)

    class Still(Walk):
        def _observation(self) -> Any:
            return np.zeros((84, 84, 3), dtype)

    class Changes(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            actions = actions.copy()
            actions[0, 40, 40:] = 9 if where == "action" else 0
            observations, *rest = super().step(actions)
            observations = observations.copy()
            observations[0, 40, 40:] = 9 if where == "obs" else 0
            return (observations, *rest)

    make = functools.partial(LedgerEnv, Still((9,), observation_space=space, action_space=space), tmp_path, keep_values=True)
    envs = LedgerVectorEnv(Changes([make]), tmp_path / "trainer.npz", keep_values=True)
    envs.reset(seed=0)
    envs.step(np.zeros((1, 84, 84, 3), dtype))
    envs.close()
    (difference,) = compare(tmp_path).differences
    assert difference.first[where] == "an array of shape (84, 84, 3)"
    if where == "action":
        given, received = received, given
    changes = ", ".join(f"[40, {at // 3}, {at % 3}]: {given} -> {received}" for at in range(120, 124))
    assert difference.second[where] == f"it with 132 of 21,168 elements changed: {changes}, ..."
    assert "env gave an array of shape (84, 84, 3), trainer received it with 132 of 21,168 elements changed: " in str(compare(tmp_path))


@pytest.mark.parametrize(("dtype", "value"), [(np.float32, np.nan), (np.uint8, 3)])
def test_only_equal_values_are_said_to_be_the_same_in_another_shape(tmp_path: Path, dtype: Any, value: Any) -> None:
    class Flat(gym.ObservationWrapper):
        def observation(self, observation: Any) -> Any:
            return np.full(100, value, dtype)

    class Column(gym.ObservationWrapper):
        def observation(self, observation: Any) -> Any:
            return observation.reshape(100, 1)

    space = spaces.Box(0, 255, (100,), dtype)
    env = LedgerEnv(Flat(Walk(observation_space=space)), tmp_path, 0, keep_values=True)
    trainer = LedgerEnv(Column(env), tmp_path / "trainer", 0, keep_values=True)
    trainer.reset()
    trainer.close()
    rewrite(tmp_path / "trainer" / "env-0.npz", tap="vector")
    comparison = compare(tmp_path / "env-0.npz", tmp_path / "trainer" / "env-0.npz")
    assert comparison.differences[0].second["obs"] == "the same values in another shape or number"


def test_without_values_a_report_says_only_that_they_differ(run: Path) -> None:
    def change(part: dict[str, np.ndarray]) -> None:
        part["h_obs"][5] ^= 1

    edit(run / "trainer.npz", 0, change)
    comparison = compare(run)
    assert comparison.differences[0].first == {}
    assert "obs differs" in str(comparison)


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_an_end_that_one_side_made_up_is_one_difference(tmp_path: Path, mode: str) -> None:
    class Ends(SyncVectorEnv):
        """Says once that an episode of env 1 was truncated, and goes on with it."""

        def step(self, actions: Any) -> Any:
            observations, rewards, terminated, truncated, infos = super().step(actions)
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 5:
                truncated = truncated.copy()
                truncated[1] = True
                if mode == "SameStep":
                    final = np.full(2, None, object)
                    final[1] = observations[1]
                    infos = {**infos, "final_obs": final, "_final_obs": truncated}
            return observations, rewards, terminated, truncated, infos

    if mode == "SameStep" and not hasattr(__import__("gymnasium").vector, "AutoresetMode"):
        pytest.skip("this Gymnasium has next-step mode alone")
    makers = [lambda i=i: walk(tmp_path, i, (40,)) for i in range(2)]
    vector_env = vector_of(makers, "sync", mode) if mode == "NextStep" else Ends(makers, autoreset_mode=mode)
    if mode == "NextStep":
        vector_env = Ends(makers)
    envs = LedgerVectorEnv(vector_env, tmp_path / "trainer.npz")
    drive(envs, 20)
    envs.close()
    comparison = compare(tmp_path)
    assert comparison.hops[0].differences == 1, str(comparison)
    (difference,) = comparison.differences
    assert (difference.env, difference.step, difference.fields) == (1, 5, ("truncated",))


def test_ledgers_in_two_files_that_hold_one_environment_are_refused(run: Path) -> None:
    (run / "copy").mkdir()
    (run / "copy" / "env-0.npz").write_bytes((run / "env-0.npz").read_bytes())
    with pytest.raises(LedgerError, match="both hold env 0: name a directory with the ledgers of one run"):
        compare(run)


def test_walks_of_one_seed_compared_crosswise_differ(tmp_path: Path) -> None:
    # A check that could not fail would be none: different courses must never be equal.
    for name, told in [("a", False), ("b", False)]:
        envs = walks(tmp_path / name, n=2, told=told)
        drive(envs, 30, seed=ord(name))
        envs.close()
    for path in (tmp_path / "b" / "trainer.npz", tmp_path / "a" / "env-0.npz", tmp_path / "a" / "env-1.npz"):
        rewrite(path, run="")
    comparison = compare(tmp_path / "a", tmp_path / "b" / "trainer.npz")
    assert comparison.exit_status == 1
    assert comparison.hops[0].streams_different == 2


def test_long_texts_are_shown_where_they_differ(tmp_path: Path) -> None:
    space, said = spaces.Text(6000, charset="abc"), "a" * 5000

    class Says(Walk):
        def _observation(self) -> str:
            return said

    class Other(gym.Wrapper):
        def step(self, action: Any) -> Any:
            _, *rest = self.env.step(action)
            return "a" * 4000 + "b" + "a" * 999, *rest

    makers = [lambda: Other(LedgerEnv(Says((50,), 0, space), tmp_path, 0, keep_values=True))]
    envs = LedgerVectorEnv(SyncVectorEnv(makers), tmp_path / "trainer", keep_values=True)
    drive(envs, 1)
    envs.close()
    (difference,) = compare(tmp_path).differences
    assert (difference.first["obs"][:24], difference.second["obs"][:24]) == ("..." + "a" * 21, "..." + "a" * 20 + "b")
    assert max(len(difference.first["obs"]), len(difference.second["obs"])) < 400


def test_the_parts_of_a_tuple_are_told_from_their_values(tmp_path: Path) -> None:
    space = spaces.Tuple((spaces.Discrete(1000), spaces.MultiDiscrete([1000, 1000])))
    envs = [LedgerEnv(Walk(seed=seed, observation_space=space), tmp_path / str(seed), 0, keep_values=True) for seed in (0, 1)]
    texts = []
    for env in envs:
        env.reset(seed=0)
        number, numbers = env.step(0)[0]
        texts.append(f"obs[0] = {number}, obs[1] = [{numbers[0]}, {numbers[1]}]")
        env.close()
    rewrite(tmp_path / "1" / "env-0.npz", tap="vector", run=read(tmp_path / "0" / "env-0.npz").meta.get("run", ""))
    found = [one for one in compare(tmp_path / "0", tmp_path / "1" / "env-0.npz").differences if one.step == 1]
    assert [" ".join(text["obs"].split()) for one in found for text in (one.first, one.second)] == texts
