"""`make bench-gates` goes on where it was broken off: what was kept is printed with the rest and not run again."""

import json
from functools import partial
from pathlib import Path

import pytest

from tests.bench.common.sections import Section
from tests.bench.gate_cells.kept import Kept, Run
from tests.bench.gates import SECTIONS, figures, gathered


def counted(scale: float, seed: int, *, name: str, marks: Path, fails: bool = False) -> Section:
    """A section that leaves a mark each time it runs."""
    with marks.open("a") as file:
        file.write(name)
    if fails:
        raise RuntimeError("broken off")
    section = Section(title=f"{name} at {scale:g}", numbers={"aa_limits": scale, "hack_units: length": 100.0})
    section.header("seed")
    section.row(seed)
    section.require("holds", name != "b")
    return section


def test_a_run_that_was_broken_off_goes_on_and_prints_all_of_it(tmp_path: Path) -> None:
    marks, file = tmp_path / "marks", tmp_path / "kept.json"
    first, second = partial(counted, name="a", marks=marks), partial(counted, name="b", marks=marks)
    asked = partial(gathered, scale=1.0, seed=7, processes=1)
    with pytest.raises(RuntimeError, match="broken off"):
        list(asked({"a": first, "b": partial(second, fails=True)}, Kept(path=file)))
    runs = list(asked({"a": first, "b": second}, Kept(path=file)))
    assert marks.read_text() == "abb"
    assert [run.section.title for run in runs] == ["a at 1", "b at 1"]
    assert ("-> kept: holds" in runs[0].text(), "-> BROKEN b at 1: holds" in runs[1].text()) == (True, True)
    assert figures(runs, whole=False) == {"aa_limits": 1.0, "hack_units": {"length": 100.0}}


def kept_at(scale: float, seed: int) -> Kept:
    kept = Kept()
    kept.add("a", Run(section=Section(title="a"), cpu_s=1.0, scale=scale, seed=seed, commit="abc"))
    return kept


@pytest.mark.parametrize(("scale", "seed", "is_found"), [(0.5, 7, True), (0.25, 7, True), (1.0, 7, False), (0.5, 8, False)])
def test_what_was_kept_stands_for_no_larger_scale_and_no_other_seed(scale: float, seed: int, *, is_found: bool) -> None:
    assert (kept_at(0.5, 7).find("a", scale=scale, seed=seed) is not None) is is_found


def test_what_was_kept_says_how_it_was_run_and_lives_through_the_file(tmp_path: Path) -> None:
    kept = Kept(path=tmp_path / "kept.json")
    kept.add("a", Run(section=Section(title="a", numbers={"found": float("inf")}), cpu_s=1.0, scale=0.5, seed=7, commit="abc"))
    again = Kept(path=tmp_path / "kept.json").find("a", scale=0.5, seed=7)
    assert again == kept.find("a", scale=0.5, seed=7)
    assert again is not None
    assert again.text().endswith("(1 s of CPU, scale 0.5, seed 7, abc)")
    assert json.loads((tmp_path / "kept.json").read_text())["a"]["commit"] == "abc"


def test_every_section_has_a_name_of_its_own() -> None:
    assert len(SECTIONS) == 30
    assert {"grid-1", "grid-4", "absolute_limits", "live_hacks"} <= set(SECTIONS)
