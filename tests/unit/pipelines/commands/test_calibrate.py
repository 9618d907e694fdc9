"""The machine is measured on the demo's own model, alone, in a process that the demo can do without."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.machine import usable_cores
from pipelines.commands.demonstration.calibrate import main
from pipelines.commands.demonstration.planning import Speed, measuring
from pipelines.commands.demonstration.profiles import PROFILES

ROWS = 3


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Measuring tries several numbers of threads."""
    kept = torch.get_num_threads()
    yield
    torch.set_num_threads(kept)


def test_it_loads_first_measures_when_the_machine_is_its_own_and_leaves_half_of_it_to_people(tiny_model: Path) -> None:
    began: list[int] = []
    found = main(tiny_model, ROWS, lambda: began.append(torch.get_num_threads()))
    assert len(began) == 1
    speed = Speed(**found)  # type: ignore[arg-type]
    assert (speed.cores, speed.training_threads) == (usable_cores(), max(1, usable_cores() // 2))
    assert torch.get_num_threads() == speed.training_threads, "a turn is timed with the threads that an update gets"
    assert speed.answers_per_s > 1, "a tiny model's answer is no matter of seconds"
    assert 0 < speed.turn_s < 60


def test_a_process_of_its_own_waits_for_the_word_and_tells_one_line(tiny_model: Path) -> None:
    profile = replace(PROFILES["tiny"], model=str(tiny_model), concurrency=ROWS)
    with measuring(profile, environment=os.environ, snapshot=Path(profile.model)) as measure:
        assert measure().cores == usable_cores()


def test_a_machine_that_cannot_be_measured_is_told_as_that(tmp_path: Path) -> None:
    profile = replace(PROFILES["tiny"], model=str(tmp_path / "nothing"))
    with (
        measuring(profile, environment=os.environ, snapshot=Path(profile.model)) as measure,
        pytest.raises(RuntimeError, match="could not be measured: exit"),
    ):
        measure()
