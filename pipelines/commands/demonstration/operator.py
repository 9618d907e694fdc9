"""The person who says yes, over REST like any operator's tool."""

from typing import Any

import httpx

from app.domain.release.releases import Release

APPROVERS = ("demo-operator", "demo-colleague")
"""A second one where the rules ask for two."""


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

    def approve(self, release: Release) -> list[str]:
        """Approve, by as many people as are needed; returns sentences about what was answered."""
        said: list[str] = []
        for name in APPROVERS[: release.approvals_needed or 1]:
            body: dict[str, Any] = {"evidence_digest": release.evidence_digest, "approver": name, "reason": "looked at the evidence"}
            try:
                answer = self._http.post(f"/v1/releases/{release.id}/approve", json=body)
            except httpx.TransportError as error:
                return [*said, f"{name} could not reach the service: {error}"]
            if answer.status_code >= 400:
                return [*said, f"{name} was refused: {answer.text[:200]}"]
            said.append(f"{name} approved {release.version_name} over REST, bound to evidence {(release.evidence_digest or '')[:12]}")
        return said

    def close(self) -> None:
        """Close the connection."""
        self._http.close()
