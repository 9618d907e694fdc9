"""The gates' configuration: what could not protect anybody is refused with the cure."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.domain.errors import BadConfig
from app.domain.release.by_people import PeopleTerms
from app.settings import owner_of, read_toml
from pipelines.config import loop_config
from pipelines.evaluation.config import (
    ApprovalConfig,
    GatesConfig,
    Good,
    HoldoutConfig,
    MetricClass,
    MetricConfig,
    SloConfig,
    StageConfig,
    check,
    terms_of,
)

GOLD = MetricConfig(name="tests_pass", source="observation:tests_pass", kind=MetricClass.GOLD, margin=0.015)


def test_the_defaults_are_those_of_the_specification() -> None:
    config = GatesConfig()
    check(config)
    assert [stage.share for stage in config.stages] == [0.05, 0.25, 0.50]
    assert (config.alpha_abort_e, config.alpha_abort_gst, config.alpha_post) == (0.025, 0.025, 0.01)
    assert sum(config.weight_of(metric) for metric in config.metrics) == pytest.approx(1.0)
    assert [metric.name for metric in config.required] == ["task_success", "reward"]


def test_the_hash_changes_with_every_value() -> None:
    assert GatesConfig().hash == GatesConfig().hash
    assert msgspec.structs.replace(GatesConfig(), alpha_post=0.02).hash != GatesConfig().hash
    assert terms_of(GatesConfig()).config_hash == GatesConfig().hash
    daily = msgspec.structs.replace(GatesConfig(), reentry_season_s=86_400.0)
    assert (daily.hash != GatesConfig().hash, terms_of(daily).reentry_season_s) == (True, 86_400.0)


def test_a_config_survives_its_way_through_json() -> None:
    assert msgspec.convert(terms_of(GatesConfig()).gates, GatesConfig) == GatesConfig()


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"stages": (StageConfig(share=0.5), StageConfig(share=0.25))}, "each larger than the one before"),
        ({"stages": ()}, "at least one"),
        ({"alpha_abort_e": 0.2}, "alpha_abort_e"),
        ({"metrics": ()}, "at least one"),
        ({"metrics": (GOLD, GOLD)}, "each used once"),
        ({"metrics": (msgspec.structs.replace(GOLD, margin=None),)}, "no gold metric"),
        ({"metrics": (msgspec.structs.replace(GOLD, kind=MetricClass.PROXY),)}, "no gold metric"),
        ({"metrics": (msgspec.structs.replace(GOLD, source="nonsense"),)}, "unknown source"),
        ({"slos": (SloConfig(source="typo", limit=0.1),)}, "limit on typo: unknown source"),
        ({"slos": (SloConfig(source="observation:", limit=0.1),)}, "unknown source"),
        ({"slos": (SloConfig(source="fault", limit=0.0),)}, "between 0 and 1"),
        ({"slos": (SloConfig(source="fault", limit=1.0),)}, "between 0 and 1"),
        ({"slos": (SloConfig(source="length", limit=0.1),)}, "threshold"),
        ({"metrics": (msgspec.structs.replace(GOLD, good=Good.SAME),)}, "two bad directions"),
        ({"metrics": (msgspec.structs.replace(GOLD, weight=1.5),)}, "sum to 1.5"),
        ({"metrics": tuple(msgspec.structs.replace(GOLD, name=f"m{n}", weight=0.1) for n in range(5))}, "require at most 4"),
        ({"holdback_first": 1.0}, "holdback_first and anchor_share are shares"),
        ({"anchor_share": -0.1}, "holdback_first and anchor_share are shares"),
        ({"lasting_share": 0.1}, "set it between 0.2 and 0.5, or to 0"),
        ({"margin_share_max": 1.5}, "set it to at most 1, or to 0"),
        ({"approval": ApprovalConfig(n=0)}, "set them to at least 1"),
        ({"metrics": (msgspec.structs.replace(GOLD, source="observation:"),)}, "unknown source 'observation:'"),
        ({"metrics": (msgspec.structs.replace(GOLD, low=1.0, high=1.0),)}, "metric tests_pass: low has to be below high"),
        ({"metrics": (msgspec.structs.replace(GOLD, quantile=1.0),)}, "quantile lies between 0 and 1"),
        ({"metrics": (msgspec.structs.replace(GOLD, prompt_price=-1.0),)}, "prompt_price .* at least 0"),
        ({"metrics": (msgspec.structs.replace(GOLD, margin=0.0),)}, "margin lies between 0 and 1"),
        ({"metrics": (msgspec.structs.replace(GOLD, by_turns=True),)}, "counted by turns is a guardrail"),
        ({"metrics": (msgspec.structs.replace(GOLD, turns_cap=0),)}, "turns_cap is at least 1"),
        ({"metrics": (msgspec.structs.replace(GOLD, abort_margin=1.0),)}, "abort_margin lies between 0 and 1"),
        ({"metrics": (msgspec.structs.replace(GOLD, window_s=-1.0),)}, "window_s is not negative"),
    ],
)
def test_a_config_that_protects_nobody_is_refused(changes: dict[str, object], cure: str) -> None:
    config = msgspec.structs.replace(GatesConfig(), **changes)
    with pytest.raises(BadConfig, match=cure):
        check(config)


def test_a_gold_metric_that_is_rewarded_is_no_gold_metric() -> None:
    """Invariant I3: what promotes must not be what is trained on."""
    config = msgspec.structs.replace(GatesConfig(), metrics=(GOLD,))
    check(config, rewarded=frozenset({"rating"}))
    with pytest.raises(BadConfig, match="must not be part of the reward"):
        check(config, rewarded=frozenset({"tests_pass"}))


def test_the_owner_of_the_file_counts_as_its_last_editor_where_the_file_says_so(tmp_path: Path) -> None:
    file = tmp_path / "ratchet.toml"
    file.write_text('[gates.approval]\nedited_by = "file"\n')
    config = loop_config(read_toml(file)).gates
    check(config)
    assert terms_of(config, owner=owner_of(file)).edited_by == f"user:{file.owner()}"
    assert terms_of(config, owner="user:eve").config_hash == terms_of(config, owner="user:ada").config_hash
    named = msgspec.structs.replace(config, approval=ApprovalConfig(edited_by="user:eve"))
    assert terms_of(named, owner=owner_of(file)).edited_by == "user:eve"
    assert terms_of(GatesConfig(), owner=owner_of(file)).edited_by is None
    assert owner_of(None) is None
    with pytest.raises(BadConfig, match="edited_by is 'eve'"):
        check(msgspec.structs.replace(config, approval=ApprovalConfig(edited_by="eve")))


@pytest.mark.parametrize("approval", [ApprovalConfig(n=0), ApprovalConfig(n_in_doubt=0)])
def test_nothing_is_promoted_without_anybody(approval: ApprovalConfig) -> None:
    with pytest.raises(BadConfig, match="at least 1"):
        check(msgspec.structs.replace(GatesConfig(), approval=approval))


ALLOWED: list[dict[str, Any]] = [
    {"holdback_first": 0.0}, {"anchor_share": 0.0}, {"holdback_first": 0.999}, {"lasting_share": 0.0}, {"lasting_share": 0.2},
    {"lasting_share": 0.5}, {"margin_share_max": 0.0}, {"margin_share_max": 1.0}, {"approval": ApprovalConfig(n=1, n_in_doubt=1)},
    {"holdout": HoldoutConfig(share=0.005, days=7.0)}, {"holdout": HoldoutConfig(share=0.1, days=366.0)},
    *({name: 0.05} for name in ("alpha_abort_e", "alpha_abort_gst", "alpha_ni_e", "alpha_ni_gst", "alpha_post", "alpha_data", "alpha_slo")),
    {"stages": (StageConfig(share=0.001), StageConfig(share=0.999))},
    {"people": PeopleTerms(votes=20, judges=1, margin=0.001, holdback=0.05, holdback_s=86_400.0, longest_s=0.001)},
    {"people": PeopleTerms(votes=1000, judges=20, margin=0.999, holdback=0.5)},
    *({"metrics": (msgspec.structs.replace(GOLD, **changes),)} for changes in (
        {"turns_cap": 1}, {"abort_margin": 0.0}, {"abort_margin": 0.999}, {"window_s": 0.0}, {"prompt_price": 0.0}, {"quantile": 0.001},
        {"quantile": 0.999}, {"margin": 0.001}, {"margin": 0.999}, {"weight": 1.0}, {"low": 0.0, "high": 0.001},
    )),
    {"metrics": tuple(msgspec.structs.replace(GOLD, name=f"m{n}", weight=0.25) for n in range(4))},
]  # fmt: skip


@pytest.mark.parametrize("changes", ALLOWED, ids=str)
def test_the_last_value_before_the_refused_ones_is_taken(changes: dict[str, Any]) -> None:
    check(msgspec.structs.replace(GatesConfig(), **changes))


REFUSED: list[dict[str, Any]] = [
    {"holdback_first": -0.001}, {"anchor_share": 1.0}, {"lasting_share": 0.199}, {"lasting_share": 0.501}, {"margin_share_max": -0.001},
    {"approval": ApprovalConfig(n=1, n_in_doubt=0)}, {"approval": ApprovalConfig(edited_by="ada")},
    {"holdout": HoldoutConfig(share=0.004)}, {"holdout": HoldoutConfig(share=0.101)}, {"holdout": HoldoutConfig(days=6.9)},
    {"holdout": HoldoutConfig(days=366.1)}, {"stages": (StageConfig(share=0.0),)}, {"stages": (StageConfig(share=1.0),)},
    {"stages": (StageConfig(share=0.5), StageConfig(share=0.5))},
    *({name: value} for name in ("alpha_abort_gst", "alpha_slo") for value in (0.0, 0.051)),
    *({"people": msgspec.structs.replace(PeopleTerms(), **{name: value})} for name, value in (
        ("votes", 19), ("votes", 1001), ("judges", 0), ("judges", 21), ("margin", 0.0), ("margin", 1.0), ("holdback", 0.049),
        ("holdback", 0.501), ("longest_s", 0.0), ("holdback_s", 86_399.0),
    )),
    *({"metrics": (msgspec.structs.replace(GOLD, **changes),)} for changes in (
        {"abort_margin": -0.001}, {"quantile": 0.0}, {"margin": 1.0}, {"low": 1.0, "high": 0.0}, {"weight": 1.001},
        {"by_turns": True, "margin": None, "good": Good.SAME},
    )),
]  # fmt: skip


@pytest.mark.parametrize("changes", REFUSED, ids=str)
def test_the_first_value_beyond_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match=r"\[gates\] in the configuration: "):
        check(msgspec.structs.replace(GatesConfig(), **changes))
