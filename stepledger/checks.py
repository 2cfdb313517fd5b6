"""Checks of the values that pass a tap, made while recording, in the first calls only: a ledger keeps digests, and no values.

They stand in the place of the functions that digest, as those that keep values do, and make room for them again: what a step costs
afterwards is what it would without. A check that can't be made of a value (its `look` raised) is taken back as a whole: nothing is
claimed of it. What was found is in the entry ``checks`` of the ledger's meta, and `stepledger.lints` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from .bounds import LeafBounds, SpaceBounds, array_leaves
from .format import Meta

if TYPE_CHECKING:
    from .digest import SpaceDigest
    from .recorder import Recorder
    from .vector import RowRecorder

__all__ = ["ACTION_OUTSIDE", "CALLS", "CHANGED", "OBS_NOT_FINITE", "OBS_OUTSIDE", "BatchChecks", "EnvChecks", "Resets", "RowChecks"]

#: Calls of an environment, resets and steps, of which values are looked at.
CALLS = 100

#: Codes of `stepledger.lints.LINTS`.
ACTION_OUTSIDE, OBS_OUTSIDE, OBS_NOT_FINITE, CHANGED = "SL601", "SL602", "SL603", "SL610"

#: Characters of a sentence about a value.
_LONGEST = 200


class _Notes:
    """What was checked and found so far, as the entry ``checks`` of a meta.

    Its containers keep their sizes, or are lists that only grow: a flush by another thread may read them at any moment.
    """

    def __init__(self, final: Meta, codes: Iterable[str]) -> None:
        self.meta: Meta = {"calls": 0, "made": list(codes), "found": []}
        self._found: dict[tuple[str, int], list[Any]] = {}
        final["checks"] = self.meta

    def found(self, code: str, stream: int, place: tuple[int, int], detail: str) -> None:
        """Count a finding; the first of each code and stream is kept."""
        known = self._found.get((code, stream))
        if known is not None:
            known[4] += 1
            return
        self._found[code, stream] = row = [code, stream, *place, 1, detail[:_LONGEST]]
        self.meta["found"].append(row)

    def take_back(self, *codes: str) -> None:
        """These checks can't be made."""
        self.meta["made"] = [code for code in self.meta["made"] if code not in codes]


class Resets:
    """What resets of an environment were given, as the entry ``resets`` of a meta; all of them are counted.

    The list holds: resets; those with a seed; different seeds; those with options; those behind the last one that had options.
    """

    def __init__(self, final: Meta) -> None:
        self._seeds: set[Any] = set()
        self._told = True
        self._counts = final["resets"] = [0, 0, 0, 0, 0]

    def count(self, seed: Any, options: Any) -> None:
        """Count a reset."""
        try:
            self._count(seed, bool(options))
        except Exception:  # what it was given can't be told: nothing is claimed of any
            self._counts[:] = [0, 0, 0, 0, 0]
            self._told = False

    def _count(self, seed: Any, has_options: bool) -> None:
        if not self._told:
            return
        counts = self._counts
        counts[0] += 1
        if seed is not None:
            counts[1] += 1
            if len(self._seeds) < 2:
                self._seeds.add(str(seed))
                counts[2] = len(self._seeds)
        if has_options:
            counts[3], counts[4] = counts[3] + 1, 0
        else:
            counts[4] += 1


