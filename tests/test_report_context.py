"""The steps around a place: the right ones, from the right sides, marked where they differ, also where little is left of the ledgers."""

from __future__ import annotations

import functools
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from common import Walk, assert_refused, drive, environment, rewrite, run_walks, stepledger, vector_of, walk
from faults import Dose, FaultyEnv, FaultyVectorEnv
from gymnasium import spaces

from stepledger import Comparison, Difference, LearnerLedger, LedgerEnv, LedgerVectorEnv, compare, read
from stepledger.cli import main
from stepledger.compare import load
from stepledger.report.beside import beside
from stepledger.report.context import Context, Recorded
from stepledger.report.pairing import Tap
from stepledger.report.text import report

IMAGES = spaces.Dict({"camera": spaces.Box(0, 255, (12, 16, 3), np.uint8), "speed": spaces.Box(-np.inf, np.inf, (2,), np.float32)})


def record(
    directory: Path, fault: str, dose: Dose, *, n: int = 2, steps: int = 60, keep: bool = True, space: spaces.Space | None = None
) -> Comparison:
    """Both sides of a boundary with a fault in it."""

    def make(index: int) -> gym.Env:
        env = LedgerEnv(Walk((9, 14, 6), seed=index, observation_space=space), directory, index, keep_values=keep)
        return FaultyEnv(env, fault, dose, index=index) if fault.startswith(("step", "reset", "reply")) else env

    envs = vector_of([functools.partial(make, index) for index in range(n)])
    if not fault.startswith(("step", "reset", "reply")):
        envs = FaultyVectorEnv(envs, fault, dose)
    envs = LedgerVectorEnv(envs, directory / "trainer.npz", keep_values=keep)
    drive(envs, steps)
    envs.close()
    return compare(directory)


def recorded(directory: Path) -> Recorded:
    return Recorded(load(directory)[0])


def values(context: Context, tap: int) -> list[str]:
    """The observations that a tap shows."""
    return [side.values["obs"].text for row in context.rows if (side := row.sides[tap]) is not None]


def test_the_steps_before_and_after_are_there_from_both_sides(tmp_path: Path) -> None:
    (difference, *_) = record(tmp_path, "obs:f16", Dose(at=40)).differences
    context = recorded(tmp_path).around(difference, 2)
    assert context.taps == ("env", "vector")
    assert [row.here for row in context.rows] == [False, False, True, False, False]
    here = context.here
    assert here is not None
    assert (here.episode, here.step, here.differ) == (difference.episode, difference.step, {"obs"})
    ledger = read(tmp_path / f"env-{difference.env}.npz").streams[difference.env]
    for offset, row in enumerate(context.rows, difference.position[0] - 2):
        first, second = row.sides
        assert first is not None
        assert second is not None
        assert np.array_equal(first.values["obs"].leaves[0].value, ledger.values["values_obs_0"][offset])
        texts = [{name: value.text for name, value in side.values.items()} for side in (first, second)]
        assert (texts[0] == texts[1]) == (not row.here)


@pytest.mark.parametrize(
    ("fault", "side"), [("step:lost", 1), ("step:repeated", 0), ("step:filled", 0), ("reset:lost", 1), ("reset:extra", 0)]
)
def test_an_event_that_one_side_lacks_is_a_gap_and_the_rest_stays_in_step(tmp_path: Path, fault: str, side: int) -> None:
    comparison = record(tmp_path, fault, Dose(at=3), n=1)
    source = recorded(tmp_path)
    gaps = [one for one in comparison.differences if "event" in one.fields]
    assert gaps
    for difference in gaps:
        context = source.around(difference)
        here = context.here
        assert here is not None
        assert here.sides[side] is None
        assert here.sides[1 - side] is not None
        assert here.differ == {"event"}
        assert not any(row.differ for row in context.rows if not row.here)
    assert "*no such event" in report(comparison, source)


def test_all_kept_differences_of_a_shifted_reply_can_be_shown(tmp_path: Path) -> None:
    comparison = record(tmp_path, "reply:shifted", Dose(at=5), n=1)
    source = recorded(tmp_path)
    for difference in comparison.differences:
        context = source.around(difference)
        assert context.here is not None, difference
        assert context.here.differ, difference


