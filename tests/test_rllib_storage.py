"""RLlib: a run directory may be a URI; the run is recorded locally, and stored there by finish() and at the end."""

from __future__ import annotations

import functools
import json
import logging
import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray import tune
from ray.rllib.algorithms.ppo import PPO
from rllib_common import SAMPLED, OwnMode, config, hop

from stepledger import LedgerError, compare
from stepledger.cli import main
from stepledger.remote import Remote, fetched
from stepledger_ray import LedgerCallback, attach, finish

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's temporary directory."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def build(uri: str, runners: int = 0, **options: Any) -> Any:
    return attach(config(runners), uri, **options).build_algo()


@pytest.mark.parametrize("runners", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_run_is_stored_at_its_uri_by_finish_and_at_the_end(any_uri, temporary, capsys, runners):
    uri = any_uri
    one = config(runners).callbacks(functools.partial(LedgerCallback, uri))
    algorithm = one.build_algo()
    algorithm.train()
    before = finish(algorithm)
    assert before.exit_status == 0
    assert compare(uri).to_dict() == before.to_dict()
    algorithm.train()
    algorithm.stop()
    result = compare(uri)
    assert result.exit_status == 0
    assert result.events > before.events
    assert hop(result, "episode -> learner").events == algorithm.metrics.peek(SAMPLED)
    assert finish(algorithm).to_dict() == result.to_dict()
    assert not list(temporary.glob("stepledger-*"))
    first, *_, last = [line for line in capsys.readouterr().out.splitlines() if line.startswith("stepledger: ")]
    assert first.startswith(f"stepledger: recording the taps env, vector, episode and learner into {temporary / 'stepledger-'}")
    assert first.endswith(f", to be stored at {uri}")
    assert last == f"stepledger: compare again with: stepledger compare {shlex.quote(uri)}"
    assert main(shlex.split(last.partition("with: stepledger ")[2])) == 0
    assert capsys.readouterr().out == f"{result}\n"
    assert json.loads(Remote(uri).read_text("report.json") or "")["equal"] is True


def test_what_comparing_on_the_way_has_kept_is_stored(uri, temporary):
    algorithm = build(uri, runners=1, compare_every=1, retain="differences")
    result = [algorithm.train() for _ in range(2)][-1]["stepledger"]
    algorithm.stop()
    report = json.loads(Remote(uri).read_text("report.json") or "")
    assert report["equal"] is True
    assert report["events"] >= result["events_compared"] > 0
    with fetched(uri) as local:
        assert len(list(local.glob("*.npz"))) == 5  # of two envs, the vector env, the episodes and the Learner
    assert not list(temporary.glob("stepledger-*"))


def test_a_uri_that_holds_a_run_is_refused_and_resume_goes_on_in_it(uri, temporary):
    algorithm = build(uri)
    algorithm.train()
    algorithm.stop()
    first = compare(uri)
    with pytest.raises(LedgerError, match="holds a run already: name another directory"):
        build(uri)
    assert compare(uri).to_dict() == first.to_dict()
    algorithm = build(uri, resume=True)
    algorithm.train()
    algorithm.stop()
    result = compare(uri)
    assert result.exit_status == 0
    assert result.events > first.events
    assert not list(temporary.glob("stepledger-*"))


def test_a_build_that_was_refused_leaves_no_run_behind(uri, temporary):
    with pytest.raises(LedgerError, match="has the autoreset mode"):
        attach(config(mode="vector_entry_point", env=OwnMode), uri).build_algo()
    assert Remote(uri).read_text("run.json") is None
    assert not list(temporary.glob("stepledger-*"))


def test_a_run_that_could_not_be_stored_is_named_and_resumed(uri, s3, temporary, caplog, capsys):
    from pyarrow.fs import S3FileSystem

    server = S3FileSystem(endpoint_override=s3, scheme="http", allow_bucket_creation=True, allow_bucket_deletion=True)
    algorithm = build(uri)
    algorithm.train()
    text = Remote(uri).read_text("run.json") or ""
    server.delete_dir(uri.split("/")[2])
    with caplog.at_level(logging.WARNING, "stepledger_ray"):
        algorithm.stop()
    (directory,) = temporary.glob("stepledger-*")
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("stepledger_ray")]
    assert f"the run could not be stored, and is in {directory}" in warning
    assert capsys.readouterr().out.splitlines()[-1] == f"stepledger: compare again with: stepledger compare {directory}"
    first = compare(directory)
    assert first.exit_status == 0
    server.create_dir(uri.split("/")[2])
    with server.open_output_stream(uri.removeprefix("s3://").partition("?")[0] + "/run.json") as file:
        file.write(text.encode())
    algorithm = build(uri, resume=True)
    algorithm.train()
    algorithm.stop()
    assert compare(uri).exit_status == 0
    assert compare(uri).events > first.events
    assert not directory.exists()


def test_a_uri_that_cannot_be_used_is_refused_when_the_algorithm_is_built(uri, s3):
    with pytest.raises(LedgerError, match=r"can't be used .Unrecognized filesystem type"):
        build("nosuch://bucket/run")
    with pytest.raises(LedgerError, match=r"can't be written .*check the URI and the credentials"):
        build(f"s3://no-such-bucket/run?endpoint_override={s3}&scheme=http")
    with pytest.raises(LedgerError, match="names a file of the machine 'ledger'"):
        build("file://ledger")


def test_a_file_uri_is_a_path(tmp_path, temporary, capsys):
    algorithm = build((tmp_path / "a run").as_uri())
    algorithm.train()
    algorithm.stop()
    assert compare(tmp_path / "a run").exit_status == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"stepledger compare {tmp_path / 'a run'}")
    assert not list(temporary.glob("stepledger-*"))


@pytest.mark.long
def test_each_trial_of_tune_is_stored_in_a_place_of_its_own(uri, tmp_path):
    one = attach(config(1).training(lr=tune.grid_search([0.001, 0.002])), uri)
    run_config = tune.RunConfig(storage_path=str(tmp_path / "tune"), stop={"training_iteration": 2}, verbose=0)
    results = tune.Tuner(PPO, param_space=one, run_config=run_config).fit()
    assert not results.errors
    for result in results:
        assert compare(Remote(uri).below(Path(result.path).name).uri).exit_status == 0
