"""Fixtures of the commands at a terminal."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.db.engine import open_engine
from app.settings import Settings
from tests.unit.pipelines.commands.terminal.at_a_terminal import CONFIG, Terminal


@pytest.fixture
def terminal(tmp_path: Path, migrated: Callable[[Settings], None]) -> Iterator[Terminal]:
    """In a data folder with a configuration and an empty database."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "ratchet.toml").write_text(CONFIG)
    engine = open_engine(f"sqlite:///{folder / 'ratchet.db'}")
    made = Terminal(folder, engine)
    migrated(made.settings)
    yield made
    engine.dispose()
