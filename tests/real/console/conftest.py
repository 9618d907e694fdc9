"""A real service with pages and a real Chromium, both for the session. What cannot be had fails by name."""

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.domain.ids import utc_now
from tests.broker import free_port
from tests.fakes.releases import ReleaseRoom
from tests.real.console.site import PASSWORD, prepare, settings_of
from tests.real.parts import ROOT, missing

DRIVER = ROOT / ".cache" / "browser-venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
"""Without a sandbox: in a container there is none to be had, and the only pages are ours."""
START_S = 90.0


@dataclass
class Site:
    """The service, with a hand on its database."""

    url: str
    room: ReleaseRoom
    process: "subprocess.Popen[bytes]"
    made: int = field(default=2)

    def candidate(self) -> str:
        """The id of a fresh release that waits for people; what was under way before it is over."""
        self.made += 1
        self.room.clock.now = utc_now()
        return self.room.ready(f"v{self.made}").id

    def promote(self, release_id: str) -> None:
        """As the watch does with what was approved."""
        self.room.clock.now = utc_now()
        self.room.desk.promote(self.room.desk.begin_promotion(release_id).id)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, port = tmp_path_factory.mktemp("site"), free_port()
    room = prepare(settings_of(folder, port))
    yield from served(folder, port, room)


def served(folder: Path, port: int, room: ReleaseRoom) -> Iterator[Site]:
    """The service as a process of its own."""
    log = folder / "api.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.real.console.site", str(folder), str(port)], cwd=ROOT, stdout=out, stderr=out,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        try:
            wait_for(f"http://127.0.0.1:{port}/status", process, log)
            yield Site(url=f"http://127.0.0.1:{port}", room=room, process=process)
        finally:
            process.kill()
            process.wait()


def wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        try:
            httpx.get(url, timeout=5.0, trust_env=False)
            return
        except httpx.TransportError:
            assert process.poll() is None, log.read_text()[-2000:]
            time.sleep(0.2)
    raise AssertionError(f"the service did not answer: {log.read_text()[-2000:]}")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright from an environment of its own."""
    made = subprocess.run([sys.executable, str(ROOT / "infra" / "setup.py"), "browser"], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        missing("Chromium", made.stderr.strip()[-600:])
    sys.path.append(str(DRIVER))  # at the end: what the project has itself is taken from there
    playwright = importlib.import_module("playwright.sync_api").sync_playwright().start()
    browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
    yield browser
    browser.close()
    playwright.stop()


@dataclass
class Tab:
    """A page in a browser of its own, with everything that it complained of."""

    page: Any
    site: Site
    complaints: list[str] = field(default_factory=list[str])

    def said(self, kind: str, text: str) -> None:
        """A page that says 401, 404 or 409 is a page; everything else that the browser's console tells of is a fault."""
        if kind in ("error", "warning") and "Failed to load resource" not in text:
            self.complaints.append(text)

    def open(self, path: str = "") -> None:
        self.page.goto(f"{self.site.url}/console{path}", wait_until="load")

    def sign_in(self, name: str) -> None:
        self.open("/login")
        self.page.fill("#name", name)
        self.page.fill("#password", PASSWORD)
        self.page.click("main button")
        self.page.wait_for_url("**/console")


Open = Callable[..., Tab]


@pytest.fixture
def browse(chromium: Any, site: Site) -> Iterator[Open]:
    """Opens tabs; in the end no page complained, of a violated policy or of anything else."""
    opened: list[tuple[Any, Tab]] = []

    def one(*, width: int = 1280, scheme: str = "light", scripts: bool = True, who: str | None = "ada") -> Tab:
        viewport = {"width": width, "height": 900}
        context = chromium.new_context(viewport=viewport, color_scheme=scheme, java_script_enabled=scripts)
        tab = Tab(page=context.new_page(), site=site)
        expected = "Failed to load resource"  # a page that says 401, 404 or 409 is a page
        tab.page.on(
            "console", lambda said: said.type in ("error", "warning") and expected not in said.text and tab.complaints.append(said.text)
        )
        tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        opened.append((context, tab))
        if who is not None:
            tab.sign_in(who)
        return tab

    yield one
    for context, tab in opened:
        context.close()
        assert tab.complaints == []
