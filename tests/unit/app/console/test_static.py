"""What browsers load is small, of a known version and licence, and as it was published."""

import gzip
import hashlib
from pathlib import Path

import app.console

STATIC = Path(app.console.__file__).parent / "static"
VENDORED = {
    "htmx.min.js": ("htmx.org", "4.0.1", "Zero-Clause BSD", "a0abb04f2f45a1f89d1d4844023245537e5e6014c87b144553e0607b4cc32130"),
}
"""File: (package of the npm registry, version, licence, SHA-256 of the file as in the package's `dist/`)."""


def test_vendored_files_are_as_they_were_published() -> None:
    assert {path.name for path in (STATIC / "vendor").glob("*.js")} == VENDORED.keys()
    for name, (_, _, licence, digest) in VENDORED.items():
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest
        assert licence in (STATIC / "vendor" / f"{name.split('.')[0]}.LICENSE.txt").read_text()


def test_everything_a_page_loads_is_within_sixty_kilobytes() -> None:
    files = [path for path in STATIC.rglob("*") if path.suffix in (".js", ".css")]
    assert len(files) == 3
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) <= 60_000


def test_our_script_makes_no_html_and_no_style() -> None:
    script = (STATIC / "console.js").read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", ".style", "new Function"):
        assert word not in script
