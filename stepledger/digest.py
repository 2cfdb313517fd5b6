"""Value -> declared space -> 64 bits.

A value is cast to the space that declares it, so that both sides of a boundary digest the same thing however it travelled, and
the cast value's bytes are hashed with a seed that depends on its dtype and shape. `SpaceDigest` does that for one space: for
one value (`SpaceDigest.one`) and for a batch with the environments along its first axis (`SpaceDigest.rows`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash
from gymnasium import spaces

from .errors import LedgerError

__all__ = ["DIGESTS", "MISSING", "MISSING_NUMBER", "SpaceDigest"]

Hash = Callable[[Any, int], bytes]
Layout = tuple[np.dtype[Any], tuple[int, ...]] | None

#: Stands for a value that did not arrive at all, such as a final observation that is absent from ``info``. No value digests to it.
MISSING = bytes(8)
#: Likewise, as the columns of a ledger have it.
MISSING_NUMBER = int.from_bytes(MISSING, "big")

#: Rows up to this many bytes are cut out of one copy of the batch; longer ones are hashed where they lie.
_SMALL_ROW = 1024

#: A discrete space with at most this many values is digested by looking the value up.
_TABLE = 1024


def _blake2b(data: Any, seed: int) -> bytes:
    return hashlib.blake2b(data, digest_size=8, key=seed.to_bytes(8, "little")).digest()


#: Name in a ledger's meta -> ``hash(contiguous buffer, 64-bit seed) -> 8 bytes``.
DIGESTS: dict[str, Hash] = {"xxh3_64": xxhash.xxh3_64_digest, "blake2b": _blake2b}


def seed_of(kind: str, shape: tuple[int, ...] = ()) -> int:
    """The seed for values of one dtype and shape; it does not depend on the digest in use."""
    return xxhash.xxh3_64_intdigest(f"{kind}{list(shape)}".encode())


class _Leaf(Protocol):
    """One part of a space that holds values of its own: how it is described, cast and digested."""

    description: dict[str, Any]
    #: What `value` gives: an array of this dtype and shape (a value of another size cut or repeated to fit), or `None`: JSON bytes.
    layout: Layout

    def one(self, value: Any, /) -> bytes: ...

    def rows(self, batch: Any) -> Iterable[bytes]: ...

    def value(self, value: Any) -> npt.NDArray[Any] | bytes: ...


def _kind(space: spaces.Space[Any]) -> str:
    """The name of Gymnasium's class: a class of somebody's own that is made of it holds the same values."""
    known = (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete, spaces.Dict, spaces.Tuple)
    return next(kind.__name__ for kind in known if isinstance(space, kind))


class _ArrayLeaf:
    """Box, MultiBinary and MultiDiscrete: an array of the space's dtype."""

    def __init__(self, space: spaces.Space[Any], hash_: Hash) -> None:
        assert space.dtype is not None
        assert space.shape is not None
        self.dtype = np.dtype(space.dtype)
        self.shape = tuple(space.shape)
        if self.dtype.hasobject:
            raise LedgerError(f"the space {space} holds Python objects and can't be digested: declare a numeric dtype.")
        if self.dtype.char in "gG":  # its padding bytes are random: equal values would differ
            raise LedgerError(f"the space {space} holds long doubles and can't be digested: declare float64.")
        self.layout: Layout = (self.dtype, self.shape)
        self.description: dict[str, Any] = {"type": _kind(space), "dtype": self.dtype.str, "shape": list(self.shape)}
        if isinstance(space, spaces.MultiDiscrete):
            self.description["nvec"] = np.asarray(space.nvec).tolist()
        self._hash = hash_
        self._size = int(np.prod(self.shape, dtype=np.int64))
        self.one = _array_digest(self.dtype, self.shape, hash_)
        # Of the batches that came last, so that the next one of that shape takes the short way; a batch always has an axis.
        self._usual: tuple[int, ...] = ()
        self._cut: Callable[[bytes], tuple[bytes, ...]]
        self._seeds: repeat[int]

    def _cast(self, value: Any) -> npt.NDArray[Any]:
        return _cast(value, self.dtype)

    def value(self, value: Any) -> npt.NDArray[Any]:
        array = self._cast(value)
        return array.reshape(self.shape) if array.size == self._size else np.resize(array, self.shape)

    def rows(self, batch: Any) -> Iterable[bytes]:
        if type(batch) is np.ndarray and batch.dtype is self.dtype and batch.shape == self._usual:
            return map(self._hash, self._cut(batch.tobytes()), self._seeds)
        array = self._cast(batch)
        n, shape = len(array), array.shape[1:]
        seed = _array_seed(self.dtype, self.shape, shape)
        size = array.nbytes // n if n else 0
        if size == 0:
            return repeat(self._hash(b"", seed), n)
        if size <= _SMALL_ROW:
            self._usual, self._cut, self._seeds = array.shape, _splitter(size, n).unpack, repeat(seed)
            return map(self._hash, self._cut(array.tobytes()), self._seeds)
        view = np.ascontiguousarray(array).data.cast("B")
        return [self._hash(view[start : start + size], seed) for start in range(0, n * size, size)]


