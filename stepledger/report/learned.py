"""What was learned of each step, for reports: learned transitions beside the sampled ones that they were found to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..format import STEP, StreamKey
from ..ledger import Ledger
from ..sampled import EPISODE_START, FIELDS, Columns, Sampled, Window, concatenate
from ..transitions import learned_columns
from .values import Value, digest_value, flag_value, kept_value, reward_value

__all__ = ["Learned"]


class Learned:
    """Looks up what was learned of a step.

    Args:
        samplers: The ledgers of the tap in front of the learner.
        learners: The ledgers of learners.
    """

    def __init__(self, samplers: Sequence[Ledger], learners: Sequence[Ledger]) -> None:
        keys = sorted((key, number) for number, ledger in enumerate(samplers) for key in ledger.streams)
        self._streams = {key: (samplers[number], samplers[number].streams[key]) for key, number in keys}
        self._meta = learners[0].meta
        self._sampled = Sampled([Window(*self._streams[key]) for key, _ in keys])
        self._learned: Columns = concatenate([learned_columns(stream) for ledger in learners for stream in ledger.streams.values()])
        at = self._sampled.find(self._learned, self._meta)
        # The learned transitions in the order of the steps that they begin with.
        self._order = np.argsort(at, kind="stable")
        self._at = at[self._order]
        windows = self._sampled.stream_of(np.arange(len(self._sampled)))
        self._rows = {key: np.flatnonzero(windows == number) for number, (key, _) in enumerate(keys)}

    def given(self, key: StreamKey, event: int) -> dict[str, Value]:
        """The transition of a step as it was sampled.

        Args:
            key: The stream.
            event: Index of the step in what is left of it.
        """
        ledger, stream = self._streams[key]
        data = stream.data
        return {
            "obs": kept_value(ledger, stream, "obs", event - 1) if event else Value("not there any more"),
            "action": kept_value(ledger, stream, "action", event),
            "reward": reward_value(data["h_rew"][event], ledger.meta["reward_dtype"]),
            "next_obs": kept_value(ledger, stream, "obs", event),
            "terminated": flag_value(data["terminated"][event]),
            "truncated": flag_value(data["truncated"][event]),
        }

    def side(self, key: StreamKey, event: int) -> tuple[tuple[dict[str, Value], str] | None, frozenset[str]]:
        """What was learned of a step: its values, what else there is to say, and the fields that differ from what was sampled.

        Of several transitions that were learned of it, one that differs; `None` where there is none.
        """
        rows = self._rows[key]
        at = int(np.searchsorted(self._sampled.columns["event"][rows], event))  # a stream's rows are in order
        found = rows[at : at + 1]
        if not len(found) or self._sampled.columns["event"][found[0]] != event or self._streams[key][1].data["kind"][event] != STEP:
            return None, frozenset()
        begin, end = np.searchsorted(self._at, found[0]), np.searchsorted(self._at, found[0], side="right")
        learned = self._order[begin:end]
        if not len(learned):
            return None, frozenset({"event"} if self._meta.get("each_step") == "once" else ())
        columns = {name: column[learned] for name, column in self._learned.items()}
        unequal = self._sampled.unequal(np.full(len(learned), found[0]), columns, self._meta)
        different = np.logical_or.reduce(list(unequal.values()))
        one = int(different.argmax())
        times = "" if len(learned) == 1 else f"learned from {len(learned):,} times"
        steps = int(columns["n"][one])
        note = ", ".join(filter(None, [times, f"over {steps} steps" if steps > 1 else ""]))
        return (self._values(columns, one), note), frozenset(name for name, mask in unequal.items() if mask[one])

    def _values(self, columns: Columns, at: int) -> dict[str, Value]:
        values = {}
        for name in FIELDS:
            said = self._meta.get("fields", {}).get(name, {})
            values[name] = Value("not compared") if "skip" in said else self._value(name, columns[name][at])
        if EPISODE_START in columns and columns[EPISODE_START][at] >= 0:
            values[EPISODE_START] = flag_value(columns[EPISODE_START][at])
        return values

    def _value(self, name: str, value: Any) -> Value:
        if name == "reward":
            return reward_value(value, self._sampled.reward_dtype)
        return flag_value(value) if name in ("terminated", "truncated") else digest_value(value)
