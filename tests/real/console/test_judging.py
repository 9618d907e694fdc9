"""Judging blind in a real browser: by keys alone and without scripts, and nothing is told before the vote."""

import pytest

from tests.real.console.conftest import Open

pytestmark = pytest.mark.real


@pytest.mark.parametrize("scripts", [True, False])
def test_a_pair_is_judged_by_keys_alone_and_told_afterwards(browse: Open, scripts: bool) -> None:
    tab = browse(who="bob" if scripts else "ada", scripts=scripts)
    page = tab.page
    tab.open("/pairs/release-2")
    assert "You said" not in page.inner_text("main")
    assert "tiny-v2" not in page.inner_text("main")
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Both the same":
            break
    page.keyboard.press("Enter")
    page.wait_for_url("**seen=**")
    told = page.inner_text("main")
    assert "You said: both the same" in told
    assert "tiny-v2" in told
    assert "1 of 4 judged by you" in told
