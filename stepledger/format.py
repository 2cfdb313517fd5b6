"""The file format: what a journal and a sealed ledger hold.

The reader is in `stepledger.ledger`, the writers are in `stepledger.journal` and `stepledger.sealed`.

A **sealed ledger** is an ``.npz`` without pickles. Its members, in this order (n events in all, concatenated over the streams):

======================  ==============  ===================================================================================
``meta``                str             JSON, see below
``stream_index``        int64           env index of each stream
``stream_offsets``      int64           where each stream begins; one more at the end, n
``kind``                uint8           0 reset, 1 step, 2 transition
``terminated``          bool
``truncated``           bool
``h_obs`` ``h_act``     uint64          digests; ``h_act`` of a reset is 0
``h_rew``               uint32, uint64  the reward's bits in ``meta.reward_dtype`` (as wide as that dtype); 0 at a reset
more digests            as in meta      ``meta.columns`` names them: identities and successors of episode and learner ledgers
``episode`` ``step``    int64           from 0 at the first reset; step 0 is the reset. Deflated; all other columns are stored as they are
``values_obs_{j}`` ..   leaf's dtype    with ``keep_values``: one row per event and leaf of the space (``values_act_{j}`` likewise);
                                        a leaf without a fixed shape is UTF-8 JSON in uint8 with ``values_obs_{j}_offsets`` (int64, n + 1)
======================  ==============  ===================================================================================

A **journal** is a sequence of ``np.save`` records. The first is the meta (uint8, JSON); then, block after block, one structured array
of events (`event_dtype`, ordered by stream) and the kept values of those events, leaf by leaf. Each record is followed by 8 bytes: its
xxh3_64, seeded with the checksum before it, so that a record that is cut, changed or moved ends what can be trusted.

The **meta** of both is one JSON object. Those in the first part are always there; a sealed ledger has those of the last part besides:

=====================  ===============  ===================================================================================
``format``             int              `FORMAT`
``id``                 str              of this ledger, unique
``tap``                str              ``"env"``, ``"vector"``, ``"episode"`` or ``"learner"``
``digest``             str              ``"xxh3_64"`` or ``"blake2b"``
``reward_dtype``       str              ``"<f4"`` or ``"<f8"``
``observation_space``  object           its ``type`` and what of it values are cast to; ``leaves``: a path and a space for each leaf
``action_space``       object           likewise
``stream_keys``        list             a `StreamKey` for each stream, as a list; a learner's ``env`` is its own index
``keep_values``        bool             whether observations and actions are stored
``values``             object           ``obs``, ``act``: for each stored leaf its dtype and shape, or null where it is JSON
``leaves``             object           ``obs``, ``act``: for each leaf the keys that lead to it
``created``            float            seconds since 1970
``closed``             bool             whether nothing comes after; false in a journal and after ``flush()``
``versions``           object           of stepledger, gymnasium and numpy
``columns``            object           further columns: name -> ``"<u8"`` or ``"<i8"``
---------------------  ---------------  -----------------------------------------------------------------------------------
``run``                str              identity of the run, the same at all taps; empty where they can't tell each other
``group``              str              ledgers of different groups (``"evaluation"``) are not compared with each other
``taps``               list of str      taps that the run has, so that one that is missing is missed
``conflicts_with``     str              ``id`` of the ledger that was recorded under the same name at the same time, or empty
``begins``             list             for each stream: events dropped before the first that is here, episode and step of the last of them
``autoreset_mode``     str              a vector env's: ``"NextStep"``, ``"SameStep"`` or ``"Disabled"``; for the reader only
``flags``              str              ``"exclusive"``: truncated is "truncated and not terminated"; ``"done"``: terminated is either;
                                        ``"both"``, or absent: each is what it says
``fields``             object           field -> what is said of it: ``skip``, why it can't be compared; ``note``, by which function a
                                        side was taken first; ``column``, in which it is
``handed_space``       object           the space of what wrappers around the vector env made of its observations (column ``h_out``)
``whole_episodes``     bool             an EnvRunner's: it samples a number of episodes, and may not return others that ended
``each_step``          str              what a learner promises: ``"once"``, ``"at most once"``, or nothing
``replays``            bool             a learner's: it has a replay buffer, so that transitions are also found by what they hold
``capacity``           int              how many steps that buffer holds
``horizon``            int              how many sampled steps may still be learned from
``gamma``              float            by which rewards over n steps (column ``n``) were summed
``runners``            list of int      EnvRunners whose steps a learner was given
---------------------  ---------------  -----------------------------------------------------------------------------------
``ended``              float            seconds since 1970
``in_flight``          bool             a call was with the environment when the ledger was written
``exited``             bool             written at interpreter exit, and not by ``close()``
``stopped``            str              why recording ended before the run did
``notes``              list of str      sentences for the report; an EnvRunner's are in the journal too
``strays``             list             calls of the training env that are not its trainer's, see `stepledger.strays.Stray` (column ``by``)
=====================  ===============  ===================================================================================
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .digest import Layout
from .errors import LedgerError

__all__ = ["FORMAT", "RESET", "STEP", "TRANSITION", "Place", "StreamKey", "event_dtype"]

#: Version of the format, in ``meta.format``. 1: the published reference (blake2b, no ``tap``, no journal). 2: this one.
FORMAT = 2

RESET, STEP, TRANSITION = 0, 1, 2

SEALED, JOURNAL = ".npz", ".journal"

#: Reward dtypes that can be recorded -> the unsigned integer dtype of their bits.
REWARD_BITS: dict[str, np.dtype[Any]] = {"<f4": np.dtype("<u4"), "<f8": np.dtype("<u8")}

Meta = dict[str, Any]


class StreamKey(NamedTuple):
    """Whose events a stream holds.

    Attributes:
        runner: The EnvRunner's index; 0 where there are none.
        env: Position of the environment in its vector env.
        agent: The agent; empty where there is only one.
        incarnation: Counts the processes that were this runner, from 0.
    """

    runner: int = 0
    env: int = 0
    agent: str = ""
    incarnation: int = 0


class Place(NamedTuple):
    """Where one ledger is written, and whose it is.

    Attributes:
        directory: The folder; `None` leaves the one that the tap was made with.
        key: The stream, or for a vector env the runner whose streams they are.
        run: Identity of the run, the same at all of its taps; empty where they can't tell each other.
        group: Ledgers of different groups (``"evaluation"``) are not compared with each other.
        options: How to record, instead of as the tap was made; see `stepledger.LedgerEnv`.
        taps: The taps that the run has, so that one whose ledgers are missing is missed.
    """

    directory: str | None
    key: StreamKey
    run: str = ""
    group: str = ""
    options: dict[str, Any] | None = None
    taps: tuple[str, ...] = ()

    def path(self, tap: str) -> Path:
        """The ledger of this tap, where the directory is given."""
        runner = f"runner-{self.key.runner}.{self.key.incarnation}"
        return Path(self.directory or "", self.group, f"{runner}-{tap}.npz")

    def meta(self, streams: int | None = None) -> dict[str, Any]:
        """What the ledger's meta says of it; a number of streams means environments 0 to n-1 instead of the key's own."""
        keys = [self.key] if streams is None else [self.key._replace(env=env) for env in range(streams)]
        return {"stream_keys": [list(key) for key in keys], "run": self.run, "group": self.group, "taps": list(self.taps)}


def event_dtype(reward_dtype: str, columns: dict[str, str]) -> np.dtype[Any]:
    """The journal's record of one event; ``columns`` are the further ones of ``meta.columns``."""
    return np.dtype(
        [
            ("stream", "<u4"),
            ("kind", "u1"),
            ("terminated", "?"),
            ("truncated", "?"),
            ("h_obs", "<u8"),
            ("h_act", "<u8"),
            ("h_rew", REWARD_BITS[reward_dtype]),
            *columns.items(),
        ]
    )


