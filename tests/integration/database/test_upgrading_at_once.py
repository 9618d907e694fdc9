"""Several containers of one release start at the same moment, and each upgrades the database first."""

import subprocess
import sys

from sqlalchemy import text

from app.db.engine import open_engine, writing
from app.db.migrate import current_revision, head_revision
from tests.conftest import NewDatabase

UPGRADE = "import sys; from app.db.migrate import upgrade; upgrade(sys.argv[1])"


def test_of_several_upgrades_at_once_one_does_it_and_the_others_find_it_done(new_postgres_database: NewDatabase) -> None:
    with new_postgres_database() as url:
        engine = open_engine(url)
        with writing(engine) as connection:
            connection.execute(text("DROP SCHEMA public CASCADE"))
            connection.execute(text("CREATE SCHEMA public"))
        engine.dispose()
        started = [subprocess.Popen([sys.executable, "-c", UPGRADE, url], stderr=subprocess.PIPE, text=True) for _ in range(3)]
        ended = [(one.communicate(timeout=120)[1][-2_000:], one.returncode) for one in started]
        assert ended == [("", 0)] * 3
        assert current_revision(url) == head_revision()
