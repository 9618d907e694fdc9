"""Lists go on by a key: nothing is shown twice and nothing is left out, also where rows have the same moment."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, insert, select

from app.db.chunks import chunked
from app.db.engine import reading, writing
from app.db.sight.paging import key_of, page_by_key, page_by_number, read_key, read_number
from app.db.tables import audit, versions
from app.domain.errors import BadRequest

AT = datetime(2026, 11, 24, 12, 0, 0, 123456, tzinfo=UTC)


def test_every_row_is_on_one_page_whatever_its_size(sqlite_engine: Engine) -> None:
    with writing(sqlite_engine) as connection:
        for n, moment in enumerate([AT, AT, AT, AT - timedelta(seconds=1), AT + timedelta(seconds=1)]):
            row = {
                "digest": f"d{n}",
                "policy": "p",
                "name": f"n{n}",
                "kind": "rl",
                "step": 1,
                "base_model": "b",
                "licence": "l",
                "tags": {},
            }
            connection.execute(insert(versions).values(**row, parent=None, created_at=moment))
    for limit in range(1, 7):
        seen, after, pages = list[str](), None, 0
        while pages == 0 or after is not None:
            with reading(sqlite_engine) as connection:
                query = select(versions.c.digest, versions.c.created_at)
                page = page_by_key(
                    connection, query, versions.c.created_at, versions.c.digest, after=after, limit=limit, made=lambda r: r.digest
                )
            assert len(page.rows) <= limit
            seen, after, pages = [*seen, *page.rows], page.after, pages + 1
        assert seen == ["d4", "d2", "d1", "d0", "d3"]
        assert pages == -(-5 // limit)


def test_numbers_go_down_page_by_page(sqlite_engine: Engine) -> None:
    with writing(sqlite_engine) as connection:
        for n in range(1, 6):
            row = {
                "seq": n,
                "occurred_at": AT,
                "actor": "a",
                "action": "x",
                "subject": "s",
                "detail": {},
                "previous_hash": "0",
                "hash": str(n),
            }
            connection.execute(insert(audit).values(**row))
    seen, after = list[int](), "6"
    while after is not None:
        with reading(sqlite_engine) as connection:
            page = page_by_number(connection, select(audit.c.seq), audit.c.seq, after=after, limit=2, made=lambda row: row.seq)
        seen, after = [*seen, *page.rows], page.after
    assert seen == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("moment", [AT, datetime(1969, 12, 31, 23, tzinfo=UTC)])
def test_a_place_is_read_back_to_the_microsecond(moment: datetime) -> None:
    assert read_key(key_of(moment, "a.b")) == (moment, "a.b")
    assert key_of(datetime(2026, 11, 24, tzinfo=UTC), "x") == "1795478400000000.x"


@pytest.mark.parametrize("text", ["", "x", "12", "12.", "x.y", "1" * 18 + ".y"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="is no place in this list") as refused:
        read_key(text)
    assert refused.value.param == "after"


def test_numbers_are_read_as_far_as_a_table_counts() -> None:
    assert read_number("9" * 18) == 10**18 - 1
    for text in ("", "-1", "x", "9" * 19):
        with pytest.raises(BadRequest, match="is no place in this list"):
            read_number(text)


def test_pieces_are_full_but_the_last() -> None:
    assert list(chunked(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(chunked(range(4), 2)) == [[0, 1], [2, 3]]
    assert [len(piece) for piece in chunked(range(501))] == [500, 1]
