"""Digests that are computed late are those that would have been computed at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("stable_baselines3")

from stepledger.digest import SpaceDigest
from stepledger.sb3.digests import Digester
from stepledger.sb3.places import Places

pytestmark = pytest.mark.sb3

N = 3
BOX = spaces.Box(-1, 1, (2, 2), np.float32)
SPACES = {
    "Box": BOX,
    "large Box": spaces.Box(0, 255, (80, 80), np.uint8),
    "Discrete": spaces.Discrete(5),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
    "MultiBinary": spaces.MultiBinary(4),
    "Dict": spaces.Dict({"a": BOX, "b": spaces.Discrete(3)}),
}


def batch_of(space: spaces.Space) -> Any:
    values = [space.sample() for _ in range(N)]
    return {key: np.stack([value[key] for value in values]) for key in space} if isinstance(space, spaces.Dict) else np.stack(values)


def at_once(space: spaces.Space, batch: Any) -> list[int]:
    return [int.from_bytes(digest, "big") for digest in SpaceDigest(space).rows(batch)]


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_they_are_the_same_however_many_wait_and_whatever_becomes_of_the_batch(space: spaces.Space) -> None:
    digester, expected, found = Digester(space, "xxh3_64", N), [], []
    for _ in range(300):
        batch = batch_of(space)
        expected.append(at_once(space, batch))
        found.append(digester.of(batch))
        for part in batch.values() if isinstance(batch, dict) else [batch]:
            part[:] = 0
    assert [one.values.tolist() for one in found] == expected
    assert not any(one.raw for one in found)


@pytest.mark.parametrize(
    "batch",
    [np.ones((N, 2, 2), np.float64), np.ones((N, 4), np.float32), np.ones((2, 2, N), np.float32).T, [[[0, 1], [1, 0]]] * N],
    ids=["another dtype", "another shape", "not contiguous", "a list"],
)
def test_a_batch_that_is_not_as_its_space_says(batch: Any) -> None:
    assert Digester(BOX, "xxh3_64", N).of(batch).values.tolist() == at_once(BOX, batch)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(
    "value",
    [
        np.full((2, 2), 0.5, np.float32),
        np.full((2, 2), 0.5),
        np.full(4, 0.5, np.float32),
        np.full((2, 2), 0.5, np.float32).T[::-1],
        0.5,
    ],
    ids=["as the space says", "another dtype", "another shape", "not contiguous", "a scalar"],
)
def test_a_value_in_the_place_of_another(value: Any, late: bool) -> None:
    digester, batch = Digester(BOX, "xxh3_64", N), batch_of(BOX)
    digests = digester.of(batch)
    if not late:
        digests.values.tolist()
    changed = digester.replaced(digests, [(1, value), (2, None)])
    first, _, _ = at_once(BOX, batch)
    assert changed.values.tolist() == [first, int.from_bytes(SpaceDigest(BOX).one(value), "big"), 0]
    assert digester.replaced(digests, [(1, value)]).values.tolist()[1:] == [changed.values[1], digests.values[2]]
    assert digests.values.tolist() == at_once(BOX, batch)


def test_an_interrupt_while_they_are_computed_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    digester, batches = Digester(BOX, "xxh3_64", N), [batch_of(BOX) for _ in range(3)]
    found = [digester.of(batch) for batch in batches]

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(digester.space, "rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            found[0].values.tolist()
    assert [one.values.tolist() for one in found] == [at_once(BOX, batch) for batch in batches]


def test_places_are_counted_and_positions_stay_what_they_were() -> None:
    places = Places(2)
    positions = [places.t.values.tolist()]
    places.reset(np.array([True, True]))
    places.stepped()
    before = places.t
    places.reset(np.array([False, True]))
    places.stepped_one(0)
    places.stepped()
    positions += [before.values.tolist(), places.t.values.tolist()]
    assert positions == [[-1, -1], [1, 1], [3, 3]]
    episode, step = places.last
    assert (episode.tolist(), step.tolist()) == ([0, 1], [3, 1])
