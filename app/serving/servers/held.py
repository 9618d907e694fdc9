"""What a server of other make holds, and whose weights sampled an answer: the same words in every dialect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.domain.errors import Unavailable

UNVERSIONED = "default"
"""What vLLM and SGLang call their weights until somebody labelled or replaced them."""
DIGEST_LENGTH = 64


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a version can be sampled from."""

    url: str
    model: str
    label: str | None
    """What the server calls the base's weights."""
    adapter: bool = False
    """Whether it lies on the base as an adapter, which is named by its digest."""
    doubt: str | None = None
    """Why its log-probabilities are not to be trained on."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one server holds, as it says itself."""

    base: str
    """Name of the base model, under which it was started."""
    version: str | None
    """Label of the base's weights: `default`, or the digest that the last update in place gave; None where the server does not tell."""
    adapters: frozenset[str]

    @property
    def base_digest(self) -> str | None:
        """Digest of the base's weights: by its label where it has one, else by the name it was started under."""
        label = self.base if self.version in (None, UNVERSIONED) else self.version
        return label if label is not None and is_digest(label) else None

    def place(self, digest: str, url: str, *, doubt: str | None = None) -> Place | None:
        """Where this server, at `url`, samples from a version; None where it does not hold it."""
        if digest in self.adapters:
            return Place(url=url, model=digest, label=self.version, adapter=True, doubt=doubt)
        return Place(url=url, model=self.base, label=self.version, doubt=doubt) if digest == self.base_digest else None


def is_digest(name: str) -> bool:
    """Whether a name can be a digest of weights."""
    return len(name) == DIGEST_LENGTH and set(name) <= set("0123456789abcdef")


def held_of(models: Mapping[str, Any], version: str | None, *, url: str) -> Held:
    """From the answer of `/v1/models` and the base's label. Raises `Unavailable` for a server without a base."""
    cards = models.get("data", [])
    base = next((str(card["id"]) for card in cards if not card.get("parent")), None)
    if base is None:
        raise Unavailable(f"{url}/v1/models names no base model: is a model server there?")
    return Held(base=base, version=version, adapters=frozenset(str(card["id"]) for card in cards if card.get("parent")))


def other_weights(spans: Sequence[Mapping[str, Any]] | None, *, asked: str | None) -> str | None:
    """Why tokens with these `weight_versions` were not all sampled by the version labelled `asked`; None where they were, or where the
    server keeps no labels."""
    if not spans or asked is None:
        return None
    found = [(str(span["version"]), int(span["start"])) for span in spans]
    if [version for version, _ in found] == [asked]:
        return None
    if len(found) == 1:
        return f"sampled by the weights {found[0][0][:12]}, not by {asked[:12]}: the server's weights were replaced before it began"
    parts = ", ".join(f"{version[:12]} from token {start}" for version, start in found)
    return f"sampled by more than one version ({parts}): the server's weights were replaced meanwhile"
