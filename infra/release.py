"""What a release has to tell about itself: `sbom.cdx.json` (CycloneDX 1.6) and `licences.md`, from the lock and what is installed.

    .venv/bin/python infra/release.py --out dist

Standard library only. A package of the lock that is not installed, or in another version, is refused: nobody knows its licence then. So is
an image of others that infra/ names by its tag alone: a tag is whatever its registry says that day.
"""

import argparse
import json
import re
import sys
import uuid
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SERVED = "Ratchet's own code is Apache-2.0. The quickstart's model, SmolLM2-135M-Instruct, is Apache-2.0 and not part of a release."
UNKNOWN = "not stated"


def locked(lock: str) -> list[tuple[str, str, list[str]]]:
    """(name, version, SHA-256 of each of its files) of a lock, in order."""
    entries = [entry for entry in lock.replace("\\\n", " ").splitlines() if "==" in entry]
    pins = [(entry.split()[0].split("=="), re.findall(r"--hash=sha256:([0-9a-f]{64})", entry)) for entry in entries]
    return [(name, version, hashes) for (name, version), hashes in pins]


def licence_of(name: str) -> str:
    """What a package says its licence is: the SPDX expression, else the classifiers, else the first line of the old field."""
    about = metadata.metadata(name)
    classifiers = [c.rpartition(" :: ")[2] for c in about.get_all("Classifier") or [] if c.startswith("License :: ")]
    named = [c for c in classifiers if c != "OSI Approved"]
    old = str(about["License"]).strip().partition("\n")[0][:100] if "License" in about else ""
    stated = str(about["License-Expression"]) if "License-Expression" in about else ""
    return stated or " OR ".join(named) or old or _title(name) or UNKNOWN


def _title(name: str) -> str:
    """The first line of the licence that a package brings, where it says nothing else."""
    files = [file for file in metadata.files(name) or [] if re.match(r"(?i)licen[cs]e|copying", file.name)]
    texts = [Path(str(file.locate())).read_text(errors="replace").strip() for file in files[:1]]
    return next((text.partition("\n")[0].strip("# ")[:100] for text in texts if text), "")


def component(name: str, version: str, hashes: list[str]) -> dict[str, Any]:
    """One package as CycloneDX has it; the hashes are of the files that the lock allows."""
    purl = f"pkg:pypi/{_normalised(name)}@{version}"
    sums = [{"alg": "SHA-256", "content": digest} for digest in hashes]
    return {
        "type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl,
        "licenses": [{"license": {"name": licence_of(name)}}],
        "externalReferences": [{"type": "distribution", "url": f"{purl}#{each['content'][:12]}", "hashes": [each]} for each in sums],
    }  # fmt: skip


def images() -> list[str]:
    """What the Dockerfile builds on and what compose runs beside our own image, as they name it."""
    based = re.findall(r"^ARG BASE=(\S+)", (ROOT / "infra" / "Dockerfile").read_text(), re.MULTILINE)
    files = sorted((ROOT / "infra").glob("compose*.yaml"))
    run = [name for file in files for name in re.findall(r"^ *image: *(\S+)", file.read_text(), re.MULTILINE)]
    return sorted({name for name in (*based, *run) if name != "ratchet"})


def is_pinned(image: str) -> bool:
    """Whether a digest says which image that is."""
    return re.search(r":[\w.\-]+@sha256:[0-9a-f]{64}$", image) is not None


def container(image: str) -> dict[str, Any]:
    """An image as CycloneDX has it."""
    named, _, digest = image.partition("@")
    name, _, tag = named.rpartition(":")
    purl = f"pkg:oci/{name.rpartition('/')[2]}@{digest.replace(':', '%3A')}?repository_url={name}&tag={tag}"
    return {"type": "container", "bom-ref": purl, "name": name, "version": f"{tag}@{digest}", "purl": purl}


def bill(pins: list[tuple[str, str, list[str]]], *, now: datetime) -> dict[str, Any]:
    """The bill of materials."""
    version = metadata.version("ratchet")
    ours = {
        "type": "application",
        "bom-ref": "ratchet",
        "name": "ratchet",
        "version": version,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
    components = [*(component(*pin) for pin in pins), *(container(image) for image in images())]
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": f"urn:uuid:{uuid.uuid4()}", "version": 1,
        "metadata": {"timestamp": now.isoformat(), "component": ours}, "components": components,
        "dependencies": [{"ref": "ratchet", "dependsOn": [each["bom-ref"] for each in components]}],
    }  # fmt: skip


def report(pins: list[tuple[str, str, list[str]]]) -> str:
    """The licences as a table."""
    rows = [f"| {name} | {version} | {licence_of(name).replace('|', '/')} |" for name, version, _ in pins]
    return "\n".join(["# Licences", "", SERVED, "", "| package | version | licence |", "|---|---|---|", *rows, ""])


def missing(pins: list[tuple[str, str, list[str]]]) -> list[str]:
    """Packages of the lock that are not installed as it says; a local part of a version (+cpu) is the registry's."""
    found = {_normalised(d.name): d.version.partition("+")[0] for d in metadata.distributions()}
    return [f"{name}=={version}" for name, version, _ in pins if found.get(_normalised(name)) != version]


def _normalised(name: str) -> str:
    """As registries spell it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    """Write both; the exit code is 2 where a package is not installed as the lock says, or an image is named without its digest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the two files")
    given = parser.parse_args()
    pins = locked((ROOT / "requirements.lock").read_text())
    if absent := missing(pins):
        print(f"not installed as the lock says: {', '.join(absent)}; run `make venv` first", file=sys.stderr)
        return 2
    if loose := [image for image in images() if not is_pinned(image)]:
        print(f"named without a digest in infra/: {', '.join(loose)}; write tag@sha256:… there", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "sbom.cdx.json").write_text(json.dumps(bill(pins, now=datetime.now(UTC)), indent=1) + "\n")
    (given.out / "licences.md").write_text(report(pins))
    print(f"{given.out}: sbom.cdx.json and licences.md of {len(pins)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
