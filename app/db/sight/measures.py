"""Labels added up: reads of `label_rollups`, and of nothing else."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Connection, cast, func, select

from app.db.chunks import one_of
from app.db.learning.rollups import hour_of
from app.db.tables import label_rollups
from app.domain.release.sums import Sums

R = label_rollups.c


def _sum(column: ColumnElement[int]) -> ColumnElement[int]:
    """PostgreSQL adds bigints to a numeric, which would come back as a Decimal."""
    return cast(func.sum(column), BigInteger)


ADDED = (_sum(R.n).label("n"), _sum(R.total).label("total"), _sum(R.squares).label("squares"), _sum(R.negative).label("negative"))


def read_sums(
    connection: Connection, policy: str, *by: ColumnElement[Any], versions: Collection[str] | None = None, since: datetime | None = None,
    measures: Collection[str] | None = None,
) -> Mapping[tuple[Any, ...], Sums]:  # fmt: skip
    """Sums grouped by some of the columns."""
    query = select(*by, *ADDED).where(R.policy == policy)
    if versions is not None:
        query = query.where(one_of(connection, R.version, sorted(versions)))
    if since is not None:
        query = query.where(R.hour >= hour_of(since))
    if measures is not None:
        query = query.where(R.measure.in_(sorted(measures)))
    found = connection.execute(query.group_by(*by))
    return {tuple(row[: len(by)]): Sums(n=row.n, total=row.total, squares=row.squares, negative=row.negative) for row in found}
