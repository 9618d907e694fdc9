"""`ratchet model draft`: from logged answers to a record beside the version and in the audit chain, kept or not."""

import os
import threading
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from app import wiring
from app.db.engine import open_engine
from app.domain.ids import utc_now
from app.domain.learning.cycles import CycleStatus
from app.policy.storage.heads import read_record
from app.settings import Settings, from_environment, read_toml
from app.trajectories.segments import ParquetSegments
from pipelines.commands.audit import audit
from pipelines.commands.model import model
from pipelines.commands.running.drafting import drafting_beside
from pipelines.config import loop_config
from tests.fakes.releases import deployed
from tests.fakes.toys import FIRST, WORDS, walk, write_toy
from tests.integration.batching.rows import add_turn
from tests.ports.test_trajectory_store_port import payload

TOML = '[policies.composer]\nmodel = "."\nbase_name = "tiny"\nbase_model = "tiny"\n'


@dataclass(frozen=True)
class Deployment:
    """A toy that serves, sixty people's answers of its own, and how to reach it."""

    environment: dict[str, str]
    digest: str

    @property
    def settings(self) -> Settings:
        """Of this deployment."""
        return from_environment(self.environment)

    def answer(self, count: int = 60) -> None:
        """So many people are answered, a dozen tokens each."""
        engine, names = open_engine(self.settings.database_url), [f"turn-{number}" for number in range(count)]
        for number, name in enumerate(names):
            add_turn(engine, name, version=self.digest, minute=number, actor=f"person-{number}")
        engine.dispose()
        answers = [
            replace(payload(name), prompt_tokens=(5, 6, start), completion_tokens=walk(start, 12), logprobs=None)
            for number, name in enumerate(names)
            if (start := FIRST + 7 * number % WORDS)
        ]
        ParquetSegments(str(self.settings.data / "segments")).write("segment-1", answers)


@pytest.fixture
def deployment(sqlite_url: str, tiny_model: Path, tmp_path: Path) -> Deployment:
    """Of one policy."""
    path = tmp_path / "ratchet.toml"
    path.write_text(TOML)
    environment = {"RATCHET_DATABASE_URL": sqlite_url, "RATCHET_DATA": str(tmp_path / "data"), "RATCHET_CONFIG": str(path)}
    write_toy(tmp_path / "toy", tiny_model)
    return Deployment(environment, deployed(from_environment(environment), tmp_path / "toy"))


def test_a_head_is_trained_on_what_was_logged_and_its_verdict_is_recorded(deployment: Deployment) -> None:
    runner, weights = CliRunner(env=deployment.environment), wiring.open_weights(deployment.settings)

    told = runner.invoke(model, ["draft", "--policy", "composer"], catch_exceptions=False)
    assert "not kept" in told.output
    assert "0 answers of this version can be used" in told.output

    deployment.answer()
    told = runner.invoke(
        model, ["draft", "--policy", "composer", "--seconds", "8", "--tokens", "600", "--seed", "7"], catch_exceptions=False
    )
    record = read_record(weights, deployment.digest)
    assert record is not None
    assert 30 < record.figures["answers"] <= 50, "600 tokens are 50 answers"
    assert record.figures["seed"] == 7
    assert record.figures["seconds"] < 9
    assert record.figures["first_draft_acceptance"][0] > 0.9, record.figures
    assert record.reason in told.output, "what drafting costs on this machine decides whether it is kept"
    assert told.output.startswith("kept" if record.kept else "not kept")

    story = runner.invoke(audit, ["show"], catch_exceptions=False)
    assert "draft_head.trained" in story.output


def test_the_loop_trains_a_head_for_a_champion_that_answered_enough(deployment: Deployment) -> None:
    with Path(deployment.environment["RATCHET_CONFIG"]).open("a") as file:
        file.write("[drafting]\nafter_answers = 40\nsteps = 30\n")
    settings = deployment.settings
    weights, cycles = wiring.open_weights(settings), wiring.cycle_book(settings)
    config = loop_config(read_toml(settings.config)).drafting
    beside = replace(
        drafting_beside(settings, ["composer"], cycles, config=config, owner="one"), environment={**os.environ, **deployment.environment}
    )
    deployment.answer(39)
    beside.once(threading.Event())
    assert read_record(weights, deployment.digest) is None, "39 answers are not 40"

    engine = open_engine(settings.database_url)
    add_turn(engine, "turn-39", version=deployment.digest, minute=39, actor="person-39")
    now = utc_now()
    cycle = cycles.elect("composer", 0, owner="one", now=now, lease=timedelta(minutes=1))
    assert cycle is not None
    beside.once(threading.Event())
    assert read_record(weights, deployment.digest) is None, "a cycle runs"

    cycles.finish(cycle, status=CycleStatus.HELD, reason="for the test", now=now)
    beside.once(threading.Event())
    record = read_record(weights, deployment.digest)
    assert record is not None
    assert record.figures["steps"] == 30, "as [drafting] says"
    engine.dispose()


def test_one_process_of_a_deployment_trains_at_a_time(deployment: Deployment) -> None:
    one, other = (wiring.drafting_term(deployment.settings, owner=owner) for owner in ("one", "other"))
    with one() as renew:
        assert renew is not None
        with other() as refused:
            assert refused is None
        renew()
    with other() as renew:
        assert renew is not None


def test_an_unknown_policy_is_refused(sqlite_url: str, tmp_path: Path) -> None:
    (tmp_path / "ratchet.toml").write_text(TOML)
    environment = {"RATCHET_DATABASE_URL": sqlite_url, "RATCHET_DATA": str(tmp_path), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml")}
    refused = CliRunner(env=environment).invoke(model, ["draft", "--policy", "nobody"])
    assert refused.exception is not None
    assert "nobody" in str(refused.exception)
