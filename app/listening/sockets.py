"""Where a server of ours listens."""

import socket


def bound(host: str, port: int) -> socket.socket:
    """A socket bound to an address, IPv6 where it looks so. Raises `OSError`, and leaves nothing open.

    It is said to be TCP, so that asyncio lets small answers out at once: else a body waits 40 ms until its headers were acknowledged.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener
