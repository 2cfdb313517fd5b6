"""Where the parts of a learned transition come from that are not those of its step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .chance import AROUND, common, is_usual
from .changes import Cause
from .constants import Constants
from .explain import flags_changed
from .format import RESET, StreamKey
from .pairs import counted
from .received import rewards_made
from .result import Explanation
from .sampled import Columns, Sampled
from .tracks import REACH

__all__ = ["Origins"]


class Origins:
    """Explains differences of learned transitions from the digests of what was sampled.

    Args:
        sampled: The transitions as they were sampled.
    """

    def __init__(self, sampled: Sampled) -> None:
        self._sampled = sampled
        meta = sampled.windows[0].ledger.meta
        self._known = Constants({**meta, "observation_space": meta.get("handed_space", meta["observation_space"])})

    @cached_property
    def _index(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """The digests of all observations in order, and to each its place: number of the window and event, in one number."""
        digests = [_given(window.stream.data) for window in self._sampled.windows]
        places = [np.arange(len(part)) + (number << 40) for number, part in enumerate(digests)]
        found, place = np.concatenate(digests), np.concatenate(places)
        order = np.argsort(found, kind="stable")
        return found[order], place[order]

    def explain(self, row: int, fields: tuple[str, ...], sides: tuple[Columns, Columns], which: int) -> list[Explanation]:
        """What may be behind a difference, best first.

        Args:
            row: Of the sampled transition.
            fields: Which differ.
            sides: Transitions as they should be and as they were learned.
            which: The row of this one there.
        """
        expected, found = ({name: int(column[which]) for name, column in side.items()} for side in sides)
        why: list[Explanation] = []
        for field in ("obs", "next_obs"):
            if field in fields:
                why += self._observation(row, field, found[field])
        if {"terminated", "truncated"} & set(fields):
            flags = ((bool(side["terminated"]), bool(side["truncated"])) for side in (expected, found))
            why += flags_changed(*flags)
        if "reward" in fields:
            usual = self._is_usual(row, "h_rew", found["reward"])
            why += [
                cause.of("the reward") for cause in rewards_made(expected["reward"], found["reward"], self._sampled.reward_dtype, usual)
            ]
            why += self._column(row, "reward", "h_rew", found["reward"])
        if "action" in fields:
            why += [*self._constant(row, "action", "action", found["action"]), *self._column(row, "action", "h_act", found["action"])]
        return why

    def _constant(self, row: int, space: str, field: str, value: int) -> list[Explanation]:
        noun = f"the {field.replace('_', ' ')}"
        if value == self._known.digest(space, float("nan")):
            return [Cause("SL109", "NaN").of(noun)]
        if value != self._known.digest(space, 0.0):
            return []
        return [Cause("SL101", "zero", not self._is_usual(row, "h_obs" if space == "obs" else "h_act", value)).of(noun)]

    def _is_usual(self, row: int, column: str, value: int) -> bool:
        """Whether a value is given around a transition anyway, so that there it may be by chance."""
        number, event = self._event(row)
        data = self._sampled.windows[number].stream.data
        begin = max(0, event - AROUND)
        given = _given(data) if column == "h_obs" else data[column]
        near = given[begin : event + AROUND]
        others = (data["kind"][begin : event + AROUND] != RESET) | (column == "h_obs")
        others[event - begin] = False
        return is_usual(near[others], value)

    def _column(self, row: int, field: str, column: str, value: int) -> list[Explanation]:
        """Whether an action or a reward is that of another step near this one."""
        number, event = self._event(row)
        data = self._sampled.windows[number].stream.data
        for k in range(1, REACH + 1):
            for at, code, when in ((event - k, "SL102", "before"), (event + k, "SL113", "later")):
                if 0 <= at < len(data["kind"]) and data["kind"][at] != RESET and int(data[column][at]) == value:
                    begin = max(0, event - AROUND)
                    near = np.delete(data[column][begin : event + AROUND], event - begin)
                    verb = "may be" if common(near, value) else "is"
                    return [Explanation(code, f"the {field} {verb} that of {counted(k, 'step')} {when}")]
        return []

    def _observation(self, row: int, field: str, value: int) -> list[Explanation]:
        constant = self._constant(row, "obs", field, value)
        if any(one.sure for one in constant):
            return constant
        return [*constant, *self._of_another(row, field, value)]

    def _of_another(self, row: int, field: str, value: int) -> list[Explanation]:
        number, event = self._event(row)
        place = self._place_of(value, number, event)
        if place is None:
            return []
        where, own = self._named(*place[:2]), self._sampled.windows[number].stream
        stream, is_ = self._sampled.windows[place[0]].stream, "is" if place[2] else "may be"
        same_episode = place[0] == number and stream.columns["episode"][place[1]] == own.columns["episode"][event]
        if field == "obs":
            stale = Explanation("SL503", f"the obs {is_} that of {where}")
            if place[:2] != (number, event):
                return [stale]
            as_if = ":" if place[2] else ", as if"
            return [
                Explanation("SL113", f"the obs {is_} the one after it{as_if} it was replaced, or its array changed, before it was stored"),
                stale,
            ]
        wrong = Explanation("SL504", f"the next obs {is_} that of {where}")
        if same_episode:
            return [wrong]
        crosses = Explanation("SL502", f"the next obs {is_} that of {where}, which is another episode")
        return [crosses, wrong] if stream.data["kind"][place[1]] == RESET else [wrong, crosses]

    def _event(self, row: int) -> tuple[int, int]:
        """Number of the window and event of a transition's step."""
        return int(self._sampled.stream_of(np.array(row))), int(self._sampled.columns["event"][row])

    def _place_of(self, value: int, number: int, event: int) -> tuple[int, int, bool] | None:
        """Window and event of an observation, and whether there is no other: of several, the nearest of the same stream, else the first."""
        digests, places = self._index
        first, stop = (
            np.searchsorted(digests, np.array([value], np.uint64), "left"),
            np.searchsorted(digests, np.array([value], np.uint64), "right"),
        )
        found = places[int(first[0]) : int(stop[0])]
        if not len(found):
            return None
        own = found[found >> 40 == number] & ((1 << 40) - 1)
        if len(own):
            return number, int(own[np.argmin(np.abs(own - event))]), len(found) == 1
        return int(found[0]) >> 40, int(found[0]) & ((1 << 40) - 1), len(found) == 1

    def _named(self, number: int, event: int) -> str:
        stream = self._sampled.windows[number].stream
        key: StreamKey = stream.key
        runner = f"runner {key.runner} " if key.runner else ""
        return f"{runner}env {key.env} episode {stream.columns['episode'][event]} step {stream.columns['step'][event]}"


def _given(data: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.uint64]:
    """The observations as the learner was given them: wrappers around the vector env may have changed them."""
    given: npt.NDArray[np.uint64] = data.get("h_out", data["h_obs"])
    return given
