"""Tables as files: the same values, and no cell that a spreadsheet would compute."""

import csv
import io

import pytest

from app.console.sheets import Sheet, cell, defused


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1+1", "@SUM(1)", "\tx", "\rx"])
def test_what_would_be_a_formula_gets_a_quote(text: str) -> None:
    assert defused(cell(text)) == f"'{text}"


@pytest.mark.parametrize(("value", "text"), [(-1.5, "-1.5"), (3, "3"), ("plain", "plain"), (None, ""), (True, "true")])
def test_numbers_stay_numbers_and_words_words(value: object, text: str) -> None:
    assert defused(cell(value)) == text


def test_a_sheet_goes_through_csv_and_comes_back() -> None:
    sheet = Sheet(name="s", title="S", columns=("a", "b"), rows=[(cell('x, "y"\nz'), cell(2.5))])
    assert list(csv.reader(io.StringIO(sheet.csv().removeprefix("\ufeff")))) == [["a", "b"], ['x, "y"\nz', "2.5"]]
    assert sheet.json() == '[{"a": "x, \\"y\\"\\nz", "b": 2.5}]'


def test_a_long_cell_is_cut_on_the_page_and_whole_in_the_file() -> None:
    long = cell("x" * 1_000_000)
    assert len(long.short) < 3_000
    assert len(defused(long)) == 1_000_000
