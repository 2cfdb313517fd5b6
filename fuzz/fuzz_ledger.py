"""Reads, compares and recovers files that atheris makes of small ledgers, and checks what is said of them.

    make fuzz                                        ten minutes
    .venv-fuzz/bin/python fuzz/fuzz_ledger.py FILE   one file that was found, once more

The first byte of an input says of which ledger the rest is a file. As it is, it is checked against that ledger (`tests/damaged.py`): an
error of one sentence, or a correct prefix, which says that it is one. Then it is taken for what somebody made who knows checksums: those
are put right, and the file has to be an answer or an error, whatever it holds. One that takes long, or much memory, is found by
libFuzzer's limits. One mutation in three is of the meta, as JSON; the others are libFuzzer's own.
"""

from __future__ import annotations

import io
import json
import os
import random
import sys
import tempfile
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import atheris  # noqa: E402

# Without them, what is covered says nothing of what the readers do.
with atheris.instrument_imports(include=["stepledger", "zipfile", "json"]):
    import numpy as np
    import xxhash
    from damaged import Subject, assert_sentence

    from stepledger import LedgerError, compare, read
    from stepledger.cli import main
    from stepledger.recover import recover

#: The ledgers that files are made of, each with its partner; they stay as they are, so that what was found stays found.
LEDGERS = sorted((ROOT / "fuzz" / "ledgers").iterdir())


def checksums_right(data: bytes, journal: bool) -> bytes:
    """The file with the checksums that its content has, as far as its parts can be found."""
    return _journal_right(data) if journal else _archive_right(data)


def _journal_right(data: bytes) -> bytes:
    magic, checksum, at = b"\x93NUMPY\x01\x00", 0, 0
    fixed = bytearray(data)
    while data[at : at + 8] == magic:
        header = at + 10 + int.from_bytes(data[at + 8 : at + 10], "little")
        following = data.find(magic, header)
        end = (len(data) if following < 0 else following) - 8
        if end < header:
            break
        checksum = xxhash.xxh3_64_intdigest(bytes(fixed[at:end]), checksum)
        fixed[end : end + 8] = checksum.to_bytes(8, "little")
        at = end + 8
    return bytes(fixed)


def _archive_right(data: bytes) -> bytes:
    fixed, at = bytearray(data), data.find(b"PK\x01\x02")
    while at >= 0 and at + 46 <= len(data):
        method = int.from_bytes(data[at + 10 : at + 12], "little")
        packed, where = (int.from_bytes(data[at + offset : at + offset + 4], "little") for offset in (20, 42))
        begin = where + 30 + sum(int.from_bytes(data[where + offset : where + offset + 2], "little") for offset in (26, 28))
        content = data[begin : begin + packed]
        if method == 8:
            try:
                content = zlib.decompressobj(-15).decompress(content, 1 << 20)
            except zlib.error:
                content = b""
        fixed[at + 16 : at + 20] = zlib.crc32(content).to_bytes(4, "little")
        at = data.find(b"PK\x01\x02", at + 4)
    return bytes(fixed)


def other_meta(data: bytes, seed: int, most: int) -> bytes | None:
    """The file with another value somewhere in its meta; `None` where it has none that can be found, or the file would be too long."""
    rng = random.Random(seed)
    try:
        if data[:2] == b"PK":
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                members = {info.filename: archive.read(info) for info in archive.infolist()}
            meta = json.loads(str(np.load(io.BytesIO(members["meta.npy"]), allow_pickle=False)))
            members["meta.npy"] = _npy(np.array(json.dumps(_changed(meta, rng))))
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w") as archive:
                for name, content in members.items():
                    archive.writestr(name, content)
            other = buffer.getvalue()
        else:
            begin = 10 + int.from_bytes(data[8:10], "little")
            end = data.find(b"\x93NUMPY", begin) - 8
            meta = json.loads(data[begin:end])
            other = _npy(np.frombuffer(json.dumps(_changed(meta, rng)).encode(), np.uint8)) + bytes(8) + data[end + 8 :]
            other = _journal_right(other)
    except Exception:  # it is damaged already
        return None
    return other if len(other) < most and meta_of(other) != meta_of(data) else None


def meta_of(data: bytes) -> bytes:
    """What a file says of itself, where its checksum is right; nothing where it isn't."""
    if data[:2] == b"PK":
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                return archive.read("meta.npy")
        except Exception:  # it is damaged
            return b""
    try:  # not by where the next record begins: that may be damaged
        record = io.BytesIO(data)
        np.load(record, allow_pickle=False)
    except Exception:
        return b""
    first = data[: record.tell()]
    return first if data[len(first) : len(first) + 8] == xxhash.xxh3_64_digest(first)[::-1] else b""


