"""A test run says at its end what ran and which real parts took part."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_end_of_a_run_names_what_ran_and_the_real_parts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "run"), "-n", "1"]
    chosen = ["tests/integration/database/test_database_fixtures.py", "tests/unit/app/domain/test_slots.py"]
    said = subprocess.run([*command, *chosen], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "what ran" in said
    assert [line.split()[0] for line in said.splitlines() if "(of all processes together)" in line] == ["tests/integration", "tests/unit"]
    assert "real processes: PostgreSQL" in said
