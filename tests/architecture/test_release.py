"""What a release tells about itself: every package of the lock, with its hashes and a licence."""

import json
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
    }
    assert told == {spelled_alike(pin): set(hashes) for pin, hashes in locked_pins()}
    assert bill["dependencies"][0]["dependsOn"] == [each["bom-ref"] for each in bill["components"]]
    table = (tmp_path / "licences.md").read_text()
    assert [line for line in table.splitlines() if line.endswith("| not stated |")] == []
