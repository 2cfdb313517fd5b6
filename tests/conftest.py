"""What the tests share: the fault library lives with the examples, which run as scripts and so are no package."""

import os
import socket
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS, EXAMPLES = Path(__file__).parent, Path(__file__).parents[1] / "examples"

sys.path.insert(0, str(EXAMPLES))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", action="store_true", help="write the pages of the docs that tests make")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what takes long, unless ``make test-long`` asks for it."""
    if not os.environ.get("STEPLEDGER_LONG"):
        skip = pytest.mark.skip(reason="takes long: make test-long")
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(skip)


#: What the S3 server of the tests takes from anybody.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """One local Ray instance for all tests; its workers import test modules and faults by name."""
    ray = pytest.importorskip("ray")
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(TESTS), str(EXAMPLES)]), **CREDENTIALS}}
    os.environ.update(RAY_worker_niceness="0")  # else its workers starve beside other tests
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error", runtime_env=environment)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of a real S3 server that runs here."""
    pytest.importorskip("pyarrow")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    yield "{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def uri(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place in a new bucket of that server, with nothing in it."""
    from pyarrow.fs import S3FileSystem

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    S3FileSystem(endpoint_override=s3, scheme="http", allow_bucket_creation=True).create_dir(bucket)
    return f"s3://{bucket}/some/run?endpoint_override={s3}&scheme=http"


@pytest.fixture(scope="session")
def gcs() -> Iterator[str]:
    """The address of a server of Google's protocol that runs here, with a bucket that is called that."""
    pytest.importorskip("pyarrow")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop()


@pytest.fixture(params=["s3", "gs"])
def any_uri(request: pytest.FixtureRequest) -> str:
    """A place in a bucket of a server of each kind, with nothing in it."""
    if request.param == "s3":
        uri: str = request.getfixturevalue("uri")
        return uri
    address = request.getfixturevalue("gcs")
    return f"gs://anonymous@bucket/{uuid.uuid4().hex}/run?endpoint_override={address}&scheme=http&retry_limit_seconds=5"
