"""The scripts of docs/known-differences.md print what the page says: where one no longer does, the library has been repaired."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "known-differences.md"
MARKS = {"RLlib": pytest.mark.ray, "Stable-Baselines3": pytest.mark.sb3}


def scripts() -> list[Any]:
    found = []
    for section in PAGE.read_text().split("\n## ")[1:]:
        title = section.partition("\n")[0]
        blocks = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", section, re.DOTALL)
        if blocks:
            found.append(pytest.param(*blocks.groups(), id=title, marks=[MARKS[title.partition(":")[0]]]))
    return found


@pytest.mark.parametrize(("script", "output"), scripts())
def test_a_script_prints_what_the_page_says(tmp_path: Path, script: str, output: str) -> None:
    (tmp_path / "script.py").write_text(script)  # worker processes import it
    done = subprocess.run([sys.executable, "-W", "ignore", tmp_path / "script.py"], capture_output=True, text=True)
    assert done.stdout == output, done.stderr
