"""What a process and everything it started listens on."""

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, kw_only=True)
class Door:
    """One listening TCP socket."""

    process: str
    pid: int
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        address = ipaddress.ip_address(self.host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def doors(processes: Sequence[psutil.Process]) -> list[Door]:
    """Every socket that these processes listen on."""
    return [door for process in processes for door in _doors(process)]


def reachable_from_outside(pid: int | None = None) -> list[Door]:
    """The sockets of a process (this one) and its descendants that another machine could connect to."""
    parent = psutil.Process(pid or os.getpid())
    return [door for door in doors([parent, *parent.children(recursive=True)]) if not door.is_loopback]


def _doors(process: psutil.Process) -> list[Door]:
    try:
        name = " ".join(process.cmdline())[:120] or process.name()
        found = process.net_connections(kind="inet")
    except psutil.NoSuchProcess:
        return []
    return [
        Door(process=name, pid=process.pid, host=connection.laddr[0], port=connection.laddr[1])
        for connection in found
        if connection.status == psutil.CONN_LISTEN
    ]
