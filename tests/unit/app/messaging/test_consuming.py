"""The consumer's own decisions, over a client that is a list of records: where it reads on, what it leaves out, when it begins again."""

from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.errors import KafkaConfigurationError, KafkaConnectionError, OffsetOutOfRangeError
from kafka.structs import TopicPartition

from app.domain.errors import Unavailable
from app.domain.telemetry.streams import Position
from app.domain.telemetry.streams import TopicPartition as Place
from app.messaging.cluster import Cluster
from app.messaging.consumer import KafkaSource
from app.messaging.options import KafkaConfig
from tests.unit.app.messaging.test_codec import Record

EMBEDDED = Cluster(bootstrap=None, address_file=Path("none"))
REAL = Cluster(bootstrap="127.0.0.1:9", address_file=Path("none"), options=KafkaConfig())
REAL_0: Place = ("ratchet.events", 0)
FIRST: Place = ("ratchet.events.1", 0)


class Client:
    """kafka-python's consumer: hands out what lies in `topics` from where it was told to; `jumps` is the embedded broker's defect."""

    def __init__(self, topics: dict[str, str | None]) -> None:
        self.ids = topics
        self.log: dict[Place, list[int]] = {}
        self.ends: dict[Place, int] = {}
        self.position: dict[Place, int | None] = {}
        self.jumps: dict[Place, int] = {}
        self.asked: list[dict[str, int]] = []
        self.committed: list[Mapping[Any, Any]] = []
        self.closed = False
        self.sought: list[tuple[str, int, int]] = []
        self.error: Exception | None = None
        self.looked_up: list[str] = []
        self._cluster = SimpleNamespace(cluster_id="c", topic_id=self.ids.get)

    def assign(self, places: list[TopicPartition]) -> None:
        self.position = {(place.topic, place.partition): None for place in places}

    def assignment(self) -> list[TopicPartition]:
        return [TopicPartition(*place) for place in self.position]

    def seek(self, place: TopicPartition, offset: int) -> None:
        self.sought.append((place.topic, place.partition, offset))
        self.position[place.topic, place.partition] = offset

    def seek_to_beginning(self, place: TopicPartition) -> None:
        self.sought.append((place.topic, place.partition, -1))
        self.position[place.topic, place.partition] = -1

    def highwater(self, place: TopicPartition) -> int | None:
        return self.ends.get((place.topic, place.partition))

    def partitions_for_topic(self, topic: str) -> set[int]:
        self.looked_up.append(topic)
        return {0}

    def commit_async(self, offsets: Mapping[Any, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.committed.append(offsets)

    def poll(self, *, timeout_ms: int, max_records: int) -> dict[TopicPartition, list[Any]]:
        self.asked.append({"timeout_ms": timeout_ms, "max_records": max_records})
        if self.error is not None:
            raise self.error
        found: dict[TopicPartition, list[Any]] = {}
        for place, offsets in self.log.items():
            start = self.jumps.pop(place, None) or self.position.get(place) or 0
            there = [Record([], topic=place[0], partition=place[1], offset=offset) for offset in offsets if offset >= start]
            self.position[place] = max(offsets, default=-1) + 1
            if there:
                found[TopicPartition(*place)] = there
        return found

    def close(self, *, autocommit: bool, timeout_ms: int) -> None:
        assert not autocommit, "the database is told, not the broker"
        assert timeout_ms <= 1_000
        self.closed = True


class Room:
    """A source and all that it leans on."""

    def __init__(self, cluster: Cluster = EMBEDDED, *, known: dict[Place, Position] | None = None, mine: Collection[int] = (0,)) -> None:
        self.mine = frozenset(mine)
        self.open_epochs = [1]
        self.known = known or {}
        self.forgotten: list[Place] = []
        self.now_s = 1_000.0
        self.has_backlog = True
        self.left = False
        self.clients: list[Client] = []
        self.ids: dict[str, str | None] = {"ratchet.events": "t1"}
        self.contents: dict[Place, list[int]] = {}
        self.source = KafkaSource(
            cluster, self, self, group="g", positions=self, backlog=lambda: self.has_backlog, client=self.connect,  # type: ignore[arg-type]
            monotonic=lambda: self.now_s,
        )  # fmt: skip

    def connect(self, cluster: Cluster, group: str) -> Client:
        assert group == "g"
        self.clients.append(Client(self.ids))
        self.clients[-1].log = self.contents
        return self.clients[-1]

    @property
    def client(self) -> Client:
        return self.clients[-1]

    def readable(self, topic: str) -> list[int]:
        return list(self.open_epochs)

    def partitions(self) -> frozenset[int]:
        return self.mine

    def leave(self) -> None:
        self.left = True

    def read(self) -> Mapping[Place, Position]:
        return self.known

    def forget(self, places: Collection[Place]) -> None:
        self.forgotten += places

    def offsets(self, *, after_s: float = 0.0) -> list[int]:
        self.now_s += after_s
        return [delivery.offset for delivery in self.source.poll(0.0)]


def test_it_reads_on_where_the_database_says_and_asks_for_two_thousand_records_at_a_time() -> None:
    room = Room(known={FIRST: Position(3, None)})
    room.contents = {FIRST: [0, 1, 2, 3, 4]}
    assert room.offsets() == [3, 4]
    assert room.client.sought == [(*FIRST, 3)], "and nothing before it is fetched"
    room.source.poll(1.5)
    assert room.client.asked == [{"timeout_ms": 0, "max_records": 2_000}, {"timeout_ms": 1_500, "max_records": 2_000}]


def test_what_the_database_has_applied_is_passed_over_though_the_broker_brings_it() -> None:
    room = Room(known={FIRST: Position(3, None)})
    room.contents = {FIRST: [1, 2, 3]}
    room.source.poll(0.0)
    room.client.jumps = {FIRST: 1}
    room.contents[FIRST] += [4]
    assert room.offsets() == [4]


def test_a_gap_is_read_again_three_times_and_then_taken_as_real() -> None:
    room = Room()
    room.contents = {FIRST: [0, 1, 4, 5]}
    assert room.offsets() == [0, 1]
    assert room.client.position[FIRST] == 2, "from where it began"
    assert [room.offsets() for _ in range(3)] == [[], [], [4, 5]]
    room.contents[FIRST] += [8]
    assert [room.offsets() for _ in range(4)] == [[], [], [], [8]], "the next gap has three readings of its own"


def test_a_gap_that_closes_when_it_is_read_again_loses_nothing() -> None:
    room = Room()
    room.contents = {FIRST: list(range(6))}
    room.source.poll(0.0)
    room.contents[FIRST] += [6, 7, 8]
    room.client.jumps = {FIRST: 8}
    assert room.offsets() == []
    assert room.offsets() == [6, 7, 8]


def test_on_a_real_cluster_gaps_are_legal() -> None:
    room = Room(REAL, known={REAL_0: Position(0, "c/t1")})
    room.contents = {REAL_0: [0, 1, 4, 5]}
    assert room.offsets() == [0, 1, 4, 5]


def test_a_partition_of_a_real_cluster_that_nobody_has_read_begins_at_its_beginning() -> None:
    room = Room(REAL)
    room.contents = {REAL_0: [7, 8]}
    assert room.offsets() == [7, 8]
    assert room.client.sought == [(*REAL_0, -1)]
    assert room.forgotten == []
    assert room.source.incarnations() == {"ratchet.events": "c/t1"}


@pytest.mark.parametrize(("before", "again"), [("c/t1", False), (None, False), ("c/t0", True), ("other/t1", True)])
def test_a_position_in_another_topic_of_that_name_does_not_count(before: str | None, *, again: bool) -> None:
    room = Room(REAL, known={REAL_0: Position(2, before)})
    room.contents = {REAL_0: [0, 1, 2, 3]}
    assert room.offsets() == ([0, 1, 2, 3] if again else [2, 3])
    assert room.forgotten == ([REAL_0] if again else [])


def test_a_topic_that_is_made_anew_while_it_is_read_is_noticed_within_a_second() -> None:
    room = Room(REAL, known={REAL_0: Position(0, "c/t1")})
    room.contents = {REAL_0: [0, 1]}
    assert room.offsets() == [0, 1]
    room.ids["ratchet.events"] = "t2"
    room.contents[REAL_0][:] = [0]
    assert room.offsets(after_s=0.75) == []
    assert room.forgotten == []
    assert room.offsets(after_s=0.25) == [0]
    assert room.forgotten == [REAL_0]
    assert room.source.incarnations() == {"ratchet.events": "c/t2"}
    room.offsets(after_s=2.0)
    assert room.forgotten == [REAL_0], "once"


@pytest.mark.parametrize("at_once", [False, True])
def test_metadata_that_lacks_the_topic_s_id_for_a_moment_moves_nobody(*, at_once: bool) -> None:
    room = Room(REAL, known={REAL_0: Position(2, "c/t1")})
    room.contents = {REAL_0: [0, 1, 2, 3]}
    room.ids["ratchet.events"] = None if at_once else "t1"
    assert room.offsets() == [2, 3]
    for id_ in (None, "t1", None):
        room.ids["ratchet.events"] = id_
        assert room.offsets(after_s=2.0) == []
        assert (room.forgotten, room.source.incarnations()) == ([], {"ratchet.events": "c/t1"})
    room.ids["ratchet.events"] = "t2"
    assert room.offsets(after_s=2.0) == [0, 1, 2, 3]
    assert room.forgotten == [REAL_0]


def test_a_topic_that_the_client_does_not_know_yet_is_asked_for() -> None:
    room = Room(REAL)
    room.ids["ratchet.events"] = None
    room.offsets()
    assert room.client.looked_up == ["ratchet.events"]
    assert room.source.incarnations() == {}


@pytest.mark.parametrize(("end", "beyond"), [(4, False), (5, False), (3, True)])
def test_a_position_beyond_the_end_is_an_alarm_and_one_at_the_end_is_none(end: int, *, beyond: bool) -> None:
    room = Room(REAL, known={REAL_0: Position(4, "c/t1")})
    room.offsets()
    room.client.ends = {REAL_0: end}
    assert room.offsets() == []
    assert room.forgotten == ([REAL_0] if beyond else [])
    assert room.source.high_waters() == {REAL_0: end}


def test_the_embedded_brokers_ends_prove_nothing() -> None:
    room = Room(known={FIRST: Position(4, None)})
    room.offsets()
    room.client.ends = {FIRST: 0}
    room.offsets()
    assert room.forgotten == []
    assert room.source.incarnations() == {}


def test_a_position_outside_the_topic_is_read_from_the_beginning() -> None:
    room = Room(REAL, known={REAL_0: Position(4, "c/t1")})
    room.offsets()
    room.client.error = OffsetOutOfRangeError({TopicPartition(*REAL_0): 4})
    assert room.offsets() == []
    assert room.forgotten == [REAL_0]
    room.client.error = None
    room.contents[REAL_0] = [0, 1]
    assert room.offsets() == [0, 1]


def test_a_broker_that_does_not_answer_is_left_and_connected_to_anew() -> None:
    room = Room()
    room.contents = {FIRST: [0, 1]}
    assert room.offsets() == [0, 1]
    room.client.error = KafkaConnectionError("gone")
    with pytest.raises(Unavailable, match="does not answer"):
        room.source.poll(0.0)
    assert room.client.closed
    assert room.source.high_waters() == {}
    room.source.commit({FIRST: 2})
    room.offsets()
    assert len(room.clients) == 2


def test_a_mistake_of_ours_is_no_outage() -> None:
    room = Room()
    room.offsets()
    room.client.error = KafkaConfigurationError("no such setting")
    with pytest.raises(KafkaConfigurationError):
        room.source.poll(0.0)
    assert not room.client.closed


def test_the_broker_is_told_the_next_offset_and_a_refusal_of_that_stops_nothing() -> None:
    room = Room()
    room.source.commit({FIRST: 1})
    room.offsets()
    room.source.commit({FIRST: 7})
    assert [{(p.topic, p.partition): tuple(told) for p, told in each.items()} for each in room.client.committed] == [{FIRST: (7, "", -1)}]
    for error in (KafkaConnectionError("gone"), AssertionError("closed")):
        room.client.error = error
        room.source.commit({FIRST: 8})
    assert len(room.client.committed) == 1


@pytest.mark.parametrize(("silent_s", "backlog", "rebuilt"), [(15.0, True, False), (15.5, True, True), (15.5, False, False)])
def test_a_consumer_that_is_silent_for_more_than_fifteen_seconds_with_a_backlog_is_rebuilt(
    silent_s: float, *, backlog: bool, rebuilt: bool
) -> None:
    room = Room()
    room.has_backlog = backlog
    room.offsets()
    room.offsets(after_s=silent_s)
    room.offsets()
    assert (len(room.clients), room.clients[0].closed) == ((2, True) if rebuilt else (1, False))


def test_silence_is_counted_from_what_was_heard_last() -> None:
    room = Room()
    room.offsets()
    room.contents[FIRST] = [0]
    assert room.offsets(after_s=10.0) == [0]
    room.offsets(after_s=10.0)
    assert not room.clients[0].closed
    room.has_backlog = False
    room.offsets(after_s=6.0)
    room.has_backlog = True
    room.offsets(after_s=14.0)
    assert not room.clients[0].closed, "after a look at the backlog the count begins anew"


def test_epochs_and_fellow_members_are_followed_and_a_lost_topic_takes_the_client_with_it() -> None:
    room = Room(mine=(2, 0))
    room.offsets()
    assert list(room.client.position) == [("ratchet.events.1", 0), ("ratchet.events.1", 2)]
    room.open_epochs = [1, 2]
    room.offsets(after_s=1.0)
    assert len(room.clients) == 1, "a topic more needs no new client"
    assert len(room.client.position) == 4
    room.open_epochs = [2]
    room.offsets(after_s=1.0)
    assert [client.closed for client in room.clients] == [True, False]
    assert list(room.client.position) == [("ratchet.events.2", 0), ("ratchet.events.2", 2)]


def test_who_has_no_partition_waits_and_leaving_hands_them_over() -> None:
    room = Room(mine=())
    assert room.offsets() == []
    assert room.clients == []
    room.mine = frozenset({0})
    room.offsets()
    assert len(room.clients) == 1, "who reads nothing looks at every turn"
    room.source.close()
    assert (room.client.closed, room.left) == (True, True)


def test_a_jump_moves_the_fetch_alone_and_is_noticed() -> None:
    room = Room()
    room.contents = {FIRST: [0, 1]}
    room.offsets()
    room.contents[FIRST] += [2, 3, 4]
    room.source.jump(FIRST, 4)
    assert room.offsets() == []
    assert room.offsets() == [2, 3, 4]
