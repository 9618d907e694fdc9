"""Which of a deployment's places every machine reaches, and where what is kept lies."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.domain.errors import BadConfig
from app.policy.storage.remote_files import is_url


@dataclass(frozen=True, kw_only=True)
class Storage:
    """URLs of object storage; None where the place is a folder of this machine."""

    weights: str | None = None
    """RATCHET_WEIGHTS: snapshots by digest."""
    states: str | None = None
    """RATCHET_STATES: checkpoints, states of versions, candidates on their way to whoever publishes them."""

    @staticmethod
    def of(*, weights: str, states: str) -> "Storage":
        """Of the two settings, each a folder or a URL."""
        return Storage(weights=_url(weights), states=_url(states))

    @property
    def is_reached_by_all(self) -> bool:
        """Whether workers of other machines find everything."""
        return self.weights is not None and self.states is not None

    def require(self, address: str, nodes: Sequence[str]) -> None:
        """Raises `BadConfig` where the cluster at `address` has workers on other machines (`nodes`) and a place is a folder of this one."""
        lacking = [name for name, url in (("RATCHET_WEIGHTS", self.weights), ("RATCHET_STATES", self.states)) if url is None]
        if not lacking:
            return
        example = " and ".join(f"{name}=s3://bucket/{name.partition('_')[2].lower()}" for name in lacking)
        raise BadConfig(
            f"the Ray cluster at {address} trains on other machines ({', '.join(nodes)}), which do not see the folder"
            f"{'s' if len(lacking) > 1 else ''} of this one that {' and '.join(lacking)} name{'' if len(lacking) > 1 else 's'}: "
            f"name object storage, such as {example}"
        )


def _url(location: str) -> str | None:
    return location if is_url(location) else None
