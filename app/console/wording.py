"""How values are written on the pages."""

from datetime import datetime

from app.domain.ids import utc_now
from app.domain.views.measures import Measure


def short(digest: str | None) -> str:
    """The first twelve digits of a digest."""
    return digest[:12] if digest else "–"


def share(value: float | None) -> str:
    """A share as a percentage."""
    return "–" if value is None else f"{100 * value:.1f} %"


def clock_time(moment: datetime | None) -> str:
    """Date and time of day, UTC."""
    return "–" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"


def age(moment: datetime | None) -> str:
    """How long ago, in the largest unit that fits."""
    if moment is None:
        return "–"
    return f"{span((utc_now() - moment).total_seconds())} ago"


def left(moment: datetime | None) -> str:
    """How long until then; `over` after it."""
    if moment is None:
        return "–"
    seconds = (moment - utc_now()).total_seconds()
    return f"{span(seconds)} left" if seconds > 0 else "over"


def span(seconds: float) -> str:
    """A length of time in its largest unit, and the next one where the first is small."""
    seconds = max(0.0, seconds)
    if seconds >= 172_800:
        return f"{seconds / 86_400:.0f} d"
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def measured(value: Measure | None) -> str:
    """A mean with its interval."""
    return "–" if value is None else f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"


def plural(count: int, one: str, many: str | None = None) -> str:
    """`1 person`, `12,300 people`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