def _cast(value: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    array = np.asarray(value)
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        return array.astype(dtype)


@functools.lru_cache(maxsize=256)
def _array_seed(dtype: np.dtype[Any], declared: tuple[int, ...], shape: tuple[int, ...]) -> int:
    # An assignment into a vector env's buffer adds or drops leading axes of length one: not a difference. Every other shape is.
    return seed_of(dtype.str, declared if _without_leading_ones(shape) == _without_leading_ones(declared) else shape)


@functools.lru_cache(maxsize=256)  # environments of one kind share it: less for the processor's caches to hold
def _array_digest(dtype: np.dtype[Any], shape: tuple[int, ...], hash_: Hash) -> Callable[[Any], bytes]:
    seed = _array_seed(dtype, shape, shape)

    def one(value: Any) -> bytes:
        # Locals of a closure, and no call that can be done without: this runs twice per environment step.
        try:
            if value.dtype is dtype and value.shape == shape:
                return hash_(value, seed)
        except (AttributeError, TypeError, ValueError, BufferError):  # no array, or not contiguous
            pass
        array = _cast(value, dtype)
        return hash_(array.tobytes(), _array_seed(dtype, shape, array.shape))

    return one


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape


@functools.lru_cache(maxsize=64)  # batches of a vector env have one length, chunks of episodes any
def _splitter(size: int, n: int) -> struct.Struct:
    """Cuts ``n * size`` bytes into ``n`` pieces in one call."""
    return struct.Struct(f"{size}s" * n)


class _DiscreteLeaf:
    """Discrete: a 64-bit integer."""

    layout: Layout = (np.dtype(np.int64), ())

    def __init__(self, space: spaces.Discrete[Any], hash_: Hash) -> None:
        start, n = int(space.start), int(space.n)
        self.description: dict[str, Any] = {"type": "Discrete", "n": n, "start": start}
        self._hash = hash_
        self._seed = seed_of(np.dtype(np.int64).str)
        self._table = {value: self._digest(value) for value in range(start, start + min(n, _TABLE))}

    def _digest(self, value: int) -> bytes:
        return self._hash(value.to_bytes(8, "little", signed=True), self._seed)

    def one(self, value: Any) -> bytes:
        try:
            return self._table[value]
        except (KeyError, TypeError):
            return self._digest(int(self.value(value)))

    def value(self, value: Any) -> npt.NDArray[Any]:
        with np.errstate(all="ignore"):
            return np.asarray(value).astype(np.int64).reshape(())

    def rows(self, batch: Any) -> Iterable[bytes]:
        array = np.asarray(batch)
        if array.dtype.kind not in "iu":
            with np.errstate(all="ignore"):
                array = array.astype(np.int64)
        table, digest = self._table, self._digest
        try:
            return [table[value] for value in array.ravel().tolist()]
        except KeyError:
            return [table[value] if value in table else digest(value) for value in array.astype(np.int64).ravel().tolist()]


class _TextLeaf:
    """Text: the string in UTF-8."""

    layout: Layout = None

    def __init__(self, space: spaces.Text, hash_: Hash) -> None:
        self.description: dict[str, Any] = {"type": "Text", "max_length": int(space.max_length)}
        self._hash = hash_
        self._seed = seed_of("text")

    def one(self, value: Any) -> bytes:
        return self._hash(str(value).encode("utf-8", "surrogatepass"), self._seed)

    def rows(self, batch: Any) -> Iterable[bytes]:
        return [self.one(value) for value in batch]

    def value(self, value: Any) -> bytes:
        return json.dumps(str(value)).encode()


class _SequenceLeaf:
    """Sequence: the digests of its elements, and so their number and order."""

    layout: Layout = None

    def __init__(self, space: spaces.Sequence, hash_: Hash) -> None:
        self._feature = SpaceDigest(space.feature_space, hash_)
        self.description: dict[str, Any] = {"type": "Sequence", "feature": self._feature.description}
        self._stacked = space.stack
        self._hash = hash_
        self._seed = seed_of("sequence")

    def one(self, value: Any) -> bytes:
        elements = self._feature.rows(value) if self._stacked else map(self._feature.one, value)
        return self._hash(b"".join(elements), self._seed)

    def rows(self, batch: Any) -> Iterable[bytes]:
        return [self.one(value) for value in batch]

    def value(self, value: Any) -> bytes:
        return json.dumps(_plain(value)).encode()


class _GraphLeaf:
    """Graph: its nodes, its edges and their links; an absent part is not an empty one."""

    layout: Layout = None

    def __init__(self, space: spaces.Graph, hash_: Hash) -> None:
        self._nodes = SpaceDigest(space.node_space, hash_)
        self._edges = None if space.edge_space is None else SpaceDigest(space.edge_space, hash_)
        self.description: dict[str, Any] = {
            "type": "Graph",
            "nodes": self._nodes.description,
            "edges": None if self._edges is None else self._edges.description,
        }
        self._hash = hash_
        self._seed = seed_of("graph")

    def one(self, value: Any) -> bytes:
        parts: list[bytes] = [_number(len(value.nodes)), *self._nodes.rows(value.nodes)]
        if value.edges is None or self._edges is None:
            parts.append(MISSING)
        else:
            parts += [_number(1), _number(len(value.edges)), *self._edges.rows(value.edges)]
        if value.edge_links is None:
            parts.append(MISSING)
        else:
            links = np.ascontiguousarray(np.asarray(value.edge_links).astype(np.int64))
            parts += [_number(1), self._hash(links.tobytes(), seed_of("links", links.shape))]
        return self._hash(b"".join(parts), self._seed)

    def rows(self, batch: Any) -> Iterable[bytes]:
        return [self.one(value) for value in batch]

    def value(self, value: Any) -> bytes:
        return json.dumps({"nodes": _plain(value.nodes), "edges": _plain(value.edges), "edge_links": _plain(value.edge_links)}).encode()


class _OneOfLeaf:
    """OneOf: which of the spaces, and the value in it."""

    layout: Layout = None

    def __init__(self, space: Any, hash_: Hash) -> None:
        self._choices = [SpaceDigest(choice, hash_) for choice in space.spaces]
        self.description: dict[str, Any] = {"type": "OneOf", "spaces": [choice.description for choice in self._choices]}
        self._hash = hash_
        self._seed = seed_of("oneof")

    def one(self, value: Any) -> bytes:
        index = int(value[0])
        return self._hash(_number(index) + self._choices[index].one(value[1]), self._seed)

    def rows(self, batch: Any) -> Iterable[bytes]:
        return [self.one(value) for value in batch]

    def value(self, value: Any) -> bytes:
        return json.dumps([int(value[0]), _plain(value[1])]).encode()


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def _plain(value: Any) -> Any:
    """The value as JSON can hold it; floats keep every digit."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value


Path = tuple[Any, ...]


def _leaves(space: spaces.Space[Any], hash_: Hash, path: Path = ()) -> list[tuple[Path, _Leaf]]:
    """The leaves of a space, dict keys sorted, each with the keys that lead to it."""
    if isinstance(space, spaces.Dict):
        for key in space.spaces:
            if not isinstance(key, (str, int)):
                raise LedgerError(f"the key {key!r} of a Dict space can't be recorded: use strings or integers.")
        # As strings: integers and strings together have no order of their own.
        return [leaf for key in sorted(space.spaces, key=str) for leaf in _leaves(space.spaces[key], hash_, (*path, key))]
    if isinstance(space, spaces.Tuple):
        return [leaf for index, part in enumerate(space.spaces) for leaf in _leaves(part, hash_, (*path, index))]
    return [(path, _leaf(space, hash_))]


def _leaf(space: spaces.Space[Any], hash_: Hash) -> _Leaf:
    if isinstance(space, (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)):
        return _ArrayLeaf(space, hash_)
    if isinstance(space, spaces.Discrete):
        return _DiscreteLeaf(space, hash_)
    if isinstance(space, spaces.Text):
        return _TextLeaf(space, hash_)
    if isinstance(space, spaces.Sequence):
        return _SequenceLeaf(space, hash_)
    if isinstance(space, spaces.Graph):
        return _GraphLeaf(space, hash_)
    if isinstance(space, spaces.OneOf):
        return _OneOfLeaf(space, hash_)
    raise LedgerError(
        f"a space of type {type(space).__name__} can't be recorded: use a space of Gymnasium, or convert it in a wrapper inside the ledger."
    )


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


class SpaceDigest:
    """Digests the values of one space.

    Args:
        space: Any nesting of Gymnasium's spaces.
        digest: A name in `DIGESTS`, or such a function.

    Raises:
        LedgerError: The space holds a part that is not one of Gymnasium's spaces, or the digest's name is unknown.

    Attributes:
        description: The space as JSON; ledgers of different descriptions are not compared. Bounds of a Box are left out: vector
            envs batch environments whose bounds differ.
        paths: For each leaf of the space, the keys and indices that lead to it, in the order of their digests.
        one: ``one(value) -> bytes``, the digest of one value.
    """

    def __init__(self, space: spaces.Space[Any], digest: str | Hash = "xxh3_64") -> None:
        if isinstance(digest, str):
            if digest not in DIGESTS:
                raise LedgerError(f"digest {digest!r} is unknown: use one of {', '.join(DIGESTS)}.")
            digest = DIGESTS[digest]
        self._made_of = space, digest
        found = _leaves(space, digest)
        if not found:
            raise LedgerError(f"the space {space} has no values, so that there is nothing to record: leave the ledger out.")
        self.paths: list[Path] = [path for path, _ in found]
        self._leaves: list[_Leaf] = [leaf for _, leaf in found]
        self._hash = digest
        self._is_tuple = isinstance(space, spaces.Tuple)
        self._single = len(found) == 1 and found[0][0] == ()
        self._seed = seed_of("composite", (len(found),))
        if self._single:
            self.description: dict[str, Any] = self._leaves[0].description
            self.one: Callable[[Any], bytes] = self._leaves[0].one
        else:
            self.description = {
                "type": _kind(space),
                "leaves": [[list(path), leaf.description] for path, leaf in found],
            }
            self.one = self._one

    def __reduce__(self) -> tuple[Any, ...]:
        return SpaceDigest, self._made_of

    def _one(self, value: Any) -> bytes:
        return self._hash(b"".join(leaf.one(_at(value, path)) for path, leaf in zip(self.paths, self._leaves)), self._seed)

    def rows(self, batch: Any) -> Iterable[bytes]:
        """The digests of a batch.

        Args:
            batch: As a vector env gives or takes it: each array leaf with the environments along its first axis, each other leaf a
                sequence with one value per environment; or, but for a Tuple space, a list of unbatched values.

        Returns:
            One digest per environment, each equal to `one` of that environment's value.
        """
        if self._single:
            return self._leaves[0].rows(batch)
        if self._one_by_one(batch):
            return [self._one(value) for value in batch]
        columns = [list(leaf.rows(_at(batch, path))) for path, leaf in zip(self.paths, self._leaves)]
        return [self._hash(b"".join(row), self._seed) for row in zip(*columns)]

    def each(self, values: Iterable[Any]) -> Iterable[bytes]:
        """The digests of several values that are not batched."""
        return map(self.one, values)

    def _one_by_one(self, batch: Any) -> bool:
        """Whether a batch is a list of unbatched values; Gymnasium takes a list for the parts of a Tuple space as well as a tuple."""
        return isinstance(batch, np.ndarray) or (isinstance(batch, list) and not self._is_tuple)

    @property
    def layouts(self) -> list[Layout]:
        """For each leaf, the dtype and shape of its cast values; `None` where a value is JSON of any length."""
        return [leaf.layout for leaf in self._leaves]

    def values(self, value: Any) -> list[npt.NDArray[Any] | bytes]:
        """The cast value of each leaf, as a ledger with ``keep_values`` stores it."""
        return [leaf.value(_at(value, path)) for path, leaf in zip(self.paths, self._leaves)]

    def batch_values(self, batch: Any) -> list[Sequence[npt.NDArray[Any] | bytes]]:
        """For each leaf, the cast values of a batch that `rows` accepts, one per environment."""
        if not self._single and self._one_by_one(batch):
            return [[leaf.value(_at(value, path)) for value in batch] for path, leaf in zip(self.paths, self._leaves)]
        return [[leaf.value(value) for value in _at(batch, path)] for path, leaf in zip(self.paths, self._leaves)]
