"""Digests of batches, computed as late as somebody asks for them: many batches at once, which takes a fraction of the time."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from ..checks import BatchChecks
from ..digest import MISSING, SpaceDigest
from ..format import Meta

__all__ = ["Digester", "Digests", "FirstBatches", "bytes_of"]

Values = npt.NDArray[np.uint64]

#: Spaces whose batches are arrays.
_PLAIN = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)

#: Batches that wait at most, and the bytes up to which one waits: the digests of longer ones are computed at once, and nothing is kept.
_WAITING = 128
_SMALL = 1 << 14


def bytes_of(batch: Any, space: spaces.Space[Any]) -> bytes:
    """The bytes of a batch, if it has the dtype of its space: equal ones have equal digests, and take less time to be told equal.

    Returns:
        Nothing where the dtype is another one.
    """
    if isinstance(batch, dict):
        parts = [(batch[key], space[key].dtype) for key in sorted(batch)]  # type: ignore[index]
        return b"".join(part.tobytes() for part, _ in parts) if all(part.dtype == dtype for part, dtype in parts) else b""
    return bytes(batch.tobytes()) if batch.dtype == space.dtype else b""


class Digests:
    """The digests of one batch.

    Args:
        values: They themselves, ``(n,)`` uint64.
        digester: Who computes them, where they aren't known.
        raw: From this.
    """

    __slots__ = ("_digester", "_raw", "_values")

    def __init__(self, values: Values | None, digester: Digester | None = None, raw: bytes = b"") -> None:
        self._values, self._digester, self._raw = values, digester, raw

    @property
    def values(self) -> Values:
        """The digests, ``(n,)`` uint64."""
        if self._values is None and self._digester is not None:
            self._digester.settle()
            raw = self._raw  # read before: who sets the values empties it afterwards
            if self._values is None:  # an interrupt, or another thread, is in the middle of it
                return self._digester.of_bytes([raw]).reshape(-1)
        assert self._values is not None
        return self._values

    @property
    def raw(self) -> bytes:
        """The bytes of the batch, while they are not computed; else nothing."""
        return self._raw

    def settle(self, values: Values) -> None:
        """Take the values."""
        self._values, self._raw = values, b""

    def but(self, env: int, digest: int) -> Digests:
        """The same with another digest for one environment."""
        values = self.values.copy()
        values[env] = digest
        return Digests(values)


class Digester:
    """Digests the batches of one space.

    Args:
        space: Of one environment.
        digest: As in `stepledger.LedgerEnv`.
        n: Number of environments.

    Attributes:
        space: How one value is digested.
        n: Number of environments.
    """

    def __init__(self, space: gymnasium.Space[Any], digest: str, n: int) -> None:
        self.space = SpaceDigest(space, digest)
        self.n = n
        self._shape = (n, *(space.shape or ())) if isinstance(space, _PLAIN) else None
        self._dtype = space.dtype
        self._waiting: list[Digests] = []

    def of(self, batch: Any) -> Digests:
        """The digests of a batch, which may be changed afterwards.

        Args:
            batch: As `stepledger.digest.SpaceDigest.rows` takes it.
        """
        if not self._waits(batch):
            values = np.empty(self.n, np.uint64)
            values[:] = np.frombuffer(b"".join(self.space.rows(batch)), ">u8")
            return Digests(values)
        if len(self._waiting) >= _WAITING:
            self.settle()
        return self._late(batch.tobytes())

    def _late(self, raw: bytes) -> Digests:
        digests = Digests(None, self, raw)
        self._waiting.append(digests)
        return digests

    def _waits(self, batch: Any) -> bool:
        return type(batch) is np.ndarray and batch.shape == self._shape and batch.dtype == self._dtype and 0 < batch.nbytes <= _SMALL

    def settle(self) -> None:
        """Compute the digests of all batches that wait."""
        waiting, self._waiting = self._waiting, []
        for digests, values in zip(waiting, self.of_bytes([one.raw for one in waiting])):
            digests.settle(values)

    def of_bytes(self, batches: list[bytes]) -> Values:
        """The digests of the bytes of batches, ``(batches, n)``."""
        assert self._shape is not None
        values = np.frombuffer(b"".join(batches), self._dtype).reshape(-1, *self._shape[1:])
        return np.frombuffer(b"".join(self.space.rows(values)), ">u8").astype(np.uint64).reshape(-1, self.n)

    def one(self, value: Any) -> int:
        """The digest of one value; that of a missing one for `None`."""
        return int.from_bytes(MISSING if value is None else self.space.one(value), "big")

    def replaced(self, digests: Digests, values: list[tuple[int, Any]]) -> Digests:
        """The digests of a batch with other values for some environments.

        Args:
            digests: Of the batch.
            values: Environments and their values; `None` is one that is missing.
        """
        if raw := digests.raw:
            assert self._shape is not None
            size = len(raw) // self.n
            for env, value in values:
                if not (isinstance(value, np.ndarray) and value.shape == self._shape[1:] and value.dtype == self._dtype):
                    break
                raw = raw[: env * size] + value.tobytes() + raw[(env + 1) * size :]
            else:
                return self._late(raw)
        for env, value in values:
            digests = digests.but(env, self.one(value))
        return digests


class FirstBatches(BatchChecks):
    """Checks the first batches that a VecEnv gives, see `stepledger.checks`.

    Args:
        final: As for all `BatchChecks`; likewise ``space``.
        observations: Is asked for the digests of each batch, by a method that is replaced.
        actions: Likewise, before a batch of actions is sent.
    """

    def __init__(self, final: Meta, space: gymnasium.Space[Any], observations: Digester, actions: Digester) -> None:
        super().__init__(final, space, observations.n, observations.space.rows)
        self._observations, self._actions = observations, actions
        self._own = observations.of, actions.of
        observations.of, actions.of = self._of, self._of_actions  # type: ignore[method-assign]

    def _of(self, batch: Any) -> Digests:
        digests = self._own[0](batch)
        self.look(batch)
        return digests

    def _of_actions(self, batch: Any) -> Digests:
        digests = self._own[1](batch)
        self.send(batch)
        return digests

    def end(self) -> None:
        """Leave the methods of their class."""
        del self._observations.of, self._actions.of
