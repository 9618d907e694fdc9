"""A process shows its metrics and answers probes at an address of its own."""

import socket
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
