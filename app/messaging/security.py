"""TLS, SCRAM and bearer tokens towards a real cluster, in kafka-python's words."""

import json
import time
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from kafka.net.sasl.oauth import AbstractTokenProvider

from app.domain.errors import BadConfig, Unavailable
from app.messaging.cluster import Cluster

TOKEN_TIMEOUT_S = 5.0
EARLY_S = 60.0
"""A token is fetched anew this long before it ends."""


def security_settings(cluster: Cluster) -> dict[str, Any]:
    """For every client of the cluster; nothing for the embedded broker. Raises `BadConfig`."""
    config = cluster.options
    if cluster.embedded or config.security == "PLAINTEXT":
        return {}
    settings: dict[str, Any] = {"security_protocol": config.security}
    if config.security.endswith("SSL"):
        files = {"ssl_cafile": config.ca_file, "ssl_certfile": config.certificate_file, "ssl_keyfile": config.key_file}
        settings |= {"ssl_check_hostname": config.check_hostname} | {name: file for name, file in files.items() if file is not None}
    if config.sasl_mechanism is None:
        return settings
    if not cluster.password:
        raise BadConfig(f"[kafka] asks for {config.sasl_mechanism}, and there is no password: set RATCHET_KAFKA_PASSWORD")
    settings["sasl_mechanism"] = config.sasl_mechanism
    if config.sasl_mechanism == "OAUTHBEARER":
        assert config.token_url is not None
        assert config.username is not None
        provider = ClientCredentials(config.token_url, config.username, cluster.password, scope=config.token_scope)
        return settings | {"sasl_oauth_token_provider": provider}
    return settings | {"sasl_plain_username": config.username, "sasl_plain_password": cluster.password}


class ClientCredentials(AbstractTokenProvider):
    """Bearer tokens by OAuth's client-credentials grant (RFC 6749, section 4.4), kept until shortly before they end."""

    def __init__(self, url: str, client: str, secret: str, *, scope: str | None) -> None:
        super().__init__()
        self._url = url
        self._form = {"grant_type": "client_credentials", "client_id": client, "client_secret": secret} | (
            {"scope": scope} if scope else {}
        )
        self._token = ""
        self._ends_s = float("-inf")

    def token(self) -> Any:  # noqa: ANN401 - the base class says nothing, which reads as None
        """A token that is good for a while. Raises `Unavailable`."""
        if time.monotonic() >= self._ends_s:
            self._fetch()
        return self._token

    def _fetch(self) -> None:
        request = Request(self._url, data=urlencode(self._form).encode(), headers={"Accept": "application/json"})
        try:
            with urlopen(request, timeout=TOKEN_TIMEOUT_S) as response:
                answer = json.load(response)
            self._token = str(answer["access_token"])
            self._ends_s = time.monotonic() + max(0.0, float(answer.get("expires_in", 0)) - EARLY_S)
        except (URLError, OSError, ValueError, KeyError, TypeError) as error:
            raise Unavailable(f"no token for Kafka came from {self._url} ({error}): check token_url and RATCHET_KAFKA_PASSWORD") from error
