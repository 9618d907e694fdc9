"""The console's colours are readable: WCAG 2.2, success criterion 1.4.3, 4.5 to 1 for text."""

import re
from pathlib import Path

import pytest

import app.console

STYLE = (Path(app.console.__file__).parent / "static" / "console.css").read_text()
SCHEMES = [dict(re.findall(r"--(\w+): (#\w+)", block)) for block in re.findall(r":root \{([^}]*)\}", STYLE)]


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(digit * 2 for digit in digits) if len(digits) == 3 else digits
    channels = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_black_on_white_is_21_to_1() -> None:
    assert contrast("#000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("scheme", SCHEMES, ids=["light", "dark"])
@pytest.mark.parametrize("text", ["ink", "soft", "go", "stop", "wait", "link"])
@pytest.mark.parametrize("ground", ["page", "card"])
def test_text_stands_out_from_its_ground(scheme: dict[str, str], text: str, ground: str) -> None:
    assert contrast(scheme[text], scheme[ground]) >= 4.5


@pytest.mark.parametrize("scheme", SCHEMES, ids=["light", "dark"])
@pytest.mark.parametrize("series", ["s0", "s1", "s2", "s3"])
def test_lines_stand_out_from_their_ground(scheme: dict[str, str], series: str) -> None:
    """WCAG 2.2, success criterion 1.4.11: 3 to 1 for what is no text."""
    assert contrast(scheme[series], scheme["card"]) >= 3.0


def test_buttons_are_readable_on_their_ground() -> None:
    for scheme in SCHEMES:
        assert contrast(scheme["card"], scheme["link"]) >= 4.5
        assert all(contrast(scheme["ink"], scheme[ground]) >= 4.5 for ground in ("tint", "plus", "minus"))
