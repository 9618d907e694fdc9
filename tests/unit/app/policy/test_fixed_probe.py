"""Whether measured log-probabilities are these weights', and whether a swap moved them: the bounds from both sides, by hand."""

import json
import math
from pathlib import Path

import pytest

from app.policy.scoring.fixed_probe import Expected, divergence, not_arrived, strange, way_moved, write_expected, written


def says(*logprobs: float) -> Expected:
    return Expected(tokens=tuple(range(len(logprobs) + 1)), logprobs=logprobs)


def test_the_divergence_is_the_mean_of_r_less_one_less_its_logarithm_and_the_largest_gap_either_way() -> None:
    assert divergence([-1.0, -2.0], [-1.0, -2.0]) == (0.0, 0.0)
    # gaps of log 2 and 0: (2 − 1 − log 2 + 0) / 2
    assert divergence([-1.0, -2.0], [-1.0 + math.log(2), -2.0]) == pytest.approx(((1 - math.log(2)) / 2, math.log(2)))
    # a gap of −1: 1/e − 1 + 1
    assert divergence([-1.0], [-2.0]) == pytest.approx((1 / math.e, 1.0))
    assert divergence([-60.0], [0.0])[0] == pytest.approx(math.expm1(50.0) - 60.0), "no overflow"


def test_what_is_no_number_is_no_number() -> None:
    assert all(math.isnan(value) for value in divergence([-1.0, math.nan], [-1.0, -1.0]))
    assert strange([math.nan], says(-1.0)) is not None


@pytest.mark.parametrize(("gap", "is_strange"), [(0.138, False), (0.139, True), (-0.144, False), (-0.145, True)])
def test_a_hundredth_of_a_nat_per_token_is_what_kernels_may_differ_by(gap: float, is_strange: bool) -> None:
    # ½g² + g³/6 + …: 0.00997 and 0.01012 upwards, 0.00989 and 0.01002 downwards
    assert (strange([-3.0 + gap] * 8, says(*[-3.0] * 8)) is not None) is is_strange


@pytest.mark.parametrize(("gap", "is_strange"), [(1.5, False), (1.51, True), (-1.5, False), (-1.51, True)])
def test_one_token_of_many_may_be_off_by_one_and_a_half(gap: float, is_strange: bool) -> None:
    told = strange([-3.0 + gap] + [-3.0] * 299, says(*[-3.0] * 300))
    assert (told is not None) is is_strange
    if told is not None:
        assert "largest gap 1.5" in told


@pytest.mark.parametrize(("step", "is_told"), [(0.1898, True), (0.1897, False), (-0.1898, True)])
def test_how_far_a_swap_went_is_told_where_its_square_is_ten_times_the_blur(step: float, is_told: bool) -> None:
    # 10 · 0.06² = 0.036 = 0.18974²
    old, new = says(*[-3.0] * 5), says(*[-3.0 + step] * 5)
    moved = way_moved(old.logprobs, [-3.0 + step / 4] * 5, old, new)
    assert moved == (pytest.approx(0.25) if is_told else None)
    assert (not_arrived(old.logprobs, old.logprobs, old, new) is not None) is is_told


@pytest.mark.parametrize(("share", "arrived"), [(0.49, False), (0.51, True), (1.0, True), (1.49, True), (1.51, False), (-1.0, False)])
def test_new_weights_have_arrived_from_half_of_the_way_to_as_much_beyond_it(share: float, arrived: bool) -> None:
    old, new = says(-1.0, -5.0, -2.0), says(-3.0, -1.0, -2.0)
    after = [before + share * (wanted - before) for before, wanted in zip(old.logprobs, new.logprobs, strict=True)]
    told = not_arrived(old.logprobs, after, old, new)
    assert (told is None) is arrived
    if told is not None:
        assert f"went {share:.0%} of the way" in told


def test_what_the_trainer_wrote_is_read_again_to_five_digits(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no finished snapshot"):
        write_expected(tmp_path, says(-1.0))
    (tmp_path / "READY").write_text("d\n")
    write_expected(tmp_path, says(-1.234567, -0.5))
    [file] = [path for path in tmp_path.iterdir() if path.name != "READY"]
    assert json.loads(file.read_text()) == {"tokens": [0, 1, 2], "logprobs": [-1.23457, -0.5]}
    assert written(file.read_bytes()) == says(-1.23457, -0.5)
