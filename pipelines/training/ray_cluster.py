"""How this process comes to Ray: the cluster of `RAY_ADDRESS`, or one of its own that only who has its token reaches.

Whoever reaches a Ray cluster runs code in it. Ray's defaults are servers on every interface and no authentication; here its
servers listen on loopback and every call carries a random token of the deployment, from a file that its owner alone may read.
Ray reads both from the environment when it is first imported: that import happens here.
"""

# Ray leaves parts of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import logging
import os
import sys
from pathlib import Path

import psutil

from app.domain.errors import BadConfig, Unavailable
from pipelines.training.elsewhere.storage import Storage

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 << 20
"""Batches of token ids need a few megabytes; weights travel as files. Ray refuses less than 75 MiB."""
LOOPBACK = "127.0.0.1"


def join_cluster(*, workers: int, token_file: Path, storage: Storage = Storage()) -> bool:  # noqa: B008 - frozen
    """Join the cluster of RAY_ADDRESS with the token that its environment names, or start one here: loopback, token, no dashboard.

    Returns whether workers have to find everything in object storage, because their machines may be others than this one. Raises
    `BadConfig` where they are and there is none.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        _stay_at_home(token_file)
    import ray

    if address:
        if not ray.is_initialized():
            if os.environ.get("RAY_AUTH_MODE") != "token":
                log.warning("RAY_AUTH_MODE is not `token`: whoever reaches the Ray cluster at %s runs code in it", address)
            ray.init(address=address, log_to_driver=False)
        return _is_apart(address, storage)
    if ray.is_initialized():
        return False
    ray.init(
        address="local", _node_ip_address=LOOPBACK, num_cpus=workers, include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES, log_to_driver=False, configure_logging=False,
    )  # fmt: skip
    found = str(ray.util.get_node_ip_address())
    if found != LOOPBACK:
        ray.shutdown()
        raise Unavailable(
            f"Ray listens on {found}, which other machines reach: unset what sets its address, or name a cluster in RAY_ADDRESS"
        )
    return False


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None where it is none of this machine's, as behind some container networks."""
    return next((name for name, own in psutil.net_if_addrs().items() if address in {one.address for one in own}), None)


def _is_apart(address: str, storage: Storage) -> bool:
    """Whether the cluster's workers share no folder with this process; with object storage for everything nobody needs one."""
    if storage.is_reached_by_all:
        return True
    import ray

    others = sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"] and not interface_of(node["NodeManagerAddress"]))
    if others:
        try:
            storage.require(address, others)
        except BadConfig:
            ray.shutdown()
            raise
    return False


def _stay_at_home(token_file: Path) -> None:
    """Tell Ray, before it is imported, to listen on loopback only and to ask for the token."""
    wanted = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # off, 127.0.0.1 stays 127.0.0.1; else Ray takes the machine's outside address for it
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
    }
    if all(os.environ.get(name) == value for name, value in wanted.items()) and "RAY_AUTH_TOKEN" not in os.environ:
        return
    assert "ray" not in sys.modules, "Ray was imported before it was told how to listen: join_cluster comes first"
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update(wanted)