def test_a_long_run_of_lost_events_is_shortened(tmp_path: Path) -> None:
    run_walks(tmp_path, n=1, steps=60)
    path = tmp_path / "trainer.npz"
    with np.load(path) as archive:
        keep = np.r_[0:20, 50 : len(archive["kind"])]
        columns = {name: archive[name][keep] for name in archive.files if archive[name].ndim and len(archive[name]) == len(archive["kind"])}
    rewrite(path, {**columns, "stream_offsets": np.array([0, len(keep)])})
    (difference,) = compare(tmp_path).differences
    assert difference.events == 30
    context = recorded(tmp_path).around(difference)
    assert len(context.rows) <= 3 + 7 + 3
    assert sum(row.left_out or row.here for row in context.rows) == 30
    assert any("24 more" in line for line in beside(context))


def test_elements_and_leaves_that_differ_are_named(tmp_path: Path) -> None:
    comparison = record(tmp_path, "obs:stale", Dose(at=30), space=IMAGES)
    text = report(comparison, recorded(tmp_path))
    assert '*obs["camera"] 12x16x3 uint8' in text
    assert '*obs["speed"] [' in text
    assert 'obs["camera"][0, 0, 0]: ' in text
    assert 'obs["speed"][1]: ' in text
    assert "elements of obs differ" in text


def test_values_that_were_not_kept_are_told_by_their_digests(tmp_path: Path) -> None:
    comparison = record(tmp_path, "obs:stale", Dose(at=30), keep=False)
    (difference, *_) = comparison.differences
    context = recorded(tmp_path).around(difference)
    env, vector = values(context, 0), values(context, 1)
    at = [row.here for row in context.rows].index(True)
    assert vector[at] == env[at - 1] != env[at]  # so that one sees that it is stale
    assert all(one.startswith("#") for one in env)


def test_all_differences_are_shown_with_v_and_the_first_of_each_env_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = record(tmp_path, "obs:f16", Dose(0.1))
    assert main(["compare", str(tmp_path)]) == 1
    short, hint = capsys.readouterr()
    assert main(["compare", str(tmp_path), "-v"]) == 1
    long, _ = capsys.readouterr()
    assert "--html report.html" in hint
    assert len(comparison.differences) > 4
    assert long.count("\n  > episode") == len(comparison.differences)
    assert short.splitlines()[-1] == long.splitlines()[-1]
    assert "> episode" not in short


def learner_run(directory: Path) -> Comparison:
    """A loop that learns from a wrong reward, from a wrong successor, from one step never, and from one step twice."""
    makers = [functools.partial(walk, directory, index, (9, 14, 6), keep_values=True) for index in range(3)]
    envs = LedgerVectorEnv(vector_of(makers, mode="Disabled"), directory / "trainer.npz", keep_values=True)
    ledger = LearnerLedger(directory / "learner.npz", each_step_once=True)
    obs, _ = envs.reset(seed=0)
    for number in range(60):
        actions = np.full(3, number % 4)
        following, rewards, terminated, truncated, _ = envs.step(actions)
        learned, successors = rewards.copy(), following.copy()
        learned[1] = 0 if number == 20 else learned[1]
        successors[2] = following[1] if number == 30 else successors[2]
        if number != 40:
            ledger.transitions(obs, actions, learned, successors, terminated, truncated)
        if number == 50:
            ledger.transitions(obs[:1], actions[:1], learned[:1], successors[:1], terminated[:1], truncated[:1])
        obs = following
        if (ended := terminated | truncated).any():
            obs, _ = envs.reset(options={"reset_mask": ended})
    envs.close()
    ledger.close()
    return compare(directory)


