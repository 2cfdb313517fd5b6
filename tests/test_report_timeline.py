"""The timeline: each environment by its steps, with its differences, and where a new process went on with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import drive, rewrite, run_walks, walks

from stepledger import Comparison, Difference, LedgerError, compare, read
from stepledger.report.context import Recorded
from stepledger.report.html import page
from stepledger.report.timeline import WIDTH, timeline
from stepledger.result import Explanation, Hop, StreamResult


def difference(env: int, position: tuple[int, int] = (-1, -1), incarnation: int = 0, episode: int = 0, step: int = 0) -> Difference:
    return Difference("env -> vector", env, episode, step, ("obs",), incarnation=incarnation, position=position)


def comparison(*differences: Difference) -> Comparison:
    counts = Counter((one.runner, one.env, one.agent) for one in differences)
    streams = tuple(StreamResult(*which, count) for which, count in sorted(counts.items()))
    return Comparison((Hop("env -> vector", different_streams=streams),), differences)


def test_differences_are_where_they_are_in_their_stream(tmp_path: Path) -> None:
    run_walks(tmp_path, n=3, steps=99)
    recorded = Recorded([read(path) for path in sorted(tmp_path.glob("*.npz"))])
    second = read(tmp_path / "env-1.npz").streams[1]
    episode, step = int(second.columns["episode"][50]), int(second.columns["step"][50])
    found = [difference(0, (0, 0)), difference(0, (99, 99)), difference(0, (99, 98)), difference(1, episode=episode, step=step)]
    shown = timeline(recorded, comparison(*found, difference(2, (-1, 25)), difference(-1)))
    assert shown is not None
    events = len(read(tmp_path / "env-0.npz").streams[0])
    assert [line.name for line in shown.lines] == ["env 0", "env 1", "env 2"]
    scaled = [round(WIDTH * at / shown.events) for at in (0, 99, 50, 25)]
    assert [line.differences for line in shown.lines] == [(scaled[0], scaled[1]), (scaled[2],), (scaled[3],)]
    assert [line.count for line in shown.lines] == [3, 1, 1]
    assert shown.lines[0].events == events
    assert shown.left_out == 0
    assert timeline(recorded, comparison(), "evaluation") is None


def test_a_run_of_events_is_as_long_as_it_is_and_all_differences_are_counted(tmp_path: Path) -> None:
    run_walks(tmp_path, n=4, steps=99)
    recorded = Recorded([read(path) for path in sorted(tmp_path.glob("*.npz"))])
    run = replace(difference(0, (20, 20)), events=50)
    resets = replace(difference(1, (10, 10)), events=30, explanations=(Explanation("SL309", "all envs were reset"),))
    found = comparison(run, resets)
    hop = replace(found.hops[0], different_streams=(StreamResult(0, 0, "", 700), StreamResult(0, 1, "", 1), StreamResult(0, 2, "", 0)))
    shown = timeline(recorded, replace(found, hops=(hop,)))
    assert shown is not None
    assert [line.runs for line in shown.lines] == [((round(WIDTH * 20 / shown.events), round(WIDTH * 69 / shown.events)),), (), (), ()]
    assert [(line.count, line.elsewhere) for line in shown.lines] == [(700, False), (1, False), (0, True), (0, False)]


def test_a_new_process_goes_on_where_the_one_before_ended(tmp_path: Path) -> None:
    for incarnation, steps in enumerate((30, 10)):
        run_walks(tmp_path / str(incarnation), n=1, steps=steps)
        for path in (tmp_path / str(incarnation)).glob("*.npz"):
            rewrite(path, stream_keys=[[0, 0, "", incarnation]])
    ledgers = [read(path) for path in sorted(tmp_path.rglob("*.npz"))]
    lengths = [len(next(iter(ledger.streams.values()))) for ledger in ledgers[::2]]
    shown = timeline(Recorded(ledgers), comparison(difference(0, (2, 2), 0), difference(0, (2, 2), 1)))
    assert shown is not None
    (line,) = shown.lines
    assert line.events == sum(lengths) == shown.events
    assert line.restarts == (round(WIDTH * lengths[0] / line.events),)
    assert line.differences == tuple(round(WIDTH * at / line.events) for at in (2, lengths[0] + 2))


def test_of_many_environments_those_with_differences_are_shown(tmp_path: Path) -> None:
    envs = walks(tmp_path, n=70)
    drive(envs, 3)
    envs.close()
    recorded = Recorded([read(tmp_path / "trainer.npz")])
    shown = timeline(recorded, comparison(*(difference(env, (1, 1)) for env in range(60, 70))))
    assert shown is not None
    assert len(shown.lines) + shown.left_out == 70
    assert [line.name for line in shown.lines if line.count] == [f"env {env}" for env in range(60, 70)]
    assert np.all(np.diff([int(line.name.split()[1]) for line in shown.lines]) > 0)


def test_where_checkpoints_were_saved_is_marked(tmp_path: Path) -> None:
    run_walks(tmp_path, n=2, steps=99)
    rewrite(tmp_path / "trainer.npz", checkpoints=[[10, 20], [50, 20], [10**30, 30]])
    recorded = Recorded([read(path) for path in sorted(tmp_path.glob("*.npz"))])
    shown = timeline(recorded, comparison())
    assert shown is not None
    assert [line.checkpoints for line in shown.lines] == [
        tuple(round(WIDTH * at / shown.events) for at in some) for some in ([10, 50], [20, 30])
    ]
    assert 'class="checkpoint"' in page(compare(tmp_path), recorded)


@pytest.mark.parametrize("checkpoints", ["no", {"no": 1}, ["no"], [[1]], [[1, True]], [[1, None]], [[-3, 1]], [[1, 2.0]], [5]])
def test_checkpoints_that_are_no_numbers_of_events_are_refused(tmp_path: Path, checkpoints: Any) -> None:
    run_walks(tmp_path, n=2, steps=9)
    rewrite(tmp_path / "trainer.npz", checkpoints=checkpoints)
    with pytest.raises(LedgerError, match="its meta is damaged"):
        read(tmp_path / "trainer.npz")


@pytest.mark.sb3
def test_where_stable_baselines3_began_to_learn_again_is_marked(tmp_path: Path) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.callbacks import CheckpointCallback
    from stable_baselines3.common.env_util import make_vec_env

    from stepledger.sb3 import LedgerCallback

    model = sb3.PPO("MlpPolicy", make_vec_env("Pendulum-v1", 1, seed=0), n_steps=16, batch_size=16, n_epochs=1, seed=0, device="cpu")
    callback = LedgerCallback(tmp_path / "ledger")
    model.save(tmp_path / "model")  # while nothing is recorded
    for _ in range(2):
        model.learn(32, callback=[callback, CheckpointCallback(10, str(tmp_path))])
    model.env.close()
    recorded = Recorded([read(path) for path in sorted(tmp_path.rglob("*.npz"))])
    shown = timeline(recorded, comparison())
    assert shown is not None
    (line,) = shown.lines
    assert line.restarts == (round(WIDTH * 33 / line.events),)
    at = [1 + 10, 1 + 20, 1 + 30, 34 + 10, 34 + 20, 34 + 30]  # each learn() begins with a reset
    assert line.checkpoints == tuple(round(WIDTH * one / line.events) for one in at)
    assert callback.comparison is not None
    text = page(callback.comparison, recorded)
    assert 'class="key restart"' in text
    assert 'class="key checkpoint"' in text
