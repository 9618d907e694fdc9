"""Whose fault a refusal of the database is: only the data's may bury a record."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from sqlalchemy import Engine, select, text

from app.db.engine import reading, writing
from app.db.ingestion.streams import SqlEffects
from app.db.tables import dead_letters, turns
from app.domain.errors import OwnFault, RatchetError, Unavailable
from app.domain.telemetry.streams import EffectBatch, JoinRules
from app.domain.telemetry.turns import SamplingParams, Usage
from app.trajectories.segments import ParquetSegments
from pipelines.ingestion.isolate import Isolator
from tests.fakes.served import applied, at, turn
from tests.fakes.streaming import MemorySegments, acting

FIFTY = tuple(applied(turn(f"t{n}"), offset=n) for n in range(50))


def store_of(engine: Engine, segments: MemorySegments | None = None) -> SqlEffects:
    kept = segments or MemorySegments()
    return SqlEffects(engine, rules=lambda: JoinRules(policies={}), segments=kept)


def refusal(engine: Engine, batch: EffectBatch) -> type[RatchetError] | None:
    try:
        Isolator(store=store_of(engine), clock=lambda: at(1), pause=lambda _: None).apply(batch)
    except RatchetError as error:
        return type(error)
    return None


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE turns RENAME COLUMN completion TO answer",
        "DROP TABLE applied_events",
        {"sqlite": "ALTER TABLE turns RENAME COLUMN kind TO sort", "postgresql": "ALTER TABLE turns ADD COLUMN tenant TEXT NOT NULL"},
    ],
)
def test_a_schema_of_another_version_stops_ingestion_and_buries_none_of_fifty_healthy_turns(
    engine: Engine, change: str | dict[str, str]
) -> None:
    with writing(engine) as connection:
        connection.execute(text(change if isinstance(change, str) else change[engine.dialect.name]))
    assert refusal(engine, EffectBatch(events=FIFTY)) is OwnFault
    with reading(engine) as connection:
        assert connection.execute(select(dead_letters.c.id)).all() == []


def test_a_number_that_the_database_cannot_hold_buries_its_record_and_the_others_are_applied(engine: Engine) -> None:
    bad = turn("bad", usage=Usage(prompt_tokens=2**63, completion_tokens=2))
    batch = EffectBatch(events=(*FIFTY[:3], applied(bad, offset=60)))
    assert refusal(engine, batch) is None
    with reading(engine) as connection:
        assert len(connection.execute(select(turns.c.inference_id)).all()) == 3
        assert connection.execute(select(dead_letters.c.offset)).scalars().all() == [60]


@pytest.mark.parametrize("beyond", ["usage", "top_k", "routed_experts"])
def test_records_with_numbers_that_no_column_holds_are_buried_however_many_they_are(engine: Engine, tmp_path: Path, beyond: str) -> None:
    values: dict[str, Any] = {
        "usage": Usage(prompt_tokens=0, completion_tokens=2**63), "top_k": SamplingParams(top_k=2**31), "routed_experts": [[[2**15]]],
    }  # fmt: skip
    wrong = {"sampling" if beyond == "top_k" else beyond: values[beyond]}
    hostile = [applied(turn(f"bad{n}", **wrong), offset=n) for n in range(6)]
    store = SqlEffects(engine, rules=lambda: JoinRules(policies={}), segments=ParquetSegments(str(tmp_path)))
    isolator = Isolator(store=store, clock=lambda: at(1), pause=lambda _: None)
    assert isolator.apply(EffectBatch(events=tuple(hostile))) == 0
    assert isolator.apply(EffectBatch(events=(applied(turn("healthy"), offset=60),))) == 1
    with reading(engine) as connection:
        assert connection.execute(select(turns.c.inference_id)).scalars().all() == ["healthy"]
        assert sorted(connection.execute(select(dead_letters.c.offset)).scalars()) == list(range(6))


def test_a_bucket_or_disk_that_takes_nothing_is_waited_for(engine: Engine) -> None:
    def full(name: str, payloads: object) -> int:
        raise OSError(28, "No space left on device")

    store = SqlEffects(engine, rules=lambda: JoinRules(policies={}), segments=acting(MemorySegments(), write_sized=full))
    with pytest.raises(Unavailable, match="No space left"):
        store.apply(EffectBatch(events=FIFTY, next_offsets={("t", 0): 50}), now=at(1))
    assert store_of(engine).apply(EffectBatch(events=FIFTY), now=at(1)) == 50


class Bucket(ThreadingHTTPServer):
    """As much of S3 as takes a file in parts and tells its size; while it is `busy` it answers nothing but 503."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.busy, self.refused = True, 0
        self.parts: dict[str, dict[int, bytes]] = {}
        self.files: dict[str, bytes] = {}

    @property
    def segments(self) -> str:
        return f"s3://key:secret@bucket/segments?scheme=http&endpoint_override=127.0.0.1:{self.server_port}&region=us-east-1"


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        bucket = self.server
        assert isinstance(bucket, Bucket)
        body, url = self.body(), urlsplit(self.path)
        said = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        if bucket.busy:
            bucket.refused += 1
            self.tell(503, "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>")
        elif "uploads" in said:
            self.tell(200, "<InitiateMultipartUploadResult><UploadId>one</UploadId></InitiateMultipartUploadResult>")
        elif "partNumber" in said:
            bucket.parts.setdefault(url.path, {})[int(said["partNumber"])] = body
            self.tell(200)
        elif self.command == "POST":
            bucket.files[url.path] = b"".join(part for _, part in sorted(bucket.parts.pop(url.path).items()))
            self.tell(200, '<CompleteMultipartUploadResult><ETag>"etag"</ETag></CompleteMultipartUploadResult>')
        else:
            self.tell(200 if url.path in bucket.files else 404, length=len(bucket.files.get(url.path, b"")))

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def tell(self, status: int, body: str = "", *, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("ETag", '"etag"')
        self.send_header("Last-Modified", "Thu, 26 Nov 2026 12:00:00 GMT")
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with Bucket() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_bucket_that_answers_503_is_waited_for_and_takes_the_same_turns_when_it_is_well(sqlite_engine: Engine, bucket: Bucket) -> None:
    kept = ParquetSegments(bucket.segments)
    store = SqlEffects(sqlite_engine, rules=lambda: JoinRules(policies={}), segments=kept)
    batch = EffectBatch(events=FIFTY, next_offsets={("t", 0): 50})
    with pytest.raises(Unavailable, match="HTTP status 503"):
        store.apply(batch, now=at(1))
    with reading(sqlite_engine) as connection:
        assert connection.execute(select(turns.c.inference_id)).all() == []
    assert bucket.refused > 1, "pyarrow asks again by itself"
    bucket.busy = False
    assert store.apply(batch, now=at(2)) == 50
    with reading(sqlite_engine) as connection:
        names = set(connection.execute(select(turns.c.payload_segment)).scalars())
    assert set(bucket.files) == {f"/bucket/segments/{name}.parquet" for name in names}
    assert [b"PAR1" in file for file in bucket.files.values()] == [True]
