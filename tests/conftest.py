"""What the tests share: the fault library lives with the examples, which run as scripts and so are no package."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS, EXAMPLES = Path(__file__).parent, Path(__file__).parents[1] / "examples"

sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """One local Ray instance for all tests; its workers import test modules and faults by name."""
    ray = pytest.importorskip("ray")
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(TESTS), str(EXAMPLES)])}}
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error", runtime_env=environment)
    yield
    ray.shutdown()
