"""Returns and lengths of episodes, as each tap saw them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from common import drive_one, rewrite, run_walks, walk

from stepledger import compare, read
from stepledger.report.context import Recorded
from stepledger.report.episodes import episodes_of, summary, unlike


def recorded(directory: Path) -> Recorded:
    return Recorded([read(path) for path in sorted(directory.glob("*.npz"))])


def test_returns_and_lengths_are_those_of_the_environment(tmp_path: Path) -> None:
    env = walk(tmp_path, 0)
    events = drive_one(env, 40)
    env.close()
    (found,) = episodes_of(recorded(tmp_path))
    returns, lengths, total, steps = [], [], 0.0, 0
    for kind, _, _, reward, terminated, truncated in events:
        if kind == 0:
            total, steps = 0.0, 0
            continue
        total, steps = total + float(np.float32(reward)), steps + 1
        if terminated or truncated:
            returns.append(total)
            lengths.append(steps)
    assert found.tap == "env"
    assert found.lengths.tolist() == lengths
    assert found.returns.tolist() == pytest.approx(returns)
    assert found.number.tolist() == list(range(len(lengths)))
    (told,) = summary([found])
    assert told["length"].endswith(f"({min(lengths)} to {max(lengths)})")


def test_episodes_that_two_taps_saw_unlike_are_named(tmp_path: Path) -> None:
    run_walks(tmp_path, n=2)
    first, second = episodes_of(recorded(tmp_path))
    assert (first.tap, second.tap) == ("env", "vector")
    assert unlike(first, second, 5) == ([], 0)
    with np.load(tmp_path / "trainer.npz") as archive:
        rewards, kinds = archive["h_rew"].copy(), archive["kind"]
    rewards[np.flatnonzero(kinds == 1)[[0, 1, 20]]] = np.float32(100).view(np.uint32)
    rewrite(tmp_path / "trainer.npz", {"h_rew": rewards})
    changed = compare(tmp_path).differences
    first, second = episodes_of(recorded(tmp_path))
    shown, number = unlike(first, second, 1)
    assert number == len({(one.env, one.episode) for one in changed})
    (one,) = shown
    assert (one.key.env, one.number) == (changed[0].env, changed[0].episode)
    assert one.returns[1] > 100 > one.returns[0]
    assert one.lengths[0] == one.lengths[1]


def test_a_stream_without_a_whole_episode_has_none(tmp_path: Path) -> None:
    env = walk(tmp_path, 0, lengths=(50,))
    drive_one(env, 5)
    env.close()
    assert episodes_of(recorded(tmp_path)) == []
    assert episodes_of(Recorded([])) == []
