"""Tokens of forms, and where somebody may be sent after signing in."""

import pytest

from app.access.forms import FormTokens, local_path


def test_a_form_fits_whoever_it_was_made_for_while_its_secret_is_honoured() -> None:
    known = ["new", "old"]
    forms, before = FormTokens(lambda: known), FormTokens(lambda: ["old"])
    assert forms.of("ada") != forms.of("bob")
    assert forms.fits(forms.of("ada"), "ada")
    assert forms.fits(before.of("ada"), "ada"), "made before the secrets were rotated"
    assert not before.fits(forms.of("ada"), "ada")
    assert not forms.fits(forms.of("ada"), "bob")
    assert not forms.fits("", "ada")
    assert not forms.fits("é" * 64, "ada")


def test_every_browser_gets_another_cookie_that_nobody_guesses() -> None:
    made = {FormTokens.fresh_cookie() for _ in range(20)}
    assert len(made) == 20
    assert {len(cookie) for cookie in made} == {32}  # 24 bytes


@pytest.mark.parametrize("asked", ["/console", "/console/releases/r1?policy=tab&a=1", "/console/"])
def test_a_path_of_the_console_is_gone_on_to(asked: str) -> None:
    assert local_path(asked) == asked


@pytest.mark.parametrize(
    "asked",
    [
        None, "", "/", "/consoles", "/feedback", "//evil.org/console", "https://evil.org/console", "https:/console", "\\\\evil.org",
        "/console\\evil", "/console//evil.org", "/console/\u202e", "/console/\nx", "console",
    ],
)  # fmt: skip
def test_every_other_place_is_the_first_page(asked: str | None) -> None:
    assert local_path(asked) == "/console"
