"""What people do to rules, versions, data and access, in a real browser: with and without scripts, on a phone, and axe finds nothing."""

import importlib
from typing import Any

import pytest

from app.db.learning.rule_sets import SqlReplays
from app.domain.ids import utc_now
from app.domain.learning.rule_sets import Mover, Replay, Shift
from tests.fakes.releases import POLICY
from tests.real.console.conftest import Open, Site, Tab

pytestmark = pytest.mark.real
LOOKS = {"mouse": {}, "phone-in-the-dark-without-scripts": {"width": 380, "scheme": "dark", "scripts": False}}
RULES = 'name = "kept"\n[[terms]]\nname = "edit_persistence"\nweight = 2.0\n'


def clean(tab: Tab, *, scripts: bool = True) -> None:
    """Axe finds nothing, and the page is no wider than its window."""
    if not scripts:
        return
    axe = importlib.import_module("axe_playwright_python.sync_playwright").Axe()
    found = [(one["id"], one["nodes"][0]["html"][:200]) for one in axe.run(tab.page).response["violations"]]
    assert found == [], tab.page.url
    assert tab.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), tab.page.url


def outcome() -> Replay:
    """What a labeller would write."""
    movers = [
        Mover(
            inference_id=f"i{n}", segment="task=edit", before=0.1 * n, after=-0.2 * n, paid_before={"edit_persistence": 0.1 * n},
            paid_after={"edit_persistence": -0.2 * n},
        )
        for n in range(5, 0, -1)
    ]  # fmt: skip
    shift = Shift(spoke_before=24, mean_before=0.2, spoke_after=24, mean_after=0.4)
    return Replay(
        turns=24, changed=5, before=(0.0, 0.1, 0.2, 0.3, 0.4), after=(-1.0, 0.0, 0.2, 0.3, 0.4), segments={"task=edit": (24, 0.2, 0.1)},
        terms={"edit_persistence": shift}, movers=tuple(movers), excluded={"no_signal": 3}, name="kept", digest="d" * 64,
    )  # fmt: skip


def answered(site: Site) -> None:
    """As a labeller does between two rounds."""
    book = SqlReplays(site.room.engine)
    asked = book.waiting(POLICY)
    assert asked is not None
    book.settle(asked, outcome=outcome(), refused=None, now=utc_now())


@pytest.mark.parametrize("look", LOOKS)
def test_a_rule_set_is_replayed_and_proposed(browse: Open, site: Site, look: str) -> None:
    scripts = "without" not in look
    tab = browse(who="rosa", **LOOKS[look])
    page = tab.page
    tab.open("/rewards")
    clean(tab, scripts=scripts)
    page.get_by_role("link", name="Replay a rule set").click()
    clean(tab, scripts=scripts)
    page.fill("#f-toml", RULES)
    page.get_by_role("button", name="Replay").click()
    page.get_by_text("It waits for the labeller").wait_for()
    answered(site)
    page.reload()
    page.get_by_text("5 of the newest 24 labels would move").wait_for()
    clean(tab, scripts=scripts)
    page.get_by_role("link", name="Propose it").click()
    clean(tab, scripts=scripts)
    page.get_by_role("button", name="Propose").click()
    page.wait_for_url("**/rewards**done=**")
    page.get_by_text("Done. What is shown is how it is now.").wait_for()


@pytest.mark.parametrize("scripts", [True, False])
def test_a_follow_up_is_read_by_keys_alone(browse: Open, site: Site, scripts: bool) -> None:
    tab = browse(who="ada" if scripts else "bob", scripts=scripts, width=380)
    page = tab.page
    tab.open("/readings")
    clean(tab, scripts=scripts)
    assert "leaned to" not in page.inner_text("main")
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Dissatisfied":
            break
    page.keyboard.press("Enter")
    page.wait_for_url("**seen=**")
    assert "leaned to satisfied and abstained" in page.inner_text("main")
    clean(tab, scripts=scripts)


@pytest.mark.parametrize("look", LOOKS)
def test_a_version_is_pinned_and_unpinned(browse: Open, site: Site, look: str) -> None:
    scripts = "without" not in look
    tab = browse(who="ada", **LOOKS[look])
    page = tab.page
    tab.open("/versions/v1")
    page.get_by_role("link", name="Pin it").click()
    assert "kept until somebody unpins it" in page.text_content(".verdict")
    clean(tab, scripts=scripts)
    page.fill("#reason", "the good old one")
    page.get_by_role("button", name="Pin").click()
    page.get_by_text("the good old one").wait_for()
    clean(tab, scripts=scripts)
    page.get_by_role("link", name="Unpin it").click()
    page.fill("#reason", "over")
    page.get_by_role("button", name="Unpin").click()
    page.get_by_role("link", name="Pin it", exact=True).wait_for()


