"""A process shows its metrics and answers probes at an address of its own."""

import socket
import time
import urllib.error
import urllib.request

import pytest

from app.domain.errors import BadConfig
from app.telemetry.exposition import expose
from app.telemetry.instruments import Instruments


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_process_is_ready_when_it_says_so_and_live_before() -> None:
    own = Instruments("label")
    server = expose(own, "127.0.0.1:0")
    assert server is not None
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        assert get(f"{url}/live")[0] == 200
        assert get(f"{url}/ready")[0] == 503
        own.ready = True
        assert get(f"{url}/ready")[0] == 200
        assert "ratchet_process_ready 1.0" in get(f"{url}/metrics")[1]
        assert get(f"{url}/etc/passwd")[0] == 404
        assert get(f"{url}/metrics", host="evil.example")[0] == 421, "a foreign name that points here"
        assert get(f"{url}/metrics", origin="https://evil.example")[0] == 403
    finally:
        server.shutdown()
        server.server_close()


def test_a_client_that_sends_a_byte_now_and_then_is_cut_off_and_others_are_answered_meanwhile() -> None:
    server = expose(Instruments("label"), "127.0.0.1:0", request_s=0.5)
    assert server is not None
    port = int(server.server_address[1])
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as slow:
            slow.sendall(b"GET /live HTTP/1.0\r\nx: ")
            assert get(f"http://127.0.0.1:{port}/live") == (200, "ok\n")
            assert seconds_until_cut_off(slow) < 5
        assert get(f"http://127.0.0.1:{port}/live") == (200, "ok\n")
    finally:
        server.shutdown()
        server.server_close()


def seconds_until_cut_off(client: socket.socket, *, at_most: float = 10.0) -> float:
    """A byte every tenth of a second, until nobody takes it any more."""
    began = time.monotonic()
    client.settimeout(0.1)
    while time.monotonic() - began < at_most:
        try:
            client.sendall(b"x")
            if client.recv(1) == b"":
                break
        except TimeoutError:  # nothing was answered: it still listens
            continue
        except (BrokenPipeError, ConnectionResetError):
            break
    return time.monotonic() - began


@pytest.mark.parametrize("address", ["9464", "here:", "0.0.0.0:x", "127.0.0.1:65536", ":9464", "127.0.0.1:"])
def test_what_is_no_address_is_refused_in_a_sentence(address: str) -> None:
    with pytest.raises(BadConfig, match="set it to an address such as"):
        expose(Instruments("label"), address)


def test_a_taken_address_is_refused_in_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BadConfig, match="set RATCHET_METRICS to a free address"):
            expose(Instruments("label"), f"127.0.0.1:{taken.getsockname()[1]}")