class EnvChecks:
    """Checks what a single environment is given and gives.

    Args:
        recorder: Its two functions that digest are set, and replaced here.
        env: The environment.
        observations: Digests an observation, and does nothing else.
    """

    def __init__(self, recorder: Recorder, env: gymnasium.Env[Any, Any], observations: SpaceDigest) -> None:
        self._notes = _Notes(recorder.final, (ACTION_OUTSIDE, OBS_OUTSIDE, OBS_NOT_FINITE, CHANGED))
        self._recorder = recorder
        self._left = CALLS
        self._digest = observations.one
        self._previous: tuple[Any, bytes] | None = None  # what was handed out last, and its digest then
        self._acted = False
        self._episode, self._step = -1, 0
        self._action = self._look_of(env.action_space, ACTION_OUTSIDE)
        self._observation = self._look_of(env.observation_space, OBS_OUTSIDE, OBS_NOT_FINITE)
        self._own = recorder.digest_action, recorder.digest_observation
        recorder.digest_action, recorder.digest_observation = self._with_action, self._with_observation

    def _look_of(self, space: gymnasium.Space[Any], *codes: str) -> Callable[[Any], tuple[str, str]] | None:
        try:
            return SpaceBounds(space).look
        except Exception:
            self._notes.take_back(*codes)
            return None

    def _with_action(self, action: Any) -> bytes:
        digest = self._own[0](action)
        self._acted = True
        self._forget_if_changed()
        if self._action is not None:
            try:
                outside, infinite = self._action(action)
                if outside or infinite:
                    self._notes.found(ACTION_OUTSIDE, 0, (max(self._episode, 0), self._step + 1), outside or infinite)
            except Exception:
                self._action = None
                self._notes.take_back(ACTION_OUTSIDE)
        return digest

    def _with_observation(self, observation: Any) -> bytes:
        digest = self._own[1](observation)
        if self._previous is not None:
            before, place = self._previous, (max(self._episode, 0), self._step)
            if self._changed():
                same = ", and hands it out again" if before[0] is observation else ""
                self._notes.found(CHANGED, 0, place, f"the next call changed what this one had given{same}")
        if self._acted:
            self._episode, self._step = max(self._episode, 0), self._step + 1
        else:
            self._episode, self._step = self._episode + 1, 0
        self._acted = False
        if self._observation is not None:
            try:
                outside, infinite = self._observation(observation)
                for code, detail in ((OBS_OUTSIDE, outside), (OBS_NOT_FINITE, infinite)):
                    if detail:
                        self._notes.found(code, 0, (self._episode, self._step), detail)
            except Exception:
                self._observation = None
                self._notes.take_back(OBS_OUTSIDE, OBS_NOT_FINITE)
        if CHANGED in self._notes.meta["made"]:
            self._previous = observation, digest
        self._notes.meta["calls"] += 1
        self._left -= 1
        if self._left <= 0:
            self._end()
        return digest

    def before_reset(self) -> None:
        """The environment is about to be reset; a step that never came back is no step."""
        self._acted = False
        self._forget_if_changed()

    def _changed(self) -> bool:
        """Whether what was handed out last is not what it was."""
        assert self._previous is not None
        observation, digest = self._previous
        try:
            return self._digest(observation) != digest
        except Exception:
            self._previous = None
            self._notes.take_back(CHANGED)
            return False

    def _forget_if_changed(self) -> None:
        """What has changed before the environment is called was changed by whoever it was handed to."""
        if self._previous is not None and self._changed():
            self._previous = None

    def _end(self) -> None:
        self._previous = None
        self._recorder.digest_action, self._recorder.digest_observation = self._own


