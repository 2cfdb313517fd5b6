"""Files that earlier versions wrote: kept, and read by every later version as what they hold."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import version1
from common import Walk, assert_refused, drive_one, rewrite, run_walks
from gymnasium import spaces

from stepledger import Ledger, LedgerError, compare, read
from stepledger.cli import main
from stepledger.directory import find
from stepledger.format import FIRST, FORMAT, JOURNAL, SEALED, WINDOWED
from stepledger.journal import Journal, scan
from stepledger.recover import recover

GOLDEN = Path(__file__).parent / "data" / "golden"
RUNS = sorted(path.name for path in GOLDEN.iterdir())
FILES = [f"{run}/{path.name}" for run in RUNS for path in sorted((GOLDEN / run).iterdir()) if path.suffix in (SEALED, JOURNAL)]

#: Golden run -> exit status, events compared, hops. A journal has no end.
RESULTS = {
    "1-sealed": (0, 38, ["env -> vector"]),
    "1-sealed-fault": (1, 38, ["env -> vector"]),
    "1-sealed-float64": (0, 38, ["env -> vector"]),
    "1-sealed-values": (0, 38, ["env -> vector"]),
    "2-journal": (3, 30, ["env -> vector"]),
    "2-journal-values": (3, 30, ["env -> vector"]),
    "2-journal-byte": (3, 30, ["env -> vector"]),
    "2-journal-byte-values": (3, 30, ["env -> vector"]),
    "2-rllib": (0, 105, ["env -> vector", "vector -> episode", "episode -> learner"]),
    "2-sb3": (0, 37, ["env -> vector", "vector -> learner"]),
    "2-sealed": (0, 52, ["env -> vector", "vector -> learner"]),
    "2-sealed-values": (0, 30, ["env -> vector"]),
    "3-journal-window": (3, 30, ["env -> vector"]),
    "3-sealed-window": (0, 30, ["env -> vector"]),
}


@functools.cache
def contents(run: str) -> dict[str, Any]:
    """What the files of a golden run hold, as NumPy alone has read it when they were made."""
    return json.loads((GOLDEN / run / "content.json").read_text())


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a golden run, since reading may leave a lock, and recovering changes files."""
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / request.param))


def assert_holds(ledger: Ledger, content: dict[str, Any]) -> None:
    """The ledger has the streams of the content, and in each of them the same columns and the same kept values."""
    assert [list(key) for key in ledger.streams] == [stream["key"] for stream in content["streams"]]
    for stream, expected in zip(ledger.streams.values(), content["streams"]):
        assert {name: column.tolist() for name, column in stream.columns.items() if name in expected["columns"]} == expected["columns"]
        assert set(stream.data) <= set(expected["columns"])
        values = {name: column if isinstance(column, list) else column.tolist() for name, column in stream.values.items()}
        assert values == expected["values"]
        assert (None if stream.kept is None else stream.kept.tolist()) == expected["kept"]


@pytest.mark.parametrize("name", FILES)
def test_a_golden_file_holds_what_it_held(name: str) -> None:
    run, _, file = name.partition("/")
    content = contents(run)[file]
    ledger = read(GOLDEN / name)
    assert_holds(ledger, content)
    assert ledger.open_end == name.endswith(JOURNAL)
    if run.startswith("1-"):
        assert ledger.meta["format"] == FIRST
        assert ledger.meta["tap"] == {"env": "env", "trainer": "vector"}[content["meta"]["side"]]
        assert np.dtype(ledger.meta["reward_dtype"]).name == content["meta"]["reward_dtype"]
    else:
        assert ledger.meta == content["meta"]
        assert str(ledger.meta["format"]) == run[0]


