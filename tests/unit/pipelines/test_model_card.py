"""The model card says everything a version was made of and with."""

from datetime import UTC, datetime

from app.domain.release.versions import RunStatus, TrainingRun, Version, VersionKind
from pipelines.projection import model_card

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def _version(kind: VersionKind, **tags: str) -> Version:
    return Version(
        digest="d" * 64, policy="composer", name="smollm2-135m-rl-1121-s7", kind=kind, parent="p" * 64, step=7, run_id="run",
        created_at=NOW, base_model="HuggingFaceTB/SmolLM2-135M-Instruct", licence="Apache-2.0", tags=tags,
    )  # fmt: skip


def _run(**metrics: object) -> TrainingRun:
    return TrainingRun(
        id="composer-1", policy="composer", batch_id="batch-7", parent="p" * 64, status=RunStatus.SUCCEEDED, metrics=dict(metrics),
        config={"learning_rate": 1e-5}, started_at=NOW,
    )  # fmt: skip


def test_a_card_has_base_licence_batch_rule_set_code_and_config() -> None:
    card = model_card(_version(VersionKind.RL, batch="batch-7", code="ratchet 0.1.0 sha256:ab"), _run(rule_set="rules-3", turns=80))
    for fact in (
        "HuggingFaceTB/SmolLM2-135M-Instruct", "| licence of the base | Apache-2.0 |", "| batch | batch-7 |",
        "| reward rule set | rules-3 |", "| code | ratchet 0.1.0 sha256:ab |", "| turns | 80 |", "| config | ", "d" * 64, "p" * 64,
        "ratchet lineage smollm2-135m-rl-1121-s7",
    ):  # fmt: skip
        assert fact in card
    assert card.count("batch-7") == 1


def test_a_pretrained_versions_card_has_its_corpus() -> None:
    card = model_card(_version(VersionKind.PRETRAIN, corpus="arena.parquet", code="c"), _run())
    assert "| corpus | arena.parquet |" in card
    assert "| corpus, as read | batch-7 |" in card
    assert "rule set" not in card


def test_a_base_has_a_card_without_a_run() -> None:
    card = model_card(_version(VersionKind.BASE), None)
    assert "training run" not in card
    assert "Apache-2.0" in card
