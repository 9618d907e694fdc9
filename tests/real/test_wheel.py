"""A release as others get it: the wheel in an environment of its own, outside the checkout, with the demo of the tiny model to its end."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.real.parts import ROOT

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

PARTS = ("app", "pipelines", "migrations")
BUILT_FROM = (*PARTS, "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, made as `make release` makes it, of a copy: building leaves folders beside the sources."""
    tree = tmp_path_factory.mktemp("tree")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name)
    make = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    assert " ".join(["pip", *make]) in (ROOT / "Makefile").read_text()
    subprocess.run([sys.executable, "-m", "pip", *make, str(tree / "dist"), "."], cwd=tree, check=True, capture_output=True)
    (made,) = (tree / "dist").glob("ratchet-*.whl")
    return made


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> "Elsewhere":
    """A fresh environment with the wheel. What it needs is that of the checkout's environment, found by a path and not installed again."""
    folder = tmp_path_factory.mktemp("elsewhere")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    locked = next(path for path in map(Path, sys.path) if (path / "sqlalchemy").is_dir())
    (packages / "locked.pth").write_text(f"{locked}\n")  # a path alone: the editable installation there is not followed
    return Elsewhere(folder)


class Elsewhere:
    """A user's home without a checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()

    def run(self, program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a program of the environment, with nothing of ours in its variables."""
        environment = {"HOME": str(self.home), "PATH": "/usr/bin:/bin", "RAY_worker_niceness": "0"}
        command = [str(self.folder / "venv" / "bin" / program), *arguments]
        return subprocess.run(command, cwd=self.home, env=environment, capture_output=True, text=True, check=False)


def test_everything_that_is_not_a_test_or_a_tool_of_the_checkout_is_in_the_wheel(wheel: Path) -> None:
    files = subprocess.run(["git", "ls-files", *PARTS], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    there = set(zipfile.ZipFile(wheel).namelist())
    assert len(files) > 400
    assert sorted(set(files) - there) == []
    assert {name.split("/")[0] for name in there} == {*PARTS, f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"}


def test_the_code_that_runs_is_the_wheel_s(elsewhere: Elsewhere) -> None:
    code = "import app, pipelines; print(app.__file__); print(pipelines.__file__)"
    found = elsewhere.run("python", "-c", code).stdout.split()
    assert [Path(line).is_relative_to(elsewhere.folder) for line in found] == [True, True]


def test_a_database_is_made_by_the_migrations_of_the_wheel(elsewhere: Elsewhere) -> None:
    made = elsewhere.run("ratchet", "db", "upgrade")
    assert made.returncode == 0, made.stderr
    assert elsewhere.run("ratchet", "db", "check").returncode == 0


def test_the_demo_runs_to_its_end_without_a_checkout(elsewhere: Elsewhere) -> None:
    played = elsewhere.run("ratchet", "demo", "--model", "tiny", "--json")
    assert played.returncode == 0, played.stdout[-3000:] + played.stderr[-2000:]
    told = json.loads(played.stdout.strip().splitlines()[-1])
    assert told["promoted"]
    assert (elsewhere.home / ".cache" / "ratchet" / "models" / "tiny" / "READY").is_file()