class EpisodeCounter:
    """Numbers the events of one stream: episodes from 0 at the first reset, steps from 0 at each reset.

    A stream that begins with a step (recording began within an episode) counts that episode as 0 too.

    Args:
        last: Episode and step of the event before, where there was one.
    """

    def __init__(self, last: tuple[int, int] | None = None) -> None:
        self._episode, self._step = (0, -1) if last is None else last
        self._begun = last is not None

    @property
    def last(self) -> tuple[int, int] | None:
        """Episode and step of the last event that was counted."""
        return (self._episode, self._step) if self._begun else None

    def count(self, kind: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Episode and step of the next events of the stream."""
        if not len(kind):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        reset = kind == RESET
        if not self._begun:
            self._begun = True
            if reset[0]:
                self._episode = -1
            else:
                self._step = 0
        episode = self._episode + np.cumsum(reset)
        at = np.arange(len(kind))
        last_reset = np.maximum.accumulate(np.where(reset, at, -1))
        step = np.where(last_reset >= 0, at - last_reset, self._step + 1 + at)
        self._episode, self._step = int(episode[-1]), int(step[-1])
        return episode, step


def begins_of(meta: Meta) -> list[tuple[int, tuple[int, int] | None]]:
    """For each stream, how many events came before the first that is here, and episode and step of the last of those."""
    begins = meta.get("begins", [[0, 0, -1]] * len(meta["stream_keys"]))
    return [(events, (episode, step) if events else None) for events, episode, step in begins]


def checked_meta(meta: Any) -> Meta:
    """The meta of a ledger, as far as reading depends on it.

    Raises:
        LedgerError: It is not one, or of another version.
    """
    if not isinstance(meta, dict) or "format" not in meta:
        raise LedgerError("this is not a ledger of stepledger: name the files that were recorded.")
    if meta["format"] != FORMAT:
        raise LedgerError(f"format {meta['format']!r} is not the {FORMAT} that this version reads: read it with the version that wrote it.")
    try:
        ok = _is_meta(meta)
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError):
        ok = False
    if not ok:
        raise LedgerError("its meta is damaged: record again.")
    return meta


#: Entries that reading and comparing depend on, besides those that `_is_meta` looks into.
_ENTRIES: Meta = {"id": str, "tap": str, "digest": str, "closed": bool, "keep_values": bool, "versions": dict}
_OPTIONAL_ENTRIES: Meta = {
    "run": str,
    "stopped": str,
    "conflicts_with": str,
    "in_flight": bool,
    "exited": bool,
    "flags": str,
    "group": str,
    "each_step": str,
    "capacity": int,
    "gamma": (int, float),
    "replays": bool,
    "whole_episodes": bool,
    "ended": (int, float),
    "notes": list,
    "taps": list,
    "runners": list,
    "begins": list,
    "horizon": int,
    "strays": list,
    "handed_space": dict,
}


def _is_meta(meta: Meta) -> bool:
    """Whether the entries are what they must be; may raise almost anything where they are not."""
    keys, columns, values, fields = meta["stream_keys"], meta["columns"], meta["values"], meta.get("fields", {})
    if not all(isinstance(part, dict) for part in (columns, values, fields)):
        return False
    own = event_dtype("<f4", {}).names or ()
    return (
        all(isinstance(meta.get(name), kind) for name, kind in _ENTRIES.items())
        and all(isinstance(meta[name], kind) for name, kind in _OPTIONAL_ENTRIES.items() if name in meta)
        and all(isinstance(one, str) for name in ("notes", "taps") for one in meta.get(name, []))
        and all(isinstance(one, int) for one in meta.get("runners", []))
        and all(_is_stray(stray) for stray in meta.get("strays", []))
        and all(isinstance(path, list) for which in ("obs", "act") for path in meta["leaves"][which])
        and meta["reward_dtype"] in REWARD_BITS
        and 0 <= meta["created"] < 1e11
        and all(_is_space(meta[name]) for name in ("observation_space", "action_space"))
        and all(name.isidentifier() and name not in own and descr in ("<u8", "<i8") for name, descr in columns.items())
        and (meta["tap"] != "learner" or {"h_next", "h_id", "t"} <= columns.keys())
        and isinstance(keys, list)
        and all(_is_key(key) for key in keys)
        and len({tuple(key) for key in keys}) == len(keys)
        and len(meta.get("begins", keys)) == len(keys)
        and all(_is_begin(begin) for begin in meta.get("begins", []))
        and all(_is_layouts(values.get(which)) for which in ("obs", "act"))
        and all(_is_said_of_field(said, {*own, *columns}) for said in fields.values())
    )


def _is_space(description: Any) -> bool:
    if not isinstance(description, dict) or not isinstance(description.get("type"), str):
        return False
    return all(isinstance(path, list) and _is_space(leaf) for path, leaf in description.get("leaves", []))


def _is_said_of_field(said: Any, columns: set[str]) -> bool:
    return (
        isinstance(said, dict)
        and all(said.values())
        and all(isinstance(text, str) for text in said.values())
        and said.get("column", "kind") in columns
    )


def _is_stray(stray: Any) -> bool:
    return isinstance(stray, list) and [type(part) for part in stray] == [int, int, int, str, str, bool]


def _is_key(key: Any) -> bool:
    return isinstance(key, list) and [type(part) for part in key] == [int, int, str, int]


def _is_begin(begin: Any) -> bool:
    """Whether these are numbers of events and of an episode and a step, the step -1 where no event came before."""
    if not isinstance(begin, list) or [type(part) for part in begin] != [int, int, int]:
        return False
    events, episode, step = begin
    return all(0 <= number < 1 << 62 for number in (events, episode, step + 1))  # columns are int64, and count on from here


def _is_layouts(layouts: Any) -> bool:
    if not isinstance(layouts, list):
        return False
    try:
        for layout in layouts:
            if layout is not None:
                descr, shape = layout
                dtype = np.dtype(descr)
                if dtype.hasobject or not dtype.itemsize or len(shape) > 31 or not all(type(n) is int and n >= 0 for n in shape):
                    return False
                if dtype.itemsize * math.prod(max(n, 1) for n in shape) >= 1 << 48:
                    return False
    except (TypeError, ValueError):
        return False
    return True


def layouts_of(meta: Meta) -> list[tuple[str, Layout]]:
    """Name and layout of each column of kept values, in the order in which a block holds them."""
    return [
        (f"values_{which}_{index}", None if layout is None else (np.dtype(layout[0]), tuple(layout[1])))
        for which in ("obs", "act")
        for index, layout in enumerate(meta["values"][which])
    ]
