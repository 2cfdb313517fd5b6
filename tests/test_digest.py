"""Value -> declared space -> 64 bits."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepledger import LedgerError
from stepledger.digest import DIGESTS, MISSING, SpaceDigest

DTYPES = [np.float16, np.float32, np.float64, bool, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Foreign:
    """An array of another library, such as a torch tensor."""

    def __init__(self, array: Any) -> None:
        self._array = np.asarray(array)

    def __repr__(self) -> str:
        return f"Foreign({self._array.tolist()})"

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._array if dtype is None else self._array.astype(dtype)


def box(shape: tuple[int, ...], dtype: Any) -> spaces.Box:
    kind = np.dtype(dtype).kind
    low, high = (0, 1) if kind == "b" else (0, 100) if kind == "u" else (-100, 100)
    return spaces.Box(low, high, shape, dtype)


def boxes() -> st.SearchStrategy[spaces.Box]:
    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    return st.builds(box, st.one_of(shapes, st.just((30, 20))), st.sampled_from(DTYPES))


def flat_spaces() -> st.SearchStrategy[spaces.Space]:
    return st.one_of(
        boxes(),
        st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 2000), st.integers(-50, 50)),
        st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 9), min_size=1, max_size=4)),
        st.builds(lambda rows: spaces.MultiDiscrete(np.array(rows)), st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1)),
        st.builds(spaces.MultiBinary, st.one_of(st.integers(1, 9), st.just([2, 3]))),
        st.builds(lambda n: spaces.Text(n, charset=string.ascii_letters + "äß漢"), st.integers(1, 12)),
    )


def all_spaces() -> st.SearchStrategy[spaces.Space]:
    def nest(inner: st.SearchStrategy[spaces.Space]) -> st.SearchStrategy[spaces.Space]:
        parts = st.lists(inner, min_size=1, max_size=3)
        return st.one_of(
            parts.map(spaces.Tuple),
            parts.map(lambda found: spaces.Dict(dict(zip("zay", found)))),
            st.builds(lambda space: spaces.Sequence(space), inner),
            parts.map(spaces.OneOf),
        )

    graphs = st.builds(
        spaces.Graph,
        st.one_of(st.just(box((3,), np.float32)), st.just(spaces.Discrete(5))),
        st.sampled_from([None, spaces.Discrete(4), box((2,), np.float32)]),
    )
    stacked = st.builds(lambda space: spaces.Sequence(space, stack=True), st.one_of(boxes(), st.just(spaces.Discrete(7))))
    return st.recursive(st.one_of(flat_spaces(), graphs, stacked), nest, max_leaves=4)


def batch_of(space: spaces.Space, values: list[Any]) -> Any:
    """The values as a vector env hands them out."""
    return concatenate(space, values, create_empty_array(space, len(values)))


@quick
@given(space=all_spaces(), n=st.integers(1, 4), seed=st.integers(0, 1 << 30), digest=st.sampled_from(sorted(DIGESTS)))
def test_a_batch_digests_to_the_digests_of_its_values(space: spaces.Space, n: int, seed: int, digest: str) -> None:
    space.seed(seed)
    values = [space.sample() for _ in range(n)]
    tap = SpaceDigest(space, digest)
    expected = [tap.one(value) for value in values]
    assert list(tap.rows(batch_of(space, values))) == expected
    assert list(tap.each(values)) == expected
    if not isinstance(space, spaces.Tuple):  # there a list may stand for the tuple of its parts
        assert list(tap.rows(values)) == expected  # a list of values, as a user may pass actions
    assert all(len(one) == 8 and one != MISSING for one in expected)
    # Another instance, as in another process, says the same.
    assert [SpaceDigest(space, digest).one(value) for value in values] == expected


@quick
@given(space=all_spaces(), seed=st.integers(0, 1 << 30))
def test_kept_values_have_the_layout_that_was_promised(space: spaces.Space, seed: int) -> None:
    space.seed(seed)
    values = [space.sample() for _ in range(3)]
    tap = SpaceDigest(space)
    batched = tap.batch_values(batch_of(space, values))
    for row, value in enumerate(values):
        for column, leaf, layout in zip(batched, tap.values(value), tap.layouts, strict=True):
            if layout is None:
                assert isinstance(leaf, bytes)
                assert column[row] == leaf
            else:
                assert (leaf.dtype, leaf.shape) == layout
                np.testing.assert_array_equal(column[row], leaf)


@pytest.mark.parametrize("digest", sorted(DIGESTS))
@pytest.mark.parametrize("dtype", [*DTYPES, ">f4", ">i8"], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 0), (2, 3), (40, 30)], ids=str)
def test_every_dtype_and_size_of_a_box_digests_alike_alone_and_in_a_batch(dtype: Any, shape: tuple[int, ...], digest: str) -> None:
    batch = np.random.default_rng(0).integers(0, 2, (4, *shape)).astype(dtype)
    tap = SpaceDigest(spaces.Box(0, 1, shape, np.dtype(dtype)), digest)
    assert list(tap.rows(batch)) == [tap.one(value) for value in batch]


def test_the_two_digests_differ() -> None:
    space = box((3,), np.float32)
    assert SpaceDigest(space, "blake2b").one(np.ones(3)) != SpaceDigest(space, "xxh3_64").one(np.ones(3))


@pytest.mark.parametrize(
    "same",
    [
        np.array([0.5, -1.25, 3.0], np.float64),
        np.array([0.5, -1.25, 3.0], np.float16),
        np.array([0.5, -1.25, 3.0], ">f4"),
        [0.5, -1.25, 3.0],
        (0.5, -1.25, 3.0),
        Foreign([0.5, -1.25, 3.0]),
        [np.float32(0.5), np.float64(-1.25), 3],
        np.array([0.5, 9, -1.25, 9, 3.0, 9], np.float32)[::2],
        np.array([3.0, -1.25, 0.5], np.float32)[::-1],
        np.array([[0.5, -1.25, 3.0]], np.float32),  # a leading axis of length one, which a vector env's buffer adds or drops
        np.ma.masked_array([0.5, -1.25, 3.0], dtype=np.float32),
        np.array([0.5, -1.25, 3.0], object),
    ],
    ids=lambda same: f"{type(same).__name__}-{getattr(same, 'dtype', '')}{getattr(same, 'strides', '')}",
)
def test_a_value_is_cast_to_its_declared_space_first(same: Any) -> None:
    tap = SpaceDigest(box((3,), np.float32))
    expected = tap.one(np.array([0.5, -1.25, 3.0], np.float32))
    assert tap.one(same) == expected
    assert list(tap.rows([same, same])) == [expected, expected]


def test_a_batch_of_another_kind_is_cast_too() -> None:
    tap = SpaceDigest(box((2, 3), np.float32))
    values = np.random.default_rng(0).standard_normal((4, 2, 3))
    expected = [tap.one(value) for value in values.astype(np.float32)]
    transposed = np.ascontiguousarray(values.astype(np.float32).transpose(2, 1, 0)).transpose(2, 1, 0)
    strided = np.zeros((8, 2, 6), np.float32)
    strided[::2, :, ::2] = values
    batches = [values, values.tolist(), list(values), tuple(values), Foreign(values), [Foreign(one) for one in values], transposed]
    for batch in [*batches, strided[::2, :, ::2], np.asfortranarray(values.astype(np.float32))]:
        assert list(tap.rows(batch)) == expected
    big = SpaceDigest(box((40, 30), np.float32))  # rows that are hashed where they lie
    values = np.random.default_rng(0).standard_normal((4, 40, 30)).astype(np.float32)
    assert list(big.rows(np.asfortranarray(values))) == [big.one(value) for value in values]


def test_float64_on_the_wire_changes_nothing_and_float16_does() -> None:
    tap = SpaceDigest(box((3,), np.float32))
    value = np.array([0.1, 0.7979722, -2.675495], np.float32)
    assert tap.one(value.astype(np.float64)) == tap.one(value)
    assert tap.one(value.astype(np.float16)) != tap.one(value)


def test_the_least_bit_of_any_element_matters() -> None:
    tap = SpaceDigest(box((40, 30), np.float64))
    value = np.random.default_rng(0).standard_normal((40, 30))
    seen = {tap.one(value)}
    for at in [(0, 0), (39, 29), (17, 3)]:
        other = value.copy()
        other[at] = np.nextafter(other[at], np.inf)
        seen.add(tap.one(other))
    assert len(seen) == 4


def test_order_and_shape_of_an_image_matter() -> None:
    space = spaces.Box(0, 255, (6, 5, 3), np.uint8)
    tap = SpaceDigest(space)
    image = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)
    others = [image[:, :, ::-1], image[::-1], image.transpose(2, 0, 1), image.reshape(5, 6, 3), image.reshape(-1), image.transpose(1, 0, 2)]
    digests = [tap.one(image), *map(tap.one, others)]
    assert len(set(digests)) == len(digests)
    assert [next(iter(tap.rows(other[None]))) for other in others] == digests[1:]


def test_equal_bytes_of_another_dtype_or_shape_differ() -> None:
    zeros = [((4,), np.float32), ((2,), np.float64), ((4,), np.int32), ((2, 2), np.float32), ((16,), np.uint8), ((4,), ">f4")]
    assert len({SpaceDigest(spaces.Box(0, 1, shape, np.dtype(dtype))).one(np.zeros(shape, dtype)) for shape, dtype in zeros}) == len(zeros)


def test_nan_is_equal_to_itself_and_a_cast_keeps_it() -> None:
    tap = SpaceDigest(box((3,), np.float32))
    value = np.array([np.nan, np.inf, -0.0], np.float32)
    assert tap.one(value) == tap.one(value.copy())
    assert tap.one(value) == tap.one(value.astype(np.float64)) == tap.one(value.tolist())
    assert list(tap.rows(np.stack([value, value]))) == [tap.one(value)] * 2
    assert tap.one(value) != tap.one(np.array([np.nan, np.inf, 0.0], np.float32))  # bits, not numbers
    assert tap.one(value) != tap.one(np.array([0.0, np.inf, -0.0], np.float32))


def test_a_value_that_overflows_its_space_is_cast_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    tap = SpaceDigest(spaces.Box(0, 255, (2,), np.uint8))
    assert tap.one(np.array([300, 1])) == tap.one(np.array([44, 1], np.uint8))
    tap.one(np.array([np.nan, 1e30]))
    list(tap.rows(np.array([[np.nan, 1e30]])))
    SpaceDigest(box((1,), np.float16)).one(np.array([1e30]))
    SpaceDigest(spaces.Discrete(3)).one(np.nan)
    assert not recwarn.list


@pytest.mark.parametrize("value", [2, np.int64(2), np.uint8(2), np.array(2), np.array([2]), 2.0, np.float32(2), Foreign(2), [2]], ids=repr)
def test_a_discrete_value_is_a_64_bit_integer_however_it_comes(value: Any) -> None:
    for space in (spaces.Discrete(3), spaces.Discrete(5, start=-2), spaces.Discrete(2000)):
        tap = SpaceDigest(space)
        assert tap.one(value) == tap.one(2)


@pytest.mark.parametrize("value", [-1, 3, 1500, 1 << 40, -(1 << 62)])
def test_a_discrete_value_out_of_range_digests_as_itself(value: int) -> None:
    tap = SpaceDigest(spaces.Discrete(3))
    assert tap.one(value) == SpaceDigest(spaces.Discrete(2000)).one(value)
    assert list(tap.rows(np.array([0, value, 2]))) == [tap.one(0), tap.one(value), tap.one(2)]
    assert list(tap.rows([0, value])) == [tap.one(0), tap.one(value)]
    assert len({tap.one(one) for one in (0, 1, 2, value)}) == 4


def test_a_discrete_batch_is_cast_as_its_values_are() -> None:
    tap = SpaceDigest(spaces.Discrete(3))
    for batch in (np.array([1.7, -0.5, 9.2]), np.array([True, False, True]), np.array([1, 2, 250], np.uint8), np.array([[1], [2], [7]])):
        assert list(tap.rows(batch)) == [tap.one(value) for value in batch.ravel()]
    big = np.array([(1 << 63) + 5, 1], np.uint64)
    assert list(tap.rows(big)) == [tap.one(value) for value in big]


def test_a_space_of_ones_own_is_described_as_what_it_is_made_of() -> None:
    class Mine(spaces.Box):
        pass

    class MyDict(spaces.Dict):
        pass

    mine, plain = Mine(-1, 1, (2,)), spaces.Box(-1, 1, (2,))
    assert SpaceDigest(mine).description == SpaceDigest(plain).description
    assert SpaceDigest(MyDict({"a": mine})).description == SpaceDigest(spaces.Dict({"a": plain})).description


def test_start_is_part_of_a_discrete_space() -> None:
    assert SpaceDigest(spaces.Discrete(3)).description != SpaceDigest(spaces.Discrete(3, start=1)).description


def test_dict_keys_are_sorted_so_their_order_does_not_matter() -> None:
    one = spaces.Dict([("b", spaces.Discrete(3)), ("a", box((2,), np.float32))])
    other = spaces.Dict([("a", box((2,), np.float32)), ("b", spaces.Discrete(3))])
    first, second = SpaceDigest(one), SpaceDigest(other)
    assert first.description == second.description
    assert first.one({"b": 1, "a": np.ones(2)}) == second.one({"a": np.ones(2, np.float32), "b": 1})


def test_swapped_parts_of_a_composite_differ() -> None:
    tap = SpaceDigest(spaces.Dict({"a": box((2,), np.float32), "b": box((2,), np.float32)}))
    ones, twos = np.ones(2, np.float32), np.full(2, 2, np.float32)
    assert tap.one({"a": ones, "b": twos}) != tap.one({"a": twos, "b": ones})
    pair = SpaceDigest(spaces.Tuple((spaces.Discrete(3), spaces.Discrete(3))))
    assert pair.one((0, 1)) != pair.one((1, 0))


def test_integer_keys_of_a_dict_are_keys_too() -> None:
    space = spaces.Dict({10: spaces.Discrete(3), 2: spaces.Discrete(3), "a": spaces.Discrete(3)})
    tap = SpaceDigest(space)
    values = [{10: 0, 2: 1, "a": 2}, {10: 1, 2: 0, "a": 2}]
    assert len({tap.one(value) for value in values}) == 2
    assert list(tap.rows({10: np.array([0, 1]), 2: np.array([1, 0]), "a": np.array([2, 2])})) == [tap.one(value) for value in values]


@pytest.mark.parametrize("stack", [False, True])
def test_a_sequence_is_its_elements_their_number_and_order(stack: bool) -> None:
    tap = SpaceDigest(spaces.Sequence(box((2,), np.float32), stack=stack))
    ones, twos = np.ones(2, np.float32), np.full(2, 2, np.float32)

    def one(*elements: np.ndarray) -> bytes:
        return tap.one(np.array(elements, np.float32).reshape(-1, 2) if stack else elements)

    digests = [one(), one(ones), one(ones, ones), one(ones, twos), one(twos, ones)]
    assert len(set(digests)) == len(digests)
    assert one(ones.astype(np.float64), twos) == one(ones, twos)


def test_an_absent_part_of_a_graph_is_not_an_empty_one() -> None:
    tap = SpaceDigest(spaces.Graph(box((2,), np.float32), spaces.Discrete(4)))
    nodes = np.ones((2, 2), np.float32)
    edges, links = np.array([1, 2]), np.array([[0, 1], [1, 0]])
    graphs = [
        (nodes, None, None),
        (nodes, edges, links),
        (nodes, edges, links[::-1]),
        (nodes, edges[::-1], links),
        (nodes, edges, None),
        (nodes, np.zeros(0, np.int64), np.zeros((0, 2), np.int64)),
        (nodes[:1], None, None),
        (nodes + 1, None, None),
    ]
    digests = [tap.one(spaces.GraphInstance(*graph)) for graph in graphs]
    assert len(set(digests)) == len(digests)
    assert tap.one(spaces.GraphInstance(nodes, edges.astype(np.int32), links.astype(np.int32))) == digests[1]


def test_the_chosen_space_of_a_one_of_matters() -> None:
    tap = SpaceDigest(spaces.OneOf((spaces.Discrete(3), spaces.Discrete(3))))
    assert tap.one((0, 1)) != tap.one((1, 1))
    assert tap.one((np.int64(1), np.int64(1))) == tap.one((1, 1))


def test_text_may_hold_anything() -> None:
    tap = SpaceDigest(spaces.Text(20))
    texts = ["", "a", "a\0", "a\0\0", "ä", "漢字", "\ud800"]
    assert len({tap.one(text) for text in texts}) == len(texts)
    assert tap.one(np.str_("ä")) == tap.one("ä")


class Strange(spaces.Space):
    """A space that is not one of Gymnasium's own."""


