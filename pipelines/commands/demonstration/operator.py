"""The person who says yes, over REST like any operator's tool."""

import httpx

from app.domain.errors import Refused
from app.domain.release.releases import Release

NAME = "demo-operator"


class Operator:
    """Approves what is READY."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=10.0)

    def is_well(self) -> bool:
        """Whether the service answers and all it depends on is there."""
        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def approve(self, release: Release) -> str:
        """Approve, and say so. Raises `Refused`; it may be that the release moved on meanwhile, so look again."""
        body = {"evidence_digest": release.evidence_digest, "approver": NAME, "reason": "looked at the evidence"}
        try:
            answer = self._http.post(f"/v1/releases/{release.id}/approve", json=body)
        except httpx.TransportError as error:
            raise Refused(f"{NAME} could not reach the service: {error}") from error
        if answer.is_error:
            raise Refused(f"{NAME} was refused: {answer.text[:400]}")
        return f"{NAME} approved {release.version_name} over REST, bound to evidence {(release.evidence_digest or '')[:12]}"

    def close(self) -> None:
        """Close the connection."""
        self._http.close()
