"""Damaged and hostile files: an error, or a correct prefix that says it is one; never a wrong verdict, a hang, or much memory."""

from __future__ import annotations

import io
import itertools
import json
import os
import struct
import tracemalloc
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import version1
import xxhash
from common import Walk, assert_refused, drive_one, run_python, run_walks
from damaged import PREFIX, REFUSED, WHOLE, Subject, assert_sentence, subject
from gymnasium import spaces

from stepledger import LedgerError, compare, read
from stepledger.cli import main
from stepledger.directory import find
from stepledger.format import event_dtype
from stepledger.recover import recover

LONG = bool(os.environ.get("STEPLEDGER_LONG"))

#: Ledgers that are damaged: sealed, a journal, of the first version; without values, with all, with the last ones; each side once.
KINDS: dict[str, dict[str, Any]] = {
    "sealed": {"journal": False, "faulty": True},
    "sealed values": {"journal": False, "keep_values": True, "side": "trainer"},
    "sealed window": {"journal": False, "keep_values": 4},
    "journal": {"journal": True, "side": "trainer", "faulty": True},
    "journal values": {"journal": True, "keep_values": True},
    "journal window": {"journal": True, "keep_values": 4, "side": "trainer"},
    "first version": {},
}


def made(directory: Path, kind: str) -> Subject:
    if kind != "first version":
        return subject(directory, **KINDS[kind])
    space, action = spaces.Box(-1, 1, (2,)), spaces.Discrete(3)
    events = drive_one(Walk((3, 5, 1), 0, space), 8)
    for name, side in (("env-0", "env"), ("trainer", "trainer")):
        version1.write(directory / f"{name}.npz", side, {0: events}, space, action, keep_values=True)
    return Subject(directory / "env-0.npz", directory / "trainer.npz")


@pytest.fixture(scope="module", params=KINDS)
def damaged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return made(tmp_path_factory.mktemp("damaged"), request.param)


def peak_of(use: Callable[[], Any]) -> int:
    """The most memory that Python and NumPy take for this, in bytes."""
    tracemalloc.start()
    try:
        use()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def flipped(data: bytes, at: int, mask: int) -> bytearray:
    altered = bytearray(data)
    altered[at] ^= mask
    return altered


def test_a_file_cut_anywhere_is_refused_or_a_prefix(damaged: Subject, tmp_path: Path) -> None:
    every = 1 if LONG else 67
    outcomes = Counter(damaged.check(damaged.data[:length], tmp_path) for length in range(0, len(damaged.data), every))
    if damaged.path.suffix == ".journal":
        assert outcomes.keys() >= {REFUSED, PREFIX}
    else:  # the directory of an archive is at its end
        assert outcomes.keys() == {REFUSED}


@pytest.mark.parametrize("mask", [None] if not LONG else [*(1 << bit for bit in range(8)), 0xFF])
def test_a_byte_flipped_anywhere_is_refused_or_ends_what_is_trusted_or_changes_nothing(
    damaged: Subject, tmp_path: Path, mask: int | None
) -> None:
    every = 1 if LONG else 61
    places = range(0, len(damaged.data), every)
    outcomes = Counter(damaged.check(flipped(damaged.data, at, mask or 1 << at % 8), tmp_path) for at in places)
    assert outcomes[REFUSED] > outcomes[WHOLE] + outcomes[PREFIX]
    assert outcomes[WHOLE] < len(places) / 3  # names, dates and the like that nothing depends on