@pytest.mark.skipif(not hasattr(gym.vector, "AutoresetMode"), reason="this Gymnasium resets by itself")
def test_what_was_learned_is_beside_what_was_sampled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = learner_run(tmp_path)
    source = recorded(tmp_path)
    found = {}
    for difference in comparison.differences:
        here = source.around(difference).here
        assert here is not None
        found[difference.fields, difference.kind] = here
    reward = found[("reward",), "changed"]
    assert reward.differ == {"reward"}
    assert reward.sides[1] is not None
    assert reward.sides[1].values["reward"].text == "0.0"
    assert found[("next_obs",), "changed"].differ == {"next_obs"}
    assert found[("event",), "lost"].sides[1] is None
    twice = found[("event",), "extra"].sides[1]
    assert twice is not None
    assert twice.note == "it was learned from 2 times"
    (changed,) = [one for one in comparison.differences if one.fields == ("reward",)]
    arguments = ["--env", changed.env, "--episode", changed.episode, "--step", changed.step]
    assert main(["show", str(tmp_path), *map(str, arguments)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"env 1, episode {changed.episode}, step {changed.step}; reward differs there"
    assert out.splitlines()[1].split() == ["env", "vector", "learner"]
    assert "*reward 0.0" in out


def test_show_prints_the_sides_around_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (difference, *_) = record(tmp_path, "reward:stale", Dose(at=20)).differences
    place = ["--env", str(difference.env), "--episode", str(difference.episode), "--step", str(difference.step)]
    assert main(["show", str(tmp_path), *place, "--around", "1"]) == 0
    first, taps, *lines = capsys.readouterr().out.splitlines()
    assert first == f"env {difference.env}, episode {difference.episode}, step {difference.step}; reward differs there"
    assert taps.split() == ["env", "vector"]
    assert sum(line.startswith("> ") for line in lines) == 1
    assert sum("step" in line for line in lines) == 3
    assert sum("*reward" in line for line in lines) == 1
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "trainer.npz").rename(tmp_path / "elsewhere" / "trainer.npz")
    assert main(["show", str(tmp_path), *place, "--around", "1", "--trainer", str(tmp_path / "elsewhere" / "trainer.npz")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == first


def test_show_follows_a_step_through_all_taps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_walks(tmp_path, n=1, steps=40)
    (tmp_path / "episode.npz").write_bytes((tmp_path / "trainer.npz").read_bytes())
    with np.load(tmp_path / "trainer.npz") as archive:
        columns = {name: archive[name] for name in archive.files if archive[name].ndim and len(archive[name]) == len(archive["kind"])}
    # The vector env loses an event, and what leaves the sampler has two more lost and one twice.
    rows = np.delete(np.arange(len(columns["kind"])), 6)
    for path, order in [("trainer", rows), ("episode", np.insert(np.delete(rows, [11, 12]), 20, rows[22]))]:
        kept = {name: column[order] for name, column in columns.items()}
        rewrite(
            tmp_path / f"{path}.npz", {**kept, "stream_offsets": np.array([0, len(order)])}, tap="vector" if path == "trainer" else path
        )
    rewrite(tmp_path / "episode.npz", id="another")
    comparison = compare(tmp_path)
    found = {one.kind: one for one in comparison.differences if one.hop == "vector -> episode"}
    assert {one.hop for one in comparison.differences} == {"env -> vector", "vector -> episode"}
    source, key = recorded(tmp_path), read(tmp_path / "env-0.npz").streams[0]
    episodes, steps = key.columns["episode"], key.columns["step"]
    there = {}
    for at in range(len(key)):
        context = source.at(key.key, int(episodes[at]), int(steps[at]), 2)
        assert context is not None
        assert context.taps == ("env", "vector", "episode")
        here = context.here
        assert here is not None
        there[at] = [side is not None for side in here.sides]
        if at == 21:
            assert [row.sides[:2] for row in context.rows if row.episode < 0] == [(None, None)]  # the event that came twice
    gaps = {at: sides for at, sides in there.items() if not all(sides)}
    assert gaps == {6: [True, False, False], 12: [True, True, False], 13: [True, True, False]}
    assert found["lost"].events == 2
    assert main(["show", str(tmp_path), "--env", "0", "--episode", str(episodes[12]), "--step", str(steps[12])]) == 0
    assert "event differs there" in capsys.readouterr().out


def test_show_says_which_places_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_walks(tmp_path, n=2)
    run = ["show", tmp_path, "--episode", "1"]
    assert "there is no env 7: the ledgers have the envs 0-1." in assert_refused(capsys, *run, "--env", 7, "--step", 0)
    assert "there is no runner 3, env 1" in assert_refused(capsys, *run, "--env", 1, "--step", 0, "--runner", 3)
    assert "env 1 has no episode 1 with a step 99: its steps are 0 to 5." in assert_refused(capsys, *run, "--env", 1, "--step", 99)
    assert "its episodes are 0 to" in assert_refused(capsys, "show", tmp_path, "--env", 1, "--step", 0, "--episode", 99)
    with pytest.raises(SystemExit):
        main(["show", str(tmp_path), "--env", "-1", "--episode", "0", "--step", "0"])


def test_what_was_dropped_or_is_gone_is_said_and_not_made_up(tmp_path: Path) -> None:
    comparison = record(tmp_path, "obs:f16", Dose(at=60))
    (difference, *_) = comparison.differences
    ledgers = load(tmp_path)[0]
    dropped = [
        replace(ledger, streams=type(ledger.streams)([stream.after(len(stream) - 3) for stream in ledger.streams.values()]))
        for ledger in ledgers
    ]
    assert recorded(tmp_path).around(difference).here is not None
    assert "dropped" in Recorded(dropped).around(difference).missing
    assert "'vector' is not there any more" in Recorded(ledgers[:-1]).around(difference).missing
    assert Recorded([], "they are gone").around(difference).missing == "they are gone"
    unknown = Difference("episode -> learner", -1, -1, -1, ("event",), "extra")
    assert "nobody sampled" in recorded(tmp_path).around(unknown).missing
    for context in (Recorded(dropped).around(difference), recorded(tmp_path).around(unknown)):
        assert context.rows == ()
        assert "can't be shown" in "\n".join(beside(context))


def test_any_number_of_steps_around_a_place_takes_no_longer_than_the_ledgers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_walks(tmp_path, steps=20)
    assert main(["show", str(tmp_path), "--env", "1", "--episode", "0", "--step", "2", "--around", str(10**15)]) == 0
    assert "  episode 0 step 0  reset" in capsys.readouterr().out


@pytest.mark.parametrize("number", ["-1", "two", "1.5"])
def test_a_number_that_is_none_is_refused_in_words(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["show", "ledger", f"--env={number}", "--episode", "0", "--step", "2"])
    assert refused.value.code == 2
    assert f"argument --env: {number!r} is no whole number, 0 or more" in capsys.readouterr().err


def test_hostile_names_and_values_are_only_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "</td><script>alert(1)</script>\x1b[31m\n\u202e"
    space = spaces.Dict({name: spaces.Text(8, charset="\x1b[2J<>&\n"), "other\x1b[2J": spaces.Discrete(9)})
    envs = vector_of([lambda: LedgerEnv(Walk(observation_space=space), tmp_path, 0, keep_values=True)])
    envs = LedgerVectorEnv(envs, tmp_path / "trainer.npz", keep_values=True)
    drive(envs, 12)
    envs.close()
    rewrite(tmp_path / "trainer.npz", {"h_obs": np.load(tmp_path / "trainer.npz")["h_obs"] ^ np.uint64(1)})
    for arguments in (["compare", tmp_path, "-v"], ["info", tmp_path], ["show", tmp_path, "--env", 0, "--episode", 1, "--step", 0]):
        main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert all(one.isprintable() or one == "\n" for one in out + err)
        assert r"\x1b[31m" in out


@pytest.mark.skipif(os.name != "posix", reason="terminals are other things elsewhere")
@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_terminal_gets_colours_and_a_pipe_gets_none(tmp_path: Path, term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "120")  # of the pipe too
    record(tmp_path, "obs:f16", Dose(0.1))
    ours, theirs = pty.openpty()
    options = {"TERM": term, "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-m", "stepledger", "compare", str(tmp_path), "-v"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**{name: value for name, value in environment().items() if name != "NO_COLOR"}, **options},
    )
    os.close(theirs)
    parts = []
    try:
        while part := os.read(ours, 65536):
            parts.append(part)
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(60) == 1
    shown = b"".join(parts).decode().replace("\r\n", "\n")
    assert ("\x1b[" in shown) == (term != "dumb")
    plain = stepledger("compare", tmp_path, "-v", check_stderr=True).stdout
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == plain


def test_of_a_run_of_events_no_more_is_looked_up_than_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million may be lost in a row: to look all of them up takes minutes, and gigabytes."""
    run_walks(tmp_path, n=1, steps=500)
    with np.load(tmp_path / "trainer.npz") as archive:
        keep = np.r_[0:20, 490 : len(archive["kind"])]
        columns = {name: archive[name][keep] for name in archive.files if archive[name].ndim and len(archive[name]) == len(archive["kind"])}
    rewrite(tmp_path / "trainer.npz", {**columns, "stream_offsets": np.array([0, len(keep)])})
    (difference,) = compare(tmp_path).differences
    looked, side = [], Tap.side
    monkeypatch.setattr(Tap, "side", lambda tap, at: looked.append(at) or side(tap, at))
    context = recorded(tmp_path).around(difference)
    assert difference.events == sum(row.left_out or row.here for row in context.rows) == 470
    assert len(looked) <= 2 * len(context.rows) < 30
