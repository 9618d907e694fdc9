"""What a person showed an answer should have been: read from what was observed of the turn, pure.

| kind            | from                                                                                | hint, answer wanted         |
|-----------------|-------------------------------------------------------------------------------------|-----------------------------|
| `demonstration` | the observation of that name, the latest                                            | the text, all of it         |
| `edit`          | `edit_persistence` with texts, the last look at the longest edit that was rewritten | what stands there, in place |
| `regenerate`    | asked again, and the last answer to the same prompt was neither undone nor replaced | that answer                 |
| `follow_up`     | a next message that is surely a complaint, by the rule set's threshold              | its words, none             |

The most telling one counts, in this order. An edit back to what stood there before (an undo) shows nothing that was wanted.
"""

from collections.abc import Callable

import msgspec

from app.domain.learning.corrections import Correction, CorrectionKind, Reaction
from app.domain.learning.rewards import DueTurn
from app.domain.telemetry.events import IMPORTED, Observation
from app.domain.telemetry.signals import ObservationName, RawEdit
from pipelines.labelling.follow_up.term import FollowUp
from pipelines.labelling.persistence import similarity
from pipelines.labelling.regions import region_now
from pipelines.labelling.rule_set import RuleSet

REWRITTEN = 0.95
"""sim4 of what stands there and what the model wrote, from which on an edit is as good as kept."""
REVERTED = 0.9
"""sim4 of what stands there and what stood there before, from which on it was taken back."""


def correction_of(reaction: Reaction, rule_set: RuleSet) -> Correction | None:
    """The lesson in what people did with a turn; None where there is none."""
    turn = reaction.turn
    for read in (_demonstration, _edit, _regenerate, _complaint(rule_set)):
        found = read(reaction)
        if found is not None:
            kind, observation, said, wanted = found
            author = observation.actor or turn.facts.actor
            return Correction(
                inference_id=turn.facts.inference_id, kind=kind, said=said, wanted=wanted, author=author,
                newcomer=author in reaction.newcomers,
            )  # fmt: skip
    return None


Found = tuple[CorrectionKind, Observation, str, str | None]


def _named(turn: DueTurn, name: ObservationName) -> list[Observation]:
    """About this very turn: what was said of its episode shows no single answer."""
    return [o for o in turn.observations if o.name == name and o.inference_id == turn.facts.inference_id]


def _demonstration(reaction: Reaction) -> Found | None:
    shown = [o for o in _named(reaction.turn, ObservationName.DEMONSTRATION) if str(o.value).strip()]
    if not shown or str(shown[-1].value).strip() == reaction.turn.facts.completion.strip():
        return None
    return CorrectionKind.DEMONSTRATION, shown[-1], str(shown[-1].value), str(shown[-1].value)


def _edit(reaction: Reaction) -> Found | None:
    looks: dict[str, tuple[float, Observation, RawEdit]] = {}
    for observation in _named(reaction.turn, ObservationName.EDIT_PERSISTENCE):
        if "inserted" in observation.value:
            raw = msgspec.convert(observation.value, RawEdit)
            name = raw.edit or f"{raw.start}:{raw.inserted}"
            if name not in looks or raw.horizon_s >= looks[name][0]:
                looks[name] = (raw.horizon_s, observation, raw)
    for _, observation, raw in sorted(looks.values(), key=lambda look: -len(look[2].inserted)):
        now = _stands(raw)
        replaced = raw.before if raw.start is None else raw.before[raw.start : raw.start + raw.replaced]
        is_lesson = now.strip() and similarity(now, raw.inserted) < REWRITTEN and (not replaced or similarity(now, replaced) < REVERTED)
        if is_lesson:
            answer = reaction.turn.facts.completion
            wanted = answer.replace(raw.inserted, now) if raw.inserted and answer.count(raw.inserted) == 1 else None
            return CorrectionKind.EDIT, observation, now, wanted
    return None


def _stands(raw: RawEdit) -> str:
    if raw.start is None:
        return raw.after
    return region_now(before=raw.before, start=raw.start, replaced=raw.replaced, inserted=raw.inserted, after=raw.after)


def _regenerate(reaction: Reaction) -> Found | None:
    asked = [o for o in _named(reaction.turn, ObservationName.REGENERATE) if o.value]
    if not asked or not reaction.retries:
        return None
    last = reaction.retries[-1]
    refused = any(o.value for name in (ObservationName.REGENERATE, ObservationName.UNDO) for o in _named(last, name))
    kept = last.facts.completion
    if refused or not _may_teach(last) or not kept.strip() or kept.strip() == reaction.turn.facts.completion.strip():
        return None
    return CorrectionKind.REGENERATE, asked[-1], kept, kept


def _may_teach(turn: DueTurn) -> bool:
    """Whether its answer may be learned from, which is its own to say: it is not in the batch, so nothing else asks."""
    return turn.facts.train_consent and not turn.facts.erased and not turn.facts.source.startswith(IMPORTED)


def _complaint(rule_set: RuleSet) -> Callable[[Reaction], Found | None]:
    """By the rule set's own term: what is punished also teaches, and nothing else does."""
    reader = next((term for term, _ in rule_set.terms if isinstance(term, FollowUp)), None)

    def read(reaction: Reaction) -> Found | None:
        mine = _named(reaction.turn, ObservationName.FOLLOW_UP)
        if reader is None or not mine:
            return None
        score = reader.score(reaction.turn.facts, mine[:1], weight=1.0)
        if score.value is None or score.value >= 0.0:
            return None
        return CorrectionKind.FOLLOW_UP, mine[0], str(mine[0].value), None

    return read