def test_bytes_taken_out_put_in_or_repeated_are_no_wrong_verdict(damaged: Subject, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = damaged.data
    for _ in range(3000 if LONG else 8):
        begin, end, to = sorted(int(one) for one in rng.integers(0, len(data), 3))
        part = rng.bytes(int(rng.integers(1, 40)))
        for altered in (data[:begin] + data[end:], data[:begin] + part + data[begin:], data[:to] + data[begin:end] + data[to:]):
            damaged.check(altered, tmp_path)


@pytest.mark.parametrize("more", [b"\0", b"PK\5\6", b"some text\n", bytes(70_000)], ids=["one", "signature", "text", "many"])
def test_bytes_before_or_behind_a_file_are_no_part_of_a_whole_one(damaged: Subject, tmp_path: Path, more: bytes) -> None:
    outcome = WHOLE if damaged.path.suffix == ".journal" else REFUSED  # what is behind the last whole block is a torn one
    assert damaged.check(damaged.data + more, tmp_path) == outcome
    assert damaged.check(more + damaged.data, tmp_path) == REFUSED


def test_damage_takes_no_memory_out_of_proportion(damaged: Subject, tmp_path: Path) -> None:
    """Among what is damaged are lengths, shapes and offsets."""
    damaged.check(damaged.data, tmp_path)
    most = 60 * len(damaged.data) + (2 << 20)
    for at in range(0, len(damaged.data), 1 if LONG else 401):
        for mask in (0x80, 0x7F) if LONG else (0x80,):
            assert peak_of(lambda at=at, mask=mask: damaged.check(flipped(damaged.data, at, mask), tmp_path, recovering=False)) < most


# Hostile archives.


class Evil:
    """Would be called by a reader that trusts pickles."""

    def __reduce__(self) -> Any:
        return (os._exit, (99,))


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def header(descr: Any, shape: Any, *, fortran: bool = False) -> bytes:
    text = f"{{'descr': {descr!r}, 'fortran_order': {fortran}, 'shape': {shape!r}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def members_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED, more: list[tuple[str, bytes]] | None = None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in [*members.items(), *(more or [])]:
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return buffer.getvalue()


def in_directory(data: bytes, offset: int, size: int, value: int) -> Iterator[bytes]:
    """The archive with a number in the directory's entry of one member after the other changed."""
    at = data.find(b"PK\x01\x02")
    while at >= 0:
        yield data[: at + offset] + value.to_bytes(size, "little") + data[at + offset + size :]
        at = data.find(b"PK\x01\x02", at + 4)


def in_local(data: bytes, offset: int, size: int, value: int) -> Iterator[bytes]:
    """Likewise in the headers before the members."""
    at = data.find(b"PK\x03\x04")
    while at >= 0:
        yield data[: at + offset] + value.to_bytes(size, "little") + data[at + offset + size :]
        at = data.find(b"PK\x03\x04", at + 4)


def lies(data: bytes) -> Iterator[bytes]:
    """Lengths, places, ways of compression and names that are not so, in either of the two headers of each member."""
    for value in (0, 1, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF):
        for offset in (20, 24, 42):  # packed size, size, place
            yield from in_directory(data, offset, 4, value)
        for offset in (18, 22):
            yield from in_local(data, offset, 4, value)
    for value in (0, 1, 8, 9, 12, 14, 99, 0xFFFF):
        yield from in_directory(data, 10, 2, value)
        yield from in_local(data, 8, 2, value)
    for value in (0, 1, 0xFFFF):
        for offset in (28, 30, 32):  # lengths of name, extra field and comment
            yield from in_directory(data, offset, 2, value)
        for offset in (26, 28):
            yield from in_local(data, offset, 2, value)


@pytest.mark.parametrize("kind", ["sealed values", "first version"])
def test_an_archive_whose_headers_lie_is_no_wrong_verdict(tmp_path: Path, kind: str) -> None:
    (tmp_path / "work").mkdir()
    one = made(tmp_path, kind)
    most = 60 * len(one.data) + (2 << 20)
    for altered in itertools.islice(lies(one.data), None, None, 1 if LONG else 43):
        assert peak_of(lambda altered=altered: one.check(altered, tmp_path / "work")) < most


@pytest.mark.parametrize("kind", ["sealed values", "sealed window", "first version"])
def test_members_that_an_entry_of_the_directory_swallows_are_missed(tmp_path: Path, kind: str) -> None:
    """A comment of an entry may be as long as all entries behind it."""
    (tmp_path / "work").mkdir()
    one = made(tmp_path, kind)
    outcomes = [one.check(altered, tmp_path / "work") for altered in in_directory(one.data, 32, 2, 0x2000)]
    assert outcomes[:-1] == [REFUSED] * (len(members_of(one.data)) - 1)


def test_what_numpy_says_of_a_header_is_told_in_a_sentence(tmp_path: Path) -> None:
    """It takes three lines, and tells how to trust the file."""
    (tmp_path / "work").mkdir()
    one = made(tmp_path, "sealed")
    members = members_of(one.data)
    for name in members:
        assert one.check(zipped({**members, name: b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 0xFFFF}), tmp_path / "work") == REFUSED


@pytest.mark.parametrize("kind", ["sealed values", "sealed window", "first version"])
def test_a_member_of_another_type_or_shape_is_refused_in_little_memory(tmp_path: Path, kind: str) -> None:
    (tmp_path / "work").mkdir()
    one = made(tmp_path, kind)
    members = members_of(one.data)
    shapes = [(1 << 40,), (1 << 62,), (1 << 63,), (10**30,), (-1,), (0, 10**30), (1,) * 40, (1 << 31, 1 << 31), (True,), (1.5,), "x", None]
    descrs: list[Any] = [
        "|O",
        "<U1000000000",
        "|V0",
        "<f16",
        [("a", "<f4", (1 << 30,))],
        "<M8[s]",
        "nonsense",
        [],
        None,
        ("<f4", (1 << 40,)),
    ]
    found = 0
    for name, content in members.items():
        (length,) = struct.unpack("<H", content[8:10])
        body = content[10 + length :]
        written = np.lib.format.read_array_header_1_0(io.BytesIO(content[8:]))
        heads = [header(written[2].str, shape) for shape in shapes] + [header(descr, written[0]) for descr in descrs]
        heads += [header(written[2].str, written[0], fortran=True), b"\x93NUMPY\x03\x00" + content[8:12], b"\x93NUMPY\x01\x00\xff\xff"]
        heads += [b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 0xFFFF, b"\x93NUMPY\x01\x00\xff\xff" + b"[" * 0xFFFE + b"\n", b""]
        others = [npy(np.array([Evil()], object)), npy(np.array(Evil(), object)), content[:-1], content + b"\0"]
        others += [head + body for head in heads]
        for other in others if LONG else others[:: 2 if name == "h_obs.npy" else 17]:
            altered, outcomes = zipped({**members, name: other}), list[str]()
            peak = peak_of(lambda altered=altered, outcomes=outcomes: outcomes.append(one.check(altered, tmp_path / "work")))
            assert peak < 60 * (len(one.data) + len(other)) + (2 << 20)
            found += outcomes == [REFUSED]
    assert found > (10 * len(members) if LONG else 15)


@pytest.mark.parametrize("kind", ["sealed values", "first version"])
@pytest.mark.parametrize("size", [1 << 26, *([1 << 29] if LONG else [])])
def test_a_member_that_inflates_takes_no_memory(tmp_path: Path, kind: str, size: int) -> None:
    """A bomb: what its headers promise is in no proportion to what a ledger's columns are."""
    (tmp_path / "work").mkdir()
    one = made(tmp_path, kind)
    members = members_of(one.data)
    bomb = deflated(size)
    for name in members if LONG else ("meta.npy", "kind.npy", "episode.npy", "values_obs_0.npy"):
        for head in (b"", header("|u1", (size,)), header("<U1", (size // 4,)), header(f"<U{size // 4}", ())):
            altered = with_deflated(members, name, head, bomb, size)
            assert peak_of(lambda altered=altered: one.check(altered, tmp_path / "work")) < 60 * len(altered) + (8 << 20)


def deflated(size: int) -> bytes:
    """Zeros, deflated as far as that goes: 1,030 to 1."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    pieces = [packer.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return b"".join([*pieces, packer.flush()])


def with_deflated(members: dict[str, bytes], name: str, head: bytes, bomb: bytes, size: int) -> bytes:
    """The archive with a member that is a head and many zeros; its checksum is wrong, which is found behind them only."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH) + bomb
    data = zipped({**members, name: packed})
    at, place = data.find(b"PK\x01\x02"), -1
    while at >= 0:
        if data[at + 46 : at + 46 + len(name)] == name.encode():
            place = at
        at = data.find(b"PK\x01\x02", at + 4)
    whole = len(head) + size
    entry = data[place : place + 10] + (8).to_bytes(2, "little") + data[place + 12 : place + 24] + whole.to_bytes(4, "little")
    return data[:place] + entry + data[place + 28 :]


def test_a_ledger_that_says_much_of_itself_in_few_bytes_is_refused(tmp_path: Path) -> None:
    """JSON is parsed into many times what it takes."""
    one = made(tmp_path, "sealed")
    (tmp_path / "work").mkdir()
    members = members_of(one.data)
    for text in ("[" + "[]," * (1 << 20) + "[]]", '{"a":' * 900 + "1" + "}" * 900, "9" * 5000, '"' + "a" * (1 << 22) + '"'):
        altered = zipped({**members, "meta.npy": npy(np.array(text))}, zipfile.ZIP_DEFLATED)
        assert peak_of(lambda altered=altered: one.check(altered, tmp_path / "work")) < 60 * len(altered) + (40 << 20)


def test_members_of_one_name_or_of_the_same_bytes_are_refused(tmp_path: Path) -> None:
    one = made(tmp_path, "sealed values")
    (tmp_path / "work").mkdir()
    members = members_of(one.data)
    with pytest.warns(UserWarning, match="Duplicate name"):
        twice = zipped(members, more=[("kind.npy", members["terminated.npy"])])
    assert one.check(twice, tmp_path / "work") == REFUSED
    data = zipped(members)
    entries = [at for at in range(len(data)) if data[at : at + 4] == b"PK\x01\x02"]
    for first, second in itertools.pairwise(entries):  # each member lies where the one before it does
        shared = data[: second + 42] + data[first + 42 : first + 46] + data[second + 46 :]
        assert one.check(shared, tmp_path / "work") == REFUSED


NAMES = ["../evil.npy", "/tmp/evil.npy", "..\\evil.npy", "C:\\evil.npy", "a/../../evil.npy", "evil.npz", "\0.npy", "x" * 60_000]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_member_of_any_name_is_left_alone(tmp_path: Path, name: str) -> None:
    one = made(tmp_path, "sealed values")
    (tmp_path / "work").mkdir()
    before = sorted(tmp_path.rglob("*"))
    inner = zipped(members_of(one.data))  # an archive in an archive is a member like others
    assert one.check(zipped(members_of(one.data), more=[(name, inner)]), tmp_path / "work") in (WHOLE, REFUSED)
    assert sorted(tmp_path.rglob("*")) == before


# Hostile journals.


def record(array: np.ndarray | bytes, seed: int) -> tuple[bytes, int]:
    """A record of a journal with its checksum, and that."""
    content = array if isinstance(array, bytes) else npy(array)
    checksum = xxhash.xxh3_64_intdigest(content, seed)
    return content + checksum.to_bytes(8, "little"), checksum


def records_of(data: bytes) -> list[bytes]:
    """The records of a journal, without their checksums."""
    parts = data.split(b"\x93NUMPY\x01\x00")[1:]
    return [b"\x93NUMPY\x01\x00" + part[:-8] for part in parts]


def journal_of(records: list[bytes]) -> bytes:
    out, checksum = b"", 0
    for one in records:
        written, checksum = record(one, checksum)
        out += written
    return out


@pytest.mark.parametrize("kind", ["journal", "journal values", "journal window"])
def test_a_record_of_another_type_or_shape_ends_what_is_trusted_in_little_memory(tmp_path: Path, kind: str) -> None:
    """Somebody who knows checksums has made it."""
    one = made(tmp_path, kind)
    (tmp_path / "work").mkdir()
    records = records_of(one.data)
    assert journal_of(records) == one.data
    shapes = [(1 << 40,), (1 << 62,), (10**30,), (0, 1 << 40), (0,) * 33, (1,) * 33, (), (2, 2)]
    for index, content in enumerate(records):
        (length,) = struct.unpack("<H", content[8:10])
        dtype = np.lib.format.read_array_header_1_0(io.BytesIO(content[8:]))[2]
        descr = np.lib.format.dtype_to_descr(dtype)
        others = [header(descr, shape) + content[10 + length :] for shape in shapes]
        others += [header(other, (3,)) + bytes(300) for other in ("|O", "<U1000", [("a", "|O")], "|V8")]
        others += [npy(np.array([Evil()], object)), b""]
        for other in others if LONG else others[index % 4 :: 4]:
            altered = journal_of([*records[:index], other, *records[index + 1 :]])
            assert peak_of(lambda altered=altered: one.check(altered, tmp_path / "work")) < 60 * len(altered) + (2 << 20)


def test_a_block_whose_streams_are_not_in_order_ends_what_is_trusted(tmp_path: Path) -> None:
    """Reading and sealing would take its events in different orders."""
    run_walks(tmp_path / "run", n=2, steps=5)
    code = """
import sys
from pathlib import Path
from common import drive, walks
envs = walks(Path(sys.argv[1]), n=2)
drive(envs, 5)
envs.write_journal()
import os
os._exit(0)
"""
    run_python(code, tmp_path)
    path = tmp_path / "trainer.journal"
    meta, events = records_of(path.read_bytes())
    (length,) = struct.unpack("<H", events[8:10])
    dtype = np.lib.format.read_array_header_1_0(io.BytesIO(events[8:]))[2]
    rows = np.frombuffer(events[10 + length :], dtype)
    assert read(path).events == len(rows)
    path.write_bytes(journal_of([meta, npy(rows[::-1].copy())]))
    assert read(path).events == 0
    assert read(path).open_end


def test_many_streams_in_many_blocks_take_memory_in_proportion(tmp_path: Path) -> None:
    one = made(tmp_path, "journal")
    meta, *_ = records_of(one.data)
    said = json.loads(meta[10 + struct.unpack("<H", meta[8:10])[0] :])
    n = 5000
    said["stream_keys"] = [[0, env, "", 0] for env in range(n)]
    blocks = [np.zeros(1, event_dtype(said["reward_dtype"], said["columns"], n)) for _ in range(500)]
    for number, block in enumerate(blocks):
        block["stream"] = 9 * number
    path = tmp_path / "work.journal"
    path.write_bytes(journal_of([npy(np.frombuffer(json.dumps(said).encode(), np.uint8)), *map(npy, blocks)]))
    size = path.stat().st_size
    assert peak_of(lambda: recover(path)) < 60 * size
    assert read(tmp_path / "work.npz").events == len(blocks)


# Hostile meta.


#: JSON that an entry of the meta may be replaced by.
HOSTILE = {
    **{name: name for name in ("null", "true", "false", "0", "1", "-1", "2", "1.5", "1e308", "-0.0", "[]", "{}", '""', "[[]]", "[null]")},
    "nan": "NaN",
    "infinity": "Infinity",
    "minus infinity": "-Infinity",
    "2**63": str(1 << 63),
    "10**400": str(10**400),
    "5,000 digits": "9" * 5000,
    "a long text": '"' + "x" * 200_000 + '"',
    "control characters": '"\\u001b[2J\\r\\n\\u202e\\u0000"',
    "half a character": '"\\ud800"',
    "a path": '"../../etc/passwd"',
    "a dtype": '"|O"',
    "a format": '"{0.__class__} %s %n"',
    "markup": '"<script>alert(1)</script>"',
    "900 deep": "[" * 900 + "]" * 900,
    "100,000 deep": "[" * 100_000 + "]" * 100_000,
    "an object of lists": '{"obs": [], "act": [], "leaves": [[]], "type": "Box", "skip": "x", "column": "h_obs"}',
    "a huge space": '{"type": "Box", "dtype": "<f8", "shape": [1048576, 1048576]}',
    "a hollow space": '{"type": "Box", "dtype": "<f8", "shape": [0, 4611686018427387904]}',
    "a space of texts": '{"type": "Text", "max_length": 1e400}',
    "a huge discrete": '{"type": "Discrete", "n": 1e30, "start": -1e30}',
    "keys": '[[0, 0, "", 0], [0, 1, "", 0]]',
    "a negative key": '[[-1, -1, "\\u001b", -1]]',
    "a large key": "[[4611686018427387904, 99999999999999999999999, 7, 0]]",
}

#: Entries that a meta may have, besides those that the ledgers here have.
MORE = [
    *(
        "stopped",
        "conflicts_with",
        "in_flight",
        "exited",
        "flags",
        "fields",
        "each_step",
        "gamma",
        "replays",
        "capacity",
        "horizon",
        "runners",
    ),
    *(
        "strays",
        "handed_space",
        "time_limit",
        "resets",
        "checks",
        "bounds",
        "notes",
        "taps",
        "begins",
        "group",
        "run",
        "ended",
        "whole_episodes",
    ),
]


def paths_in(value: Any, depth: int = 4) -> Iterator[tuple[Any, ...]]:
    """The places of a JSON value and of the first few that are in it."""
    yield ()
    if depth and isinstance(value, (dict, list)):
        for key, part in itertools.islice(
            value.items() if isinstance(value, dict) else enumerate(value), 40 if isinstance(value, dict) else 2
        ):
            yield from ((key, *rest) for rest in paths_in(part, depth - 1))


def with_value(value: Any, path: tuple[Any, ...], text: str) -> str:
    """The value as JSON, with this JSON in a place."""
    mark = "the place of what is put in"

    def replaced(part: Any, rest: tuple[Any, ...]) -> Any:
        if not rest:
            return mark
        copied = dict(part) if isinstance(part, dict) else list(part)
        copied[rest[0]] = replaced(part[rest[0]] if isinstance(part, list) or rest[0] in part else None, rest[1:])
        return copied

    return json.dumps(replaced(value, path)).replace(json.dumps(mark), text)


def with_meta(one: Subject, text: str) -> bytes:
    """The ledger with another meta; checksums are right."""
    if one.path.suffix == ".journal":
        return journal_of([npy(np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)), *records_of(one.data)[1:]])
    return zipped({**members_of(one.data), "meta.npy": npy(np.array(text))})


def written_meta(one: Subject) -> dict[str, Any]:
    if one.path.suffix == ".journal":
        first = records_of(one.data)[0]
        return json.loads(first[10 + struct.unpack("<H", first[8:10])[0] :])
    return json.loads(str(np.load(io.BytesIO(members_of(one.data)["meta.npy"]))))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_meta_that_holds_anything_is_an_answer_or_a_sentence(
    damaged: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meta = written_meta(damaged)
    places = list(dict.fromkeys([*list(paths_in(meta))[1:], *((name,) for name in MORE)]))
    cases = [(path, what) for path in places for what in HOSTILE]
    rng = np.random.default_rng(0)
    chosen = cases if LONG else [cases[at] for at in rng.choice(len(cases), min(len(cases), 15), replace=False)]
    trainer = tmp_path / "trainer.npz"
    env = tmp_path / "env-0.npz"
    for path, what in chosen:
        own = tmp_path / damaged.path.name
        own.write_bytes(with_meta(damaged, with_value(meta, path, HOSTILE[what])))
        (tmp_path / damaged.partner.name).write_bytes(damaged.partner.read_bytes())
        try:
            ledger = read(own)
        except LedgerError as error:
            assert_sentence(error, own)
            ledger = None
        uses = [
            ["info", own],
            ["compare", env, trainer],
            ["compare", tmp_path, "-v"],
            ["lint", own],
            ["compare", tmp_path, "--format", "json"],
        ]
        uses += [["show", tmp_path, "--env", "0", "--episode", "0", "--step", "1"], ["recover", tmp_path]]
        for arguments in uses if ledger is not None else uses[:2]:
            try:
                status = main([str(one) for one in arguments])
            except BaseException as error:
                raise AssertionError(f"{path} = {what}: {arguments[0]} raised {type(error).__name__}: {error}") from error
            out, err = capsys.readouterr()
            assert status in (0, 1, 2, 3)
            assert ledger is not None or status == 2
            assert all(line.isprintable() for line in (*out.splitlines(), *err.splitlines())), (path, what, arguments[0])
            assert len(err) < 5000
            if status == 2 and arguments[0] != "recover":
                assert err.count("\n") == 1
        for left in tmp_path.iterdir():
            left.unlink()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_meta_entries_that_are_missing_are_an_answer_or_a_sentence(
    damaged: Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meta = written_meta(damaged)
    (tmp_path / damaged.partner.name).write_bytes(damaged.partner.read_bytes())
    for key in meta:
        (tmp_path / damaged.path.name).write_bytes(with_meta(damaged, json.dumps({name: one for name, one in meta.items() if name != key})))
        for arguments in (["info", tmp_path / damaged.path.name], ["compare", tmp_path], ["lint", tmp_path]):
            assert main([str(one) for one in arguments]) in (0, 1, 2, 3)
    capsys.readouterr()


# Links and names that lead out of the directory.


def test_a_link_out_of_the_run_directory_is_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_walks(tmp_path / "run", n=2)
    run_walks(tmp_path / "other", n=3)
    (tmp_path / "run" / "env-2.npz").symlink_to(tmp_path / "other" / "env-2.npz")
    message = assert_refused(capsys, "compare", tmp_path / "run")
    assert "env-2.npz" in message
    assert "leads out of" in message
    assert_refused(capsys, "info", tmp_path / "run")
    assert main(["info", str(tmp_path / "run" / "env-2.npz")]) == 0  # named, it is meant
    capsys.readouterr()


def test_a_link_within_the_run_directory_or_to_it_is_followed(tmp_path: Path) -> None:
    run_walks(tmp_path / "run", n=2)
    (tmp_path / "run" / "aside").mkdir()
    (tmp_path / "run" / "env-1.npz").rename(tmp_path / "run" / "aside" / "env-1.bin")
    (tmp_path / "run" / "env-1.npz").symlink_to(Path("aside") / "env-1.bin")
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    assert compare(tmp_path / "run").exit_status == compare(tmp_path / "latest").exit_status == 0


def test_a_directory_linked_into_a_run_is_not_searched(tmp_path: Path) -> None:
    run_walks(tmp_path / "run", n=2)
    run_walks(tmp_path / "other", n=3)
    (tmp_path / "run" / "more").symlink_to(tmp_path / "other")
    (tmp_path / "run" / "again").symlink_to(tmp_path / "run")
    assert len(find(tmp_path / "run")) == 3
    assert compare(tmp_path / "run").exit_status == 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", ["env-0.npz", "env-0.journal", "env-7.npz", "env-7.journal"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    run_walks(tmp_path, n=2)
    if (tmp_path / name).exists():
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    code = """
import sys
from pathlib import Path
from stepledger import LedgerError, compare, read
from stepledger.recover import recover
directory, name = Path(sys.argv[1]), sys.argv[2]
path = directory / name
for use in (lambda: read(path), lambda: read(path.with_suffix(".npz")), lambda: compare(directory), lambda: recover(directory)):
    try:
        use()
    except LedgerError as error:
        assert str(error).endswith((".", "compared.")), error
"""
    run_python(code, tmp_path, name, timeout=30)


def test_recovering_writes_beside_the_journal_and_not_through_a_link(tmp_path: Path) -> None:
    one = made(tmp_path, "journal values")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "env-0.journal").write_bytes(one.data)
    victim = tmp_path / "victim.txt"
    victim.write_text("precious")
    (tmp_path / "run" / "env-0.npz").symlink_to(victim)
    with pytest.raises(LedgerError, match="leads out of"):
        recover(tmp_path / "run")
    (outcome,) = recover(tmp_path / "run" / "env-0.journal")  # named, it is meant, and the link is in its way
    assert outcome.outcome in ("sealed", "damaged")
    assert victim.read_text() == "precious"
