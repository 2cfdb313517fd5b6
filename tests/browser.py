"""A real browser for what is seen of a report: headless Chromium, with what it logged and asked the network for."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: Of Debian's packages chromium and chromium-driver.
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]


class Browser:
    """One page at a time.

    Args:
        driver: Selenium's.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def show(self, path: Path, width: int = 1280, scheme: str = "light") -> None:
        """Open a file at a width in CSS pixels, light or dark."""
        self._tell("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self._tell("Emulation.setEmulatedMedia", media="screen", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.driver.get(path.resolve().as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script in the page returns."""
        return self.driver.execute_script(script, *arguments)

    def console(self) -> list[str]:
        """What was logged since the last time."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """What was asked for since the last time, but for the page itself and what it holds."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("file:", "data:"))]

    def picture(self, path: Path) -> None:
        """Save the whole page as a picture."""
        taken = self._tell("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _tell(self, command: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, parameters)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a new profile; the test is skipped where none is installed."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("Chromium and its driver are not installed: apt-get install chromium chromium-driver")
    from selenium.webdriver.chrome.service import Service

    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = selenium.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(60)
    opened = Browser(driver)
    driver.get("about:blank")
    for log in (opened.console, opened.requests):  # of the page that it opened with
        log()
    try:
        yield opened
    finally:
        driver.quit()
