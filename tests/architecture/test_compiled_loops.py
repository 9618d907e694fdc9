"""Where compiled loops are kept: they are pickles, so a service reads none that another user could have written."""

from pathlib import Path

from app.policy.compiling import SOURCES

ROOT = Path(__file__).resolve().parents[2]


def test_the_service_keeps_them_in_its_own_folder() -> None:
    unit = dict(line.split("=", 1) for line in (ROOT / "infra/systemd/ratchet@.service").read_text().splitlines() if "NUMBA" in line)
    assert unit == {"Environment": "NUMBA_CACHE_DIR=/var/lib/ratchet/compiled"}
    assert "StateDirectory=ratchet\n" in (ROOT / "infra/systemd/ratchet@.service").read_text(), "systemd gives it to the unit's own user"


def test_they_are_compiled_in_one_place() -> None:
    """Which says what is done where nothing can be kept, or what was kept is damaged."""
    users = [path for room in ("app", "pipelines") for path in (ROOT / room).rglob("*.py") if "njit" in path.read_text()]
    assert [path.relative_to(ROOT).as_posix() for path in users] == ["app/policy/compiling.py"]


def test_whatever_loops_are_made_of_is_what_kept_ones_are_found_by() -> None:
    """A helper in a file that is not would be changed by an upgrade, and the loops that call it would go on as they were."""
    words = ("import compiled", "import numba", "from numba", "from llvmlite")
    files = [path for room in ("app", "pipelines") for path in (ROOT / room).rglob("*.py")]
    of_loops = {path.relative_to(ROOT).as_posix() for path in files if any(word in path.read_text() for word in words)}
    places = [f"app/{place}" for place in SOURCES]
    assert of_loops
    assert [file for file in of_loops if not any(file == place or file.startswith(f"{place}/") for place in places)] == []
    assert [place for place in places if not any(file.startswith(place) for file in of_loops | {"app/policy/compiling.py"})] == []
