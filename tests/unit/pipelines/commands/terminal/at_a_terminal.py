"""Somebody at a terminal beside the data folder of a small deployment, without a service."""

from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner, Result
from sqlalchemy import Engine, select

from app.db.engine import reading
from app.db.tables import audit
from app.settings import Settings, from_environment
from pipelines.__main__ import ratchet
from tests.fakes.releases import POLICY

CONFIG = f'[policies.{POLICY}]\nmodel = "."\nbase_name = "tiny"\nbase_model = "tiny"\n'


@dataclass
class Terminal:
    """See the module; `engine` is of the same database."""

    folder: Path
    engine: Engine

    @property
    def environment(self) -> dict[str, str | None]:
        """What the commands are told."""
        return {
            "RATCHET_DATA": str(self.folder), "RATCHET_CONFIG": str(self.folder / "ratchet.toml"), "COLUMNS": "300",
            "RATCHET_ACTOR_SALT": "pepper", "RATCHET_URL": None, "RATCHET_TOKEN": None, "RATCHET_KEY": None,
            "XDG_CONFIG_HOME": str(self.folder),
        }  # fmt: skip

    @property
    def settings(self) -> Settings:
        """The same, read."""
        return from_environment({name: value for name, value in self.environment.items() if value is not None})

    def __call__(self, *words: str, typed: str | None = None) -> Result:
        return CliRunner(env=self.environment).invoke(ratchet, words, input=typed)

    def said(self, *words: str) -> str:
        """What a command prints that does what it is asked for."""
        ran = self(*words)
        assert ran.exit_code == 0, (ran.output, ran.exception)
        return ran.output

    def refused(self, *words: str) -> BaseException:
        """Why a command does not."""
        ran = self(*words)
        assert ran.exception is not None, ran.output
        return ran.exception

    def broken(self) -> list[tuple[str, str, str, str]]:
        """Every time that somebody acted past the service: action, subject, act, reason."""
        with reading(self.engine) as connection:
            rows = connection.execute(select(audit).where(audit.c.action.endswith("break_glass")).order_by(audit.c.seq)).all()
        return [(row.action, row.subject, row.detail["act"], row.detail["reason"]) for row in rows]


def cells(told: str, *, of: str) -> list[str]:
    """The cells of the row of a table that holds this word."""
    line = next(line for line in told.splitlines() if of in line and line.startswith("│"))
    return [cell.strip() for cell in line.strip()[1:-1].split("│")]
