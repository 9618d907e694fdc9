"""A cluster as teams run it: TLS, certificates of clients, SCRAM, bearer tokens, PLAIN; who is refused is told why.

The guard is ours (`tests.secured_broker`), the broker behind it and the client in front of it are real.
"""

import gc
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from app.db.engine import open_engine
from app.db.ingestion.epochs import SqlEpochs
from app.db.ingestion.members import SqlMembership
from app.db.ingestion.streams import SqlPositions
from app.domain.errors import Unavailable
from app.domain.ids import utc_now
from app.domain.telemetry.events import Topic
from app.domain.telemetry.streams import OutgoingEvent
from app.messaging.cluster import Cluster
from app.messaging.consumer import KafkaSource
from app.messaging.options import KafkaConfig
from app.messaging.producer import KafkaSink
from app.messaging.topics import administering
from tests.fakes.served import event_of, turn
from tests.secured_broker import Certificates, Guard, guarded_broker

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # kafka-python leaves sockets of failed connections to the collector
]
ROWS = 20


@pytest.fixture(autouse=True)
def collected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.CRITICAL, logger="kafka")  # captured records keep its exceptions, and those their sockets
    yield
    gc.collect()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.made(tmp_path_factory.mktemp("tls") / "certificates")


def cluster(address: str, *, password: str | None = None, **options: Any) -> Cluster:
    small: dict[str, Any] = {"replication": 1, "min_insync_replicas": 1} | options
    return Cluster(bootstrap=address, address_file=Path("none"), options=KafkaConfig(**small), password=password)


def trusting(certificates: Certificates, *, known: bool = False) -> dict[str, Any]:
    own = {"certificate_file": str(certificates.folder / "client.pem"), "key_file": str(certificates.folder / "client.key")}
    return {"ca_file": str(certificates.folder / "ca.pem")} | (own if known else {})


def there_and_back(sqlite_url: str, through: Cluster) -> None:
    """Send turns and read them again; fails where one does not come back."""
    engine = open_engine(sqlite_url)
    epochs, group = SqlEpochs(engine), "ratchet-ingest"
    sink = KafkaSink(through, epochs)
    source = KafkaSource(
        through, epochs, SqlMembership(engine, group=group), group=group, positions=SqlPositions(engine, group=group), backlog=lambda: False
    )  # fmt: skip
    rows = [OutgoingEvent(seq=n, topic=Topic.EVENTS, event=event_of(turn(f"t{n}")), received_at=utc_now()) for n in range(ROWS)]
    wanted, found = {row.event.id for row in rows}, set[str]()

    def read() -> bool:
        found.update(delivery.event.id for delivery in source.poll(0.5) if delivery.event is not None)
        return wanted <= found

    try:
        eventually(lambda: None not in sink.send(rows))
        eventually(read)
    finally:
        source.close()
        sink.close()
        engine.dispose()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN"])
def test_a_name_and_a_password_over_tls_open_the_way_for_producer_consumer_and_administration(
    sqlite_url: str, certificates: Certificates, mechanism: Any
) -> None:
    guard = Guard(mechanism=mechanism, passwords={"ratchet": "hush, hush"}, tls=certificates.server())
    with guarded_broker(guard) as address:
        named = {"security": "SASL_SSL", "sasl_mechanism": mechanism, "username": "ratchet"} | trusting(certificates)
        there_and_back(sqlite_url, cluster(address, password="hush, hush", **named))
    assert guard.proofs >= 3


def test_clients_show_their_certificate_where_the_cluster_asks_for_it(sqlite_url: str, certificates: Certificates) -> None:
    with guarded_broker(Guard(tls=certificates.server(asks_clients=True))) as address:
        there_and_back(sqlite_url, cluster(address, security="SSL", **trusting(certificates, known=True)))
        with (
            pytest.raises(Unavailable, match="certificate_file"),
            administering(cluster(address, security="SSL", **trusting(certificates))),
        ):
            pass


def test_bearer_tokens_are_fetched_and_shown_and_shown_anew_before_a_session_ends(sqlite_url: str, certificates: Certificates) -> None:
    guard = Guard(mechanism="OAUTHBEARER", tls=certificates.server(), lifetime_ms=2_000)
    with issuer(guard) as url, guarded_broker(guard) as address:
        named = {"security": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER", "username": "a client", "token_url": url}
        with administering(cluster(address, password="its secret", **named, **trusting(certificates))) as admin:
            before = guard.proofs
            eventually(lambda: admin.partitions() is not None and guard.proofs > before)
        there_and_back(sqlite_url, cluster(address, password="its secret", **named, **trusting(certificates)))


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "PLAIN"])
def test_a_wrong_password_is_called_one_and_nothing_is_said_of_a_broker_that_does_not_run(
    certificates: Certificates, mechanism: Any
) -> None:
    with guarded_broker(Guard(mechanism=mechanism, passwords={"ratchet": "hush"}, tls=certificates.server())) as address:
        named = {"security": "SASL_SSL", "sasl_mechanism": mechanism, "username": "ratchet"} | trusting(certificates)
        with (
            pytest.raises(Unavailable, match=r"RATCHET_KAFKA_PASSWORD") as told,
            administering(cluster(address, password="wrong", **named)),
        ):
            pass
    assert "wrong" not in str(told.value)


def test_a_server_that_another_authority_signed_is_not_believed(certificates: Certificates, tmp_path: Path) -> None:
    others = Certificates.made(tmp_path / "others")
    with (
        guarded_broker(Guard(tls=certificates.server())) as address,
        pytest.raises(Unavailable, match="ca_file"),
        administering(cluster(address, security="SSL", **trusting(others))),
    ):
        pass


@contextmanager
def issuer(guard: Guard) -> Iterator[str]:
    """A token endpoint (client credentials): what it gives out opens the guard."""

    class Tokens(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = parse_qs(self.rfile.read(int(self.headers["content-length"])).decode())
            good = (asked["grant_type"], asked["client_id"], asked["client_secret"]) == (
                ["client_credentials"],
                ["a client"],
                ["its secret"],
            )
            token = f"token-{len(guard.tokens)}"
            guard.tokens.add(token)
            self.send_response(200 if good else 401)
            self.end_headers()
            self.wfile.write(json.dumps({"access_token": token, "expires_in": 3600}).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Tokens)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/token"
    finally:
        server.shutdown()
        server.server_close()
