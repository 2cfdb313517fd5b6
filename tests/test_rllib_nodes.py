"""Two nodes that share no run directory: what was written on the other one is gathered; one that has died is named."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepledger import compare

pytest.importorskip("ray")

pytestmark = pytest.mark.ray

#: The other node sees an own directory in the place of the run directory's parent: it lives in another mount namespace.
SCRIPT = """
import json, os, signal, subprocess, sys, tempfile, time
import ray
import stepledger.progress
from ray.cluster_utils import Cluster
from ray.rllib.algorithms.ppo import PPOConfig
from stepledger_ray import attach

stepledger.progress._PATIENCE = 0.0
shared, theirs, place, dies = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "dies"
tempfile.tempdir = shared
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "resources": {"place": 1}})
ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
ray_start = f"{sys.executable} -m ray.scripts.scripts start --address={cluster.address} --num-cpus=4 --block"
start = f'mount --bind "{theirs}" "{shared}" && exec {ray_start}'
start += " --resources='{\\"place\\": 1}'"
other = subprocess.Popen(["unshare", "-m", "sh", "-c", start], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
while len([node for node in ray.nodes() if node["Alive"]]) < 2:
    time.sleep(0.2)
config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=2, num_envs_per_env_runner=2, custom_resources_per_env_runner={"place": 1})
    .training(train_batch_size=400, minibatch_size=200, num_epochs=1)
    .rl_module(model_config={"fcnet_hiddens": [8]})
)
algorithm = attach(config, place).build_algo()
algorithm.train()
algorithm.train()
if dies:
    nodes = algorithm.env_runner_group.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False)
    os.killpg(other.pid, signal.SIGKILL)
    for pid in nodes:
        if subprocess.run(["ps", "-o", "sid=", "-p", str(pid)], capture_output=True, text=True).stdout.strip() == str(other.pid):
            os.kill(pid, signal.SIGKILL)
    while len([node for node in ray.nodes() if node["Alive"]]) > 1:
        time.sleep(0.2)
algorithm.stop()
os.killpg(other.pid, signal.SIGKILL) if not dies else None
ray.shutdown()
cluster.shutdown()
"""


def namespaces_work() -> bool:
    try:
        return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    except OSError:
        return False


def train(tmp_path: Path, place: Path | str, end: str) -> str:
    """Run the script; what it shows on its terminal."""
    for name in ("shared", "theirs"):
        (tmp_path / name).mkdir()
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path / "shared"), str(tmp_path / "theirs"), str(place), end]
    # The other node must find the environment's packages, and not this test session's cluster.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    terminal, end_of_it = os.openpty()
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=end_of_it, env=environment)
    os.close(end_of_it)
    shown = b""
    with contextlib.suppress(OSError):  # that is how Linux says that a terminal's other end is closed
        while more := os.read(terminal, 1 << 16):
            shown += more
    os.close(terminal)
    assert process.wait(280) == 0, shown
    return shown.decode()


@pytest.mark.skipif(not namespaces_work(), reason="mount namespaces are closed to this user")
@pytest.mark.parametrize("end", ["lives", pytest.param("dies", marks=pytest.mark.long)])
def test_what_another_node_recorded_is_gathered_or_the_node_is_named(tmp_path: Path, end: str) -> None:
    run = tmp_path / "shared" / "run"
    shown = train(tmp_path, run, end)
    assert "comparing" in shown
    assert ("gathering" in shown) == (end == "lives")
    result = compare(run)
    assert result.equal, str(result)
    theirs = {path.name for path in (tmp_path / "theirs" / "run").glob("runner-*")}
    assert len({name.partition("-")[2][:1] for name in theirs}) == 1  # one of the two EnvRunners
    if end == "lives":
        assert result.exit_status == 0, str(result)
        assert theirs < {path.name for path in run.glob("runner-*")}
        assert result.hops[0].streams == 4
    else:
        report = json.loads((run / "report.json").read_text())
        assert report["exit_status"] == 3
        (sentence,) = [one for one in report["hops"][0]["unknown"] if one.startswith("node ")]
        assert "gave no ledgers of EnvRunner" in sentence
        assert result.hops[0].streams == 2


@pytest.mark.long
@pytest.mark.skipif(not namespaces_work(), reason="mount namespaces are closed to this user")
def test_what_another_node_recorded_is_stored_at_the_uri_of_the_run_and_stays_nowhere_else(tmp_path: Path, uri: str) -> None:
    train(tmp_path, uri, "lives")
    result = compare(uri)
    assert result.exit_status == 0, str(result)
    assert result.hops[0].streams == 4
    assert not list(tmp_path.rglob("stepledger-*"))


@pytest.mark.parametrize("name", ["../evil.npz", "a/../../evil.journal", "{}/evil.npz", "link/evil.npz", "evil.py", "run.json", ""])
def test_a_name_from_a_node_that_is_no_ledger_of_the_run_is_not_written(tmp_path: Path, name: str) -> None:
    from stepledger import LedgerError
    from stepledger_ray import nodes

    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.mkdir()
    (run / "link").symlink_to(outside)
    (run / "run.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))

    class Here:
        """Of a run, what copying a file asks for."""

        directory = str(run)

    with pytest.raises(LedgerError, match="no ledger of the run"):
        list(nodes._copy(Here(), None, name.format(outside), 4, None))  # type: ignore[arg-type]
    assert sorted(tmp_path.rglob("*")) == before
    assert (run / "run.json").read_text() == "{}"
