"""Labels on both databases: revisions, one current, corrections by late observations, events, activations and the commands over them."""

import json
from ast import literal_eval
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click import Command
from click.testing import CliRunner, Result
from sqlalchemy import Engine, insert, select, update

from app.db.access.erasures import erase_actor
from app.db.engine import open_engine, reading, writing
from app.db.ingestion.streams import SqlEffects
from app.db.learning.labels import LABEL_EVENT, SqlLabels
from app.db.sight import SqlPages
from app.db.tables import audit, batch_items, labels, observations, outbox, turns
from app.domain.learning.rewards import Label
from app.domain.policies import PolicyConfig
from app.domain.telemetry.streams import EffectBatch, JoinRules
from app.settings import Settings, from_environment
from pipelines.commands.labels import labels as labels_command
from pipelines.commands.operating import os_user
from pipelines.commands.rules import rules as rules_command
from pipelines.labelling.labeller import label, label_due
from pipelines.labelling.rule_set import RuleSet, default_toml, parse_rule_set
from tests.fakes.served import applied, at, erasure, observation, turn
from tests.fakes.streaming import MemorySegments

POLICY = PolicyConfig(model="m", base_name="b", base_model="B", held_out_share=0.0)
RULES = JoinRules(policies={}, label_wait_s=60, lateness_s=600)
ONLY_RATING = 'name = "only-rating"\n[[terms]]\nname = "rating"\nweight = 1.0\n'


@dataclass
class Bench:
    """A database with the ingestion and the labelling side of it."""

    engine: Engine

    def apply(self, *effects: Any, offset: int = 0, received: float = 1) -> None:
        segments = MemorySegments()
        store = SqlEffects(self.engine, rules=lambda: RULES, segments=segments)
        events = tuple(applied(effect, offset=offset + n, received=received) for n, effect in enumerate(effects))
        store.apply(EffectBatch(events=events), now=at(received))

    def label(self, now: datetime, *, toml: str = ONLY_RATING) -> int:
        return label_due(SqlLabels(self.engine), policy="composer", config=POLICY, rule_set=rule_set(toml), now=now, limit=100)

    def rows(self, *columns: str) -> list[tuple[Any, ...]]:
        query = select(*(labels.c[name] for name in columns)).order_by(labels.c.inference_id, labels.c.revision)
        with reading(self.engine) as connection:
            return [tuple(row) for row in connection.execute(query)]


def rule_set(toml: str) -> RuleSet:
    return parse_rule_set(toml)


@pytest.fixture
def bench(engine: Engine) -> Bench:
    return Bench(engine)


def test_a_turn_is_labelled_when_its_wait_is_over_and_not_before(bench: Bench) -> None:
    bench.apply(turn("a"), observation("o", of="a", value=0.5))
    assert bench.label(at(59)) == 0
    assert bench.label(at(60)) == 1
    assert bench.label(at(61)) == 0
    assert bench.rows("inference_id", "revision", "current", "reward", "rule_set", "exclusion") == [
        ("a", 1, True, 0.5, rule_set(ONLY_RATING).digest, None)
    ]


def test_a_late_observation_makes_a_second_revision_and_one_stays_current(bench: Bench) -> None:
    bench.apply(turn("a"))
    bench.label(at(60))
    bench.apply(observation("o", of="a", value=-1.0, occurred=100), offset=10, received=100)
    assert bench.label(at(101)) == 1
    assert bench.rows("revision", "current", "reward", "exclusion") == [(1, False, 0.0, "no_signal"), (2, True, -1.0, None)]
    assert bench.label(at(102)) == 0


def test_what_cannot_be_read_holds_up_no_other_turn_and_is_told_in_its_label_and_once_in_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.apply(turn("a"), turn("b"), observation("o", of="a", value="great"), observation("p", of="b", value=0.5))
    assert bench.label(at(60)) == 2
    assert bench.rows("inference_id", "reward", "exclusion") == [("a", 0.0, "no_signal"), ("b", 0.5, None)]
    assert [[term["abstained"] for term in terms] for (terms,) in bench.rows("terms")] == [["unreadable"], [None]]
    told = [record.getMessage() for record in caplog.records if "term_unreadable" in record.getMessage()]
    assert told == ["event=term_unreadable policy=composer inference_id=a terms=rating"]


def test_an_observation_beyond_lateness_is_ledgered_and_never_paid_not_even_by_a_later_label(bench: Bench) -> None:
    bench.apply(turn("a"), observation("in-time", of="a", value=0.5))
    bench.label(at(60))
    bench.apply(observation("too-late", of="a", value=-1.0, occurred=800), offset=10, received=800)
    assert bench.label(at(801)) == 0
    with writing(bench.engine) as connection:
        assert connection.execute(select(observations.c.status).where(observations.c.id == "too-late")).scalar_one() == "late"
        connection.execute(update(turns).values(needs_relabel=True))
    assert bench.label(at(802)) == 1
    assert bench.rows("revision", "reward")[-1] == (2, 0.5)


