"""What the tests share: the fault library lives with the examples, which run as scripts and so are no package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
