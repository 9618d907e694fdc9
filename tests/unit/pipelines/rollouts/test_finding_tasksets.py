"""A taskset by its name: one that comes with us, or one of somebody else's."""

from pathlib import Path

import pytest

from app.domain.errors import BadInput
from app.sandbox.processes import ProcessBoxes
from pipelines.rollouts.tasks import TaskData
from pipelines.rollouts.tasksets import SHIPPED, find_taskset
from pipelines.rollouts.tasksets.feature_deletion import SOURCES


class Mine:
    """A taskset of somebody else's."""

    name = "mine"

    def load(self) -> list[TaskData]:
        return []


def test_shipped_tasksets_are_found_by_their_names_and_others_by_where_they_are(tmp_path: Path) -> None:
    assert [find_taskset(name, sources=tmp_path, boxes=ProcessBoxes()).name for name in SHIPPED] == list(SHIPPED)
    assert find_taskset(f"{__name__}:Mine", sources=tmp_path, boxes=ProcessBoxes()).name == "mine"


@pytest.mark.parametrize("name", ["smal-functions", "no.such:Thing", "math:absent", "math:pi", ":x"])
def test_a_name_that_leads_nowhere_is_refused_with_those_that_there_are(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=rf"no taskset is named '{name}' .*use small-functions, feature-deletion, bridge:ADDRESS or package\.module:Class"
    ):
        find_taskset(name, sources=tmp_path, boxes=ProcessBoxes())


def test_archives_that_set_up_did_not_fetch_are_asked_for(tmp_path: Path) -> None:
    taskset = find_taskset("feature-deletion", sources=tmp_path, boxes=ProcessBoxes())
    with pytest.raises(BadInput, match="is not there: run `make data`, which fetches it"):
        taskset.load()
    (tmp_path / SOURCES[0].archive).write_bytes(b"another")
    with pytest.raises(BadInput, match="is not the file that it should be: remove it and run `make data`"):
        taskset.load()
