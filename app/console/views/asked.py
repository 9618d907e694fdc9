"""What a page is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from app.domain.people import Visitor
from app.domain.views.pages import Sight


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request for a page about a policy."""

    sight: Sight
    viewer: Visitor
    policy: str
    query: Mapping[str, str]

    def word(self, name: str) -> str | None:
        """What a field of the address says, where it says anything."""
        return self.query.get(name, "").strip()[:200] or None

    def link(self, path: str, **more: str) -> str:
        """An address within the console, for the policy."""
        return f"/console{path}?{urlencode({'policy': self.policy, **more})}"
