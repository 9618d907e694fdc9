"""Pages for everybody: axe finds nothing on any of them, none is wider than a phone, twelve tabs load, and the service stops."""

import importlib
import signal
import time
from typing import Any

import pytest

from tests.broker import free_port
from tests.real.console.conftest import Open, prepare, served, settings_of

pytestmark = pytest.mark.real
PATHS = (
    "", "/releases", "/releases/release-2", "/versions?a=v1&b=v2", "/versions/v2", "/rewards?a=r1&b=r2", "/labels/i3", "/data", "/trust",
    "/audit?verify=1", "/act/approve/release-2", "/act/roll_back/release-1", "/nothing/here", "/pairs/release-2",
    "/act/pin/v2", "/do/replay_letter/1", "/do/replay_letters/all", "/readings", "/do/replay_rules/tab",
)  # fmt: skip
DEFICIENCIES = ("protanopia", "deuteranopia", "tritanopia", "achromatopsia")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 1280])
def test_axe_finds_nothing_and_no_page_is_wider_than_its_window(browse: Open, scheme: str, width: int) -> None:
    tab = browse(scheme=scheme, width=width)
    axe = importlib.import_module("axe_playwright_python.sync_playwright").Axe()
    found: list[Any] = []
    for path in ("/login", *PATHS):
        tab.open(path)
        violations = axe.run(tab.page).response["violations"]
        found += [(path, one["id"], one["impact"], one["nodes"][0]["html"][:200]) for one in violations]
        if tab.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
            found.append((path, "wider than the window"))
    assert found == []


def test_twelve_tabs_of_one_browser_load(browse: Open) -> None:
    """Over HTTP/1.1 a browser has six connections to a host; with a stream for each tab the seventh would hang."""
    first = browse()
    for _ in range(11):
        page = first.page.context.new_page()
        page.goto(f"{first.site.url}/console", wait_until="load", timeout=10_000)
        page.locator("h1").wait_for()


def test_the_service_stops_within_five_seconds_under_streams(tmp_path: Any, chromium: Any) -> None:
    port = free_port()
    room = prepare(settings_of(tmp_path, port))
    for site in served(tmp_path, port, room):
        context = chromium.new_context()
        page = context.new_page()
        page.goto(f"{site.url}/console/login", wait_until="load")
        page.fill("#name", "vic")
        page.fill("#password", "a sentence is a good one")
        page.click("main button")
        page.wait_for_url("**/console")
        page.evaluate("for (let n = 0; n < 5; n++) new EventSource('/console/stream')")
        page.wait_for_timeout(1_000)
        stopping = time.monotonic()
        site.process.send_signal(signal.SIGTERM)
        assert site.process.wait(15) == 0
        assert time.monotonic() - stopping <= 5.0
        context.close()


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_states_differ_by_their_shape_for_who_sees_no_colour(browse: Open, deficiency: str) -> None:
    tab = browse()
    tab.open("/releases/release-2")
    session = tab.page.context.new_cdp_session(tab.page)
    session.send("Emulation.setEmulatedVisionDeficiency", {"type": deficiency})
    marks = tab.page.evaluate("[...document.querySelectorAll('.state')].map(e => getComputedStyle(e, '::before').content + e.className)")
    shapes = {mark.split("state ")[1]: mark[:3] for mark in marks if "state " in mark}
    assert shapes["pass"] != shapes["READY"] != shapes["TRAINED"] != shapes["pass"]