@pytest.mark.parametrize("look", LOOKS)
def test_letters_are_replayed_and_a_person_is_erased(browse: Open, site: Site, look: str) -> None:
    scripts = "without" not in look
    tab = browse(who="root", **LOOKS[look])
    page = tab.page
    tab.open("/data")
    clean(tab, scripts=scripts)
    page.get_by_role("link", name="1", exact=True).click()
    page.get_by_role("button", name="Replay").wait_for()
    clean(tab, scripts=scripts)
    page.get_by_role("button", name="Replay").click()
    page.get_by_text("it makes no sense even now").wait_for()
    tab.open("/data")
    page.locator("form.acts").get_by_role("button", name="Replay").click()
    page.get_by_role("button", name="Replay").click()
    page.get_by_text("0 letters applied, 1 make no sense even now").wait_for()
    clean(tab, scripts=scripts)
    tab.open("/do/erase/person")
    clean(tab, scripts=scripts)
    pseudonym = ("a" if scripts else "b") * 32
    page.fill("#f-pseudonym", pseudonym)
    page.get_by_role("button", name="Erase").click()
    page.wait_for_url(f"**/erasures/{pseudonym}**")  # the proof itself asks a broker, which this site has not got
    tab.open("/data")
    page.get_by_role("link", name=pseudonym).wait_for()
    clean(tab, scripts=scripts)


@pytest.mark.parametrize("look", LOOKS)
def test_a_person_is_added_let_in_and_shut_out(browse: Open, site: Site, look: str) -> None:
    scripts = "without" not in look
    name = "carl" if scripts else "carla"
    tab = browse(who="root", **LOOKS[look])
    page = tab.page
    tab.open("/access")
    clean(tab, scripts=scripts)
    page.get_by_role("link", name="Add a person").click()
    clean(tab, scripts=scripts)
    page.fill("#f-name", "vic")
    page.check("input[name=role_viewer]")
    page.get_by_role("button", name="Add").click()
    page.get_by_text("there is somebody called vic").wait_for()
    assert page.is_checked("input[name=role_viewer]"), "what was typed is kept"
    page.fill("#f-name", name)
    page.get_by_role("button", name="Add").click()
    link = page.text_content("#secret")
    clean(tab, scripts=scripts)
    theirs = browse(who=None, scripts=scripts)
    theirs.page.goto(link)
    theirs.page.fill("#password", "a sentence is a good one")
    theirs.page.fill("#again", "a sentence is a good one")
    theirs.page.click("main button")
    theirs.page.wait_for_url("**/console")
    tab.open(f"/people/{name}")
    clean(tab, scripts=scripts)
    page.get_by_role("link", name="Disable").click()
    page.get_by_role("button", name="Disable").click()
    page.get_by_text("disabled since").wait_for()
    if scripts:
        theirs.page.wait_for_url("**/login**", timeout=10_000)  # its stream ended
    else:
        theirs.open("/releases")
        assert "/login" in theirs.page.url


@pytest.mark.parametrize("look", LOOKS)
def test_a_key_is_made_and_revoked(browse: Open, site: Site, look: str) -> None:
    scripts = "without" not in look
    tab = browse(who="root", **LOOKS[look])
    page = tab.page
    tab.open("/do/make_key/new")
    clean(tab, scripts=scripts)
    page.fill("#f-name", f"an editor {look}")
    page.check("input[name=scope_read]")
    page.get_by_role("button", name="Make").click()
    prefix = page.text_content("#secret")[:11]
    tab.open(f"/keys/{prefix}")
    clean(tab, scripts=scripts)
    page.get_by_role("link", name="Revoke").click()
    page.get_by_role("button", name="Revoke").click()
    page.get_by_text("revoked at").first.wait_for()


def test_a_session_that_ends_over_a_rule_set_gives_it_back(browse: Open, site: Site) -> None:
    tab: Any = browse(who="rosa")
    page = tab.page
    tab.open(f"/do/replay_rules/{POLICY}")
    page.fill("#f-toml", RULES + "# words that took a while\n")
    page.context.clear_cookies()
    page.get_by_role("button", name="Replay").click()
    page.get_by_text("your session has ended").wait_for()
    page.fill("#name", "rosa")
    page.fill("#password", "a sentence is a good one")
    page.click("main button")
    page.get_by_role("button", name="Send it").click()
    page.wait_for_url("**/replays/**")
    assert "words that took a while" in page.content()
    answered(site)
