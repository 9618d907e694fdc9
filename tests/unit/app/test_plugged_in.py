"""What wiring plugs in by the settings: which secrets are good enough, whose keys are sent, what is waited for, what ends first."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from app import wiring
from app.db.engine import open_engine
from app.db.migrate import upgrade
from app.domain.errors import BadConfig, BadRequest
from app.domain.learning.batches import TurnPayload
from app.sandbox.bubblewrap import BubblewrapBoxes
from app.sandbox.processes import ProcessBoxes
from app.settings import Settings, from_environment
from tests.fakes.served import at


def given(folder: Path, **named: str) -> Settings:
    return from_environment({"RATCHET_DATA": str(folder)} | {f"RATCHET_{name}": value for name, value in named.items()})


@pytest.fixture
def deployed(tmp_path: Path, sqlite_url: str) -> Settings:
    """A deployment whose database is there and empty."""
    return given(tmp_path, DATABASE_URL=sqlite_url)


GOOD, SHORT = "x" * 16, "x" * 15


@pytest.mark.parametrize("name", ["ACTOR_SALT", "SESSION_SECRETS", "WEBHOOK_KEYS"])
@pytest.mark.parametrize("value", [SHORT, wiring.PUBLIC_SALT, f"{GOOD},{SHORT}"], ids=["short", "public", "the second one short"])
def test_a_service_that_others_reach_has_secrets_of_sixteen_characters_that_nobody_can_read_here(
    tmp_path: Path, name: str, value: str
) -> None:
    good = {"HOST": "0.0.0.0", "ACTOR_SALT": GOOD, "SESSION_SECRETS": f"{GOOD},{GOOD}", "WEBHOOK_KEYS": GOOD}
    wiring.refuse_weak_secrets(given(tmp_path, **good))
    if name == "ACTOR_SALT" and "," in value:
        return  # it is one
    with pytest.raises(BadConfig, match=rf"RATCHET_HOST is 0\.0\.0\.0, .* RATCHET_{name} is or has a value") as raised:
        wiring.refuse_weak_secrets(given(tmp_path, **good | {name: value}))
    assert ("makes everybody a stranger" in str(raised.value)) == (name == "ACTOR_SALT")


def test_a_deployment_keeps_the_salt_it_has_hashed_people_under_and_a_new_one_makes_its_own(tmp_path: Path) -> None:
    deployed = given(tmp_path)
    upgrade(deployed.database_url, "0002_bound_costs")
    (tmp_path / "fresh").mkdir()
    fresh = given(tmp_path / "fresh")
    wiring.keep_salt(fresh)
    made = wiring.actor_salt(fresh)
    assert len(made) >= wiring.SHORTEST_SECRET
    assert made != wiring.PUBLIC_SALT
    wiring.keep_salt(deployed)
    assert wiring.actor_salt(deployed) == wiring.PUBLIC_SALT
    (deployed.secrets / wiring.ACTOR_SALT).write_text("another\n")
    wiring.keep_salt(deployed)
    assert wiring.actor_salt(deployed) == "another"


@pytest.mark.parametrize("named", [{"ACTOR_SALT": GOOD}, {"DATABASE_URL": "postgresql+psycopg://h/d"}], ids=["named", "a server"])
def test_no_salt_is_made_where_it_is_named_or_others_share_the_database(tmp_path: Path, named: dict[str, str]) -> None:
    wiring.keep_salt(given(tmp_path, **named))
    assert not (tmp_path / "secrets").exists()


def test_a_fresh_secret_of_sessions_stands_in_front_of_the_one_before(deployed: Settings) -> None:
    secrets = wiring.session_secrets(deployed)
    (first,) = secrets()
    wiring.rotate_session_secret(deployed, by="user:ada")
    fresh, before = wiring.session_secrets(deployed)()
    assert (before, fresh != first) == (first, True)


@pytest.mark.parametrize(("states", "setting"), [("s3://bucket/states", True), ("/shared/states", False)])
def test_states_are_somebody_s_place_where_they_are_named_by_a_url(tmp_path: Path, states: str, setting: bool) -> None:
    found = wiring.places(given(tmp_path, STATES=states, SEGMENTS="s3://bucket/segments"))
    assert found["RATCHET_SEGMENTS"] == "s3://bucket/segments"
    assert ("RATCHET_STATES" in found, "RATCHET_WEIGHTS" in found) == (setting, True)


def test_a_person_is_known_by_the_product_s_id_or_by_what_they_are_stored_under(tmp_path: Path) -> None:
    settings = given(tmp_path, ACTOR_SALT="salt")
    stored = wiring.pseudonym_of(settings, actor="bob")
    assert wiring.pseudonym_of(settings, pseudonym=stored) == stored
    assert stored != wiring.pseudonym_of(settings, actor="eve")
    with pytest.raises(BadRequest):
        wiring.pseudonym_of(settings, actor="bob", pseudonym="bob")


def test_a_tracker_in_a_folder_is_asked_nothing(tmp_path: Path) -> None:
    wiring.check_tracking(given(tmp_path, MLFLOW_URI=f"file://{tmp_path}"))


@pytest.mark.parametrize(("ingest", "hours"), [("inbox", 1), ("direct", 7 * 24)])
def test_a_payload_waits_for_its_event_an_hour_or_a_week_where_no_inbox_knows_of_it(deployed: Settings, ingest: str, hours: int) -> None:
    settings = replace(deployed, ingest=ingest)
    assert wiring.claim_sweep(settings)._min_age.total_seconds() == hours * 3600


def payload(id_: str) -> TurnPayload:
    return TurnPayload(
        inference_id=id_, episode_id="e", policy="p", version="v", prompt_tokens=(1,), completion_tokens=(2,), logprobs=(-1.0,),
        temperature=1.0, top_p=1.0, finished_at=at(0),
    )  # fmt: skip


def test_a_file_that_no_row_knows_goes_after_an_hour_of_silence(deployed: Settings) -> None:
    store = wiring.trajectories(deployed)
    for name, minutes in (("old", 61), ("young", 59)):
        store.write_sized(name, [payload(name)])
        (file,) = Path(deployed.segments).rglob(f"{name}*")
        moment = time.time() - 60 * minutes
        os.utime(file, (moment, moment))
    assert (wiring.sweep_segments(deployed), list(store.names())) == (1, ["young"])


def test_a_standby_that_is_required_is_one_that_commits_wait_for(deployed: Settings) -> None:
    wiring.refuse_one_machine(deployed)
    with pytest.raises(BadConfig, match="a commit waits for no standby"):
        wiring.refuse_one_machine(replace(deployed, standby_required=True))


def test_a_broker_of_our_own_is_looked_for_where_no_cluster_is_named(tmp_path: Path) -> None:
    wiring.require_broker(given(tmp_path, KAFKA_BOOTSTRAP="kafka:9092"))


@pytest.mark.parametrize(
    ("named", "keys", "sent"),
    [
        ({"vllm": "http://a", "sglang": None}, {"VLLM_KEY": "v", "SGLANG_KEY": "s"}, "Bearer v"),
        ({"vllm": None, "sglang": "http://a"}, {"SGLANG_KEY": "s", "SGLANG_ADMIN_KEY": "a"}, "Bearer a"),
        ({"vllm": None, "sglang": "http://a"}, {"SGLANG_KEY": "s"}, "Bearer s"), ({"vllm": "http://a", "sglang": None}, {}, None),
    ],
)  # fmt: skip
def test_a_server_of_other_make_is_told_its_own_key(tmp_path: Path, named: dict[str, Any], keys: dict[str, str], sent: str | None) -> None:
    control: Any = wiring.server_control(given(tmp_path, **keys), **named)
    assert control._client.headers.get("authorization") == sent
    control._client.close()


def test_boxes_are_closed_unless_the_configuration_trusts_what_is_in_them() -> None:
    assert isinstance(wiring.boxes(), BubblewrapBoxes)
    assert isinstance(wiring.boxes(trusted=True), ProcessBoxes)


def test_people_sign_in_at_a_provider_where_one_is_named_and_come_back_to_the_console(deployed: Settings) -> None:
    assert wiring.oidc(deployed) is None
    named = replace(deployed, oidc=("https://id.example", "ratchet", "secret"), public_url="https://ratchet.example.com")
    found = wiring.oidc(named)
    assert found is not None
    assert found._registration.redirect_uri == "https://ratchet.example.com/console/oidc"
    with pytest.raises(BadConfig, match="has to begin with https"):
        wiring.oidc(replace(named, oidc=("http://id.example", "ratchet", "secret")))


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_news_go_to_this_machine_s_own_addresses_where_nobody_else_reaches_it(deployed: Settings, host: str, loopback: bool) -> None:
    found = wiring.courier(replace(deployed, host=host, smtp=None if loopback else "smtp://mail:587"))
    assert (found._allow_loopback, found._post_office is None, found._address) == (loopback, loopback, replace(deployed, host=host).address)


def test_a_policy_without_a_champion_has_nothing_to_train_on(deployed: Settings) -> None:
    assert wiring.trainable_labels(deployed)("composer") == 0


def test_answers_on_the_disk_are_committed_before_the_inbox_that_takes_them_ends() -> None:
    ended = list[tuple[str, Any]]()

    class Ending:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self, **more: Any) -> None:
            ended.append((self.name, more))

    parts: dict[str, Any] = dict.fromkeys(wiring.HttpAdapters.__dataclass_fields__)
    plugged: Any = wiring.HttpAdapters
    plugged(**parts | {"answers": Ending("answers"), "inbox": Ending("inbox")}).close(patience_s=2.0)
    plugged(**parts | {"inbox": Ending("inbox")}).close()
    assert ended == [("answers", {"patience_s": 2.0}), ("inbox", {}), ("inbox", {})]


def test_what_is_live_behind_the_service_waits_on_the_disk_only_beside_a_server_of_databases(deployed: Settings) -> None:
    live = wiring.http_adapters(deployed)
    try:
        assert live.answers is None
        assert live.ingestion_troubles() == []
    finally:
        live.close()


def test_an_earlier_schema_is_refused_and_a_work_s_database_is_let_go_of(deployed: Settings, sqlite_url: str) -> None:
    with wiring.opened_state(deployed) as state:
        assert cast(Any, state.pool).checkedout() == 0
    assert wiring.schema_revision(deployed) != "none"
    assert wiring.schema_revision(replace(deployed, database_url=sqlite_url.replace("ratchet.db", "nothing.db"))) == "none"
    open_engine(sqlite_url).dispose()