def test_a_turn_is_shown_with_all_that_was_said_of_it_and_of_its_episode_and_nothing_of_another_policy_s(bench: Bench) -> None:
    bench.apply(turn("a", episode="e"), turn("b", episode="e", policy="tab"))
    bench.apply(
        observation("of the turn", of="a", name="first", occurred=10),
        observation("of the episode", episode="e", policy="composer", name="second", occurred=20),
        observation("of the other policy", episode="e", policy="tab", name="third", occurred=30),
        offset=10, received=40,
    )  # fmt: skip
    bench.label(at(60))
    seen = SqlPages(bench.engine).inspect("a")
    assert seen is not None
    assert [said["name"] for said in seen.observed] == ["first", "second"]
    assert [revision.revision for revision in seen.revisions] == [1]


def test_a_turn_that_was_trained_on_keeps_the_label_it_was_trained_with(bench: Bench) -> None:
    bench.apply(turn("a"), observation("o", of="a", value=0.5))
    bench.label(at(60))
    item = {"inference_id": "a", "batch_id": "B", "episode_id": "e", "reward": 0.5, "label_revision": 1, "segment": ""}
    with writing(bench.engine) as connection:
        connection.execute(insert(batch_items), item)
        connection.execute(update(turns).values(needs_relabel=True))
    bench.label(at(70))
    assert bench.rows("revision", "current", "reward") == [(1, True, 0.5)]
    assert bench.label(at(71)) == 0  # and is not asked about again


def test_every_label_goes_to_its_topic_in_the_transaction_that_writes_it(bench: Bench) -> None:
    bench.apply(turn("a"), observation("o", of="a", value=0.5))
    bench.label(at(60))
    with reading(bench.engine) as connection:
        sent = connection.execute(select(outbox).where(outbox.c.topic == "ratchet.labels")).one()
    made = msgspec.json.decode(sent.payload, type=Label)
    assert (sent.key, sent.type, made.reward, made.revision) == ("a", LABEL_EVENT, 0.5, 1)
    assert [(term.name, term.evidence) for term in made.terms] == [("rating", ("o",))]


# --- the commands -----------------------------------------------------------------------------------------------------------

CONFIG = '[policies.composer]\nmodel = "m"\nbase_name = "b"\nbase_model = "B"\nheld_out_share = 0.0\n'


@dataclass
class Deployment:
    """A data folder with two labelled turns and the commands over it."""

    bench: Bench
    folder: Path
    environment: dict[str, str]

    def run(self, command: Command, *arguments: str) -> Result:
        return CliRunner().invoke(command, arguments, env=self.environment | {"COLUMNS": "200"}, catch_exceptions=False)


