"""`make drill`: a database is lost, restored to a moment, and the loop goes on."""

import json
import subprocess
import sys

from tests.architecture.sources import ROOT


def test_a_lost_database_comes_back_whole_forgets_again_and_trains_on_nothing_twice() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.bench.drill"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["missed"] == []
    assert found["trained_twice"] == 0