def is_crafted(data: bytes, original: bytes) -> bool:
    """Whether somebody who knows checksums has made the file: it says something else of itself, with a checksum that is right."""
    return meta_of(data) not in (b"", meta_of(original))


def _npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


#: What a value of the meta is changed to.
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 255, 1 << 31, 1 << 62, 1 << 63, 10**40, 0.5, -0.0, 1e308, float("nan"), float("inf"), ""),
    *("<f4", "<f8", "|O", "<u8", "<i8", "|b1", "|V0", "<U9", "env", "vector", "learner", "episode", "Box", "Dict", "exclusive", "done"),
    *(
        "NextStep",
        "SameStep",
        "xxh3_64",
        "blake2b",
        "h_obs",
        "once",
        "SL601",
        "\x1b[2J",
        "\ud800",
        "../x",
        [],
        {},
        [[]],
        [None],
        [0, 0, "", 0],
    ),
    *([[0, 0, "", 0]], [[0, 0, -1]], [[5, 1, 2]], {"obs": [], "act": []}, {"obs": {"skip": "x"}}, {"reward": {"column": "h_obs"}}),
    *({"calls": 1, "made": ["SL601"], "found": [["SL601", 0, 0, 0, 1, "x"]]}, [[0, 0, 0, "a", "b", True]], [1, 2, 3, 4, 5]),
]
ENTRIES = [
    *("begins", "fields", "flags", "notes", "taps", "runners", "checks", "resets", "bounds", "strays", "handed_space", "time_limit", "run"),
    *("group", "stopped", "in_flight", "each_step", "gamma", "replays", "columns", "conflicts_with", "ended", "horizon", "autoreset_mode"),
]


def _changed(value: Any, rng: random.Random, depth: int = 0) -> Any:
    if depth and (not isinstance(value, (dict, list)) or not value or rng.random() < 0.3):
        return rng.choice(VALUES)
    if isinstance(value, dict):
        key = rng.choice([*value, *([] if depth else ENTRIES)])
        return {**value, key: _changed(value.get(key), rng, depth + 1)}
    changed = list(value)
    at = rng.randrange(len(changed))
    changed[at : at + 1] = rng.choice(
        [[], [changed[at]] * 2, [_changed(changed[at], rng, depth + 1)], [_changed(changed[at], rng, depth + 1)]]
    )
    return changed


def answered(one: Subject, data: bytes, directory: Path) -> None:
    """The file is an answer, or an error of one sentence, in each use."""
    path = directory / one.path.name
    sides = (path, one.partner) if one.original.meta["tap"] == "env" else (one.partner, path)
    for number, use in enumerate((lambda: read(path), lambda: compare(*sides), lambda: recover(path))):
        path.write_bytes(data)
        try:
            use()
        except LedgerError as error:
            assert_sentence(error, None if number else path)
    for name in (path, path.with_suffix(".npz")):
        name.unlink(missing_ok=True)
    path.write_bytes(data)
    assert main(["info", str(path)]) in (0, 2)
    path.unlink()


def run() -> None:
    """Fuzz as the arguments say, which are libFuzzer's."""
    warnings.simplefilter("ignore")
    subjects = []
    for directory in LEDGERS:
        own, partner = sorted(directory.iterdir())  # env-0 and trainer
        subjects.append(Subject(own, partner))
    work = Path(tempfile.mkdtemp(prefix="stepledger-fuzz-"))
    sys.stdout = sys.stderr = open(os.devnull, "w")  # of `stepledger info`; libFuzzer writes beside them

    def one_input(data: bytes) -> None:
        if not data:
            return
        one = subjects[data[0] % len(subjects)]
        file = data[1:]
        right = checksums_right(file, one.path.suffix == ".journal")
        with np.errstate(all="ignore"):
            if not is_crafted(file, one.data):
                one.check(file, work)
            answered(one, right, work)

    if corpus := [Path(argument) for argument in sys.argv[1:] if Path(argument).is_dir()]:
        for number, one in enumerate(subjects):
            (corpus[0] / f"intact-{number}").write_bytes(bytes([number]) + one.data)

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        other = other_meta(data[1:], seed, most) if seed % 3 == 0 else None
        return atheris.Mutate(data, most) if other is None else data[:1] + other

    atheris.Setup(sys.argv, one_input, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    run()
