"""What a release tells about itself: every package of the lock, with its hashes and a licence."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

from tests.architecture.sources import ROOT
from tests.architecture.test_dependencies import locked_pins, spelled_alike


def test_a_release_names_every_locked_package_with_its_hashes_and_licence(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "infra" / "release.py", "--out", tmp_path], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    bill = json.loads((tmp_path / "sbom.cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    told = {
        spelled_alike(f"{each['name']}=={each['version']}"): {
            checksum["content"] for file in each["externalReferences"] for checksum in file["hashes"]
        }
        for each in bill["components"]
        if each["type"] == "library"
    }
    assert told == {spelled_alike(pin): set(hashes) for pin, hashes in locked_pins()}
    assert bill["dependencies"][0]["dependsOn"] == [each["bom-ref"] for each in bill["components"]]
    images = {f"{each['name']}:{each['version']}" for each in bill["components"] if each["type"] == "container"}
    compose = "".join((ROOT / "infra" / name).read_text() for name in ("compose.yaml", "compose.standby.yaml", "Dockerfile"))
    assert len(images) == 5, "PostgreSQL, Kafka, SeaweedFS, Prometheus and the base of ours"
    assert all(image in compose for image in images)
    table = (tmp_path / "licences.md").read_text()
    assert [line for line in table.splitlines() if line.endswith("| not stated |")] == []


def test_a_release_asks_for_the_digest_of_every_image_of_others() -> None:
    release = runpy.run_path(str(ROOT / "infra" / "release.py"))
    digest = "@sha256:" + "a" * 64
    named = [
        "postgres:18",
        "postgres:18.6" + digest,
        "docker.io/library/postgres" + digest,
        "postgres:18.6" + digest[:-1],
        "registry:5000/x",
    ]
    assert [release["is_pinned"](name) for name in named] == [False, True, False, False, False]
    assert all(release["is_pinned"](name) for name in release["images"]())
