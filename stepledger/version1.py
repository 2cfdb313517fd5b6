"""The first version of the format, which the published reference writes, read as the present one.

What is known of it is in the reference's README: an ``.npz`` without pickles with a JSON ``meta`` (format version, side, reward dtype,
descriptions of the spaces, version of the package), the env index of each stream and stream offsets, the columns of the present version
but for ``h_rew``, which is always uint64, and one array per leaf of kept values. It doesn't give the names of the meta's entries and of the
two members about streams, so that every likely one is taken. What it leaves open is in `stepledger.format`, with what is assumed of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .archive import Archive, ForeignFileError, falls
from .errors import LedgerError
from .format import FIRST, FORMAT, RESET, REWARD_BITS, STEP, Meta, StreamKey, layouts_of
from .meta import checked_meta, is_space
from .stream import Stream

__all__ = ["FirstArchive", "is_first"]

#: What the digests of the first version are called here: of shape, dtype and bytes, in an order that only the reference knows.
DIGEST = "blake2b of format 1"

_VERSION = ("format", "format_version", "version", "ledger_version", "schema", "schema_version")
_SIDE = ("side", "tap", "role")
_REWARD = ("reward_dtype", "reward")
_OBSERVATION = ("observation_space", "obs_space", "space_obs", "single_observation_space", "observation", "obs")
_ACTION = ("action_space", "act_space", "space_act", "single_action_space", "action", "act")
_PACKAGE = ("package_version", "stepledger_version", "stepledger", "version", "package")
_INDEX = ("stream_index", "stream_indices", "env_index", "env_indices", "stream_env", "stream_envs", "indices", "index", "envs", "streams")
_OFFSETS = ("stream_offsets", "stream_offset", "offsets", "offset")

#: Column -> the dtypes in which it is taken.
_COLUMNS = {
    "kind": ("|u1",),
    "h_obs": ("<u8",),
    "h_act": ("<u8",),
    "h_rew": ("<u8", "<u4"),
    "terminated": ("|b1",),
    "truncated": ("|b1",),
}
_COUNTED = ("episode", "step")
#: Bytes of an archive that may follow a member and belong to it.
_DESCRIPTOR = 24
_INTEGERS = ("<i8", "<u8", "<i4", "<u4")


def is_first(written: Any) -> bool:
    """Whether a meta, as it was written, says that it is of the first version."""
    return isinstance(written, dict) and any(type(written.get(name)) is int and written[name] == FIRST for name in _VERSION)


class FirstArchive(Archive):
    """A sealed ledger of the first version; what it gives is what `Archive` gives of the present one."""

    def meta(self) -> Meta:
        """What the ledger says of itself, as the present version says it."""
        if missing := [name for name in (*_COLUMNS, *_COUNTED) if name not in self.names]:
            raise ForeignFileError(f"it is no ledger of stepledger, it has no {missing[0]}: name the files that were recorded.")
        written = self.written
        self._check_all_there()
        indices = self._indices()
        values = {which: self._layouts(f"values_{which}_") for which in ("obs", "act")}
        if sum(map(len, values.values())) < sum(name.startswith("values_") for name in self.names):
            raise LedgerError("its values are damaged: record again.")
        meta = checked_meta(
            {
                "format": FORMAT,
                "id": "",
                "tap": self._tap(written, len(indices)),
                "digest": DIGEST,
                "reward_dtype": _reward_dtype(_first_of(written, _REWARD)),
                "observation_space": _space(written, _OBSERVATION),
                "action_space": _space(written, _ACTION),
                "stream_keys": [list(StreamKey(env=env)) for env in indices],
                "keep_values": any(values.values()),
                "values": values,
                "leaves": {which: [[] for _ in layouts] for which, layouts in values.items()},
                "created": 0.0,
                "closed": True,
                "versions": {"stepledger": next((one for name in _PACKAGE if isinstance(one := written.get(name), str)), "unknown")},
                "columns": {},
                "fields": {"truncated": {"note": "where terminated is not set, as the first version of the format stores it"}},
            }
        )
        return {**meta, "format": FIRST}

    def streams(self, meta: Meta) -> list[Stream]:
        """All streams of the ledger of this meta."""
        keys = [StreamKey(*key) for key in meta["stream_keys"]]
        n = self._shape("kind")
        offsets = self._offsets(len(keys), n)
        columns = {name: self._in_any(name, dtypes, n) for name, dtypes in _COLUMNS.items()}
        for name in _COUNTED:  # derived from the others when they are needed, so only checked here
            self._check(name, n)
        if (columns["kind"] > STEP).any():
            raise LedgerError("its kinds of events are damaged: record again.")
        bits = REWARD_BITS[meta["reward_dtype"]]
        if len(columns["h_rew"]) and int(columns["h_rew"].max()) > np.iinfo(bits).max:
            raise LedgerError("its rewards are damaged: record again.")
        columns["h_rew"] = columns["h_rew"].astype(bits)
        reset = columns["kind"] == RESET
        for name in ("h_act", "h_rew", "terminated", "truncated"):  # a reset has nothing but its observation, whatever is written here
            columns[name] = np.where(reset, columns[name].dtype.type(0), columns[name])
        values = {name: self._values(name, layout, n) for name, layout in layouts_of(meta)}
        return [
            Stream(
                key,
                {name: column[begin:end] for name, column in columns.items()},
                {name: column[begin:end] for name, column in values.items()},
            )
            for key, begin, end in zip(keys, offsets.tolist(), offsets[1:].tolist())
        ]

    def _tap(self, written: Meta, streams: int) -> str:
        """Which side this is; where it isn't said, one environment in a file of an environment's name is taken for one."""
        side = _first_of(written, _SIDE)
        if isinstance(side, str) and side.lower() in ("env", "environment", "envs"):
            return "env"
        if isinstance(side, str) and side.lower() in ("trainer", "vector", "vec", "vecenv"):
            return "vector"
        if side is not None:
            raise LedgerError(f"it is of the side {str(side)[:40]!r}, which is neither env nor trainer: record again.")
        return "env" if streams == 1 and re.fullmatch(r"env-\d+", Path(str(self._archive.filename)).stem) else "vector"

    def _check_all_there(self) -> None:
        """Refuse an archive whose directory leaves out or renames a member: which leaves there are is known from it alone."""
        infos = sorted(self._archive.infolist(), key=lambda info: info.header_offset)
        file = self._archive.fp
        assert file is not None
        for info, end in zip(infos, [*(info.header_offset for info in infos[1:]), self._archive.start_dir]):
            self._archive.open(info).close()  # compares the two names
            file.seek(info.header_offset)
            head = file.read(30)
            begin = info.header_offset + len(head) + sum(int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
            if not 0 <= end - begin - info.compress_size <= _DESCRIPTOR:
                raise LedgerError("its columns are not all there: record again.")

    def _indices(self) -> list[int]:
        """The env index of each stream."""
        name = self._named(_INDEX)
        indices = self._in_any(name, _INTEGERS, self._shape(name))
        return [int(index) for index in indices]

    def _offsets(self, streams: int, n: int) -> npt.NDArray[np.int64]:
        """Where each stream begins, and where the last one ends, which may not be written."""
        name = self._named(_OFFSETS)
        found = self._in_any(name, _INTEGERS, self._shape(name))
        offsets = found.astype(np.int64)
        if len(offsets) == streams:
            offsets = np.append(offsets, n)
        if len(offsets) != streams + 1 or offsets[0] != 0 or offsets[-1] != n or falls(offsets) or (found > n).any():
            raise LedgerError("its streams are damaged: record again.")
        return offsets

    def _named(self, names: tuple[str, ...]) -> str:
        """The first of these members that is there."""
        for name in names:
            if name in self.names:
                return name
        raise LedgerError(f"it has no {names[0]}: record again.")

    def _shape(self, name: str) -> int:
        """How long a column says that it is."""
        shape, _ = self._header(name)
        if len(shape) != 1:
            raise LedgerError(f"its column {name} is damaged: record again.")
        return shape[0]

    def _in_any(self, name: str, dtypes: tuple[str, ...], n: int) -> npt.NDArray[Any]:
        """A column of n entries in one of these dtypes."""
        _, dtype = self._header(name)
        return self._array(name, dtype if dtype.str in dtypes else np.dtype(dtypes[0]), (n,))

    def _layouts(self, prefix: str) -> list[list[Any]]:
        """Dtype and shape of each leaf of kept values, as the members have them."""
        layouts: list[list[Any]] = []
        while f"{prefix}{len(layouts)}" in self.names:
            shape, dtype = self._header(f"{prefix}{len(layouts)}")
            layouts.append([dtype.str, list(shape[1:])])
        return layouts


def _first_of(written: Meta, names: tuple[str, ...]) -> Any:
    """The first of these entries that is there; `None` where none is."""
    return next((written[name] for name in names if name in written), None)


def _reward_dtype(said: Any) -> str:
    """As the present version writes it, of whatever names a dtype: ``"float32"``, ``"<f4"``, ``"numpy.float32"``."""
    found = re.search(r"float(32|64)|f([48])", said) if isinstance(said, str) else None
    if found is None:
        raise LedgerError("its meta is damaged: record again.")
    return "<f4" if "32" in found.groups() or "4" in found.groups() else "<f8"


def _space(written: Meta, names: tuple[str, ...]) -> Meta:
    """A space, as it is described there; a text or another object is a description too, as long as both sides have the same."""
    for place in (written, written.get("spaces"), written.get("space")):
        if isinstance(place, dict) and (said := _first_of(place, names)) is not None:
            break
    else:
        raise LedgerError("its meta describes no spaces: record again.")
    if isinstance(said, dict):
        try:
            if is_space(said):
                return said
        except (TypeError, ValueError, RecursionError):
            pass
    return {"type": said if isinstance(said, str) else json.dumps(said, sort_keys=True)}
