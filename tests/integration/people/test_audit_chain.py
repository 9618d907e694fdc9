"""The audit chain on both databases: every way to tamper is found, and fifty writers at once do not fork it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, delete, event, func, select, update

from app.db.engine import reading, writing
from app.db.release import audit
from app.db.tables import audit as audit_table
from app.db.tables import audit_head

AT = datetime(2026, 11, 21, 12, 0, 0, 123_457, tzinfo=UTC)
WRITERS = 50


def _append(engine: Engine, number: int) -> None:
    with writing(engine) as connection:
        detail = {"number": number, "share": 0.05, "note": "für Ada"}
        audit.append(
            connection,
            actor="user:ada",
            action="approve",
            subject=f"release-{number}",
            detail=detail,
            now=AT + timedelta(microseconds=number),
        )


@pytest.fixture
def chain(engine: Engine) -> Engine:
    for number in range(1, 7):
        _append(engine, number)
    return engine


def _problem(engine: Engine, seen: tuple[int, str] | None = None) -> str | None:
    with reading(engine) as connection:
        return audit.verify(connection, seen=seen).problem


def test_an_untouched_chain_verifies(chain: Engine) -> None:
    assert _problem(chain) is None


def test_an_empty_chain_verifies(engine: Engine) -> None:
    assert _problem(engine) is None


@pytest.mark.parametrize("column", ["actor", "action", "subject", "detail", "occurred_at"])
def test_an_edit_is_found(chain: Engine, column: str) -> None:
    forged = {"detail": {"number": 9}, "occurred_at": AT + timedelta(hours=1)}.get(column, "user:eve")
    with writing(chain) as connection:
        connection.execute(update(audit_table).where(audit_table.c.seq == 3).values({column: forged}))
    assert _problem(chain) is not None
    assert "entry 3" in str(_problem(chain))
    assert "edited" in str(_problem(chain))


def test_an_edit_with_a_fresh_hash_is_found_at_its_successor(chain: Engine) -> None:
    with writing(chain) as connection:
        row = connection.execute(select(audit_table).where(audit_table.c.seq == 3)).one()
        content = {**row._mapping, "actor": "user:eve"}
        content.pop("hash")
        connection.execute(update(audit_table).where(audit_table.c.seq == 3).values(actor="user:eve", hash=audit.entry_hash(**content)))
    assert "entry 4 does not follow" in str(_problem(chain))


def test_an_edit_with_a_fresh_hash_and_one_mended_link_is_found(chain: Engine) -> None:
    with writing(chain) as connection:
        row = connection.execute(select(audit_table).where(audit_table.c.seq == 3)).one()
        content = {**row._mapping, "actor": "user:eve"}
        content.pop("hash")
        fresh = audit.entry_hash(**content)
        connection.execute(update(audit_table).where(audit_table.c.seq == 3).values(actor="user:eve", hash=fresh))
        connection.execute(update(audit_table).where(audit_table.c.seq == 4).values(previous_hash=fresh))
    assert "entry 4" in str(_problem(chain)), "its own hash covers its predecessor's"


def test_a_deletion_is_found(chain: Engine) -> None:
    with writing(chain) as connection:
        connection.execute(delete(audit_table).where(audit_table.c.seq == 3))
    assert "after entry 2 comes entry 4" in str(_problem(chain))


def test_a_deletion_with_renumbering_is_found(chain: Engine) -> None:
    """agenticos#1647: hashes that leave the number out let rows be renumbered."""
    with writing(chain) as connection:
        connection.execute(delete(audit_table).where(audit_table.c.seq == 3))
        for seq in (4, 5, 6):
            connection.execute(update(audit_table).where(audit_table.c.seq == seq).values(seq=seq - 1))
    assert _problem(chain) is not None


def test_reordering_is_found(chain: Engine) -> None:
    with writing(chain) as connection:
        for old, new in ((3, 99), (4, 3), (99, 4)):
            connection.execute(update(audit_table).where(audit_table.c.seq == old).values(seq=new))
    assert "entry 3" in str(_problem(chain))


def test_truncation_is_found_by_the_head(chain: Engine) -> None:
    with writing(chain) as connection:
        connection.execute(delete(audit_table).where(audit_table.c.seq > 4))
    assert "the head says 6 entries, the chain has 4" in str(_problem(chain))


def test_truncation_together_with_the_head_is_found_by_what_was_seen_outside(chain: Engine) -> None:
    with reading(chain) as connection:
        last = list(audit.entries(connection))[-1]
    with writing(chain) as connection:
        kept = connection.execute(select(audit_table).where(audit_table.c.seq == 4)).one()
        connection.execute(delete(audit_table).where(audit_table.c.seq > 4))
        connection.execute(update(audit_head).values(seq=4, hash=kept.hash))
    assert _problem(chain) is None
    assert "cut off together with its head" in str(_problem(chain, seen=(last.seq, last.hash)))
    _append(chain, 5)
    _append(chain, 60)
    assert "written anew" in str(_problem(chain, seen=(last.seq, last.hash)))


def test_fifty_concurrent_writers_do_not_fork_the_chain(engine: Engine) -> None:
    """NemoClaw#916, Atlas#182, Containarium#1326: read-then-append forks, and locking the newest row does not help."""
    gate = threading.Barrier(WRITERS)

    def write(number: int) -> None:
        gate.wait()
        _append(engine, number)
        _append(engine, 100 + number)

    with ThreadPoolExecutor(WRITERS) as pool:
        assert list(pool.map(write, range(WRITERS))) == [None] * WRITERS
    with reading(engine) as connection:
        assert connection.execute(select(func.count()).select_from(audit_table)).scalar_one() == 2 * WRITERS
        found = audit.verify(connection)
    assert (found.entries, found.problem) == (2 * WRITERS, None)


def test_who_acts_while_the_chain_is_read_is_no_tamperer(chain: Engine) -> None:
    numbers = iter(range(7, 99))

    @event.listens_for(chain, "after_cursor_execute")
    def acts(_connection: object, _cursor: object, statement: str, *_more: object) -> None:
        if statement.startswith("SELECT audit.seq"):
            _append(chain, next(numbers))

    for _ in range(3):
        assert _problem(chain) is None
    event.remove(chain, "after_cursor_execute", acts)
    assert next(numbers) == 10, "three acts, each between the chain and its head"
    with reading(chain) as connection:
        assert audit.verify(connection).entries == 9


def test_a_transaction_that_fails_leaves_no_entry_behind(chain: Engine) -> None:
    class PowerCutError(Exception):
        pass

    def fail() -> None:
        with writing(chain) as connection:
            audit.append(connection, actor="a", action="b", subject="c", detail={}, now=AT)
            raise PowerCutError

    with pytest.raises(PowerCutError):
        fail()
    assert _problem(chain) is None
    _append(chain, 7)
    assert _problem(chain) is None
