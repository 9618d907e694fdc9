"""Fixtures of commands that act over HTTP."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.operations.canned import POLICY, Canned, canned


@pytest.fixture(scope="module")
def service() -> Iterator[Canned]:
    """A service that a test plays."""
    with canned() as played:
        yield played


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with a configuration."""
    (tmp_path / "ratchet.toml").write_text(f'[policies.{POLICY}]\nmodel = "."\nbase_name = "tiny"\nbase_model = "tiny"\n')
    return tmp_path
