"""What people did with the turns of a batch, read from real rows on both databases, up to what training is handed."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, insert, update

from app.db.engine import reading, writing
from app.db.learning.reactions import read_reactions
from app.db.tables import observations, turns
from app.domain.learning.corrections import CorrectionKind
from pipelines.labelling.corrections import correction_of
from pipelines.labelling.rule_set import default_toml, parse_rule_set
from tests.integration.batching.rows import NOON, add_turn, add_version


@pytest.fixture
def engine(engine: Engine) -> Engine:
    add_version(engine, "champion")
    return engine


def say(engine: Engine, name: str, value: Any, *, of: str, actor: str | None = None, minute: int = 0, retracted: bool = False) -> None:
    """An observation of that turn."""
    at = NOON + timedelta(minutes=minute)
    row = {
        "source": "api", "id": f"{name}-{of}-{minute}", "name": name, "value": value, "occurred_at": at, "received_at": at, "actor": actor,
        "tags": {}, "status": "joined", "retracted_at": at if retracted else None, "policy": "composer", "inference_id": of,
        "episode_id": None,
    }  # fmt: skip
    with writing(engine) as connection:
        connection.execute(insert(observations).values(row))


def corrections(engine: Engine, *names: str) -> dict[str, tuple[CorrectionKind, str, str | None, bool]]:
    rules = parse_rule_set(default_toml())
    with reading(engine) as connection:
        found = [correction_of(r, rules) for r in read_reactions(connection, names, before=NOON + timedelta(minutes=5))]
    return {c.inference_id: (c.kind, c.said, c.author, c.newcomer) for c in found if c is not None}


def test_corrections_are_read_with_their_author_and_who_is_new(engine: Engine) -> None:
    add_turn(engine, "shown", actor="asker", minute=1, completion="wrong")
    say(engine, "demonstration", "right", of="shown", minute=10)
    add_turn(engine, "by-another", actor="asker", minute=1, completion="wrong")
    say(engine, "demonstration", "right", of="by-another", actor="colleague", minute=10)
    add_turn(engine, "silent", actor="asker", minute=1, completion="wrong")
    found = corrections(engine, "shown", "by-another", "silent")
    assert found == {
        "shown": (CorrectionKind.DEMONSTRATION, "right", "asker", False),
        "by-another": (CorrectionKind.DEMONSTRATION, "right", "colleague", True),
    }


def test_what_was_taken_back_or_erased_is_not_learned_from(engine: Engine) -> None:
    add_turn(engine, "taken-back", actor="asker", completion="wrong")
    say(engine, "demonstration", "right", of="taken-back", minute=10, retracted=True)
    add_turn(engine, "erased", actor="asker", completion="wrong")
    say(engine, "demonstration", "right", of="erased", minute=10)
    with writing(engine) as connection:
        connection.execute(update(turns).where(turns.c.inference_id == "erased").values(erased_at=NOON))
    assert corrections(engine, "taken-back", "erased") == {}


def test_the_answer_kept_after_asking_again_is_the_last_to_a_prompt_as_long(engine: Engine) -> None:
    chain: dict[str, Any] = {"episode": "e", "actor": "asker"}
    add_turn(engine, "first", completion="one", minute=1, **chain)
    say(engine, "regenerate", True, of="first", minute=2)
    add_turn(engine, "second", completion="two", minute=3, **chain)
    say(engine, "regenerate", True, of="second", minute=4)
    add_turn(engine, "third", completion="three", minute=5, **chain)
    add_turn(engine, "later", completion="of another question", minute=7, prompt_tokens=30, **chain)
    found = corrections(engine, "first", "second", "third", "later")
    assert found == dict.fromkeys(("first", "second"), (CorrectionKind.REGENERATE, "three", "asker", False))
