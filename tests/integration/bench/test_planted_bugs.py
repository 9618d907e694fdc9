"""What `make bench-faults` claims: eight bugs planted in the product's code are each seen, and a door without an inbox loses."""

from pathlib import Path

import pytest

from tests.bench.faults import control
from tests.bench.planted_bugs import BUGS, Edit, caught, hunt, plant


def test_every_planted_bug_is_seen_and_the_sound_product_is_clean(sqlite_template: Path) -> None:
    found = hunt(sqlite_template)
    assert {name: (dict(sound), bool(broken)) for name, (sound, broken) in found.items()} == {bug.name: ({}, True) for bug in BUGS}
    assert caught(found) == len(BUGS) == 8


def test_a_bug_whose_text_is_gone_is_an_error_and_no_pass(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("one\n")
    with pytest.raises(ValueError, match="no longer fits"):
        plant(tmp_path / "x.py", Edit(file="x.py", old="two\n", new="three\n"), "2")


def test_the_control_loses_what_it_acknowledged_over_http() -> None:
    assert control(100) == 100
