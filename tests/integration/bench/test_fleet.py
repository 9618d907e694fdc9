"""The bench of rolling upgrades, small: door, relay and ingestion of the release before are replaced under load, there and back."""

from pathlib import Path

import pytest

from tests.bench import upgrade
from tests.bench.fleet.deployment import ROOT
from tests.broker import free_port
from tests.killable_postgres import KillablePostgres


def the_release_before(folder: Path) -> Path:
    """Its tree; in a clone without history this one's, which shows the replacing and not the schema."""
    folder.mkdir()
    try:
        upgrade.release_before(folder, None)
    except upgrade.NoReleaseBefore:
        return ROOT
    return folder


@pytest.mark.timeout(1800)  # minutes of starting processes, on a machine with other work
def test_nothing_fails_and_nothing_is_lost_or_doubled_while_everything_is_replaced(tmp_path: Path) -> None:
    before, port = the_release_before(tmp_path / "before"), free_port()
    with KillablePostgres(port=port):
        url = f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
        found = upgrade.upgrade_and_back(
            tmp_path / "data", before, url, plan=upgrade.Plan(calm_s=1, rest_s=0.5), roles=("api", "relay", "ingest"), count=1
        )
    assert upgrade.missed(found | {"p99_judged": False}) == []  # two cores that start processes say nothing of how long answers take
    assert found["answers"] > 20


def test_a_clone_without_that_revision_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(upgrade.NoReleaseBefore, match="git fetch --unshallow"):
        upgrade.release_before(tmp_path, "no-such-revision")
