"""`ratchet model draft`: from logged answers to a record beside the version and in the audit chain, kept or not."""

from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner

from app import wiring
from app.db.engine import open_engine
from app.policy.storage.heads import read_record
from app.settings import from_environment
from app.trajectories.segments import ParquetSegments
from pipelines.commands.audit import audit
from pipelines.commands.model import model
from tests.fakes.releases import deployed
from tests.fakes.toys import FIRST, WORDS, walk, write_toy
from tests.integration.batching.rows import add_turn
from tests.ports.test_trajectory_store_port import payload

TOML = '[policies.composer]\nmodel = "."\nbase_name = "tiny"\nbase_model = "tiny"\n'


def test_a_head_is_trained_on_what_was_logged_and_its_verdict_is_recorded(sqlite_url: str, tiny_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    environment = {"RATCHET_DATABASE_URL": sqlite_url, "RATCHET_DATA": str(data), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml")}
    (tmp_path / "ratchet.toml").write_text(TOML)
    settings = from_environment(environment)
    write_toy(tmp_path / "toy", tiny_model)
    digest = deployed(settings, tmp_path / "toy")
    runner, weights = CliRunner(env=environment), wiring.open_weights(settings)

    told = runner.invoke(model, ["draft", "--policy", "composer"], catch_exceptions=False)
    assert "not kept" in told.output
    assert "0 answers of this version can be used" in told.output

    engine, names = open_engine(sqlite_url), [f"turn-{number}" for number in range(60)]
    for number, name in enumerate(names):
        add_turn(engine, name, version=digest, minute=number, actor=f"person-{number}")
    engine.dispose()
    answers = [
        replace(payload(name), prompt_tokens=(5, 6, start), completion_tokens=walk(start, 12), logprobs=None)
        for number, name in enumerate(names)
        if (start := FIRST + 7 * number % WORDS)
    ]
    ParquetSegments(str(data / "segments")).write("segment-1", answers)
    told = runner.invoke(model, ["draft", "--policy", "composer", "--seconds", "9"], catch_exceptions=False)
    record = read_record(weights, digest)
    assert record is not None
    assert record.figures["answers"] > 30
    assert record.figures["first_draft_acceptance"][0] > 0.9, record.figures
    assert record.reason in told.output, "what drafting costs on this machine decides whether it is kept"
    assert told.output.startswith("kept" if record.kept else "not kept")

    story = runner.invoke(audit, ["show"], catch_exceptions=False)
    assert "draft_head.trained" in story.output


def test_an_unknown_policy_is_refused(sqlite_url: str, tmp_path: Path) -> None:
    (tmp_path / "ratchet.toml").write_text(TOML)
    environment = {"RATCHET_DATABASE_URL": sqlite_url, "RATCHET_DATA": str(tmp_path), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml")}
    refused = CliRunner(env=environment).invoke(model, ["draft", "--policy", "nobody"])
    assert refused.exception is not None
    assert "nobody" in str(refused.exception)
