"""From the alarm to the rollback in a real browser: by mouse, by keys alone, on a phone, without scripts, in the dark."""

import os
import re
from pathlib import Path

import pytest

from app.domain.ids import utc_now
from app.domain.release.alarms import AlarmKind
from app.domain.release.releases import ReleaseState
from tests.fakes.releases import POLICY
from tests.real.console.conftest import Open, Site, Tab

pytestmark = pytest.mark.real
LOOKS = {
    "mouse": {}, "phone": {"width": 380}, "without-scripts": {"scripts": False}, "dark": {"scheme": "dark"},
    "phone-in-the-dark-without-scripts": {"width": 380, "scheme": "dark", "scripts": False},
}  # fmt: skip
PICTURES = os.environ.get("RATCHET_PICTURES")
"""A folder for pictures of the pages, such as docs/console."""


def alarm(site: Site, release_id: str) -> None:
    """What the watch raises when the champion burns its limits and nothing is healthier."""
    site.room.clock.now = utc_now()
    site.room.desk.raise_incident(POLICY, release_id=release_id, reason="answers fail twice as often as the limit allows")


def calm(site: Site) -> None:
    site.room.clock.now = utc_now()
    site.room.desk.end_incident(POLICY, reason="it came back")
    if site.room.ledger.alarms(POLICY) and any(a.kind is AlarmKind.BREAKER and a.ended_at is None for a in site.room.ledger.alarms(POLICY)):
        for person in ("user:carol", "user:dan"):
            site.room.desk.unfreeze(POLICY, actor=person)


def fits(tab: Tab) -> bool:
    """Whether the page is no wider than its window, once it has settled."""
    for _ in range(50):
        if tab.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"):
            return True
        tab.page.wait_for_timeout(100)
    return False


def picture(tab: Tab, name: str) -> None:
    if PICTURES:
        tab.page.screenshot(path=str(Path(PICTURES) / f"{name}.png"), full_page=False)


@pytest.mark.parametrize("look", LOOKS)
def test_from_the_inbox_to_the_rollback(browse: Open, site: Site, look: str) -> None:
    tab = browse(**LOOKS[look])
    page, release_id = tab.page, site.candidate()
    name = site.room.desk.find(release_id).version_name
    tab.open()
    page.get_by_text(f"{name} is ready").wait_for()
    picture(tab, f"inbox-{look}")
    page.click(f'a[aria-label="Decide: {name} is ready"]')
    page.get_by_text("Safe by every gate: needs 1 more approval").wait_for()
    picture(tab, f"candidate-{look}")
    page.get_by_role("link", name="Approve").click()
    assert "Yours is the last approval needed" in page.text_content(".verdict")
    picture(tab, f"approve-{look}")
    page.fill("#reason", "every gate has room to spare")
    page.get_by_role("button", name="Approve").click()
    page.get_by_text("Done. What is shown is how it is now.").wait_for()
    assert site.room.desk.find(release_id).state is ReleaseState.APPROVED
    site.promote(release_id)
    alarm(site, release_id)
    tab.open()
    page.click("text=Look")
    page.locator(".acts").get_by_role("link", name="Roll back").click()
    assert re.search(rf"{name} → .* people; \d+ open conversations? go on with", page.text_content(".verdict"))
    page.get_by_role("button", name="Roll back").click()
    page.get_by_text("Done. What is shown is how it is now.").wait_for()
    assert site.room.desk.find(release_id).state is ReleaseState.ROLLED_BACK
    calm(site)
    assert fits(tab) or look.endswith("scripts")


def test_an_alarm_comes_by_itself_and_three_keys_roll_back(browse: Open, site: Site) -> None:
    """From the alarm on the screen to the version that was before: no mouse, ten keys at most, and what was typed meanwhile stays."""
    release_id = site.candidate()
    site.room.desk.approve(release_id, approver="user:bob", evidence=site.room.desk.find(release_id).evidence_digest or "")
    site.promote(release_id)
    tab = browse()
    page, keys = tab.page, 0
    tab.open()
    page.focus("#find")
    page.keyboard.type("half a wo")
    alarm(site, release_id)
    page.get_by_text("Alarm: incident").wait_for(timeout=5_000)
    assert page.input_value("#find") == "half a wo"
    assert page.evaluate("document.activeElement.id") == "find"
    page.evaluate("document.activeElement.blur()")
    for key in ("r", "b"):
        page.keyboard.press(key)
        keys += 1
    page.wait_for_url("**/act/roll_back/**")
    assert page.evaluate("document.activeElement.id") == "reason"
    page.keyboard.press("Enter")
    keys += 1
    page.wait_for_url("**done=**")
    assert site.room.desk.find(release_id).state is ReleaseState.ROLLED_BACK
    assert keys <= 10
    page.keyboard.press("?")
    page.get_by_role("heading", name="Keys").wait_for()
    calm(site)


def test_a_session_that_ends_over_a_form_gives_the_form_back(browse: Open, site: Site) -> None:
    tab = browse(who="bob")
    page, release_id = tab.page, site.candidate()
    tab.open(f"/act/approve/{release_id}")
    page.fill("#reason", "words that took a while")
    tab.page.context.clear_cookies()
    page.get_by_role("button", name="Approve").click()
    page.get_by_text("your session has ended").wait_for()
    assert site.room.desk.find(release_id).state is ReleaseState.READY
    page.fill("#name", "bob")
    page.fill("#password", "a sentence is a good one")
    page.click("main button")
    page.get_by_text("words that took a while").wait_for()
    page.get_by_role("button", name="Send it").click()
    page.wait_for_url("**done=**")
    assert site.room.desk.find(release_id).state is ReleaseState.APPROVED


def test_a_session_that_is_ended_ends_its_stream_within_two_seconds(browse: Open, site: Site) -> None:
    tab = browse(who="vic")
    tab.open()
    tab.page.wait_for_timeout(1_000)
    other = browse(who=None)
    other.page.context.add_cookies(tab.page.context.cookies())
    other.open()
    other.page.get_by_role("button", name="Sign out").click()
    tab.page.wait_for_url("**/console/login**", timeout=3_000)
