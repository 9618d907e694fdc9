"""podman and buildah as Debian has them, installed if need be, and images that are made here.

The base image that infra/Dockerfile names is on a registry that not every machine reaches. In its place stands one of Debian's own packages
(debootstrap), which is kept under .cache; the layers above it are podman's to keep, so that only what changed is built again.

    python -m tests.real.containers.podman      whether images are built and containers run here: exit code 3 and the reason where not
"""

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.real.parts import ROOT, debian, missing

CACHE = ROOT / ".cache" / "containers"
SUITE = "bookworm"
BASE, IMAGE = f"localhost/ratchet-debian:{SUITE}", "localhost/ratchet-test"
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
"""What infra/Dockerfile asks of BASE."""
PROGRAMS = {
    "podman": "podman runc netavark aardvark-dns catatonit", "iptables": "iptables", "nft": "nftables", "buildah": "buildah",
    "debootstrap": "debootstrap",
}  # fmt: skip
MOST = {resource.RLIMIT_NOFILE: 16_384, resource.RLIMIT_NPROC: 16_384}
"""Of files and processes; buildah may not pass on more than it has itself."""
CONFIG = """
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
"""
"""No more of anything than this machine may give: podman's own limits are above those of a machine that is a container itself."""

LAYERS_BYTES = 12_000_000_000
"""What the image and the layers that it is made of take."""
LOCKED = ("--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--security-opt=no-new-privileges", "--tmpfs=/tmp:mode=1777")
"""As production runs containers: a root that cannot be written, no capabilities, nobody's rights."""


def tools() -> dict[str, str]:
    """Installs what is missing; the variables that every call needs. Fails by name what cannot be had."""
    for program, packages in PROGRAMS.items():
        debian(program, packages)
    CACHE.mkdir(parents=True, exist_ok=True)
    files, processes = (min(most, resource.getrlimit(kind)[1]) for kind, most in MOST.items())
    (CACHE / "containers.conf").write_text(CONFIG.format(files=files, processes=processes))
    return {**os.environ, "CONTAINERS_CONF": str(CACHE / "containers.conf")}


def podman(*words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    """One command of podman's. Raises `AssertionError` with what it said where it must not fail."""
    done = subprocess.run(["podman", *words], env=tools(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, f"podman {' '.join(words)}: {done.stderr[-3000:]}{done.stdout[-1000:]}"
    return done


def base_image() -> str:
    """Debian with a Python, imported once."""
    tools()
    if podman("image", "exists", BASE, check=False).returncode != 0:
        packed = CACHE / f"{SUITE}.tar"
        if not packed.is_file():
            _debootstrap(packed)
        podman("import", str(packed), BASE)
    return BASE


def _debootstrap(packed: Path) -> None:
    root = CACHE / "root"
    shutil.rmtree(root, ignore_errors=True)
    command = ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", SUITE, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        missing("a base image", f"{' '.join(command)}: {done.stdout[-600:]}{done.stderr[-600:]}")
    half = packed.with_suffix(".half")
    subprocess.run(["tar", "-C", str(root), "-c", "--exclude=./var/cache/apt/archives/*.deb", "-f", str(half), "."], check=True)
    half.rename(packed)
    shutil.rmtree(root)


def refusal() -> str | None:
    """Why no image can be built here that fetches a package, or no container of it runs as production runs them, with a port of this
    machine; None where all of that is so."""
    free = shutil.disk_usage("/var").free
    if free < LAYERS_BYTES:
        return f"{free / 1e9:.0f} GB are free below /var, where images lie, and {LAYERS_BYTES / 1e9:.0f} are needed"
    try:
        probe = build("localhost/ratchet-probe", Path(__file__).with_name("Probe"), ROOT / "infra")
        podman("run", "--rm", *LOCKED, "--publish=127.0.0.1::80", probe, "true")
        podman("rmi", probe)
    except (pytest.fail.Exception, AssertionError) as cannot:
        return str(cannot)
    return None


def built_image(name: str = IMAGE, tree: Path = ROOT) -> str:
    """The image of a tree as its own infra/Dockerfile builds it; without arguments of the code as it lies here. Returns the name."""
    return build(name, tree / "infra" / "Dockerfile", tree)


def build(name: str, file: Path, context: Path) -> str:
    """Build on our base, with the layers of before where they still fit; the image that had the name goes. Returns the name."""
    command = [
        "buildah", "build", "--isolation=chroot", "--network=host", "--format=docker", "--layers", "--platform=linux/amd64",
        "--tag", name, "--file", str(file), "--build-arg", f"BASE={base_image()}", *pip_volumes(), str(context),
    ]  # fmt: skip
    before = podman("image", "inspect", "--format={{.Id}}", name, check=False).stdout.strip()
    done = subprocess.run(command, env=tools(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    if before and before != podman("image", "inspect", "--format={{.Id}}", name).stdout.strip():
        podman("rmi", before, check=False)  # it stays where a container of it runs
    return name


def pip_volumes() -> list[str]:
    """What this machine's pip is told (its configuration, folders of packages, authorities) told to the pip of a build, read-only."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "debug"], capture_output=True, text=True, check=False).stdout
    files = [Path(name) for name in re.findall(r"^\s+(/\S+), exists: True$", said, re.MULTILINE)]
    text = "\n".join(file.read_text() for file in files)
    folders = {Path(found) for found in re.findall(r"(?:file://|(?<=[\s=]))(/[^\s:]+)", text)}
    tops = {folder.parent if folder.name == "simple" else folder for folder in folders}  # an index beside the files that it leads to
    seen = sorted({str(path) for path in (*files, *tops) if path.exists()})
    return [word for path in seen for word in ("--volume", f"{path}:{path}:ro")]


def running(name: str, image: str, words: Sequence[str], *options: str) -> None:
    """Start a container, locked."""
    podman("run", "--detach", "--name", name, *LOCKED, *options, image, *words)


def logs(name: str) -> str:
    """Everything that a container said."""
    done = podman("logs", name, check=False)
    return done.stdout + done.stderr


if __name__ == "__main__":
    why = refusal()
    print(why or "containers run here", file=sys.stderr if why else sys.stdout)
    sys.exit(3 if why else 0)
