"""Reading ledgers: what was recorded comes back, and nothing else is believed."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import assert_refused, drive, drive_one, member_names, rewrite, run_walks, walk, walks
from gymnasium import spaces

import stepledger.format as format_module
import stepledger.meta as meta_module
from stepledger import Ledger, LedgerError, StreamKey, compare, read
from stepledger.directory import find


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with both sides of a run, with values; nobody changes it."""
    directory = tmp_path_factory.mktemp("recorded")
    run_walks(directory, n=2, keep_values=True)
    return directory


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it to be changed."""
    for path in recorded.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def assert_unreadable(path: Path, match: str | None = None) -> str:
    with pytest.raises(LedgerError, match=match) as caught:
        read(path)
    message = str(caught.value)
    assert str(path) in message
    assert message.endswith(".")
    assert "\n" not in message
    return message


def test_streams_are_found_by_key_and_by_env(run: Path) -> None:
    ledger = read(run / "trainer.npz")
    assert list(ledger.streams) == [StreamKey(env=0), StreamKey(env=1)]
    assert len(ledger.streams) == 2
    assert ledger.streams[1] is ledger.streams[StreamKey(env=1)]
    assert ledger.streams[np.int64(1)] is ledger.streams[1]
    assert ledger.events == sum(map(len, ledger.streams.values()))
    with pytest.raises(KeyError, match="env 7 has 0 streams"):
        ledger.streams[7]
    with pytest.raises(KeyError):
        ledger.streams[StreamKey(env=7)]


def test_columns_are_those_of_the_format(run: Path) -> None:
    columns = read(str(run / "env-0.npz")).streams[0].columns
    assert set(columns) == {"kind", "h_obs", "h_act", "h_rew", "terminated", "truncated", "episode", "step"}
    assert columns["h_rew"].dtype == np.uint64
    assert {len(column) for column in columns.values()} == {len(columns["kind"])}


def test_directories_are_searched_in_natural_order_without_what_was_set_aside(tmp_path: Path) -> None:
    for directory in ("deep", "old1", ".venv", "run.old2"):
        (tmp_path / directory).mkdir()
    aside = ["env-9.old1.npz", "env-9.old12.journal", "old1/env-0.npz", ".venv/data.npz"]
    for name in ["env-10.npz", "env-9.npz", "env-2.journal", "env-2.npz", "deep/env-0.npz", "old1.npz", "run.old2/old3.npz", *aside]:
        (tmp_path / name).touch()
    (tmp_path / "env-3.npz.77.tmp").touch()
    (tmp_path / "notes.txt").touch()
    expected = ["deep/env-0.npz", "env-2.npz", "env-9.npz", "env-10.npz", "old1.npz", "run.old2/old3.npz"]
    assert [str(path.relative_to(tmp_path)) for path in find(tmp_path)] == expected


def test_a_trainers_file_may_be_called_old(tmp_path: Path) -> None:
    envs = walks(tmp_path, n=1)
    drive(envs, 5)
    envs.close()
    (tmp_path / "trainer.npz").rename(tmp_path / "old1.npz")
    assert compare(tmp_path).exit_status == compare(tmp_path, tmp_path / "old1.npz").exit_status == 0


def test_what_is_not_there_is_said_to_be_not_there(tmp_path: Path) -> None:
    for name in ("env-0.npz", "env-0.journal", "env-0", "no/env-0.npz"):
        assert_unreadable(tmp_path / name, "is not there")
    assert_unreadable(tmp_path)
    (tmp_path / "file").touch()
    assert_unreadable(tmp_path / "file" / "env-0.npz")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="nothing is closed to root")
def test_a_file_that_may_not_be_read_is_named(run: Path) -> None:
    (run / "env-0.npz").chmod(0)
    assert_unreadable(run / "env-0.npz", "Permission denied")


def saved(**members: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **members)
    return buffer.getvalue()


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def saved_array(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


class Evil:
    """Would be called by a reader that trusts pickles."""

    def __reduce__(self) -> Any:
        return (os._exit, (99,))


OTHERS = {
    "an empty file": b"",
    "text": b"env,episode,step\n0,0,0\n",
    "another npz": saved(results=np.arange(5), timesteps=np.arange(5)),
    "an npz with another meta": saved(meta=np.array("no json")),
    "an npz with a meta of something else": saved(meta=np.array('{"version": 3}')),
    "an npz whose meta is a list": saved(meta=np.array("[1, 2]")),
    "an npz whose meta is a number": saved(meta=np.arange(3)),
    "a pickle": pickle.dumps({"kind": 1}),
    "a pickle in an npz": saved(meta=np.array([Evil()], object)),
    "a pickle named npy": zipped(**{"meta.npy": pickle.dumps(Evil())}),
    "a zip of something else": zipped(**{"a.txt": b"hello", "b/c.txt": b"there"}),
    "a zip of text named npy": zipped(**{"meta.npy": b"hello"}),
    "an npy": saved_array(np.arange(4)),
    "deeply nested JSON": saved(meta=np.array("[" * 100_000)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_file_that_is_no_ledger_is_refused(what: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suffix in (".npz", ".journal"):
        path = run / f"other{suffix}"
        path.write_bytes(OTHERS[what])
        assert_unreadable(path)
        assert_refused(capsys, "info", path)
        if suffix == ".npz" and what in ("another npz", "a zip of something else"):  # somebody else's, which may lie beside the ledgers
            assert compare(run).exit_status == 0
        elif suffix == ".journal" and what == "an empty file":  # its recorder was killed
            assert compare(run).exit_status == 3
            assert "other.journal is empty" in str(compare(run))
        else:
            assert_refused(capsys, "compare", run)
        assert_refused(capsys, "compare", path, run / "trainer.npz")
        assert_refused(capsys, "compare", run, path)
        path.unlink()


@pytest.mark.parametrize("name", ["kind", "terminated", "h_obs", "h_act", "h_rew", "values_obs_0"])
def test_a_column_altered_by_somebody_who_knows_checksums_is_a_difference_not_an_error(run: Path, name: str) -> None:
    with np.load(run / "env-1.npz") as archive:
        column = archive[name].copy()
    column[5] = column[5] + 1 if column.dtype != bool else ~column[5]
    rewrite(run / "env-1.npz", {name: column})
    if name == "kind" and column[5] > 1:
        assert_unreadable(run / "env-1.npz") if column[5] > 2 else read(run / "env-1.npz")
        return
    comparison = compare(run)
    assert comparison.equal == name.startswith("values")  # values are for the reader; what is compared are the digests
    if not comparison.equal:
        assert {one.env for one in comparison.differences} == {1}


def test_a_number_of_events_that_does_not_fit_is_refused(run: Path) -> None:
    path = run / "env-0.npz"
    with np.load(path) as archive:
        members = {name: archive[name] for name in archive.files}
    n = len(members["kind"])
    changes: list[dict[str, Any]] = [
        {"kind": members["kind"][:-1]},
        {"h_obs": np.append(members["h_obs"], np.uint64(1))},
        {"stream_offsets": np.array([0, n + 1])},
        {"stream_offsets": np.array([0, n - 1])},
        {"stream_offsets": np.array([1, n])},
        {"stream_offsets": np.array([0, -5])},
        {"stream_offsets": np.array([0, n, n])},
        {"stream_offsets": np.array([0, 1 << 62])},
        {"stream_offsets": np.array([0.0, float(n)])},
        {"kind": members["kind"].astype(np.int64)},
        {"kind": np.full(n, 3, np.uint8)},
        {"terminated": members["terminated"].astype(np.uint8)},
        {"h_rew": members["h_rew"].astype(np.uint64)},
        {"h_obs": members["h_obs"].astype(">u8")},
        {"h_obs": members["h_obs"].reshape(n, 1)},
        {"h_obs": np.array([Evil()] * n, object)},
        {"values_obs_0": members["values_obs_0"].astype(np.float64)},
        {"values_obs_0": np.asfortranarray(members["values_obs_0"])},
        {"values_obs_0": members["values_obs_0"][:, :2]},
    ]
    data = path.read_bytes()
    for change in changes:
        path.write_bytes(data)
        rewrite(path, change)
        assert_unreadable(path)


def test_offsets_that_fall_by_more_than_an_integer_holds_are_refused(tmp_path: Path) -> None:
    run_walks(tmp_path, n=3, steps=5)
    rewrite(tmp_path / "trainer.npz", {"stream_offsets": np.array([0, (1 << 63) - 1, -1 << 62, 18])})
    assert_unreadable(tmp_path / "trainer.npz", "its streams are damaged")


@pytest.mark.parametrize("name", ["meta", "stream_offsets", "stream_index", "kind", "h_act", "episode", "step", "values_act_0"])
def test_a_column_that_is_not_there_is_missed(run: Path, name: str) -> None:
    rewrite(run / "env-0.npz", drop=(name,))
    assert_unreadable(run / "env-0.npz")


def test_two_streams_of_one_key_are_refused(run: Path) -> None:
    keys = json.loads(str(np.load(run / "trainer.npz")["meta"]))["stream_keys"]
    rewrite(run / "trainer.npz", stream_keys=[keys[0], keys[0]])
    assert_unreadable(run / "trainer.npz", "meta is damaged")


@pytest.mark.parametrize("claimed", [1 << 33, 1 << 62])
def test_a_column_that_claims_to_be_huge_takes_no_memory(run: Path, claimed: int) -> None:
    path = run / "env-0.npz"
    rewrite(path, {"stream_offsets": np.array([0, claimed])})
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (claimed,)})
    members["kind.npy"] = header.getvalue() + bytes(10)
    path.write_bytes(zipped(**members))
    assert_unreadable(path, "shorter than it says")


def test_a_meta_that_inflates_beyond_reason_is_refused(run: Path) -> None:
    path = run / "env-0.npz"
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("meta.npy", saved_array(np.array("{}" + " " * (1 << 24))))  # UTF-32: 64 MB
        for name, data in members.items():
            if name != "meta.npy":
                archive.writestr(name, data)
    assert_unreadable(path, "meta is damaged")


def test_each_entry_of_the_meta_is_described(run: Path) -> None:
    described = set(re.findall(r"^``(\w+)``", format_module.__doc__ or "", re.MULTILINE))
    written = set(read(run / "trainer.npz").meta) | set(read(run / "env-0.npz").meta)
    assert {*written, *meta_module._ENTRIES, *meta_module._OPTIONAL_ENTRIES} <= described


@pytest.mark.parametrize("begin", [[10**30, 0, 0], [3, 10**30, 0], [3, 0, 1 << 62], [-1, 0, 0], [3, -1, 0], [3, 0, -2], [3, 0, 0.5], [3]])
def test_a_beginning_that_no_stream_has_is_refused(run: Path, begin: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "trainer.npz"
    rewrite(path, begins=[begin, [0, 0, -1]])
    assert_unreadable(path, "meta is damaged")
    assert_refused(capsys, "compare", run)


@pytest.mark.parametrize("version", [0, 4, "2", None, 2.5, 10**30])
def test_another_version_of_the_format_is_named(run: Path, version: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(run / "env-0.npz", format=version)
    message = assert_unreadable(run / "env-0.npz", "read it with the version that wrote it")
    assert f"format {version!r} " in message
    assert_refused(capsys, "compare", run)


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    space = spaces.Dict(
        {
            "box": spaces.Box(-1, 1, (2, 2)),
            "flag": spaces.MultiBinary(3),
            "graph": spaces.Graph(spaces.Box(-1, 1, (2,)), spaces.Discrete(3)),
            "number": spaces.Discrete(5, start=-2),
            "text": spaces.Text(6, charset="aä漢"),
        }
    )
    from common import Walk

    from stepledger import LedgerEnv

    env = LedgerEnv(Walk(observation_space=space), tmp_path, 0, keep_values=True)
    events = drive_one(env, 20)
    env.flush()
    journal_and_sealed = [read(tmp_path / "env-0.npz")]
    env.close()
    journal_and_sealed.append(read(tmp_path / "env-0.npz"))
    for ledger in journal_and_sealed:
        assert [path[0] for path in ledger.meta["leaves"]["obs"]] == ["box", "flag", "graph", "number", "text"]
        values = ledger.streams[0].values
        for row, event in enumerate(events):
            observation = event[2]
            np.testing.assert_array_equal(values["values_obs_0"][row], observation["box"])
            np.testing.assert_array_equal(values["values_obs_1"][row], observation["flag"])
            graph = json.loads(values["values_obs_2"][row])
            np.testing.assert_array_equal(np.array(graph["nodes"], np.float32).reshape(-1, 2), observation["graph"].nodes.reshape(-1, 2))
            assert values["values_obs_3"][row] == observation["number"]
            assert json.loads(values["values_obs_4"][row]) == observation["text"]


def test_a_ledger_says_what_it_is(run: Path) -> None:
    ledger = read(run / "trainer.npz")
    assert isinstance(ledger, Ledger)
    assert ledger.path == run / "trainer.npz"
    assert re.fullmatch(r"[0-9a-f]{32}", ledger.meta["id"])
    assert ledger.meta["tap"] == "vector"
    assert ledger.meta["autoreset_mode"] == "NextStep"
    assert ledger.meta["run"] == read(run / "env-0.npz").meta["run"] != ""
    assert "values_obs_0" in member_names(run / "trainer.npz")
    with pytest.raises(AttributeError):
        ledger.open_end = True  # type: ignore[misc]


def test_of_a_journal_and_a_sealed_ledger_the_one_that_holds_more_is_read(tmp_path: Path) -> None:
    env = walk(tmp_path, 0)
    drive_one(env, 10)
    env.flush()
    sealed = read(tmp_path / "env-0.npz")
    assert not sealed.open_end
    assert not sealed.meta["closed"]
    drive_one(env, 10)
    assert read(tmp_path / "env-0.npz").events == sealed.events  # the rest is not written yet
    env._recorder._write()
    journal = read(tmp_path / "env-0.npz")
    assert journal.events > sealed.events
    assert journal.open_end
    assert read(tmp_path / "env-0.journal").events == journal.events
    env.close()
    assert not read(tmp_path / "env-0.journal").open_end  # the name of what is now sealed


def test_a_ledger_can_be_read_and_compared_while_a_fork_of_its_recorder_lives(tmp_path: Path) -> None:
    envs = walks(tmp_path, n=1)
    drive(envs, 10)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    envs.close()
    assert compare(tmp_path).exit_status == 0


@pytest.mark.parametrize("column", ["stream_index", "episode", "step"])
@pytest.mark.parametrize("content", [b"junk", "shorter", "longer"])
def test_a_column_that_is_derived_from_others_is_checked_too(run: Path, column: str, content: Any) -> None:
    with np.load(run / "trainer.npz") as archive:
        own = archive[column]
    others = {"shorter": own[:-1], "longer": np.concatenate([own, own[:1]])}
    replace_member(run / "trainer.npz", column, content if isinstance(content, bytes) else npy(others[content]))
    assert_unreadable(run / "trainer.npz")


def test_a_column_compressed_in_a_way_that_makes_much_of_little_is_refused(run: Path) -> None:
    replace_member(run / "trainer.npz", "episode", npy(np.zeros(1 << 24, np.int64)), zipfile.ZIP_BZIP2)
    assert_unreadable(run / "trainer.npz", "compressed in a way")


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def replace_member(path: Path, name: str, content: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            if member == f"{name}.npy":
                archive.writestr(member, content, compression)
            else:
                archive.writestr(member, data)
