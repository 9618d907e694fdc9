"""A process that is cut off says since when, once at the beginning and once at the end."""

import logging
from datetime import timedelta

import pytest

from app.contact import Contact, Part
from app.domain.errors import Unavailable
from tests.fakes.clock import FrozenClock


def test_a_part_that_falls_silent_is_told_once_and_its_return_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = FrozenClock()
    contact = Contact(region="eu", clock=clock)
    assert (contact.sentence(), contact.seconds()) == (None, {})
    contact.heard(Part.DATABASE)
    assert (contact.sentence(), contact.seconds()) == (None, {("eu", "database"): 0.0})
    began = clock()
    for _ in range(3):
        contact.lost(Part.DATABASE, "no route to host")
        clock.advance(20)
    assert contact.sentence() == f"cut off from the database since {began.isoformat(timespec='seconds')}"
    assert contact.silences()[Part.DATABASE].why == "no route to host"
    assert contact.seconds() == {("eu", "database"): 60.0}
    for _ in range(3):
        contact.heard(Part.DATABASE)
    assert (contact.sentence(), contact.seconds()) == (None, {("eu", "database"): 0.0})
    first, last = (record.getMessage() for record in caplog.records)
    assert first == "cut off, serving what is here part=database region=eu error=no route to host"
    assert last == "in contact again part=database region=eu after_s=60"


def test_a_question_is_noted_and_what_nobody_needs_is_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    contact = Contact(clock=FrozenClock())

    def fails() -> int:
        raise Unavailable("gone")

    assert contact.asked(Part.DATABASE, lambda: 3) == 3
    with pytest.raises(Unavailable):
        contact.asked(Part.STORAGE, fails)
    assert list(contact.silences()) == [Part.STORAGE]
    for _ in range(2):
        contact.let_go(Part.STORAGE)
    assert (contact.silences(), contact.seconds()) == ({}, {("", "database"): 0.0, ("", "storage"): 0.0})
    assert [record.getMessage().split(" part")[0] for record in caplog.records] == ["cut off, serving what is here", "not needed any more"]


def test_parts_fall_silent_by_themselves() -> None:
    clock = FrozenClock()
    contact = Contact(clock=clock)
    contact.lost(Part.STORAGE, "a")
    clock.advance(timedelta(seconds=5).total_seconds())
    contact.lost(Part.DATABASE, "b")
    assert contact.seconds() == {("", "database"): 0.0, ("", "storage"): 5.0}
    contact.lost(Part.DATABASE, "said already", for_s=60.0)
    assert contact.seconds()["", "database"] == 0.0
    contact.heard(Part.STORAGE)
    contact.lost(Part.STORAGE, "asked a while ago", for_s=3.0)
    assert contact.seconds()["", "storage"] == 3.0
    contact.heard(Part.STORAGE)
    assert list(contact.silences()) == [Part.DATABASE]
