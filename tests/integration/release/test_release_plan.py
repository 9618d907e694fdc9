"""`ratchet release plan`: what this deployment's own traffic can answer."""

from pathlib import Path

from click.testing import CliRunner

from app.db.engine import open_engine
from pipelines.commands.release import release
from tests.fakes.releases import POLICY, release_room

TOML = f"""
[policies.{POLICY}]
model = "."
base_name = "tiny"
base_model = "tiny"
"""


def test_the_plan_shows_every_length_and_says_when_none_of_them_answers(sqlite_url: str, tmp_path: Path) -> None:
    engine = open_engine(sqlite_url)
    release_room(engine)
    engine.dispose()
    (tmp_path / "ratchet.toml").write_text(TOML)
    environment = {"RATCHET_DATABASE_URL": sqlite_url, "RATCHET_DATA": str(tmp_path), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml")}
    told = CliRunner(env=environment).invoke(release, ["plan", POLICY], catch_exceptions=False)
    assert told.exit_code == 0
    assert all(length in told.output for length in ("2.0 h", "6.0 h", "18.0 h", "2.2 d", "6.8 d", "7.0 d"))
    assert "task_success" in told.output
    assert "no canary up to 7.0 d answers" in told.output
    assert "20% of the people are the lasting cohort: they never get a candidate and are in no stage" in told.output
    assert "what they find is harm that lasts" in told.output


def test_where_a_margin_is_wide_enough_the_plan_names_the_canary_and_whom_no_candidate_ever_meets(sqlite_url: str, tmp_path: Path) -> None:
    engine = open_engine(sqlite_url)
    release_room(engine)
    engine.dispose()
    (tmp_path / "ratchet.toml").write_text(f"{TOML}[gates]\nmin_power = 0.0\nmargin_share_max = 0.0\n")
    environment = {"RATCHET_DATABASE_URL": sqlite_url, "RATCHET_DATA": str(tmp_path), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml")}
    told = CliRunner(env=environment).invoke(release, ["plan", POLICY], catch_exceptions=False).output
    assert "a canary of this policy is planned for 2.0 h at most" in told
    assert "are the lasting cohort: they never get a candidate" in told
