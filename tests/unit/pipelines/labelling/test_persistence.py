"""Edit persistence: the two measures, the survival curve, and regions carried through later edits."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.labelling.persistence import Look, no_revert, similarity, survival
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


def look(edit: str, horizon_s: float, four_gram: float, *, no_revert: float | None = None, length: int | None = None, **more: bool) -> Look:
    return Look(edit=edit, horizon_s=horizon_s, four_gram=four_gram, no_revert=no_revert, length=length, **more)


def test_an_edit_whose_observation_ended_is_censored_from_then_on() -> None:
    assert survival([look("a", 30, 1.0), look("a", 120, 0.5), look("a", 600, 0.0)]) == {30: 1.0, 120: 0.5, 600: 0.0}
    assert survival([look("a", 30, 1.0), look("a", 120, 0.5, ended=True), look("a", 600, 0.0)]) == {30: 1.0, 120: 0.5}
    both = [look("a", 30, 1.0, ended=True), look("b", 30, 0.0), look("b", 600, 0.25)]
    assert survival(both) == {30: 0.5, 600: 0.25}


def test_edits_of_one_turn_are_weighted_by_their_length_and_alike_where_a_length_is_unknown() -> None:
    # (90 · 1 + 10 · 0) / 100
    assert survival([look("a", 30, 1.0, length=90), look("b", 30, 0.0, length=10)]) == {30: 0.9}
    assert survival([look("a", 30, 1.0, length=90), look("b", 30, 0.0)]) == {30: 0.5}
    assert survival([look("a", 30, 1.0, length=0), look("b", 30, 0.0, length=0)]) == {30: 0.5}


def test_what_was_taken_back_did_not_survive_however_like_the_text_is() -> None:
    assert survival([look("a", 30, 0.98, no_revert=0.0)]) == {30: 0.0}
    assert survival([look("a", 30, 0.1, no_revert=1.0)]) == {30: 0.1}  # nor what the user rewrote, though nothing was reverted


def test_the_term_sees_a_small_edit_in_a_large_range_reverted() -> None:
    before, ai = "value = compute(1)\n" * 40, "value = compute(1)\n" * 39 + "value = compute(2)\n"
    value = {"horizon_s": 30, "before": before, "inserted": ai, "after": before}
    score = EditPersistence().score(facts(), [observed("edit_persistence", value)], weight=1.0)
    assert similarity(before, ai) > 0.98
    assert score.value == pytest.approx(0.0)


def test_edits_of_one_turn_do_not_overwrite_each_other_and_a_correction_does() -> None:
    def score(*values: dict[str, Any]) -> float | None:
        said = [observed("edit_persistence", {"horizon_s": 30} | value, id_=f"o{n}", second=n) for n, value in enumerate(values)]
        return EditPersistence().score(facts(), said, weight=1.0).value

    assert score({"four_gram": 1.0}, {"four_gram": 0.0}) == 0.5
    assert score({"four_gram": 1.0, "edit": "a"}, {"four_gram": 0.0, "edit": "b"}) == 0.5
    assert score({"four_gram": 1.0, "edit": "a"}, {"four_gram": 0.0, "edit": "a"}) == 0.0
    long, short = {"before": "", "inserted": "a" * 30, "after": "a" * 30}, {"before": "", "inserted": "bbbbbbbbbb", "after": "cccc"}
    assert score(long, short) == 0.75  # 30 of 40 characters
    assert score(long, long | {"after": ""}) == 0.0


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
