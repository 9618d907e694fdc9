"""An alarm that waits for people is told however many came and went after it."""

from datetime import timedelta

from sqlalchemy import Engine

from app.db.engine import open_engine, reading, writing
from app.db.release.alarms import SHOWN, insert_alarm, read_alarms
from app.db.sight.needs import read_needs
from app.domain.release.alarms import Alarm, AlarmKind
from tests.fakes.clock import FrozenClock

NOON = FrozenClock().now


def alarm(number: int, kind: AlarmKind, *, ended: bool) -> Alarm:
    raised = NOON + timedelta(minutes=number)
    return Alarm(
        id=f"{number:04}", policy="tab", kind=kind, release_id="r", generation=1, reason="why", raised_at=raised, raised_by="system:watch",
        until="two people", ended_at=raised if ended else None,
    )  # fmt: skip


def test_an_open_alarm_is_told_before_a_hundred_newer_ones_that_ended(database_url: str) -> None:
    engine: Engine = open_engine(database_url)
    with writing(engine) as connection:
        insert_alarm(connection, alarm(0, AlarmKind.GAP, ended=False))
        for number in range(1, SHOWN + 6):
            insert_alarm(connection, alarm(number, AlarmKind.INCIDENT, ended=True))
    with reading(engine) as connection:
        told, about = read_alarms(connection, "tab"), read_alarms(connection, "tab", release_id="r")
        waiting = read_alarms(connection, "tab", open_only=True)
        needs = read_needs(connection, "tab")
    assert [len(told), len(about)] == [SHOWN + 1] * 2
    assert (told[0].id, told[-1].id) == (f"{SHOWN + 5:04}", "0000")
    assert [one.id for one in waiting] == [one.id for one in needs.alarms] == ["0000"]
    engine.dispose()