class BatchChecks:
    """Checks the batches of observations that a vector env gives; actions are for `EnvChecks`, since some are ignored at an autoreset.

    Of an array of all environments each place is an environment's and a call's: at a reset of some, those of the others are looked at
    again.

    Args:
        final: Where to note what is found.
        space: Of one observation of each environment.
        n: Number of environments.
        rows: The digests of a batch; does nothing else.
    """

    def __init__(self, final: Meta, space: gymnasium.Space[Any], n: int, rows: Callable[[Any], Iterable[bytes]]) -> None:
        self._notes = _Notes(final, (OBS_OUTSIDE, OBS_NOT_FINITE, CHANGED))
        self._n, self._digests_of, self._left = n, rows, CALLS
        self._previous: tuple[Any, list[bytes]] | None = None
        self._sent = False
        self._leaves: list[tuple[tuple[Any, ...], LeafBounds]] = []
        try:
            self._leaves = list(array_leaves(space))
        except Exception:
            self._notes.take_back(OBS_OUTSIDE, OBS_NOT_FINITE)

    def end(self) -> None:
        """The last batch was looked at."""
        raise NotImplementedError

    def send(self, actions: Any, digests: list[bytes] | None = None) -> None:
        """Actions are about to be sent."""
        if self._previous is not None and self._digests(self._previous[0]) != self._previous[1]:
            self._previous = None  # changed by whoever it was handed to
        self._sent = True

    def look(self, batch: Any, digests: list[bytes] | None = None) -> None:
        """Look at a batch that came back, whose digests may be known."""
        call = self._notes.meta["calls"]
        if self._sent and self._previous is not None:
            for env, (now, before) in enumerate(zip(self._digests(self._previous[0]), self._previous[1])):
                if now != before:
                    self._notes.found(CHANGED, env, (-1, call - 1), "the next call changed the batch that this one had given")
        if digests is None or len(digests) != self._n or CHANGED not in self._notes.meta["made"]:
            digests = self._digests(batch)
        self._sent, self._previous = False, (batch, digests) if digests else None
        if self._leaves:
            try:
                self._look(batch, (-1, call))
            except Exception:
                self._leaves = []
                self._notes.take_back(OBS_OUTSIDE, OBS_NOT_FINITE)
        self._notes.meta["calls"] += 1
        self._left -= 1
        if self._left <= 0:
            self._previous = None
            self.end()

    def _look(self, batch: Any, place: tuple[int, int]) -> None:
        for path, bounds in self._leaves:
            values = np.asarray(_at(batch, path))
            if len(values) != self._n:
                raise ValueError("this is a batch of another number of environments")
            for code, found in zip((OBS_OUTSIDE, OBS_NOT_FINITE), bounds.look_at_rows(values) or ()):
                for env in np.flatnonzero(found).tolist():
                    detail = bounds.look(values[env])[code == OBS_NOT_FINITE]
                    self._notes.found(code, env, place, "".join(f"{key!r}: " for key in path) + detail)

    def _digests(self, batch: Any) -> list[bytes]:
        """The digests of a batch; none where that can't be done, and then not any more."""
        if CHANGED not in self._notes.meta["made"]:
            return []
        try:
            digests = list(self._digests_of(batch))
            if len(digests) != self._n:
                raise ValueError("this is a batch of another number of environments")
        except Exception:
            self._notes.take_back(CHANGED)
            return []
        return digests


class RowChecks(BatchChecks):
    """Checks the first batches that a recorder of rows is given.

    Args:
        rows: What digests its batches is replaced.
        space: As for all `BatchChecks`; likewise ``n``.
    """

    def __init__(self, rows: RowRecorder, space: gymnasium.Space[Any], n: int) -> None:
        self._rows, self._own = rows, (rows._observations, rows._actions)
        super().__init__(rows.recorder.final, space, n, rows._observations.rows)
        rows._observations = _Watched(rows._observations, self.look)  # type: ignore[assignment]
        rows._actions = _Watched(rows._actions, self.send)  # type: ignore[assignment]

    def end(self) -> None:
        """Put back what was there."""
        self._rows._observations, self._rows._actions = self._own


class _Watched:
    """A `SpaceDigest` that shows each batch to a check."""

    def __init__(self, digest: SpaceDigest, look: Callable[[Any, list[bytes]], None]) -> None:
        self._digest, self._look = digest, look

    def rows(self, batch: Any) -> Iterable[bytes]:
        """As of the digest itself."""
        rows = list(self._digest.rows(batch))  # first: what can't be digested is refused as ever
        self._look(batch, rows)
        return rows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is being unpickled there is nothing yet
            raise AttributeError(name)
        return getattr(self._digest, name)


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value