@pytest.fixture
def deployment(tmp_path: Path, migrated: Callable[[Settings], None]) -> Iterator[Deployment]:
    (tmp_path / "ratchet.toml").write_text(CONFIG)
    (tmp_path / "rules.toml").write_text(ONLY_RATING)
    environment = {"RATCHET_DATA": str(tmp_path), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml")}
    settings = from_environment(environment)
    migrated(settings)
    bench = Bench(open_engine(settings.database_url))
    bench.apply(
        turn("a"), observation("o", of="a", value=1.0), observation("f", of="a", name="follow_up", value="Thank you, works great!"),
        turn("b"),
    )  # fmt: skip
    bench.label(at(60), toml=default_toml())
    yield Deployment(bench, tmp_path, environment)
    bench.engine.dispose()


def test_the_report_counts_labels_terms_moods_exclusions_and_counters(deployment: Deployment) -> None:
    report = json.loads(deployment.run(labels_command, "report", "composer", "--json").output)
    assert (report["labels"], report["revised"], report["held_out"]) == (2, 0, 0)
    assert report["moods"] == {"satisfied": 1}
    assert report["versions"] == {"v1": {"trainable": 1, "no_signal": 1}}
    assert report["abstention_shares"] == {
        "edit_persistence": 1.0, "follow_up": 0.5, "rating": 0.5, "undo": 1.0, "tool_calls": 1.0, "clarification": 1.0, "finish": 1.0,
        "length": 0.0, "latency": 0.0,
    }  # fmt: skip
    assert report["rule_sets"] == {rule_set(default_toml()).digest: 2}
    shown = deployment.run(labels_command, "report", "composer").output
    assert "2 labels" in shown
    assert "no_signal 1" in shown


@pytest.mark.parametrize(("share", "excluded"), [("0.5", {"no_signal": 1}), ("0.0", {"no_signal": 1, "rollout": 1})])
def test_a_replay_leaves_practice_out_only_where_batches_do(deployment: Deployment, share: str, excluded: dict[str, int]) -> None:
    (deployment.folder / "ratchet.toml").write_text(f"{CONFIG}\n[batching]\nrollout_share = {share}\n")
    deployment.bench.apply(
        msgspec.structs.replace(turn("p"), source="rollout:tasks"), observation("g", of="p", name="rating", value=1.0), offset=10
    )
    deployment.bench.label(at(62))
    shown = deployment.run(rules_command, "replay", str(deployment.folder / "rules.toml"), "--policy", "composer").output
    assert "3 turns" in shown
    assert literal_eval(shown.splitlines()[0].split("excluded: ")[1]) == excluded


def test_rules_are_replayed_without_a_trace_and_activated_with_one(deployment: Deployment) -> None:
    file = str(deployment.folder / "rules.toml")
    before = deployment.bench.rows("inference_id", "revision", "reward")
    shown = deployment.run(rules_command, "replay", file, "--policy", "composer").output
    assert "2 turns, 2 change" in shown
    assert "no_signal" in shown
    assert deployment.bench.rows("inference_id", "revision", "reward") == before
    assert "never activated" in deployment.run(rules_command, "show", "composer").output
    assert "in force for composer" in deployment.run(rules_command, "activate", file, "--policy", "composer", "--break-glass").output
    history = deployment.run(rules_command, "show", "composer").output
    assert f"only-rating activated by {os_user()}" in history
    with reading(deployment.bench.engine) as connection:
        assert [tuple(row) for row in connection.execute(select(audit.c.actor, audit.c.action, audit.c.subject))] == [
            (os_user(), "break_glass", "composer"),
            (os_user(), "rule_set.activate", "composer"),
        ]
    digest = rule_set(ONLY_RATING).digest
    assert "no difference" in deployment.run(rules_command, "diff", file, digest[:12]).output
    assert deployment.bench.rows("inference_id", "revision", "reward") == before  # labels keep the rule set they were made under


def test_a_file_that_is_no_rule_set_is_refused_with_what_is_wrong(deployment: Deployment) -> None:
    (deployment.folder / "bad.toml").write_text('name = "bad"\n[[terms]]\nname = "vibes"\nweight = 1.0\n')
    result = CliRunner().invoke(rules_command, ["validate", str(deployment.folder / "bad.toml")], env=deployment.environment)
    assert result.exit_code != 0
    assert "no term is named 'vibes'" in str(result.exception)
    assert "rating" in deployment.run(rules_command, "validate", str(deployment.folder / "rules.toml")).output


def test_a_label_made_while_its_person_was_erased_is_not_written(bench: Bench) -> None:
    bench.apply(turn("a", actor="alice"), observation("o", of="a"))
    book, rules = SqlLabels(bench.engine), rule_set(ONLY_RATING)
    made = [label(due, config=POLICY, rule_set=rules, now=at(60)) for due in book.due("composer", now=at(60), limit=10)]
    bench.apply(erasure("alice"), offset=5, received=61)
    book.write(made, now=at(62))
    assert bench.rows("inference_id") == []
    assert bench.label(at(63)) == 1
    assert bench.rows("inference_id", "actor", "exclusion") == [("a", None, "erased")]


@pytest.mark.parametrize("about", [{"of": "t1"}, {"episode": "e"}], ids=["turn", "episode"])
def test_what_somebody_said_about_others_is_not_in_their_labels_once_they_are_erased(bench: Bench, about: dict[str, Any]) -> None:
    own = turn("mine", actor="alice", episode="m")
    bench.apply(turn("t1", actor="bob", episode="e"), turn("t2", actor="bob"), own, observation("o1", value=-1.0, actor="alice", **about))
    bench.label(at(70))
    with writing(bench.engine) as connection:
        erase_actor(connection, erasure("alice"), now=at(100))
    with reading(bench.engine) as connection:
        asked = connection.execute(select(turns.c.inference_id).where(turns.c.needs_relabel)).scalars().all()
    assert asked == ["t1"]
    bench.label(at(101))
    assert [row[1:] for row in bench.rows("inference_id", "reward", "exclusion", "current") if row[0] == "t1"] == [
        (-1.0, None, False), (0.0, "no_signal", True),
    ]  # fmt: skip


def test_what_was_said_about_an_erased_person_s_episode_is_not_in_the_labels_of_its_other_turns(bench: Bench) -> None:
    bench.apply(turn("hers", actor="alice", episode="e"), turn("his", actor="bob", episode="e"), observation("o1", episode="e"))
    bench.label(at(70))
    with writing(bench.engine) as connection:
        erase_actor(connection, erasure("alice"), now=at(100))
    with reading(bench.engine) as connection:
        asked = connection.execute(select(turns.c.inference_id).where(turns.c.needs_relabel)).scalars().all()
    assert asked == ["his"]
