"""Products in the world of styles that differ in channels, sparsity, base rate and taste. What people do goes through the real terms.

| product   | who says what                                                                                               | liked |
|-----------|-------------------------------------------------------------------------------------------------------------|-------|
| `editor`  | every answer becomes an edit, whose survival is measured                                                    | .15   |
| `support` | no edits; a thumb on a third, a next message on half (complaints, thanks, the next question); 40 % cut off  | .11   |
| `tab`     | seven suggestions in ten are accepted or rejected, a declared signal; people differ in how readily          | .11   |
| `agent`   | episodes of three turns; a broken call costs its own turn; half of the episodes say whether the task is done | .11   |
| `search`  | stars on a sixth, an undo by one in five who are disappointed; two kinds of questions, one hard to please   | .11   |

`search` was not looked at while the update was changed. An answer is liked where at least half of its words are in the third style; in
`editor` liking is the share of them.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from app.domain.learning.batches import LabelledTurn
from app.domain.learning.rewards import Credit, DueTurn, Exclusion
from app.domain.policies import Direction, PolicyConfig, SignalConfig, SignalType
from app.domain.telemetry.events import Observation
from app.domain.telemetry.turns import FinishReason, ToolCall, ToolVerdict
from pipelines.batching import BatchingConfig
from pipelines.batching.cut import channels, pay_chains
from pipelines.labelling.labeller import label
from pipelines.labelling.rule_set import RuleSet, default_toml, parse_rule_set
from tests.fakes.labelling import NOON, facts
from tests.learning.lines import Lesson
from tests.learning.styles import Turn, text_of

THANKS = ("Thank you, that works perfectly!", "Great, thanks", "Perfect, exactly what I needed", "That works, thank you so much")
COMPLAINTS = (
    "No, that is wrong", "That is not what I asked for", "It still does not work", "This is wrong, please read the question again",
    "That didn't work, I get the same error",
)  # fmt: skip
NEXT = ("And how do I change my address?", "Now tell me about the other plan", "What are your opening hours?", "And for two people?")
POLICY = PolicyConfig(model="m", base_name="b", base_model="B", held_out_share=0.0)
BATCHING = BatchingConfig()


def quality(turn: Turn) -> float:
    """What decides everything."""
    return turn.in_style(2)


def is_liked(turn: Turn) -> float:
    """1 or 0."""
    return float(quality(turn) >= 0.5)


@dataclass(frozen=True, kw_only=True)
class Shop:
    """One product."""

    name: str
    rules: RuleSet
    react: Callable[[Turn, random.Random, int], tuple[dict[str, Any], list[tuple[str, Any]]]]
    """(turn, numbers, place in its episode) → facts of the turn, and (name, value) of what was observed of it."""
    turns_per_episode: int = 1
    liking: Callable[[Turn], float] = is_liked


def lessons_of(shop: Shop, turns: Sequence[Turn], seed: int) -> list[Lesson]:
    """What an update gets: labelled by the rule set, paid along the chains, what nobody spoke about left out."""
    numbers = random.Random(f"{shop.name}-{seed}")
    made: list[LabelledTurn] = []
    for place, turn in enumerate(turns):
        episode, at = f"episode-{seed}-{place // shop.turns_per_episode}", place % shop.turns_per_episode
        given, said = shop.react(turn, numbers, at)
        made.append(_labelled(shop, turn, episode, at, given, said))
    eligible = [t for t in made if t.exclusion is None or (t.exclusion == Exclusion.NO_SIGNAL and shop.turns_per_episode > 1)]
    told = {t.episode_id for t in made if t.has_outcome}
    eligible = [t for t in eligible if t.exclusion is None or t.episode_id in told]
    by_id = {turn.payload.inference_id: turn for turn in turns}
    decided = channels(eligible, made, BATCHING)
    return [
        Lesson(
            turn=by_id[paid.inference_id], reward=paid.reward, episode=paid.episode_id, segment=paid.segment,
            channels=decided[paid.inference_id], actor=paid.actor,
        )
        for paid in pay_chains(eligible, made, BATCHING)
    ]  # fmt: skip


def _labelled(shop: Shop, turn: Turn, episode: str, at: int, given: dict[str, Any], said: list[tuple[str, Any]]) -> LabelledTurn:
    name = turn.payload.inference_id
    observations = tuple(
        Observation(id=f"{name}-{number}", inference_id=name, name=kind, value=value, occurred_at=NOON, source="api")
        for number, (kind, value) in enumerate(said)
    )
    known = facts(inference_id=name, episode_id=episode, completion=text_of(turn.answer), **given)
    found = label(DueTurn(facts=known, observations=observations, revision=0), config=POLICY, rule_set=shop.rules, now=NOON)
    spoke = tuple((t.name, t.value) for t in found.terms if t.value is not None and t.credit is Credit.OUTCOME)
    process = sum(t.weight * t.value for t in found.terms if t.value is not None and t.credit is Credit.PROCESS)
    return LabelledTurn(
        inference_id=name, episode_id=episode, version="", reward=found.reward, label_revision=1, rule_set=found.rule_set,
        exclusion=found.exclusion, segment=found.segment, actor=name, held_out=False, kind="answer", imported=False, train_consent=True,
        erased=False, has_logprobs=True, payload_segment="s", completion_tokens=4, finished_at=later(at), labelled_at=NOON,
        process=process, has_outcome=bool(spoke), spoke=spoke,
    )  # fmt: skip


def later(at: int) -> datetime:
    """Noon and so many seconds."""
    return NOON + timedelta(seconds=at)


def _editor(turn: Turn, numbers: random.Random, at: int) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    return {"segment": "task=edit"}, [("edit_persistence", {"horizon_s": 30.0, "four_gram": quality(turn)})]


def _support(turn: Turn, numbers: random.Random, at: int) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    liked, said = is_liked(turn) == 1.0, list[tuple[str, Any]]()
    ended = FinishReason.LENGTH if numbers.random() < 0.4 else FinishReason.STOP
    if numbers.random() < 1 / 3:
        said.append(("rating", liked if numbers.random() < 0.9 else not liked))
    if numbers.random() < 0.5:
        mood = numbers.random()
        kinds = (THANKS if mood < 0.5 else NEXT) if liked else (COMPLAINTS if mood < 0.35 else NEXT)
        said.append(("follow_up", numbers.choice(kinds)))
    return {"segment": "task=support", "finish_reason": ended}, said


def _tab(turn: Turn, numbers: random.Random, at: int) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    ready = numbers.random()
    if numbers.random() < 0.3:
        return {"segment": "task=tab"}, []  # typed on
    accepted = numbers.random() < min(0.95, 0.05 + 0.25 * ready + 0.6 * quality(turn))
    return {"segment": "task=tab"}, [("accepted", accepted)]


def _agent(turn: Turn, numbers: random.Random, at: int) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    broken = turn.answer[0] < 0 or turn.in_style(1) >= 0.5
    call = ToolCall(id="c", name="edit", arguments="{}", verdict=ToolVerdict.UNPARSABLE if broken else ToolVerdict.VALID)
    given = {"segment": "task=agent", "tool_calls": (call,), "finish_reason": FinishReason.TOOL_CALLS if at < 2 else FinishReason.STOP}
    if at < 2 or numbers.random() < 0.5:
        return given, []
    return given, [("task_success", numbers.random() < 0.05 + 0.9 * quality(turn))]


def _search(turn: Turn, numbers: random.Random, at: int) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    hard = numbers.random() < 0.5
    said: list[tuple[str, Any]] = []
    if numbers.random() < 1 / 6:
        stars = round(2.0 + 3.0 * quality(turn) - (1.5 if hard else 0.0) + numbers.gauss(0.0, 0.7))
        said.append(("rating", float(min(5, max(1, stars)))))
    if quality(turn) < 0.5 and numbers.random() < 0.2:
        said.append(("undo", True))
    return {"segment": "task=hard" if hard else "task=easy"}, said


def _rules(extra: str = "", signals: dict[str, SignalConfig] | None = None) -> RuleSet:
    return parse_rule_set(default_toml() + extra, signals=signals or {})


ACCEPTED = SignalConfig(type=SignalType.BOOLEAN, optimize=Direction.UP)
STARS = SignalConfig(type=SignalType.FLOAT, optimize=Direction.UP, low=1.0, high=5.0)
SHOPS = {
    shop.name: shop
    for shop in (
        Shop(name="editor", rules=_rules(), react=_editor, liking=quality),
        Shop(name="support", rules=_rules(), react=_support),
        Shop(name="tab", rules=_rules('\n[[terms]]\nname = "signal:accepted"\nweight = 0.5\n', {"accepted": ACCEPTED}), react=_tab),
        Shop(name="agent", rules=_rules('\n[[terms]]\nname = "task_success"\nweight = 1.0\n'), react=_agent, turns_per_episode=3),
        Shop(name="search", rules=_rules(signals={"rating": STARS}), react=_search),
    )
}
