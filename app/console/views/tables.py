"""Tables that more than one page shows."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from app.console.sheets import Cell, Sheet, cell
from app.console.views.asked import Asked
from app.console.wording import measured, short
from app.domain.release.releases import Pointer, Release
from app.domain.release.sums import Sums
from app.domain.views.measures import Measure
from app.domain.views.pages import Cells, Page, VersionInfo
from app.domain.views.rows import StepRow

REWARD, SURVIVAL, SUCCESS, FOLLOW_UP = "reward", "survival", "success", "term:follow_up"
NONE = Sums()


def measure_cell(found: Measure | None) -> Cell:
    """A mean with its interval; the file has the numbers."""
    plain = None if found is None else {"n": found.n, "mean": found.mean, "low": found.low, "high": found.high}
    return Cell(text=measured(found), value=plain, kind="n")


def version_cell(asked: Asked, digest: str, names: Mapping[str, str]) -> Cell:
    """A version by name, with a link to its page."""
    return cell(names.get(digest, short(digest)), href=asked.link(f"/versions/{digest}"), note=short(digest))


def release_sheet(asked: Asked, page: Page[Release]) -> Sheet:
    """Releases."""
    rows = [
        (
            cell(release.version_name, href=asked.link(f"/releases/{release.id}")), cell(release.state.value, kind="state"),
            cell(release.stage), cell(release.created_at), cell(release.changed_at), cell(release.reason or ""),
        )
        for release in page.rows
    ]  # fmt: skip
    return Sheet(
        name="releases", title="Releases", columns=("candidate", "state", "stage", "opened", "changed", "why"), rows=rows,
        after=page.after, empty="no candidate yet: the loop opens one after its first update",
    )  # fmt: skip


def version_sheet(asked: Asked, page: Page[VersionInfo], sums: Cells, pointer: Pointer | None, pins: Collection[str]) -> Sheet:
    """Versions with what people did with their answers."""
    names = {version.digest: version.name for version in page.rows}
    rows = [
        (
            version_cell(asked, version.digest, names), cell(role_of(version.digest, pointer), kind="state"),
            cell("pinned" if version.digest in pins else ""), cell(version.kind),
            cell(names.get(version.parent or "", short(version.parent))), cell(version.created_at),
            cell(sums.get((version.digest, REWARD), NONE).n),
            *(measure_cell(found) for found in figures(sums, version.digest)),
        )
        for version in page.rows
    ]  # fmt: skip
    columns = (
        "version",
        "role",
        "kept",
        "kind",
        "parent",
        "made",
        "labelled turns",
        "edit persistence",
        "dissatisfied",
        "task success",
        "reward",
    )
    return Sheet(name="versions", title="Versions", columns=columns, rows=rows, after=page.after, empty="no version yet")


def figures(sums: Cells, version: str) -> Sequence[Measure | None]:
    """Edit persistence, dissatisfied follow-ups, task success, reward."""
    of = {name: sums.get((version, name), NONE) for name in (SURVIVAL, FOLLOW_UP, SUCCESS, REWARD)}
    return (
        of[SURVIVAL].measure(low=0, high=1), of[FOLLOW_UP].below_zero.measure(low=0, high=1), of[SUCCESS].measure(low=0, high=1),
        of[REWARD].measure(),
    )  # fmt: skip


def role_of(digest: str, pointer: Pointer | None) -> str:
    """What the pointer says of a version."""
    if pointer is None:
        return ""
    roles = {"champion": pointer.digest, "previous": pointer.previous, "anchor": pointer.anchor}
    return ", ".join(name for name, of in roles.items() if of == digest)


def step_sheet(steps: Iterable[StepRow]) -> Sheet:
    """A release's way."""
    rows = [
        (cell(s.occurred_at), cell(s.from_state or ""), cell(s.to_state, kind="state"), cell(s.stage), cell(s.actor), cell(s.reason or ""))
        for s in steps
    ]
    return Sheet(name="history", title="Its way", columns=("when", "from", "to", "stage", "by", "why"), rows=rows)
