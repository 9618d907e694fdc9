"""Fixtures that every test may ask for: databases of both kinds, migrated and empty.

    sqlite_url      a fresh SQLite file
    postgres_url    a fresh database on a real PostgreSQL server
    database_url    the test runs twice, once on each

    sqlite_engine, postgres_engine, engine    opened on them, and closed after the test
    migrated                                  makes the databases of a data folder, as `ratchet db upgrade` does of none

A worker of pytest-xdist has its own server; it starts with the first test that asks for it.
"""

import gc
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.parts import pytest_configure, pytest_deselected, pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown

__all__ = [  # hooks: what ran, at the end
    "pytest_configure", "pytest_deselected", "pytest_sessionfinish", "pytest_terminal_summary", "pytest_testnodedown",
]  # fmt: skip

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from app.settings import Settings

# Hypothesis allows an example 200 ms and calls slow drawing unhealthy; beside other jobs on two cores both say nothing about the code.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side: a pool of threads in each would fight over the cores
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves its workers beside other tests: minutes instead of seconds

TEMPLATE = "ratchet_template"

NewDatabase = Callable[[], AbstractContextManager[str]]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is collected becomes garbage: to look for it takes a sixth of the time, and a quarter where tests are read anew."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What was imported stays: collections of garbage, which updates ask for, look through half a million objects otherwise."""
    _keep()


@pytest.fixture(scope="module", autouse=True)
def left_behind() -> Iterator[None]:
    """So does what the tests of a file left: half-way through, each collection took two seconds, and a hundred updates three minutes."""
    yield
    _keep()


def _keep() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """The URL of a fresh, migrated database; whatever asks for it runs once on SQLite and once on PostgreSQL."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """The URL of a fresh, migrated SQLite file."""
    return f"sqlite:///{shutil.copyfile(sqlite_template, tmp_path / 'ratchet.db')}"


@pytest.fixture
def postgres_url(new_postgres_database: NewDatabase) -> Iterator[str]:
    """The URL of a fresh, migrated PostgreSQL database, dropped after the test."""
    with new_postgres_database() as url:
        yield url


@pytest.fixture
def engine(database_url: str) -> Iterator["Engine"]:
    """An engine on either kind of database: whatever asks for it runs twice."""
    with _opened(database_url) as opened:
        yield opened


@pytest.fixture
def sqlite_engine(sqlite_url: str) -> Iterator["Engine"]:
    """An engine on a fresh SQLite file."""
    with _opened(sqlite_url) as opened:
        yield opened


@pytest.fixture
def postgres_engine(postgres_url: str) -> Iterator["Engine"]:
    """An engine on a fresh PostgreSQL database."""
    with _opened(postgres_url) as opened:
        yield opened


@contextmanager
def _opened(url: str) -> Iterator["Engine"]:
    from app.db.engine import open_engine  # here, because a test without a database must not pay for SQLAlchemy

    opened = open_engine(url)
    yield opened
    opened.dispose()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy: the migrations run once a session."""
    from app.db.migrate import upgrade  # here, because a test without a database must not pay for SQLAlchemy

    template = tmp_path_factory.mktemp("sqlite") / "template.db"
    upgrade(f"sqlite:///{template}")
    return template


@pytest.fixture(scope="session")
def migrated(sqlite_template: Path) -> Callable[["Settings"], None]:
    """Makes a new deployment's SQLite databases in a millisecond: copies of what the migrations made once. Half a second each otherwise."""
    from app import wiring  # here, because a test without a database must not pay for it

    def migrate(settings: "Settings") -> None:
        wiring.keep_salt(settings)
        for url in {settings.database_url, settings.inbox_url}:
            shutil.copyfile(sqlite_template, url.removeprefix("sqlite:///"))

    return migrate


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The server's URL, with `{}` in the place of the database's name."""
    from tests.postgres import running_postgres

    with running_postgres() as url:
        yield url


@pytest.fixture(scope="session")
def new_postgres_database(postgres_server: str) -> NewDatabase:
    """Makes databases as copies of one that was migrated: a copy takes some 30 ms."""
    import psycopg

    from app.db.migrate import upgrade

    conninfo = postgres_server.format("postgres").replace("+psycopg", "")

    def execute(statement: str) -> None:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[arg-type] - our own names, not input

    execute(f"CREATE DATABASE {TEMPLATE}")
    upgrade(postgres_server.format(TEMPLATE))
    numbers = count(1)

    @contextmanager
    def new_database() -> Iterator[str]:
        name = f"ratchet_{next(numbers)}"
        execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        try:
            yield postgres_server.format(name)
        finally:
            execute(f"DROP DATABASE {name} WITH (FORCE)")

    return new_database


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of the tiny random model; never change it, copy it."""
    from app.policy.tiny import write_tiny

    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its output head tied to the embedding, as SmolLM2's is."""
    from app.policy.tiny import write_tiny

    folder = tmp_path_factory.mktemp("models") / "tied"
    write_tiny(folder, tied=True)
    return folder