@pytest.mark.parametrize(
    "space",
    [
        Strange(),
        spaces.Tuple((spaces.Discrete(2), Strange())),
        spaces.Dict({"a": spaces.Dict({"b": Strange()})}),
        spaces.Sequence(Strange()),
        spaces.OneOf((spaces.Discrete(2), Strange())),
        spaces.Dict({("a", 1): spaces.Discrete(2)}),  # JSON has no such key
        spaces.Box(0, 1, (2,), np.longdouble),  # has padding bytes, which are random
    ],
    ids=["itself", "in a tuple", "in a dict", "in a sequence", "in a one-of", "a strange key", "long double"],
)
def test_an_unsupported_space_is_refused_at_construction(space: spaces.Space) -> None:
    with pytest.raises(LedgerError, match=r"^[^\n]*: [^\n]*\.$"):
        SpaceDigest(space)


def test_an_unknown_digest_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LedgerError, match="'md5' is unknown: use one of xxh3_64, blake2b"):
        SpaceDigest(spaces.Discrete(2), "md5")


@pytest.mark.parametrize("value", ["no number", object()], ids=["text", "object"])
def test_a_value_that_is_none_of_the_space_is_an_error_to_the_caller(value: Any) -> None:
    for space in (box((2,), np.float32), spaces.Discrete(3), spaces.Dict({"a": spaces.Discrete(2)})):
        with pytest.raises((TypeError, ValueError, KeyError)):
            SpaceDigest(space).one(value)


@pytest.mark.parametrize("space", [spaces.Dict({}), spaces.Tuple(())], ids=["Dict", "Tuple"])
def test_a_space_without_values_is_refused(space: spaces.Space) -> None:
    with pytest.raises(LedgerError, match="has no values"):
        SpaceDigest(space)
