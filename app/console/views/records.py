"""Records: the audit chain, and evidence as it was when people were asked, for ever."""

from typing import Any

import msgspec

from app.console.sheets import Sheet, cell
from app.console.views.asked import Asked
from app.console.views.candidate import find, word_sheet
from app.console.views.figures import effect_sheet, gate_name, gate_sheet
from app.domain.errors import NotFound
from app.domain.people import Action
from app.domain.release.gates import GateName, GateResult
from app.domain.release.releases import AuditEntry
from app.domain.release.terms import Terms
from app.domain.views.pages import AuditFilter, Page
from app.domain.views.rows import GateRow
from app.release.people import evidence_digest


def audit(asked: Asked) -> dict[str, Any]:
    """Values of the page. Raises `NotFound` for who may not read the chain."""
    if not asked.viewer.may(Action.READ_AUDIT):
        raise NotFound("the audit chain is for operators, config admins, auditors and admins to read")
    wanted = AuditFilter(
        subject=asked.word("subject"), actor=asked.word("actor"), action=asked.word("action"), policy=asked.viewer.policy
    )  # fmt: skip
    checked = asked.sight.verify() if asked.word("verify") else None
    return {
        "wanted": wanted, "checked": checked, "whole": asked.viewer.policy is None,
        "sheets": {"audit": _audit_sheet(asked, asked.sight.audit(wanted, after=asked.word("after")))},
    }  # fmt: skip


def _audit_sheet(asked: Asked, page: Page[AuditEntry]) -> Sheet:
    rows = [
        (
            cell(str(entry.seq)), cell(entry.occurred_at), cell(entry.actor), cell(entry.action), cell(entry.subject, kind="code"),
            cell(_told(entry)), cell(entry.hash[:12], kind="code"),
        )
        for entry in page.rows
    ]  # fmt: skip
    columns = ("number", "when", "who", "did", "to what", "detail", "hash")
    return Sheet(name="audit", title="Entries", columns=columns, rows=rows, after=page.after, empty="nothing was done that fits")


def _told(entry: AuditEntry) -> str:
    shown = ("reason", "from", "to", "gate", "verdict", "version_name", "generation", "digest")
    return ", ".join(f"{name} {entry.detail[name]}" for name in shown if entry.detail.get(name) is not None)


def frozen(asked: Asked, release_id: str, evidence: str) -> dict[str, Any]:
    """The evidence with this digest, as it was: recomputed from what is on record. Raises `NotFound` where nothing makes that digest."""
    release = find(asked, release_id)
    rows = _as_it_was(asked, release_id, evidence)
    said = [word for word in asked.sight.approvals(release.id) if word.evidence_digest == evidence]
    live = next((row.evidence for row in rows if row.gate == GateName.CANARY), {})
    return {
        "release": release, "gates": rows, "gate_name": gate_name, "evidence": evidence, "terms": _plain(release.config),
        "sheets": {"gates": gate_sheet(rows), "effects": effect_sheet(live), "approvals": word_sheet(said)},
    }  # fmt: skip


def _as_it_was(asked: Asked, release_id: str, evidence: str) -> list[GateRow]:
    """Answers of the gates, added one after the other until they make this digest."""
    release = find(asked, release_id)
    terms = msgspec.convert(release.config, Terms)
    newest: dict[GateName, GateResult] = {}
    shown: dict[GateName, GateRow] = {}
    for row, result in asked.sight.results(release_id):
        newest[result.gate], shown[result.gate] = result, row
        if evidence_digest(release, terms, newest) == evidence:
            return list(shown.values())
    raise NotFound(f"nothing on record of release {release_id} makes the evidence {evidence[:16]}: the link was cut short, or is another's")


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in ("gates", "plan")}
