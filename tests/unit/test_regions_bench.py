"""The bench of regions judges every figure that it promises."""

from typing import Any

import pytest

from tests.bench import regions

GOOD: dict[str, Any] = {
    "versions": [{"way": "whole", "bytes": 15_000_000}, {"way": "delta", "bytes": 150_000}], "failed": 0, "lost": 0, "doubled": 0,
    "answers_in_the_cut": 90, "versions_in_the_cut": ["a"], "champion_before_the_cut": "a", "says_so_s": 6.5,
    "engine_said": "cut off from the database since 2026", "engine_may_be_old": True, "engines_heard_of": 0, "champions_behind": 1,
    "spooled_bytes": 9, "back_s": 2.0, "sampled_elsewhere_before": 0, "lines_of_the_cut": {"api": ["a", "b"], "engine": ["a", "b"]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({}, []),
        ({"versions": [{"way": "whole", "bytes": 1000}, {"way": "delta", "bytes": 101}]}, ["a delta took 101 bytes"]),
        ({"failed": 1, "lost": 2, "doubled": 3}, ["failed is 1", "lost is 2", "doubled is 3"]),
        ({"answers_in_the_cut": 0}, ["nobody was answered"]),
        ({"versions_in_the_cut": ["a", "b"]}, ["in the cut versions"]),
        ({"says_so_s": None}, ["says_so_s is None"]),
        ({"says_so_s": 15.1}, ["says_so_s is 15.1"]),
        ({"engine_said": ""}, ["the engine said ''"]),
        ({"engine_may_be_old": False}, ["the engine said"]),
        ({"engines_heard_of": 1}, ["the ledger heard of 1 engines"]),
        ({"champions_behind": 0}, ["the ledger says 0 champions behind"]),
        ({"spooled_bytes": 0}, ["nothing was spooled"]),
        ({"back_s": None}, ["back_s is None"]),
        ({"sampled_elsewhere_before": 17}, ["another region's engine sampled 17"]),
        ({"lines_of_the_cut": {"api": ["a"], "engine": ["a", "b"]}}, ["the cut was said as"]),
    ],
)
def test_a_bound_that_does_not_hold_is_told(found: dict[str, Any], told: list[str]) -> None:
    said = regions.missed(GOOD | found)
    assert len(said) == len(told)
    assert all(sentence.startswith(beginning) for sentence, beginning in zip(said, told, strict=True))
