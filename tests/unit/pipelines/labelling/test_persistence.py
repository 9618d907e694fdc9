"""Edit persistence: the two measures, the survival curve, and regions carried through later edits."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.labelling.persistence import no_revert, similarity, survival
from pipelines.labelling.regions import carry, region_now
from pipelines.labelling.terms import EditPersistence
from tests.fakes.labelling import facts, observed

LINES = st.lists(st.sampled_from(["a\n", "b = 1\n", "return x\n", "\n", "é😀漢\n"]), max_size=12).map("".join)


@given(st.text())
def test_a_text_is_all_there_compared_with_itself(text: str) -> None:
    assert similarity(text, text) == 1.0


@given(st.text(), st.text())
def test_similarity_is_symmetric_and_a_share(a: str, b: str) -> None:
    assert similarity(a, b) == similarity(b, a)
    assert 0.0 <= similarity(a, b) <= 1.0


def test_similarity_by_hand() -> None:
    # abcde: abcd bcde; abcdx: abcd bcdx. N = 4, differing 2: (4 - 2) / 4
    assert similarity("abcde", "abcdx") == 0.5


@given(st.text(min_size=4), st.text(min_size=4), st.text())
def test_a_full_revert_leaves_nothing_and_an_untouched_edit_everything(before: str, ai: str, now: str) -> None:
    if similarity(before, ai) < 1.0:
        assert no_revert(before=before, ai=ai, now=before) == pytest.approx(0.0)
    assert no_revert(before=before, ai=ai, now=ai) == pytest.approx(1.0)
    assert -1e-9 <= no_revert(before=before, ai=ai, now=now) <= 1.0


def test_the_survival_is_the_mean_over_observed_horizons_and_later_ones_are_censored() -> None:
    assert survival({30: 1.0, 120: 0.5, 600: 0.0}, ended_at=None) == 0.5
    assert survival({30: 1.0, 120: 0.5, 600: 0.0}, ended_at=120) == 0.75


@given(LINES, LINES, LINES, LINES, LINES)
def test_text_typed_around_a_region_moves_it_and_is_not_part_of_it(head: str, tail: str, above: str, below: str, body: str) -> None:
    inserted = f"def model_wrote_this():\n    {body!r}\n"
    now = region_now(before=head + tail, start=len(head), replaced=0, inserted=inserted, after=above + head + inserted + tail + below)
    assert now == inserted


@given(st.text(), st.text(), st.data())
def test_a_carried_region_lies_in_the_new_text(old: str, new: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(old)))
    end = data.draw(st.integers(start, len(old)))
    first, last = carry(old, new, start, end)
    assert 0 <= first <= last <= len(new)
    assert carry(old, old, start, end) == (start, end)


def test_a_region_that_was_reverted_edited_or_deleted_says_so() -> None:
    before = "import os\n\ndef f():\n    pass\n\nprint(f())\n"
    start = before.index("    pass")
    edit = {"before": before, "start": start, "replaced": len("    pass\n"), "inserted": "    return os.getcwd()\n"}
    kept = before.replace("    pass\n", "    return os.getcwd()\n")
    assert region_now(**edit, after="# new\n" + kept) == "    return os.getcwd()\n"
    assert region_now(**edit, after=kept.replace("getcwd()", "getcwdb()")) == "    return os.getcwdb()\n"
    assert region_now(**edit, after=before) == "    pass\n"
    assert region_now(**edit, after="import os\n\ndef f():\n\nprint(f())\n") == ""
    assert region_now(**edit, after="") == ""


def test_the_term_measures_the_region_of_whole_files_and_not_the_files() -> None:
    before = "x = 1\n" * 200
    value = {"horizon_s": 30, "before": before, "start": 6, "inserted": "model_text()\n", "after": before}
    score = EditPersistence().score(facts(), [observed("edit_persistence", value)], weight=1.0)
    assert score.value == 0.0  # the file is as good as unchanged, but nothing of the edit is left
    kept = value | {"after": "y = 2\n" + before[:6] + "model_text()\n" + before[6:]}
    assert EditPersistence().score(facts(), [observed("edit_persistence", kept)], weight=1.0).value == 1.0


def test_a_megabyte_takes_seconds_at_most() -> None:
    big = "".join(f"value_{n * 7919 % 100_003} = {n}\n" for n in range(52_000))
    assert len(big) > 1_000_000
    inserted = "model_wrote_this()\n"
    after = big[:500_000].replace("_1", "_one") + inserted + big[500_000:].replace("_2", "_two")
    started = time.perf_counter()
    now = region_now(before=big, start=500_000, replaced=0, inserted=inserted, after=after)
    assert similarity(big, after) > 0.5
    assert inserted in now
    assert len(now) < 200
    assert time.perf_counter() - started < 30.0  # generous: a quadratic alignment would take hours
