"""Where news may be sent: not into our own network, whatever a name or an address is made to look like."""

import ipaddress
import socket
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import httpx

from app.domain.errors import BadRequest
from app.domain.release.news import MAIL, SLACK, TEAMS
from app.release.news import address_of

Resolve = Callable[[str], Sequence[str]]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
UNICAST = ipaddress.IPv6Network("2000::/3")
"""All of IPv6 that is routed in the internet; the rest is local, reserved, or an IPv4 address in disguise."""
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""RFC 6052: a translator sends what goes there to the IPv4 address in the last 32 bits."""
NOBODY_S = (
    ipaddress.IPv4Network("192.0.0.0/24"), ipaddress.IPv4Network("192.88.99.0/24"),  # protocols; relays of 6to4
    ipaddress.IPv6Network("2001::/23"), ipaddress.IPv6Network("2001:db8::/32"),  # protocols, Teredo among them; documentation
    ipaddress.IPv6Network("2002::/16"), ipaddress.IPv6Network("3fff::/20"),  # 6to4, which tunnels to an IPv4 address; documentation
)  # fmt: skip
"""Of what looks public: not given to anybody who could have a receiver there. Python's own list differs from version to version."""


def addresses_of(host: str) -> Sequence[str]:
    """Every address a name stands for now."""
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that could be asked for
        raise BadRequest(f"{host} does not resolve ({error}): correct the webhook's address", param="url") from error


def check_url(url: str, *, allow_loopback: bool, resolve: Resolve = addresses_of) -> str:
    """Refuse addresses behind which our own network lies (server-side request forgery). Asked at registration and before every delivery.

    Returns one of the addresses that were looked at: the delivery goes there and asks no resolver again, which could say something else.
    """
    if url.startswith(MAIL):
        return address_of(url)
    url = url.removeprefix(SLACK).removeprefix(TEAMS)
    try:
        parts, _ = urlsplit(url), httpx.URL(url)  # the client that will post there refuses more than urlsplit does
        _ = parts.port  # which is looked at when it is asked for
    except (ValueError, httpx.InvalidURL) as error:
        raise BadRequest(f"this is no webhook address ({error}): give https://host/path", param="url") from error
    if parts.scheme not in ("https", "http") or not parts.hostname or parts.username or parts.password:
        raise BadRequest(f"{url!r} is no webhook address: give https://host/path without user and password", param="url")
    addresses = [ipaddress.ip_address(address.partition("%")[0]) for address in resolve(parts.hostname)]
    if allow_loopback and addresses and all(address.is_loopback for address in addresses):
        return str(addresses[0])
    if parts.scheme != "https":
        raise BadRequest("a webhook's address has to begin with https://: the payload names people and versions", param="url")
    if not addresses or not all(map(is_public, addresses)):
        raise BadRequest(f"{parts.hostname} lies in a private network: a webhook's address has to be public", param="url")
    return str(addresses[0])


def is_public(address: Address) -> bool:
    """Whether it is somebody's in the internet, and not a translator's or a tunnel's way to one that is not."""
    if address in NAT64:
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
    if isinstance(address, ipaddress.IPv6Address) and address not in UNICAST:
        return False
    return address.is_global and not address.is_multicast and not any(address in network for network in NOBODY_S)
