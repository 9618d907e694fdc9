"""What a database refuses is told by the rule that refused it: neither logs nor dead letters repeat what people said."""

import pytest
from sqlalchemy import Connection, Engine, insert, text
from sqlalchemy.exc import DBAPIError, StatementError

from app.db.engine import writing
from app.db.tables import deployment_facts
from app.db.verdicts import judged, refused_value
from app.domain.errors import BadRequest
from tests.fakes.served import at

WORDS = "what-somebody-said"
STRICTER = {
    "sqlite": "CREATE TRIGGER stricter BEFORE INSERT ON deployment_facts "
    "BEGIN SELECT RAISE(ABORT, 'CHECK constraint failed: stricter'); END",
    "postgresql": "ALTER TABLE deployment_facts ADD CONSTRAINT stricter CHECK (name = 'nothing')",
}


def store(connection: Connection, **more: object) -> None:
    connection.execute(insert(deployment_facts), {"name": WORDS, "value": {"said": WORDS}, "at": at(0), **more})


def test_a_row_that_a_rule_refuses_is_not_in_the_error(engine: Engine) -> None:
    with writing(engine) as connection:
        connection.execute(text(STRICTER[engine.dialect.name]))
    with pytest.raises(BadRequest, match="stricter") as refused, judged(), writing(engine) as connection:
        store(connection)
    assert WORDS not in str(refused.value)
    with pytest.raises(DBAPIError) as raised, writing(engine) as connection:
        store(connection)
    told = refused_value(raised.value.orig, engine.dialect)  # type: ignore[arg-type] - the driver's own
    assert WORDS not in str(told)


def test_what_a_statement_was_given_is_not_in_its_error(engine: Engine) -> None:
    with pytest.raises(StatementError) as raised, writing(engine) as connection:
        store(connection, at="no moment")
    assert WORDS not in str(raised.value)
    with pytest.raises(BadRequest) as refused, judged(), writing(engine) as connection:
        store(connection, name=f"{WORDS}\ud800")
    assert WORDS not in str(refused.value)
