"""The HTML report: what an engineer sees of it in a real browser, that it is one small file, and that it is never written over unasked."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from browser import Browser, browser
from common import Walk, assert_refused, drive, rewrite, run_python, run_walks, vector_of
from faults import Dose, FaultyVectorEnv
from gymnasium import spaces

from stepledger import Comparison, LedgerEnv, LedgerError, LedgerVectorEnv, compare
from stepledger.cli import main
from stepledger.compare import load
from stepledger.report.context import Recorded
from stepledger.report.html import page
from stepledger.result import Explanation, Finding

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

HOSTILE = "</td><script>document.title='owned'</script><img src=x onerror=document.title='owned'>\x1b[31m"


class Camera(Walk):
    """A `Walk` whose observation has a picture of what it is: a disk on a sky, at the place that the episode has come to."""

    def __init__(self, seed: int, name: str = "camera") -> None:
        parts = {name: spaces.Box(0, 255, (48, 64, 3), np.uint8), "speed": spaces.Box(-np.inf, np.inf, (2,), np.float32)}
        super().__init__((9, 14, 6), seed, spaces.Dict(parts))
        self._name = name

    def _observation(self) -> dict[str, np.ndarray]:
        y, x = np.mgrid[0:48, 0:64]
        at = 60 - 4 * (self._left % 14)
        picture = np.stack([120 + y, 160 + y // 2, 255 - y], axis=-1).astype(np.uint8)
        picture[(x - at) ** 2 + (y - 24) ** 2 < 60] = (230, 90, 40)
        return {self._name: picture, "speed": self._rng.standard_normal(2).astype(np.float32)}


def record(directory: Path, fault: str, dose: Dose, n: int = 3, steps: int = 60, name: str = "camera", keep: bool = True) -> Comparison:
    def make(index: int) -> gym.Env:
        return LedgerEnv(Camera(index, name), directory, index, keep_values=keep)

    envs = FaultyVectorEnv(vector_of([functools.partial(make, index) for index in range(n)]), fault, dose)
    envs = LedgerVectorEnv(envs, directory / "trainer.npz", keep_values=keep)
    drive(envs, steps)
    envs.close()
    return compare(directory)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with images of which some are stale; beside it the ledgers."""
    directory = tmp_path_factory.mktemp("faulty")
    record(directory, "obs:stale", Dose(0.03, seed=1))
    assert main(["compare", str(directory), "--html", str(directory / "report.html")]) == 1
    return directory / "report.html"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_the_first_difference_with_tables_plots_and_pictures(
    faulty: Path, chromium: Browser, width: int, scheme: str
) -> None:
    chromium.show(faulty, width, scheme)
    assert chromium.console() == []
    assert chromium.requests() == []
    # Nothing is wider than the screen.
    assert chromium.run("return document.documentElement.scrollWidth") == width
    comparison = compare(faulty.parent)
    first = comparison.differences[0]
    place = f"env {first.env}, episode {first.episode}, step {first.step}"
    top = chromium.run("const box = document.querySelector('.first').getBoundingClientRect(); return [box.top, box.height]")
    assert top[1] > 0
    assert top[0] < 900  # without scrolling
    assert place in chromium.run("return document.querySelector('.first').innerText")
    card = "document.querySelector('#difference-1')"
    assert place in chromium.run(f"return {card}.innerText")
    assert "obs" in chromium.run(f"return {card}.querySelector('.chip').innerText")
    visible = "[...document.querySelectorAll(arguments[0])].filter(one => one.clientWidth * one.clientHeight > 0).length"
    for selector in [
        "table.fields",
        "#difference-1 .steps",
        "#difference-1 .elements",
        "#difference-1 .pictures img",
        ".plot",
        ".line svg",
    ]:
        assert chromium.run(f"return {visible}", selector) > 0, selector
    assert chromium.run(f"return {card}.querySelectorAll('.unequal').length") >= 2
    # Both sides of the step, beside each other where there is room.
    sides = chromium.run(f"return [...{card}.querySelectorAll('.steps tr.here td')].map(one => one.getBoundingClientRect().left)")
    assert len(sides) == 2
    assert (sides[0] < sides[1]) == (width == 1280)
    pictures = chromium.run("return [...document.images].map(one => one.complete && one.naturalWidth > 0)")
    assert pictures
    assert all(pictures)
    # Light and dark are what they say: letters stand out from the paper, in plots too.
    paper, ink, letters = (_luminance(chromium.run(f"return getComputedStyle({one})")) for one in _COLOURS)
    assert (paper > 0.8, ink < 0.2, letters < 0.2) == ((True,) * 3 if scheme == "light" else (False,) * 3)
    assert abs(paper - ink) > 0.6
    assert abs(paper - letters) > 0.6