@pytest.mark.parametrize("run", RUNS)
def test_a_golden_run_compares_as_it_did(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, events, hops = RESULTS[run]
    comparison = compare(GOLDEN / run)
    assert (comparison.exit_status, comparison.events, [hop.name for hop in comparison.hops]) == (status, events, hops)
    assert main(["compare", str(GOLDEN / run)]) == status
    assert main(["compare", str(GOLDEN / run), "-v", "--format", "json"]) == status
    assert main(["info", str(GOLDEN / run)]) == 0
    assert main(["lint", str(GOLDEN / run)]) in (0, 1)
    capsys.readouterr()


def test_there_is_a_golden_file_of_every_kind() -> None:
    metas = [(Path(name).suffix, read(GOLDEN / name).meta) for name in FILES]
    assert {meta["format"] for _, meta in metas} == {FIRST, FORMAT, WINDOWED}
    assert {meta["tap"] for _, meta in metas} == {"env", "vector", "episode", "learner"}
    kept = {(suffix, meta["format"], type(meta["keep_values"]).__name__, bool(meta["keep_values"])) for suffix, meta in metas}
    for suffix in (SEALED, JOURNAL):
        assert {(suffix, FORMAT, "bool", False), (suffix, FORMAT, "bool", True), (suffix, WINDOWED, "int", True)} <= kept


@pytest.mark.parametrize("golden", [run for run in RUNS if "journal" in run], indirect=True)
def test_a_golden_journal_is_sealed_with_what_it_held(golden: Path) -> None:
    recover(golden)
    for name, content in contents(golden.name).items():
        assert not (golden / name).exists()
        ledger = read(golden / name.replace(JOURNAL, SEALED))
        assert_holds(ledger, content)
        assert ledger.open_end
    assert compare(golden).exit_status == 3


@pytest.mark.parametrize("version", [WINDOWED + 1, 99])
@pytest.mark.parametrize("golden", [run for run in RUNS if run[0] != "1"], indirect=True)
def test_a_version_that_is_not_known_yet_is_refused_in_a_sentence(golden: Path, version: int, capsys: pytest.CaptureFixture[str]) -> None:
    for path in [path for path in golden.iterdir() if path.suffix in (SEALED, JOURNAL)]:
        if path.suffix == SEALED:
            rewrite(path, format=version)
        else:
            later = scan(path)
            copy = Journal(path.with_name("later.npz"), {**later.meta, "format": version})
            for block in later.blocks:
                copy.append(block)
            copy.close()
            path.with_name("later.journal").replace(path)
        message = f"{path}: format {version} is not the 1, 2 or 3 that this version reads: read it with the version that wrote it."
        with pytest.raises(LedgerError, match=re.escape(message)):
            read(path)
        assert message in assert_refused(capsys, "info", path)
    assert_refused(capsys, "compare", golden)


# The first version: what the reference's README leaves open is taken in every likely way.


SPACE, ACTION = spaces.Box(-np.inf, np.inf, (3,), np.float32), spaces.Discrete(4)


def first_run(directory: Path, change: Any = None, n: int = 2, **options: Any) -> Path:
    """A run of the first version; ``change(events of env 0)`` is what its trainer received."""
    streams = {i: drive_one(Walk((3 + i, 5, 1), i, SPACE), 40) for i in range(n)}
    for i, events in streams.items():
        version1.write(directory / f"env-{i}.npz", "env", {i: events}, SPACE, ACTION, **options)
    if change is not None:
        streams[0] = change(list(streams[0]))
    version1.write(directory / "trainer.npz", "trainer", streams, SPACE, ACTION, **options)
    return directory


def stale(events: list[Any]) -> list[Any]:
    kind, action, _, *rest = events[7]
    return [*events[:7], (kind, action, events[6][2], *rest), *events[8:]]


def other_reward(events: list[Any]) -> list[Any]:
    *before, reward, terminated, truncated = events[7]
    return [*events[:7], (*before, reward + 1.5, terminated, truncated), *events[8:]]


FAULTS: dict[str, tuple[Any, str, str]] = {
    "stale": (stale, "obs", "SL102"),
    "reward": (other_reward, "reward", ""),
    "lost": (lambda events: events[:7] + events[8:], "event", ""),
    "repeated": (lambda events: events[:8] + events[7:], "event", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("keep_values", [False, True])
def test_a_fault_in_a_run_of_the_first_version_is_named(
    tmp_path: Path, fault: str, keep_values: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    change, field, code = FAULTS[fault]
    comparison = compare(first_run(tmp_path, change, keep_values=keep_values), tmp_path / "trainer.npz")
    assert comparison.exit_status == 1
    assert len(comparison.differences) == 1
    one = comparison.differences[0]
    assert (one.env, one.fields) == (0, (field,))
    if code:
        assert one.explanations[0].code == code
    if keep_values and field == "obs":
        assert one.first["obs"] != one.second["obs"] != ""
    assert main(["compare", str(tmp_path), "-v"]) == 1
    said = capsys.readouterr().out
    assert "env 0" in said
    assert main(["show", str(tmp_path), "--env", "0", "--episode", str(one.episode), "--step", str(one.step)]) == 0
    assert main(["explain", one.explanations[0].code] if one.explanations else ["explain"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("reward_dtype", [np.float32, np.float64])
def test_rewards_of_the_first_version_are_those_that_were_given(tmp_path: Path, reward_dtype: type) -> None:
    events = drive_one(Walk((3, 5, 1), 0, SPACE), 40)
    version1.write(tmp_path / "env-0.npz", "env", {0: events}, SPACE, ACTION, reward_dtype=reward_dtype)
    stream = read(tmp_path / "env-0.npz").streams[0]
    assert stream.data["h_rew"].view(reward_dtype).tolist() == [float(reward_dtype(event[3])) for event in events]
    assert stream.columns["h_rew"].dtype == np.uint64


NAMES: dict[str, dict[str, Any]] = {
    "version": {"format_version": None, "version": 1},
    "format": {"format_version": None, "format": 1, "version": "0.1.0"},
    "reward <f4": {"reward_dtype": "<f4"},
    "reward class": {"reward_dtype": "numpy.float32"},
    "spaces as texts": {"observation_space": str(SPACE), "action_space": str(ACTION)},
    "spaces as lists": {"observation_space": ["Box", 3], "action_space": ["Discrete", 4]},
    "short names of spaces": {"observation_space": None, "action_space": None, "obs_space": str(SPACE), "act_space": str(ACTION)},
    "spaces in one": {"observation_space": None, "action_space": None, "spaces": {"observation": "Box", "action": "Discrete"}},
    "side vector": {},
    "no version of the package": {"package_version": None},
    "no side": {"side": None},
}


@pytest.mark.parametrize("what", NAMES)
def test_names_that_the_readme_does_not_give_are_taken_in_every_likely_way(tmp_path: Path, what: str) -> None:
    first_run(tmp_path, said=NAMES[what])
    assert compare(tmp_path).exit_status == 0
    assert compare(tmp_path, tmp_path / "trainer.npz").exit_status == 0
    assert {path.stem: read(path).meta["tap"] for path in find(tmp_path)} == {"env-0": "env", "env-1": "env", "trainer": "vector"}


@pytest.mark.parametrize("members", [{"stream_index": "env_index"}, {"stream_index": "indices", "stream_offsets": "offsets"}])
def test_members_that_the_readme_does_not_name_are_taken_in_every_likely_way(tmp_path: Path, members: dict[str, str]) -> None:
    assert compare(first_run(tmp_path, members=members)).exit_status == 0


def test_offsets_may_leave_out_the_end(tmp_path: Path) -> None:
    first_run(tmp_path)
    before = read(tmp_path / "trainer.npz")
    with np.load(tmp_path / "trainer.npz") as archive:
        offsets = archive["stream_offsets"]
    rewrite(tmp_path / "trainer.npz", {"stream_offsets": offsets[:-1].astype(np.int32)})
    after = read(tmp_path / "trainer.npz")
    assert [len(stream) for stream in after.streams.values()] == [len(stream) for stream in before.streams.values()]


def test_one_environment_without_a_side_is_told_by_its_name(tmp_path: Path) -> None:
    first_run(tmp_path, n=1, said={"side": None})
    assert read(tmp_path / "env-0.npz").meta["tap"] == "env"
    assert read(tmp_path / "trainer.npz").meta["tap"] == "vector"
    assert compare(tmp_path).exit_status == 0


@pytest.mark.parametrize("digest", ["xxh3_64", "blake2b"])
def test_the_first_version_is_not_compared_with_a_later_one(tmp_path: Path, digest: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_walks(tmp_path / "new", n=2, digest=digest)
    (tmp_path / "old").mkdir()
    first_run(tmp_path / "old")
    for one, other in (("old", "new"), ("new", "old")):
        said = assert_refused(capsys, "compare", tmp_path / one, tmp_path / other / "trainer.npz")
        assert "is of the first version of the format and" in said


OTHERS: dict[str, dict[str, Any]] = {
    "reward dtypes": {"reward_dtype": np.float64},
    "observation spaces": {"said": {"observation_space": "another"}},
    "action spaces": {"said": {"action_space": "another"}},
}


@pytest.mark.parametrize("setting", OTHERS)
def test_different_settings_are_refused_in_the_first_version_too(tmp_path: Path, setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, options in (("one", {}), ("other", OTHERS[setting])):
        (tmp_path / name).mkdir()
        first_run(tmp_path / name, **options)
    assert f"different {setting}" in assert_refused(capsys, "compare", tmp_path / "one", tmp_path / "other" / "trainer.npz")


DAMAGES: dict[str, dict[str, Any]] = {
    "a kind that it did not have": {"kind": 2},
    "a reward that is no float32": {"h_rew": 1 << 40},
    "offsets that fall": {"stream_offsets": -1},
    "signed kinds": {"kind": np.int64},
    "signed digests": {"h_obs": np.int64},
    "flags that are numbers": {"terminated": np.uint8},
    "indices that are no integers": {"stream_index": np.float64},
    "steps that are no integers": {"step": np.float64},
}


@pytest.mark.parametrize("what", DAMAGES)
def test_what_no_file_of_the_first_version_holds_is_refused(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    first_run(tmp_path)
    (name, change), *_ = DAMAGES[what].items()
    with np.load(tmp_path / "trainer.npz") as archive:
        column = archive[name].copy()
    if isinstance(change, int):
        column[1] = change
    else:
        column = column.astype(change)
    rewrite(tmp_path / "trainer.npz", {name: column})
    assert_refused(capsys, "info", tmp_path / "trainer.npz")


@pytest.mark.parametrize("missing", ["kind", "h_rew", "episode", "stream_index", "stream_offsets"])
def test_a_column_that_the_first_version_has_is_missed(tmp_path: Path, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    first_run(tmp_path)
    rewrite(tmp_path / "trainer.npz", drop=(missing,))
    assert missing in assert_refused(capsys, "compare", tmp_path, tmp_path / "trainer.npz")


@pytest.mark.parametrize("missing", ["reward_dtype", "observation_space", "action_space"])
def test_an_entry_that_the_first_version_has_is_missed(tmp_path: Path, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    first_run(tmp_path, said={missing: None})
    assert_refused(capsys, "compare", tmp_path)
    assert_refused(capsys, "info", tmp_path / "env-0.npz")
