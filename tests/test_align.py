"""Aligning two sequences of events."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepledger.align import RESYNC, Edit, align


def keys(values: object) -> np.ndarray:
    return np.array(values, np.uint64)


def random_keys(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 63, n, dtype=np.uint64)


def assert_leads_from_first_to_second(edits: list[Edit], first: np.ndarray, second: np.ndarray) -> None:
    """Between edits everything is equal, and the edits account for all the rest."""
    i = j = 0
    for edit in edits:
        assert edit.length > 0
        assert edit.first - i == edit.second - j >= 0
        assert (first[i : edit.first] == second[j : edit.second]).all()
        i = edit.first + (edit.length if edit.kind != "extra" else 0)
        j = edit.second + (edit.length if edit.kind != "lost" else 0)
    assert len(first) - i == len(second) - j
    assert (first[i:] == second[j:]).all()
    for one, other in pairwise(edits):
        # Neighbours of a kind are one edit.
        assert one.kind != other.kind or other.first > one.first + (one.length if one.kind != "extra" else 0)


@st.composite
def edited(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[Edit]]:
    """A sequence, what became of it, and the edits between: few, each far from the next."""
    edits: list[Edit] = []
    fresh = iter(random_keys(10_000, seed=1).tolist())
    first: list[int] = []
    second: list[int] = []
    for kind in draw(st.lists(st.sampled_from(["changed", "lost", "extra"]), max_size=6)):
        equal = [next(fresh) for _ in range(draw(st.integers(RESYNC, 150)))]
        first += equal
        second += equal
        length = draw(st.integers(1, 8))
        edits.append(Edit(kind, len(first), len(second), length))  # type: ignore[arg-type]
        first += [next(fresh) for _ in range(length)] if kind != "extra" else []
        second += [next(fresh) for _ in range(length)] if kind != "lost" else []
    equal = [next(fresh) for _ in range(draw(st.integers(0, 40)))]
    return keys(first + equal), keys(second + equal), edits


@settings(deadline=None, max_examples=300)
@given(edited())
def test_few_edits_far_apart_are_found_exactly(case: tuple[np.ndarray, np.ndarray, list[Edit]]) -> None:
    first, second, edits = case
    assert list(align(first, second)) == edits


@settings(deadline=None, max_examples=300)
@given(first=st.lists(st.integers(0, 3), max_size=60), second=st.lists(st.integers(0, 3), max_size=60))
def test_the_edits_lead_from_the_first_to_the_second_whatever_they_hold(first: list[int], second: list[int]) -> None:
    a, b = keys(first), keys(second)
    assert_leads_from_first_to_second(list(align(a, b)), a, b)


@settings(deadline=None, max_examples=100)
@given(
    data=st.data(),
    n=st.integers(0, 400),
    alphabet=st.sampled_from([1, 2, 5, 1 << 62]),
    rate=st.sampled_from([0.01, 0.1, 0.5]),
)
def test_the_edits_lead_from_the_first_to_the_second_however_many_there_are(
    data: st.DataObject, n: int, alphabet: int, rate: float
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    first = rng.integers(0, alphabet, n, dtype=np.uint64)
    second: list[int] = []
    for key in first.tolist():
        roll = rng.random()
        if roll < rate / 3:
            continue
        second.append(int(rng.integers(0, alphabet)) if roll < 2 * rate / 3 else key)
        if roll > 1 - rate / 3:
            second.append(int(rng.integers(0, alphabet)))
    assert_leads_from_first_to_second(list(align(first, keys(second))), first, keys(second))


@st.composite
def edited_twice(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """A sequence under two scripts of edits, however dense, and the number of all edits; an extra event is a new or a repeated one."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    rate, kinds = draw(st.sampled_from([0.003, 0.02, 0.1, 0.3, 0.6, 1.0])), draw(st.lists(st.sampled_from("lcer"), min_size=1, max_size=4))
    base = rng.integers(0, 1 << 63, draw(st.integers(0, 700)), dtype=np.uint64).tolist()
    sides, cost = [], 0
    for at_rate in (rate * draw(st.sampled_from([0, 0.1, 1])), rate):
        side: list[int] = []
        for key in base:
            if rng.random() >= at_rate:
                side.append(key)
                continue
            cost += 1
            kind, new = rng.choice(kinds), int(rng.integers(0, 1 << 63))
            side += {"l": [], "c": [new], "e": [key, new], "r": [key, key]}[kind]
        sides.append(keys(side))
    return sides[0], sides[1], cost


