"""What people do at a terminal to keys, webhooks, dead letters, rules and persons: over HTTP by their token, or past it and audited."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result
from sqlalchemy import insert, select

from app import wiring
from app.api.data.rules import MOST_CHARS
from app.db.access.keys import SqlKeys
from app.db.engine import reading, writing
from app.db.tables import audit, dead_letters, observations, turns
from app.domain.errors import BadInput, NotFound, Refused
from app.domain.ids import hash_actor, utc_now
from app.domain.people import Role
from app.domain.telemetry.dead_letters import PAGE
from app.domain.telemetry.streams import Effect, EffectBatch, JoinRules
from app.settings import Settings, from_environment, read_toml
from pipelines.__main__ import ratchet
from pipelines.commands.operating import NotAllowed, Silent, os_user
from pipelines.commands.ruling import usable
from pipelines.config import loop_config
from pipelines.labelling.proposals import settle
from tests.fakes.people import Town
from tests.fakes.served import applied, at, event_of, observation, turn
from tests.fakes.service import running_service

CONFIG = '[policies.composer]\nmodel = "m"\nbase_name = "b"\nbase_model = "B"\n'
ONLY_RATING = 'name = "only-rating"\n[[terms]]\nname = "rating"\nweight = 1.0\n'
ALL_GOLD = 'name = "greedy"\n[[terms]]\nname = "task_success"\nweight = 1.0\n[[terms]]\nname = "edit_persistence"\nweight = 1.0\n'
ALICE = hash_actor("alice@example.com", salt="pepper")


class Terminal:
    """Somebody at a terminal of a deployment."""

    def __init__(self, settings: Settings, url: str, environment: dict[str, str]) -> None:
        self.settings, self.url, self._environment = settings, url, environment
        self.town = Town(wiring.open_state(settings), utc_now)

    def __call__(self, *words: str, token: str | None = None) -> Result:
        environment = self._environment | {"RATCHET_URL": self.url} | ({"RATCHET_TOKEN": token} if token else {})
        return CliRunner(env=environment).invoke(ratchet, list(words))

    def token(self, name: str, role: Role, *, policy: str | None = None) -> str:
        """Of somebody new with this role, once the service knows it."""
        made, until = self.town.token(self.town.person(name, role, policy=policy)), time.monotonic() + 20
        while httpx.get(f"{self.url}/v1/me", headers={"authorization": f"Bearer {made}"}).status_code != 200 and time.monotonic() < until:
            time.sleep(0.1)
        return made

    def audited(self) -> list[tuple[str, str]]:
        """Who did what, without what came of people being added."""
        query = select(audit.c.actor, audit.c.action).where(~audit.c.action.startswith("person."), ~audit.c.actor.startswith("system:test"))
        with reading(wiring.open_state(self.settings)) as connection:
            return [(row.actor, row.action) for row in connection.execute(query.order_by(audit.c.seq))]

    def bury(self, *payloads: bytes) -> None:
        """Dead letters, in this order."""
        rows = [
            {
                "topic": "ratchet.events.1", "partition": 0, "offset": n, "payload": payload, "reason": "broken", "attempts": 1,
                "headers": {"ce_id": f"dead-{n}", "ce_source": "api", "ce_type": "ratchet.observation.v1"},
                "first_seen_at": at(0), "last_seen_at": at(0),
            }
            for n, payload in enumerate(payloads)
        ]  # fmt: skip
        with writing(wiring.open_state(self.settings)) as connection:
            connection.execute(insert(dead_letters), rows)

    def apply(self, *effects: Effect) -> None:
        """Events, as ingestion applies them."""
        store = wiring.effect_store(self.settings, rules=JoinRules(policies={}))
        store.apply(EffectBatch(events=tuple(applied(effect, offset=n) for n, effect in enumerate(effects))), now=at(10))


@contextmanager
def deployed(tmp_path: Path, migrated: Callable[[Settings], None], *, known: bool) -> Iterator[Terminal]:
    """A service, closed where somebody is `known` to it."""
    (tmp_path / "ratchet.toml").write_text(CONFIG)
    environment = {
        "RATCHET_DATA": str(tmp_path / "data"), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml"), "RATCHET_ACTOR_SALT": "pepper",
        "XDG_CONFIG_HOME": str(tmp_path), "COLUMNS": "300",
    }  # fmt: skip
    (tmp_path / "data").mkdir()
    settings = from_environment(environment)
    migrated(settings)
    if known:
        Town(wiring.open_state(settings), utc_now).person("root", Role.ADMIN)
    with running_service(settings) as url:
        yield Terminal(settings, url, environment)


@pytest.fixture
def terminal(tmp_path: Path, migrated: Callable[[Settings], None]) -> Iterator[Terminal]:
    with deployed(tmp_path, migrated, known=True) as closed:
        yield closed


ACTS = (
    ("keys", "create", "--name", "x", "--scope", "read"),
    ("keys", "revoke", "rk_00000000"),
    ("keys", "rotate-sessions"),
    ("webhooks", "add", "http://127.0.0.1:9/hook"),
    ("webhooks", "rotate", "nobody"),
    ("dlq", "replay"),
    ("dlq", "purge"),
    ("erase", "--actor", "alice@example.com"),
    ("erase", "--sweep"),
    ("erase", "--verify", "--actor", "alice@example.com"),
)


@pytest.mark.parametrize("words", ACTS, ids=lambda words: "-".join(words[:2]))
def test_nobody_acts_without_a_service_that_knows_them_and_past_it_the_chain_says_so(terminal: Terminal, words: tuple[str, ...]) -> None:
    viewer = terminal.token("vera", Role.VIEWER)
    before = terminal.audited()
    assert isinstance(terminal(*words, token=viewer).exception, NotAllowed)
    assert isinstance(terminal(*words).exception, NotAllowed), "a closed service knows nobody without a token"
    assert isinstance(terminal(*words, "--url", "http://127.0.0.1:9", token=viewer).exception, Silent)
    assert terminal.audited() == before
    if "--verify" not in words:
        terminal(*words, "--break-glass")
        assert terminal.audited()[len(before)] == (os_user(), "break_glass")


def test_keys_are_made_listed_and_ended_by_an_admin(terminal: Terminal) -> None:
    ada = terminal.token("ada", Role.ADMIN)
    made = terminal("keys", "create", "--name", "editor", "--scope", "ingest", "--policy", "composer", "--rate", "5", token=ada)
    assert made.exit_code == 0, made.exception
    key = made.stdout.strip()
    shown = terminal("keys", "list", token=ada).stdout
    assert key[:11] in shown
    assert key not in shown
    assert "editor) is revoked" in terminal("keys", "revoke", key[:11], token=ada).stdout
    assert "revoked" in terminal("keys", "list", token=ada).stdout
    assert "fresh secret" in terminal("keys", "rotate-sessions", token=ada).stdout
    assert terminal.audited()[-3:] == [("user:ada", "key.created"), ("user:ada", "key.revoked"), ("user:ada", "session_secret.rotated")]
    assert isinstance(terminal("keys", "create", "--name", "x", "--scope", "read", "--policy", "none", token=ada).exception, Refused)


def test_the_first_key_of_an_open_service_is_made_by_whoever_says_who_they_are(
    tmp_path: Path, migrated: Callable[[Settings], None]
) -> None:
    with deployed(tmp_path, migrated, known=False) as terminal:
        refused = terminal("keys", "create", "--name", "x", "--scope", "admin")
        assert isinstance(refused.exception, NotAllowed)
        assert "--break-glass" in str(refused.exception)
        assert "ratchet people first" in str(refused.exception)
        assert SqlKeys(wiring.open_state(terminal.settings)).history() == []
        assert terminal("keys", "create", "--name", "x", "--scope", "admin", "--break-glass").stdout.startswith("rk_")


def test_dead_letters_are_replayed_by_an_operator_page_by_page_and_a_hopeless_one_stops_no_other(terminal: Terminal) -> None:
    terminal.apply(turn("t"))
    good = event_of(observation("o", of="t")).data
    nested = (
        b'{"id": "n", "inference_id": "t", "name": "x", "source": "api", "occurred_at": "2026-11-21T12:00:00Z", "value": ' + b"[" * 5_000
    )
    terminal.bury(nested, *[b"\xff"] * PAGE, good)
    olga = terminal.token("olga", Role.OPERATOR)
    assert terminal("dlq", "list", "--limit", "1000", token=olga).stdout.count("broken") == PAGE + 2
    assert json.loads(terminal("dlq", "show", "2", token=olga).stdout)["payload"] == "\\xff"
    replayed = terminal("dlq", "replay", token=olga)
    assert f"1 replayed, {PAGE + 1} still make no sense" in replayed.stdout, (replayed.output, replayed.exception)
    with reading(wiring.open_state(terminal.settings)) as connection:
        assert connection.execute(select(observations.c.id)).scalars().all() == ["o"]
    assert terminal("dlq", "purge", "--days", "1", token=olga).stdout == "0 deleted\n", "it was replayed a moment ago"
    assert terminal("dlq", "purge", "--days", "0", token=olga).stdout == "1 deleted\n"
    assert {actor for actor, action in terminal.audited() if action.startswith("dead_letters.")} == {"user:olga"}
    bound = terminal.token("bound", Role.OPERATOR, policy="composer")
    for words in (("dlq", "list"), ("dlq", "show", "1"), ("dlq", "replay"), ("dlq", "purge")):
        assert isinstance(terminal(*words, token=bound).exception, NotAllowed), words
    assert isinstance(terminal("dlq", "show", "9999", token=olga).exception, Refused)
    assert isinstance(terminal("dlq", "show", "9999", "--break-glass").exception, NotFound)


def test_a_person_is_forgotten_by_an_admin_of_every_policy_and_nobody_by_a_name_that_is_none(terminal: Terminal) -> None:
    terminal.apply(turn("a", actor=ALICE), turn("b", actor="b" * 32))
    ada, bound = terminal.token("ada", Role.ADMIN), terminal.token("bound", Role.ADMIN, policy="composer")
    assert isinstance(terminal("erase", "--pseudonym", ALICE, token=bound).exception, NotAllowed)
    terminal.bury(b"somebody else's words")
    for glass in ((), ("--break-glass",)):
        assert isinstance(terminal("erase", "--pseudonym", "e", *glass, token=ada).exception, BadInput)
    with reading(wiring.open_state(terminal.settings)) as connection:
        assert len(connection.execute(select(dead_letters.c.id)).all()) == 1, "an e is in everybody's words"
    erased = terminal("erase", "--actor", "alice@example.com", token=ada)
    assert "removed 1 turns" in erased.stdout, erased.exception
    with reading(wiring.open_state(terminal.settings)) as connection:
        assert dict(connection.execute(select(turns.c.inference_id, turns.c.actor)).all()) == {"a": None, "b": "b" * 32}  # type: ignore[arg-type] - rows of two
    assert ("user:ada", "erase") in terminal.audited()
    assert "removed 0 segments" in terminal("erase", "--sweep", token=ada).stdout


def test_webhooks_are_added_rotated_and_removed_by_a_config_admin_and_the_chain_keeps_no_address(terminal: Terminal) -> None:
    cora = terminal.token("cora", Role.CONFIG_ADMIN)
    made = terminal("webhooks", "add", "slack+http://127.0.0.1:9/services/T/B/hush", "--policy", "composer", token=cora)
    assert made.exit_code == 0, made.exception
    hook = wiring.webhook_book(terminal.settings).all()[0]
    assert hook.id in terminal("webhooks", "list", token=cora).stdout
    assert terminal("webhooks", "rotate", hook.id, token=cora).stdout.startswith("whsec_")
    assert terminal("webhooks", "deliveries", hook.id, token=cora).exit_code == 0
    assert "hears no more" in terminal("webhooks", "remove", hook.id, token=cora).stdout
    assert [action for actor, action in terminal.audited() if actor == "user:cora"][-3:] == [
        "webhook.added", "webhook.rotated", "webhook.removed",
    ]  # fmt: skip
    with reading(wiring.open_state(terminal.settings)) as connection:
        assert "hush" not in str(connection.execute(select(audit.c.detail)).all())
    assert isinstance(terminal("webhooks", "add", "https://example.com/x", "--policy", "none", token=cora).exception, Refused)


@contextmanager
def labelling(settings: Settings) -> Iterator[None]:
    """A labeller that settles what is proposed, as `ratchet label` does each round."""
    stop, book = threading.Event(), wiring.rule_book(settings, "")
    policy, loop = wiring.load_policies(settings)["composer"], loop_config(read_toml(settings.config))

    def run() -> None:
        while not stop.wait(0.02):
            settle(book, policy="composer", read=partial(usable, policy=policy, loop=loop), clock=utc_now)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_rules_are_proposed_and_the_labeller_puts_them_in_force_or_says_why_not(terminal: Terminal, tmp_path: Path) -> None:
    cora, olga = terminal.token("cora", Role.CONFIG_ADMIN), terminal.token("olga", Role.OPERATOR)
    files = {"good": ONLY_RATING, "bad": ONLY_RATING.replace('"rating"', '"vibes"'), "greedy": ALL_GOLD, "long": "#" * (MOST_CHARS + 1)}
    for name, text in files.items():
        (tmp_path / f"{name}.toml").write_text(text)

    def activate(name: str, *more: str, token: str = cora) -> Result:
        return terminal("rules", "activate", str(tmp_path / f"{name}.toml"), "--policy", "composer", *more, token=token)

    assert isinstance(activate("good", token=olga).exception, NotAllowed)
    with labelling(terminal.settings):
        assert "is in force for composer" in activate("good").stdout
        bad, greedy = activate("bad"), activate("greedy")
    assert "no term is named 'vibes'" in str(bad.exception)
    assert "gold" in str(greedy.exception), "what every gate looks at must not all be paid for"
    assert isinstance(activate("greedy", "--break-glass").exception, BadInput)
    assert isinstance(activate("long").exception, Refused)
    assert [entry.name for entry in wiring.rule_book(terminal.settings, "").history("composer")] == ["only-rating"]
    acts = [row for row in terminal.audited() if row[1].startswith("rule_set.")]
    assert acts == [
        ("user:cora", "rule_set.propose"), ("user:cora", "rule_set.activate"), ("user:cora", "rule_set.propose"),
        ("system:label", "rule_set.refuse"), ("user:cora", "rule_set.propose"), ("system:label", "rule_set.refuse"),
    ]  # fmt: skip
