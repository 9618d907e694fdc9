"""infra/setup.py against a registry of three tiny wheels: it goes on after an interruption, and what is done costs nothing."""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "ratchet"
version = "0.1.0"
"""

BACKEND = """
import zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = "ratchet-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{wheel_directory}/{name}", "w") as wheel:
        wheel.writestr("ratchet.pth", "")
        wheel.writestr("ratchet-0.1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: ratchet\\nVersion: 0.1.0\\n")
        wheel.writestr("ratchet-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("ratchet-0.1.0.dist-info/RECORD", "")
    return name
"""


def publish(registry: Path, name: str, version: str) -> None:
    """Adds a wheel with one module that knows its version."""
    with zipfile.ZipFile(registry / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        wheel.writestr(f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-{version}.dist-info/RECORD", "")


def set_up(checkout: Path, *steps: str) -> subprocess.CompletedProcess[str]:
    """Runs the checkout's own copy of the script, with its registry for pip and nothing else."""
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(checkout / "registry")}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))} | pip
    script = [sys.executable, str(checkout / "infra" / "setup.py"), *steps]
    return subprocess.run(script, env=environment, capture_output=True, text=True, check=False)


def site_packages(checkout: Path) -> Path:
    """Where the checkout's own environment has its packages."""
    return checkout / ".venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def installed(checkout: Path, module: str) -> str:
    """The version of a module as the checkout's own environment imports it; empty where it cannot."""
    code = f"import {module}; print({module}.VERSION)"
    return subprocess.run([checkout / ".venv/bin/python", "-c", code], capture_output=True, text=True, check=False).stdout.strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small project, set up once; each test below leaves it whole."""
    checkout = tmp_path_factory.mktemp("checkout")
    for folder in ("infra", "registry"):
        (checkout / folder).mkdir()
    shutil.copy(ROOT / "infra" / "setup.py", checkout / "infra")
    for loops in ("decoding/body.py", "storage/delta_loops.py"):
        (checkout / "app" / "policy" / loops).parent.mkdir(parents=True)
        (checkout / "app" / "policy" / loops).write_text("def prepare() -> None:\n    pass\n")
    for package in ("", "policy", "policy/decoding", "policy/storage"):
        (checkout / "app" / package / "__init__.py").touch()
    (checkout / "pyproject.toml").write_text(PYPROJECT)
    (checkout / "backend.py").write_text(BACKEND)
    (checkout / "requirements.lock").write_text("small==1.0\ntorch==2.13.0\n")
    for name, version in (("torch", "2.13.0"), ("small", "1.0"), ("small", "2.0")):
        publish(checkout / "registry", name, version)
    first = set_up(checkout, "venv")
    assert first.returncode == 0, first.stderr
    steps = [line.partition("ratchet set-up: ")[2] for line in first.stdout.splitlines() if " ..." not in line]
    assert [step.split()[1].rstrip(":") for step in steps] == ["the", "the", "torch==2.13.0", "torch==2.13.0", "ratchet", "loops"]
    return checkout


def test_a_set_up_that_is_done_costs_nothing(checkout: Path) -> None:
    started = time.perf_counter()
    again = set_up(checkout, "venv")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert time.perf_counter() - started < 2


def test_a_set_up_that_was_cut_off_goes_on(checkout: Path) -> None:
    """As `kill -9` leaves it: no stamp, and a package whose metadata is there although not all of its files are."""
    packages = site_packages(checkout)
    (checkout / ".venv/.ratchet-setup").unlink()
    (packages / "small.py").unlink()
    (packages / "small-1.0.dist-info" / "INSTALLER").unlink()
    assert installed(checkout, "small") == ""
    assert set_up(checkout, "venv").returncode == 0
    assert installed(checkout, "small") == "1.0"
    assert installed(checkout, "torch") == "2.13.0"


def test_an_environment_that_was_cut_off_is_made_anew(checkout: Path) -> None:
    (checkout / ".venv/.ratchet-setup").unlink()
    shutil.rmtree(site_packages(checkout) / "pip")
    assert set_up(checkout, "venv").returncode == 0
    assert installed(checkout, "small") == "1.0"


def test_another_lock_is_installed(checkout: Path) -> None:
    lock = checkout / "requirements.lock"
    before = lock.read_text()
    lock.write_text(before.replace("small==1.0", "small==2.0"))
    assert set_up(checkout, "venv").returncode == 0
    assert installed(checkout, "small") == "2.0"
    lock.write_text(before)
    assert set_up(checkout, "venv").returncode == 0
    assert installed(checkout, "small") == "1.0"


def test_a_file_with_another_hash_than_the_lock_s_is_not_installed(checkout: Path) -> None:
    lock = checkout / "requirements.lock"
    before, wheel = lock.read_text(), checkout / "registry" / "small-2.0-py3-none-any.whl"
    true = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lock.write_text(f"small==2.0 \\\n    --hash=sha256:{'0' * 64}\ntorch==2.13.0\n")
    refused = set_up(checkout, "venv")
    assert refused.returncode == 2
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in refused.stderr
    assert installed(checkout, "small") == "1.0"
    lock.write_text(f"small==2.0 \\\n    --hash=sha256:{true}\ntorch==2.13.0\n")
    assert set_up(checkout, "venv").returncode == 0
    assert (installed(checkout, "small"), installed(checkout, "torch")) == ("2.0", "2.13.0")
    lock.write_text(before)
    assert set_up(checkout, "venv").returncode == 0


def test_torch_is_the_file_that_the_lock_names_or_says_itself_that_another_registry_built_it(checkout: Path) -> None:
    lock, registry = checkout / "requirements.lock", checkout / "registry"
    before, kept = lock.read_text(), (registry / "torch-2.13.0-py3-none-any.whl").read_bytes()
    true = hashlib.sha256(kept).hexdigest()
    lock.write_text(f"small==1.0\ntorch==2.13.0 \\\n    --hash=sha256:{'0' * 64}\n")
    refused = set_up(checkout, "venv")
    assert refused.returncode == 2
    assert f"torch-2.13.0-py3-none-any.whl is not the file that the lock names (sha256 {true})" in refused.stderr
    lock.write_text(f"small==1.0\ntorch==2.13.0 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{true}\n")
    good = set_up(checkout, "venv")
    assert (good.returncode, "another registry's build" in good.stdout, installed(checkout, "torch")) == (0, False, "2.13.0")
    publish(registry, "torch", "2.13.0+cpu")
    lock.write_text(f"small==1.0\ntorch==2.13.0 \\\n    --hash=sha256:{'1' * 64}\n")
    other = set_up(checkout, "venv")
    assert (other.returncode, "torch-2.13.0+cpu-py3-none-any.whl is another registry's build" in other.stdout) == (0, True)
    assert installed(checkout, "torch") == "2.13.0+cpu"
    (registry / "torch-2.13.0+cpu-py3-none-any.whl").unlink()
    lock.write_text(before)
    assert set_up(checkout, "venv").returncode == 0
    assert not (checkout / ".cache" / "torch").exists()


def test_a_step_that_fails_names_its_log_and_is_not_taken_for_done(checkout: Path) -> None:
    lock = checkout / "requirements.lock"
    before = lock.read_text()
    lock.write_text(before + "nowhere==1.0\n")
    failed = set_up(checkout, "venv")
    assert failed.returncode == 2
    assert "setup.log" in failed.stderr
    assert "nowhere==1.0" in failed.stderr
    assert set_up(checkout, "venv").returncode == 2
    lock.write_text(before)
    assert set_up(checkout, "venv").returncode == 0


def test_two_set_ups_at_once_wait_for_each_other(checkout: Path) -> None:
    (checkout / ".venv/.ratchet-setup").unlink()
    script = [sys.executable, str(checkout / "infra" / "setup.py"), "venv"]
    registry = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(checkout / "registry")}
    both = [subprocess.Popen(script, env=os.environ | registry, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=600)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted("waiting for it" in text for text in said) == [False, True]
    assert sorted("installing torch" in text for text in said) == [False, True]  # the one that waited found everything done


def test_an_unknown_step_is_refused_in_one_sentence(checkout: Path) -> None:
    refused = set_up(checkout, "everything")
    assert refused.returncode == 2
    assert refused.stderr == "ratchet set-up: unknown set-up step 'everything': use venv, model, data, vllm, browser, verifiers\n"


@pytest.mark.parametrize("version", [(3, 9, 2), (3, 10, 14), (3, 14, 0)])
def test_a_python_without_wheels_is_refused_with_the_cure(version: tuple[int, ...]) -> None:
    refused = in_set_up(f"setup.require_python({version})")
    assert f"this is Python {'.'.join(map(str, version))} but Ratchet needs 3.11, 3.12 or 3.13" in refused.stderr
    assert "make PYTHON=" in refused.stderr


@pytest.mark.parametrize("version", [(3, 11, 7), (3, 12, 1), (3, 13, 0)])
def test_every_python_with_wheels_is_taken(version: tuple[int, ...]) -> None:
    assert in_set_up(f"setup.require_python({version})").returncode == 0


@pytest.mark.parametrize(
    ("platform", "good"),
    [
        (("linux", "x86_64", "2.31"), True), (("linux", "aarch64", "2.36"), True), (("darwin", "arm64", "14.5"), True),
        (("linux", "x86_64", "2.28"), False), (("linux", "riscv64", "2.39"), False), (("darwin", "x86_64", "14.5"), False),
        (("darwin", "arm64", "13.6"), False), (("win32", "AMD64", "11"), False),
    ],
)  # fmt: skip
def test_a_platform_without_wheels_is_refused_before_anything_is_made(platform: tuple[str, str, str], good: bool) -> None:
    tried = in_set_up(f"setup.require_platform{platform}")
    assert (tried.returncode == 0) is good
    assert good or f"this is {platform[0]} on {platform[1]} ({platform[2]}), for which the lock has no wheels" in tried.stderr


def test_another_python_makes_another_environment() -> None:
    code = "import sys; before = setup.fingerprint(); sys.version_info = (3, 99, 0); print(before != setup.fingerprint())"
    assert in_set_up(code).stdout == "True\n"
    code = "import sys; here = setup.Path(sys.executable); print(setup.runs_this_python(here)); sys.version_info = (3, 99, 0)"
    found = in_set_up(f"setup.VENV = setup.Path(__import__('sys').prefix); {code}; print(setup.runs_this_python(here))")
    assert found.stdout == "True\nFalse\n"


def in_set_up(code: str) -> subprocess.CompletedProcess[str]:
    """What code says that has imported the script."""
    command = [sys.executable, "-c", f"import setup; {code}"]
    return subprocess.run(command, cwd=ROOT / "infra", capture_output=True, text=True, check=False)
