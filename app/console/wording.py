"""How values are written on the pages."""

from datetime import datetime

from app.domain.ids import utc_now


def short(digest: str | None) -> str:
    """The first twelve digits of a digest."""
    return digest[:12] if digest else "–"


def share(value: float | None) -> str:
    """A share as a percentage."""
    return "–" if value is None else f"{100 * value:.1f} %"


def clock_time(moment: datetime | None) -> str:
    """Time of day, UTC."""
    return "–" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"


def age(moment: datetime | None) -> str:
    """How long ago, in the largest unit that fits."""
    if moment is None:
        return "–"
    seconds = max(0.0, (utc_now() - moment).total_seconds())
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def mood(satisfaction: float | None) -> str:
    """What a follow-up said, from its satisfaction in [-1, 1]."""
    if satisfaction is None:
        return "none or unclear"
    return "dissatisfied" if satisfaction < 0 else "satisfied" if satisfaction > 0 else "neutral"