@settings(deadline=None, max_examples=400)
@given(edited_twice())
def test_no_script_is_cheaper_however_dense_the_edits_are(case: tuple[np.ndarray, np.ndarray, int]) -> None:
    first, second, cost = case
    edits = list(align(first, second))
    assert_leads_from_first_to_second(edits, first, second)
    assert sum(edit.length for edit in edits) <= cost


@pytest.mark.parametrize("gap", [100, 5000, 60_000])
def test_a_long_gap_is_one_edit_however_long(gap: int) -> None:
    first = random_keys(100_000)
    second = np.concatenate([first[:2000], first[2000 + gap :]])
    assert list(align(first, second)) == [Edit("lost", 2000, 2000, gap)]
    assert list(align(second, first)) == [Edit("extra", 2000, 2000, gap)]


def test_equal_sequences_have_no_edits() -> None:
    for n in (0, 1, 63, 64, 65, 5000):
        assert list(align(random_keys(n), random_keys(n))) == []


def test_a_sequence_against_nothing_is_one_edit() -> None:
    nothing = keys([])
    assert list(align(random_keys(70), nothing)) == [Edit("lost", 0, 0, 70)]
    assert list(align(nothing, random_keys(70))) == [Edit("extra", 0, 0, 70)]


@pytest.mark.parametrize("at", [0, 1, 50, 97, 98, 99])
def test_one_edit_is_found_wherever_it_is(at: int) -> None:
    first = random_keys(100)
    lost = np.delete(first, at)
    assert list(align(first, lost)) == [Edit("lost", at, at, 1)]
    assert list(align(lost, first)) == [Edit("extra", at, at, 1)]
    changed = first.copy()
    changed[at] ^= np.uint64(1)
    assert list(align(first, changed)) == [Edit("changed", at, at, 1)]


def test_a_step_repeated_is_one_extra_event() -> None:
    first = random_keys(100)
    assert list(align(first, np.insert(first, 41, first[40]))) == [Edit("extra", 41, 41, 1)]


def test_replies_shifted_by_one_from_some_step_on_are_one_extra_and_one_lost_event() -> None:
    first = random_keys(1000)
    second = np.concatenate([first[:500], first[499:-1]])
    assert list(align(first, second)) == [Edit("extra", 500, 500, 1), Edit("lost", 999, 1000, 1)]


def test_of_two_scripts_of_one_length_the_one_that_changes_in_place_is_taken() -> None:
    first = random_keys(40)
    second = first.copy()
    second[10:13] = random_keys(3, seed=9)
    assert list(align(first, second)) == [Edit("changed", 10, 10, 3)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (random_keys(300_000), random_keys(300_000, seed=1)),
        (random_keys(300_000), random_keys(1000, seed=1)),
        (np.zeros(300_000, np.uint64), np.ones(300_000, np.uint64)),
        (np.arange(300_000, dtype=np.uint64) % 7, np.arange(300_000, dtype=np.uint64)[::-1] % 5),
        (np.tile(keys([1, 2, 3, 4, 5]), 60_000), np.tile(keys([1, 2, 3, 4, 6]), 60_000)),
        (random_keys(300_000), random_keys(300_000)[::-1].copy()),
    ],
    ids=["random", "random, one short", "constant", "periodic", "every fifth", "reversed"],
)
def test_time_is_bounded_when_everything_differs(first: np.ndarray, second: np.ndarray) -> None:
    start = time.process_time()
    edits = list(align(first, second))
    # Some ten times what it takes, and some hundred times less than a quadratic search of it would.
    assert time.process_time() - start < 5
    assert_leads_from_first_to_second(edits, first, second)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
def test_time_is_bounded_when_faults_are_dense(rate: float) -> None:
    first = random_keys(50_000)
    second = np.where(np.random.default_rng(0).random(len(first)) < rate, random_keys(len(first), seed=2), first)
    start = time.process_time()
    edits = list(align(first, second))
    assert time.process_time() - start < 5
    assert_leads_from_first_to_second(edits, first, second)
