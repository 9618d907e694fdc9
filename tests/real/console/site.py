"""`python -m tests.real.console.site FOLDER PORT`: the service with its pages over a small deployment, until it is stopped."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import insert

from app import wiring
from app.db.access.people import SqlPeople
from app.db.engine import open_engine, writing
from app.db.release.pairs import SqlPairs
from app.db.tables import follow_up_readings, observations
from app.domain.ids import utc_now
from app.domain.people import Role
from app.domain.release.pairs import BlindPair
from app.logging import configure
from app.main import serve
from app.settings import Settings, from_environment
from tests.fakes.releases import POLICY, ReleaseRoom
from tests.integration.console.deployment import deploy

PEOPLE = {"ada": Role.OPERATOR, "bob": Role.OPERATOR, "vic": Role.VIEWER, "rosa": Role.CONFIG_ADMIN, "root": Role.ADMIN}
PASSWORD = "a sentence is a good one"


def settings_of(folder: Path, port: int) -> Settings:
    """Of a deployment that only this machine reaches."""
    config = folder / "ratchet.toml"
    config.write_text('[policies.tab]\nmodel = "m"\nbase_name = "tiny"\nbase_model = "tiny"\n')
    return from_environment({"RATCHET_DATA": str(folder), "RATCHET_CONFIG": str(config), "RATCHET_PORT": str(port)})


def prepare(settings: Settings) -> ReleaseRoom:
    """A candidate that is READY, and people who can sign in."""
    wiring.upgrade_schema(settings)
    engine = open_engine(settings.database_url)
    book, door = SqlPeople(engine), wiring.sign_in(settings)
    for name, role in PEOPLE.items():
        book.add(name, roles=[role], by="user:setup")
        door.accept(book.invite(name, lasts=timedelta(hours=1), by="user:setup"), PASSWORD)
    room = deploy(engine)
    SqlPairs(engine).keep([_pair(number) for number in range(4)], at=utc_now())
    with writing(engine) as connection:
        for number in (3, 5, 7):
            connection.execute(insert(observations).values(_follow_up(number)))
            connection.execute(insert(follow_up_readings).values(_asked(number)))
    return room


def _follow_up(number: int) -> dict[str, Any]:
    """What a user wrote after an answer."""
    now = utc_now()
    words = f"hm, and what of the other {number}?\n{'long ' * 80}{'x' * 300}"
    return {
        "source": "api", "id": f"f{number}", "inference_id": f"i{number}", "name": "follow_up", "value": words, "occurred_at": now,
        "received_at": now, "tags": {}, "status": "joined",
    }  # fmt: skip


def _asked(number: int) -> dict[str, Any]:
    """What the labeller's reader abstained on."""
    asked = {"inference_id": f"i{number}", "observation_id": f"f{number}", "policy": POLICY, "labelled_at": utc_now()}
    return asked | {"leaned_to": "satisfied", "unsure": True}


def _pair(number: int) -> BlindPair:
    """One question with two answers, long lines and code in them."""
    question = f"How is a list sorted, and what does it cost? Number {number}\n\n    def sort(values): ...  # {'long ' * 60}"
    return BlindPair(
        id=f"pair-{number}", release_id="release-2", policy=POLICY, suite="known", task=f"t{number}", cluster="",
        messages=[{"role": "user", "content": question}], champion_answer=f"By hand.\n{'x' * 400}", candidate_answer="`sorted(values)`",
        champion_score=0.0, candidate_score=1.0, salt=f"salt {number}",
    )  # fmt: skip


def main() -> None:
    """Serve what was prepared."""
    configure("api", "INFO")
    serve(settings_of(Path(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    main()
