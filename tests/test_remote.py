"""What lies at a URI is compared as if it lay in a directory; the file systems are real servers', of S3 and of Google's protocol."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
from common import assert_refused, drive, run_python, run_walks, walks

from stepledger import LedgerError, compare
from stepledger.cli import main
from stepledger.remote import Remote, fetched, located


@pytest.fixture
def stored(any_uri: str, tmp_path: Path) -> tuple[Path, str]:
    """A run in a directory, and the same at a URI."""
    directory = tmp_path / "run"
    run_walks(directory)
    Remote(any_uri).store(directory, sorted(path.name for path in directory.iterdir()))
    return directory, any_uri


def test_a_run_at_a_uri_is_compared_as_in_its_directory(stored: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    directory, uri = stored
    assert compare(uri).to_dict() == compare(directory).to_dict()
    assert compare(uri, Remote(uri).below("trainer.npz").uri).exit_status == 0
    assert compare(uri, directory / "trainer.npz").exit_status == 0
    assert main(["compare", uri]) == 0
    assert capsys.readouterr().out == f"{compare(directory)}\n"


def test_info_tells_of_the_ledgers_at_a_uri(stored: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    _, uri = stored
    assert main(["info", uri]) == 0
    firsts = [one.splitlines()[0] for one in capsys.readouterr().out.split("\n\n")]
    assert firsts == [f"{uri}/{name}.npz" for name in ("env-0", "env-1", "env-2", "trainer")]
    assert main(["info", Remote(uri).below("env-1.npz").uri]) == 0
    assert capsys.readouterr().out.startswith(f"{Remote(uri).below('env-1.npz').uri}\n  tap          env\n")


def test_a_journal_at_a_uri_has_an_open_end_there_too(any_uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = """
import os, signal, sys
from pathlib import Path
import stepledger.recorder
from common import drive, walks
stepledger.recorder.FLUSH_EVENTS = 50
envs = walks(Path(sys.argv[1]), n=2)
drive(envs, 200)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run_python(code, tmp_path, check=False)
    uri = any_uri
    Remote(uri).store(tmp_path, [path.name for path in tmp_path.iterdir()])
    assert compare(uri).exit_status == compare(tmp_path).exit_status == 3
    assert main(["info", Remote(uri).below("env-0.npz").uri]) == 0
    assert "never closed" in capsys.readouterr().out


def test_only_ledgers_are_fetched_each_once_and_nothing_of_them_stays(
    stored: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory, uri = stored
    (directory / "checkpoint.bin").write_bytes(b"large")
    (directory / "sub").mkdir()
    (directory / "sub" / "env-7.npz").write_bytes((directory / "env-0.npz").read_bytes())
    Remote(uri).store(directory, ["checkpoint.bin", "sub/env-7.npz"])
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with fetched(uri) as local:
        assert tmp_path / "temporary" in local.parents
        names = sorted(path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file())
        assert names == ["env-0.npz", "env-1.npz", "env-2.npz", "sub/env-7.npz", "trainer.npz"]
        (local / "env-0.npz").write_bytes(b"newer")
        Remote(uri).fetch(local)
        assert (local / "env-0.npz").read_bytes() == b"newer"
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("any_uri", ["s3"], indirect=True)
def test_a_name_that_points_out_of_the_directory_is_not_fetched(stored: tuple[Path, str], s3: str, tmp_path: Path) -> None:
    boto3 = pytest.importorskip("boto3")
    _, uri = stored
    client = boto3.client("s3", endpoint_url=f"http://{s3}", region_name="us-east-1")
    client.put_object(Bucket=uri.split("/")[2], Key="some/run/../../evil.npz", Body=b"evil")
    (tmp_path / "a" / "b").mkdir(parents=True)
    Remote(uri).fetch(tmp_path / "a" / "b")
    assert not list(tmp_path.rglob("evil.npz"))
    assert (tmp_path / "a" / "b" / "trainer.npz").exists()


def test_what_is_wrong_at_a_uri_is_one_sentence_that_names_it(stored: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    directory, uri = stored
    assert f"{Remote(uri).below('no').uri} holds no ledgers" in assert_refused(capsys, "compare", Remote(uri).below("no").uri)
    assert "is not there" in assert_refused(capsys, "info", Remote(uri).below("no.npz").uri)
    assert "holds no ledgers" in assert_refused(capsys, "compare", uri.replace("bucket", "no-such-bucket"))
    assert "nosuch://x/y can't be used (Unrecognized filesystem type" in assert_refused(capsys, "compare", "nosuch://x/y")
    assert "s3:// names no directory" in assert_refused(capsys, "info", "s3://")
    message = assert_refused(capsys, "compare", uri.replace("anonymous@", "").replace("://", "://me:secret@"))
    assert "credentials" in message
    assert "secret@" not in message
    (directory / "trainer.npz").write_bytes((directory / "trainer.npz").read_bytes()[:-100])
    Remote(uri).store(directory, ["trainer.npz"])
    assert f"{uri}/trainer.npz" in assert_refused(capsys, "compare", uri)


def test_a_uri_takes_pyarrow_and_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for command in ("compare", "info"):
        assert "s3://bucket/run can't be used without pyarrow: install it" in assert_refused(capsys, command, "s3://bucket/run")


def test_a_file_uri_is_a_path_and_takes_no_pyarrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    directory = tmp_path / "a run"
    envs = walks(directory, n=2)
    drive(envs, 20)
    envs.close()
    assert directory.as_uri().endswith("a%20run")
    assert main(["compare", directory.as_uri()]) == 0
    assert capsys.readouterr().out == f"{compare(directory)}\n"
    assert main(["info", directory.as_uri()]) == 0
    assert main(["compare", directory.as_uri(), (directory / "trainer").as_uri()]) == 0
    capsys.readouterr()
    assert "names a file of the machine 'run'" in assert_refused(capsys, "compare", "file://run/ledger")


@pytest.mark.parametrize("path", ["run", "/run", "C:/run", "a:b/c", "./s3:/x", "C:\\run"])
def test_a_path_is_no_uri(path: str) -> None:
    assert located(path) == Path(path)
    with pytest.raises(LedgerError, match="names a file of the machine"):
        located("file://host/run")
