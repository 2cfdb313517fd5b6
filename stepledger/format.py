"""The file format: what a journal and a sealed ledger hold.

The readers are in `stepledger.archive` and `stepledger.journal`, the writers in `stepledger.journal` and `stepledger.sealed`.

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
``values_index``        int64           where ``keep_values`` is a number: the events, of the n, that the rows of ``values_*`` belong to
======================  ==============  ===================================================================================

A **journal** is a sequence of ``np.save`` records. The first is the meta (uint8, JSON); then, block after block, one structured array of
events (`event_dtype`, ordered by stream, whose number takes 1, 2 or 4 bytes) and the kept values of those events, leaf by leaf. Where
``keep_values`` is a number, blocks have no values; some come later, behind a structured array that says whose they are (`KEPT`, ordered by
stream and event). What is said of the run while it goes on comes between blocks, as JSON in uint8 again: lists of the meta (`SAID`) and
what is to be added to each. Each record is followed by 8 bytes: its xxh3_64, seeded with the checksum before it, so that one that is cut,
changed or moved ends what can be trusted.

The **first version** (`FIRST`, the published reference's) is a sealed ledger too, whose README says this of it: a JSON ``meta`` with the
version of the format, the side, the reward dtype, the spaces and the version of the package; the env index of each stream; stream offsets;
the eight columns, ``h_rew`` as uint64; ``values_obs_{j}`` and ``values_act_{j}``, one array per leaf; 64-bit blake2b digests of shape,
dtype and bytes; ``truncated`` stored as "truncated and not terminated". Where it says no more, `stepledger.version1` assumes:

- The entries and members that it gives no name are those of the lists in that module: any one that is there is taken.
- The version is the integer 1. The side is ``"env"`` or ``"trainer"``; where there is none, one stream in a file ``env-{index}.npz`` is an
  environment's. Spaces may be described by any JSON, as long as both sides say the same.
- Offsets begin at 0; the last one, the number of events, may be missing.
- A reset has nothing but its observation. What is written in its other columns is not looked at.
- In which order shape, dtype and bytes are digested is unknown, so that its digests are compared with each other only.

The **meta** of the present versions is one JSON object. Those in the first part are always there; a sealed ledger has those of the last
part besides:

=====================  ===============  ===================================================================================
``format``             int              `FORMAT`, or `WINDOWED` where ``keep_values`` is a number
``id``                 str              of this ledger, unique
``tap``                str              ``"env"``, ``"vector"``, ``"episode"`` or ``"learner"``
``digest``             str              ``"xxh3_64"`` or ``"blake2b"``
``reward_dtype``       str              ``"<f4"`` or ``"<f8"``
``observation_space``  object           its ``type`` and what of it values are cast to; ``leaves``: a path and a space for each leaf
``action_space``       object           likewise
``stream_keys``        list             a `StreamKey` for each stream, as a list; a learner's ``env`` is its own index
``keep_values``        bool, int        whether observations and actions are stored; a number: of so many events, the last of each stream
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
``autoreset_mode``     str              a vector env's: ``"NextStep"``, ``"SameStep"`` or ``"Disabled"``: which events one call has
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
``time_limit``         int              steps after which the environment says that its episodes are truncated
``bounds``             object           with ``keep_values``, an environment's: ``obs``, ``act``: for each stored leaf its least and its
                                        greatest value, each a number, a list of them or null where there is none; or null
---------------------  ---------------  -----------------------------------------------------------------------------------
``ended``              float            seconds since 1970
``in_flight``          bool             a call was with the environment when the ledger was written
``exited``             bool             written at interpreter exit, and not by ``close()``
``stopped``            str              why recording ended before the run did
``notes``              list of str      sentences for the report; in the journal too, but for what is counted until the end
``checks``             object           of the values of the first ``calls`` calls: the codes of those that were ``made``, and what was
                                        ``found``: code, stream, episode, step (of a vector env -1 and the call), how often, the first
``resets``             list of int      an environment's: its resets, those with a seed, different seeds, those with options, and those
                                        behind the last one that had options
``checkpoints``        list             for each checkpoint that was saved, the number of events of each stream at that moment
``raised``             list of int      for each call of a vector env that raised, the calls before it that came back: steps, and where the
                                        mode is ``"NextStep"`` resets too
``strays``             list             calls of the training env that are not its trainer's, see `stepledger.strays.Stray` (column ``by``)
=====================  ===============  ===================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .digest import Layout

__all__ = [
    "FIRST",
    "FORMAT",
    "KEPT",
    "RESET",
    "SAID",
    "STEP",
    "TRANSITION",
    "WINDOWED",
    "Place",
    "StreamKey",
    "event_dtype",
    "window_of",
    "with_said",
]

#: Version of the format, in ``meta.format``. 1: the published reference (blake2b, no ``tap``, no journal); it is read, and never written.
#: 2: this one. 3: where ``keep_values`` is a number, so that readers that don't know of it refuse the ledger.
FIRST, FORMAT, WINDOWED = 1, 2, 3

RESET, STEP, TRANSITION = 0, 1, 2

SEALED, JOURNAL = ".npz", ".journal"

#: The journal's record of whose a row of kept values is; events are counted from the stream's first of all.
KEPT = np.dtype([("stream", "<u4"), ("event", "<i8")])

#: Lists of the meta to which a journal adds while it is written, and what they hold.
SAID: dict[str, type] = {"notes": str, "raised": int}

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


def event_dtype(reward_dtype: str, columns: dict[str, str], streams: int | None = None) -> np.dtype[Any]:
    """The journal's record of one event.

    Args:
        reward_dtype: As in the meta.
        columns: Further ones, ``meta.columns``.
        streams: How many there are, whose numbers take no more bytes than they need; `None`: four bytes, as journals had at first.
    """
    return np.dtype(
        [
            ("stream", "<u4" if streams is None else np.min_scalar_type(max(1, streams) - 1)),
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

    def skip(self, kind: npt.NDArray[np.uint8]) -> None:
        """Count the next events of the stream, of which nobody asks for their episodes and steps."""
        if not len(kind):
            return
        reset = kind == RESET
        if not self._begun:
            self._begun, self._episode, self._step = True, -int(reset[0]), 0
        number = int(np.count_nonzero(reset))
        self._episode += number
        self._step = int(reset[::-1].argmax()) if number else self._step + len(kind)

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


def window_of(meta: Meta) -> int:
    """Of how many events, the last of each stream, values are kept; 0 where those of all are, or of none."""
    kept = meta["keep_values"]
    return 0 if isinstance(kept, bool) else int(kept)


def with_said(meta: Meta, said: Mapping[str, list[Any]]) -> Meta:
    """A meta with more in some of its lists."""
    return {**meta, **{name: [*meta.get(name, []), *more] for name, more in said.items()}}


def layouts_of(meta: Meta) -> list[tuple[str, Layout]]:
    """Name and layout of each column of kept values, in the order in which a block holds them."""
    return [
        (f"values_{which}_{index}", None if layout is None else (np.dtype(layout[0]), tuple(layout[1])))
        for which in ("obs", "act")
        for index, layout in enumerate(meta["values"][which])
    ]
