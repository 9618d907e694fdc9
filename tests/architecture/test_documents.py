"""What the documents quote is what the code does: defaults, settings, make targets, subcommands, files, configuration."""

import math
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from app.settings import policies
from pipelines.__main__ import COMMANDS
from pipelines.config import LoopConfig, loop_config
from tests.architecture.sources import ROOT, known_settings

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "infra").glob("*.md"))]
NAMES = [str(document.relative_to(ROOT)) for document in DOCUMENTS]


@pytest.fixture(params=DOCUMENTS, ids=NAMES)
def text(request: pytest.FixtureRequest) -> str:
    document: Path = request.param
    return document.read_text()


def default(path: str) -> object:
    """The default of a dotted name such as `schedule.slot_s`, as TOML would hold it."""
    value: object = LoopConfig()
    for name in path.split("."):
        value = getattr(value, name)
    return msgspec.to_builtins(value)


def test_a_quoted_default_is_the_default(text: str) -> None:
    """Wherever a document says `table.key = value` for a table of the configuration."""
    tables = "|".join(LoopConfig.__struct_fields__)
    for path, value in re.findall(rf"`((?:{tables})\.[a-z_.]+) = ([^`]+)`", text):
        assert tomllib.loads(f"value = {value}")["value"] == default(path), path


def test_quoted_toml_is_accepted(text: str) -> None:
    for block in re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        parsed = tomllib.loads(block)
        if parsed.keys() <= {"policies", *LoopConfig.__struct_fields__}:  # rule sets are TOML too, of another kind
            loop_config(parsed)
            policies(parsed, relative_to=ROOT)


def test_a_quoted_setting_is_read(text: str) -> None:
    known = known_settings()
    assert set(re.findall(r"RATCHET_[A-Z_]*[A-Z]\b", text)) <= known


def test_a_quoted_make_target_is_one(text: str) -> None:
    targets = re.findall(r"^([a-z%-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    patterns = [re.compile(target.replace("%", "[a-z-]+")) for target in targets]
    for target in re.findall(r"(?:`|^\s*\$? ?)make ([a-z][a-z-]*)", text, re.MULTILINE):
        assert any(pattern.fullmatch(target) for pattern in patterns), target


def test_a_quoted_benchmark_exists(text: str) -> None:
    for name in re.findall(r"make bench-([a-z][a-z-]*)", text):
        assert (ROOT / "tests" / "bench" / f"{name.replace('-', '_')}.py").is_file(), name


def test_a_quoted_subcommand_is_one(text: str) -> None:
    assert set(re.findall(r"(?:`|^\s*\$? ?)ratchet ([a-z]+)", text, re.MULTILINE)) <= COMMANDS.keys()


def test_a_linked_file_is_there(text: str, request: pytest.FixtureRequest) -> None:
    document = DOCUMENTS[NAMES.index(request.node.callspec.id)]
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (document.parent / link).exists()] == []


def test_a_quoted_test_is_one(text: str) -> None:
    """`tests/.../test_x.py::test_y`, or `::test_z` of the file that was quoted last."""
    quoted: list[tuple[str, str]] = []
    for file, name in re.findall(r"`(tests/[\w/.]+\.py)?::(test_\w+)`", text):
        quoted.append((file or quoted[-1][0], name))
    assert [test for test in quoted if f"def {test[1]}(" not in (ROOT / test[0]).read_text()] == []


def test_a_quoted_file_of_tests_is_there(text: str) -> None:
    assert [file for file in re.findall(r"`(tests/[\w/.]+\.py)", text) if not (ROOT / file).is_file()] == []


SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
NUMBER = re.compile(r"(\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?)(?: (k|M|[KMGT]B)\b)?")


def numbers(cell: str) -> list[float]:
    """Those of a cell, with their units multiplied out."""
    return [float(digits.replace(",", "")) * SCALE[unit or ""] for digits, unit in NUMBER.findall(cell)]


def test_the_table_of_sizes_is_its_units_times_the_traffic() -> None:
    """Recomputed from the units above it; a seventh is what rounding to one or two digits takes."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in (ROOT / "docs" / "SIZING.md").read_text().splitlines()]
    cells = {row[0]: row[1:] for row in rows if len(row) > 2}

    def unit(begins: str) -> float:
        return next(numbers(row[0])[0] for name, row in cells.items() if name.startswith(begins))

    events, kept_days = unit("events a turn"), 90
    for place, turns_a_day in enumerate(numbers(" ".join(cells["turns a day"]))):
        mean = turns_a_day / 86_400
        peak, stored = 5 * mean, {"segments": turns_a_day * unit("segments:"), "PostgreSQL": turns_a_day * unit("PostgreSQL:")}
        expected = {
            "turns a second, mean and peak": [mean, peak],
            "events a second at the peak": [events * peak],
            "cores for the door": [math.ceil(events * peak / unit("single events at the door"))],
            "members of ingestion": [math.ceil(events * peak / unit("ingestion, one member"))],
            "label processes (at the mean)": [math.ceil(mean / unit("labels, one process"))],
            "tokens a second that engines write at the peak (300 a turn)": [300 * peak],
            **{f"{name} a day, after 90 days": [size, kept_days * size] for name, size in stored.items()},
        }
        for name, wanted in expected.items():
            said = numbers(cells[name][place])[: len(wanted)]
            assert said == pytest.approx(wanted, rel=1 / 7), (name, turns_a_day)