_COLOURS = [
    "document.body).backgroundColor + ''+ (0",
    "document.body).color + ''+ (0",
    "document.querySelector('.plot text')).fill + ''+ (0",
]


def _luminance(colour: str) -> float:
    red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", colour)[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_it_is_readable_without_scripts_and_prints(faulty: Path, chromium: Browser, tmp_path: Path) -> None:
    text = faulty.read_text()
    assert "<script" not in text
    assert not re.search(r"""(src|href)=["']?(?!data:|#)[^"'>]""", text.replace('xlink:href="#', 'data-href="#'))
    assert "@import" not in text
    assert "url(" not in re.sub(r"url\(#\w+\)", "", text)
    chromium.show(faulty)
    import base64

    printed = base64.b64decode(chromium.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert printed.startswith(b"%PDF")
    assert chromium.console() == []


class Parser(HTMLParser):
    """Counts elements, and whether each that is opened is closed."""

    VOID = frozenset({"meta", "link", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attributes if name == "id"]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def test_its_elements_are_closed_and_their_names_are_their_own(faulty: Path) -> None:
    parser = Parser(faulty.read_text())
    assert len(parser.ids) == len(set(parser.ids))
    assert {"table", "svg", "img", "details"} <= set(parser.tags)


def test_it_says_what_was_compared_with_which_command(faulty: Path) -> None:
    text = " ".join(re.sub(r"<[^>]*>", " ", faulty.read_text()).split())
    comparison = compare(faulty.parent)
    assert f"stepledger compare {faulty.parent} --html {faulty}" in text
    for said in [
        "obs",
        "equal",
        "10 differences" if len(comparison.differences) == 10 else "differences",
        "env-0.npz to env-2.npz (3 ledgers)",
    ]:
        assert said in text
    assert "gymnasium" in text


def test_names_and_values_from_ledgers_are_only_text(tmp_path: Path, chromium: Browser) -> None:
    record(tmp_path, "obs:stale", Dose(at=20), n=1, name=HOSTILE)
    rewrite(tmp_path / "trainer.npz", notes=[HOSTILE], versions={HOSTILE: HOSTILE})
    path = tmp_path / "a <b>&\x1b.html"
    assert main(["compare", str(tmp_path), "--html", str(path)]) == 1
    assert "<script" not in path.read_text()
    assert "\x1b" not in path.read_text()
    chromium.show(path)
    assert chromium.console() == []
    assert chromium.requests() == []
    assert chromium.run("return document.title") == "stepledger: different"
    assert "document.title='owned'" in chromium.run("return document.body.innerText")


@pytest.mark.parametrize(("rate", "steps", "least"), [(0.2, 9, 90), pytest.param(1.0, 110, 6_000, marks=pytest.mark.long)])
def test_64_envs_with_100_differences_in_all_or_each_make_a_small_file(tmp_path: Path, rate: float, steps: int, least: int) -> None:
    comparison = record(tmp_path, "obs:stale", Dose(rate), n=64, steps=steps)
    assert len(comparison.differences) >= least
    assert main(["compare", str(tmp_path), "--html", str(tmp_path / "report.html")]) == 1
    assert (tmp_path / "report.html").stat().st_size < 2_000_000


def test_images_that_hold_noise_make_a_small_file_too(tmp_path: Path) -> None:
    space = spaces.Dict({"camera": spaces.Box(0, 255, (210, 160, 3), np.uint8), "stack": spaces.Box(0, 255, (4, 84, 84), np.uint8)})
    makers = [
        functools.partial(lambda index: LedgerEnv(Walk(seed=index, observation_space=space), tmp_path, index, keep_values=True), index)
        for index in range(2)
    ]
    envs = LedgerVectorEnv(FaultyVectorEnv(vector_of(makers), "obs:zero"), tmp_path / "trainer.npz", keep_values=True)
    drive(envs, 10)
    envs.close()
    assert main(["compare", str(tmp_path), "--html", str(tmp_path / "report.html")]) == 1
    text = (tmp_path / "report.html").read_text()
    assert len(text) < 2_000_000
    assert "to keep this file small" in text
    assert "one pixel in 2 is shown" in text


def test_a_report_that_is_there_is_only_written_over_with_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_walks(tmp_path, steps=10)
    report = tmp_path / "report.html"
    report.write_text("mine")
    assert "report.html is there already: name another file, or write over it with --force." in assert_refused(
        capsys, "compare", tmp_path, "--html", report
    )
    assert report.read_text() == "mine"
    assert main(["compare", str(tmp_path), "--html", str(report), "--force"]) == 0
    assert report.read_text().startswith("<!DOCTYPE html>")
    capsys.readouterr()
    assert "can't be written (No such file or directory)" in assert_refused(
        capsys, "compare", tmp_path, "--html", tmp_path / "no" / "r.html"
    )
    assert [path.name for path in tmp_path.iterdir() if path.suffix not in (".npz", ".html")] == []


def test_force_is_not_for_what_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_walks(tmp_path / "run", steps=10)
    ledger, pipe = tmp_path / "run" / "trainer.npz", tmp_path / "pipe"
    before = ledger.read_bytes()
    os.mkfifo(pipe)
    said = {ledger: "a part of a recording", tmp_path / "run" / "report.json": "a part of a recording", tmp_path: "is a directory"}
    for path, why in {**said, pipe: "is no regular file", "": "has no name"}.items():
        for force in ([], ["--force"]):
            assert why in assert_refused(capsys, "compare", tmp_path / "run", "--html", path, *force)
    assert ledger.read_bytes() == before
    assert pipe.is_fifo()


def test_what_is_missing_is_named_with_the_extra_that_brings_it(tmp_path: Path) -> None:
    run_walks(tmp_path, steps=10)
    for name in ("jinja2", "matplotlib"):
        code = f"""
import sys
sys.modules[{name!r}] = None  # importing it fails
from stepledger.cli import main
sys.exit(main(["compare", sys.argv[1], "--html", sys.argv[1] + "/report.html"]))
"""
        process = run_python(code, tmp_path, check=False)
        assert (process.returncode, process.stdout) == (2, "")
        assert process.stderr == f'stepledger: the HTML report takes {name}: install the extra (pip install ".[report]").\n'
    assert not (tmp_path / "report.html").exists()


def test_it_can_be_written_when_the_ledgers_are_gone(tmp_path: Path, chromium: Browser) -> None:
    from stepledger.report.html import write

    comparison = record(tmp_path / "run", "obs:stale", Dose(at=20), n=2)
    write(comparison, tmp_path / "nowhere", tmp_path / "gone.html")
    write(comparison, (tmp_path / "run", tmp_path / "run" / "trainer.npz"), tmp_path / "there.html")
    with pytest.raises(LedgerError, match="is there already"):
        write(comparison, tmp_path / "run", tmp_path / "there.html")
    chromium.show(tmp_path / "gone.html")
    text = chromium.run("return document.body.innerText")
    assert "The steps are not shown: the ledgers can't be read any more" in text
    assert "nowhere is not there" in text
    chromium.show(tmp_path / "there.html")
    assert "not shown" not in chromium.run("return document.body.innerText")


@pytest.mark.parametrize("keep", [True, False])
def test_without_values_it_says_that_they_would_explain_more(tmp_path: Path, keep: bool) -> None:
    found = record(tmp_path, "obs:f16", Dose(0.1), n=2, name="arm", keep=keep)
    bare = Comparison(found.hops, tuple(replace(one, explanations=()) for one in found.differences))
    text = page(bare, Recorded(load(tmp_path)[0]))
    assert ("no known explanation fits" in text, "No known explanation fits." in text) == (keep, keep)
    assert ("keep_values=True lets the others be looked for" in text) != keep


def test_explanations_are_grouped_and_warnings_have_their_own_section(tmp_path: Path, chromium: Browser) -> None:
    @dataclass(frozen=True)
    class Warned(Comparison):
        warnings: tuple[Any, ...] = ()

    found = record(tmp_path, "obs:stale", Dose(0.1), n=2)
    why = (Explanation("SL199", f"first {HOSTILE}"), Explanation("SL198", "second"))
    differences = tuple(replace(one, explanations=why if number else ()) for number, one in enumerate(found.differences))
    one = Finding(code="SL699", tap="env", text=f"odd {HOSTILE}", count=1234, runner=0, env=1, episode=2, step=3, envs=1)
    warned = Warned(found.hops, differences, (one,))
    text = page(warned, Recorded(load(tmp_path)[0]))
    (tmp_path / "report.html").write_text(text)
    chromium.show(tmp_path / "report.html", 400)
    assert chromium.console() == []
    rows = chromium.run("return [...document.querySelectorAll('#causes tbody tr')].map(one => one.innerText)")
    assert len(rows) == 2
    assert "SL199" in rows[0]
    assert str(len(differences) - 1) in rows[0]
    assert "no known explanation fits" in rows[1]
    assert "\n1 x no known explanation fits, since env " in str(warned)
    warning = chromium.run("return document.querySelector('#warnings').innerText")
    assert all(said in warning for said in ("SL699", "1,234", "env 1, episode 2, step 3", "odd </td><script>"))
    card = chromium.run("return document.querySelector('#difference-2').innerText")
    assert card.index("SL199") < card.index("SL198")
    assert chromium.run("return document.documentElement.scrollWidth") == 400


@pytest.mark.parametrize("what", ["equal", "open end"])
def test_a_run_without_a_difference_has_a_report_too(tmp_path: Path, chromium: Browser, what: str) -> None:
    run_walks(tmp_path, steps=30)
    status = 0
    if what == "open end":
        rewrite(tmp_path / "trainer.npz", stopped="OSError: no space", closed=False)
        status = 3
    assert main(["compare", str(tmp_path), "--html", str(tmp_path / "report.html")]) == status
    chromium.show(tmp_path / "report.html", 400)
    assert chromium.console() == []
    assert chromium.run("return document.documentElement.scrollWidth") == 400
    assert chromium.run("return document.querySelector('.status').innerText") == ("Equal" if not status else "Equal as far as recorded")
    assert chromium.run("return document.querySelectorAll('.card').length") == 0


if __name__ == "__main__":  # a look at the pages: python tests/test_report_html.py FILE DIRECTORY
    with browser(Path(sys.argv[2]) / "profile") as one:
        for wide in (1280, 400):
            for colours in ("light", "dark"):
                one.show(Path(sys.argv[1]), wide, colours)
                one.picture(Path(sys.argv[2]) / f"{wide}-{colours}.png")


def test_a_field_that_was_taken_through_a_function_first_is_called_recomputed(tmp_path: Path) -> None:
    run_walks(tmp_path, n=1)
    with np.load(tmp_path / "trainer.npz") as archive:
        column = archive["h_act"].copy()
    column[2] ^= 1
    fields = {"action": {"note": "after unsquashing"}, "obs": {"note": "as stacked"}, "reward": {"skip": "rewritten"}}
    rewrite(tmp_path / "trainer.npz", {"h_act": column}, fields=fields)
    comparison = compare(tmp_path)
    found = {name: (one.status, one.recomputed) for name, one in comparison.hops[0].fields.items()}
    assert [found[name] for name in ("kind", "action", "obs", "reward")] == [
        ("equal", False),
        ("different", True),
        ("equal", True),
        ("not compared", False),
    ]
    text = page(comparison, Recorded(load(tmp_path)[0]))
    for cell in ("1 difference, recomputed<sup>", "recomputed, equal<sup>", "not compared<sup>", ">equal<"):
        assert cell in text


def test_a_persons_own_settings_of_matplotlib_neither_change_a_plot_nor_are_changed() -> None:
    """``text.usetex``, as papers want it, takes a LaTeX that is not everywhere."""
    import matplotlib

    from stepledger.report import plots

    def drawn() -> str:
        svg = plots.component(["1", "2"], np.array([0.0, 1.0]), np.array([1.0, 1.0]), [True, False], ("env", "vector"))
        return re.sub(r'id="[^"]*"|#[\w]+', "", svg)

    plain = drawn()
    with matplotlib.rc_context({"text.usetex": True, "axes.grid": True, "font.size": 30}):
        assert drawn() == plain
        assert matplotlib.rcParams["text.usetex"]
        assert matplotlib.rcParams["font.size"] == 30
