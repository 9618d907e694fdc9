"""Cut the batch of a slot, in one transaction:

labels not in any batch, drawn by lot → reasons against each → raters who act together → cap per actor and rater → share per segment
→ the chain's outcome to all its turns, newcomers' drawn to the mean → manifest

Everything is decided by hashes of ids and the slot, so the same labels give the same batch whoever cuts. Only as many labels are read
as the batch needs, however many wait: an episode's lot is a hash of its id, and the slot says from where along the lots they are taken.
"""

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from app.domain.errors import Held
from app.domain.learning.batches import BatchItem, BatchManifest, LabelGroup, LabelledTurn, Voice, batch_id, group_of
from app.domain.learning.rewards import Exclusion
from app.domain.ports import BatchStore, CutSession
from app.domain.release.versions import HoldReason
from pipelines.batching.config import BatchingConfig
from pipelines.batching.mixing import mixed
from pipelines.batching.raters import quarantined, voices_of, weighted

log = logging.getLogger(__name__)
EQUAL_WITHIN = 1e-9
STILL_TELLS = frozenset({Exclusion.EMPTY_COMPLETION, Exclusion.NO_LOGPROBS})
"""A turn left out for these cannot be trained on, and yet what people said after it is what came of its chain."""
DRAWN = 2
"""Labels drawn first, for each place in the batch: some are capped or their episode is open. Four times as many where they do not do."""
MOST_DRAWN = 32
"""Labels drawn at the most, for each place: one person with ten thousand turns must not make the cut read everything."""


def cut_batch(
    store: BatchStore, *, policy: str, slot: int, champion: str, anchor: str, config: BatchingConfig, now: datetime
) -> BatchManifest:
    """The slot's batch; the same one when the slot has one already.

    Raises `Held` (too few labels, equal rewards); then nothing is written and every label stays eligible.
    """
    with store.cutting(policy) as session:
        existing = session.existing(slot)
        if existing is not None:
            return existing
        returned = session.give_back()
        if returned:
            log.info("labels returned policy=%s slot=%d labels=%d", policy, slot, returned)
        since = session.last_window_end()
        versions, known = session.lineage(champion, config.staleness), session.known_versions()
        labels, verdicts, chosen, heard = _draw(session, versions=versions, known=known, since=since, until=now, slot=slot, config=config)
        chosen = weighted(pay_chains(chosen, labels, config), heard, deciding(labels, config), newcomer=config.newcomer_weight)
        made = session.made(since=since, until=now)
        inside = [turn for turn in labels if since is None or turn.labelled_at > since]
        not_drawn = _against_the_rest(made.groups - Counter(map(group_of, inside)), versions, known, newest_rule_set(labels))
        _refuse_useless(chosen, _counts(verdicts.values()) + not_drawn, config)
        left_out = _counts(verdicts[turn.inference_id] for turn in inside) + not_drawn
        decided_by = channels(chosen, labels, config)
        manifest = _manifest(
            chosen, decided_by, left_out, policy=policy, slot=slot, champion=champion, anchor=anchor, rule_set=newest_rule_set(labels),
            window_from=since or made.first_at or now, now=now,
        )  # fmt: skip
        session.save(manifest)
        return manifest


Verdicts = dict[str, Exclusion | None]
Heard = Mapping[str, Sequence[Voice]]


def _draw(
    session: CutSession, *, versions: Sequence[str], known: frozenset[str], since: datetime | None, until: datetime, slot: int,
    config: BatchingConfig,
) -> tuple[list[LabelledTurn], Verdicts, list[LabelledTurn], Heard]:  # fmt: skip
    """Labels along the lots, the reasons against them, the chosen ones, and who decided them: as few as fill the batch."""
    places = DRAWN
    while True:
        labels = session.unused_labels(versions=versions, since=since, until=until, slot=slot, at_most=places * config.max_turns)
        verdicts = judge(labels, versions=versions, known=known, config=config)
        heard = session.voices(labels, before=until - timedelta(days=config.newcomer_days))
        if config.quarantine:
            _quarantine(labels, verdicts, heard, config)
        eligible = [turn for turn in labels if verdicts[turn.inference_id] is None]
        chosen = choose(eligible, verdicts, slot=slot, config=config, versions=versions, heard=heard)
        if len(chosen) >= config.max_turns or len(labels) < places * config.max_turns or places >= MOST_DRAWN:
            return labels, verdicts, chosen, heard
        places *= 4


def _quarantine(labels: Sequence[LabelledTurn], verdicts: Verdicts, heard: Heard, config: BatchingConfig) -> None:
    """Write `QUARANTINED` against what rests on the word of raters who seem to act together, the rest of the chain included."""
    found = quarantined([turn for turn in labels if verdicts[turn.inference_id] is None], heard)
    if not found:
        return
    decided = deciding(labels, config)
    waiting = 0
    for turn in labels:
        said = voices_of(decided.get(turn.episode_id, turn), heard)
        if verdicts[turn.inference_id] is None and any(voice.rater in found for voice in said):
            verdicts[turn.inference_id] = Exclusion.QUARANTINED
            waiting += 1
    reasons = Counter(found.values()).most_common(3)
    log.warning("labels quarantined labels=%d raters=%d first=%s because=%s", waiting, len(found), sorted(found)[:5], reasons)


def _against_the_rest(groups: Counter[LabelGroup], versions: Sequence[str], known: frozenset[str], rule_set: str) -> Counter[Exclusion]:
    """The reasons against labels of the window that were not drawn, from what they have in common; see `_reason`."""
    against: Counter[Exclusion] = Counter()
    for group, count in groups.items():
        stated = Exclusion(group.exclusion) if group.exclusion is not None else None
        reasons = [
            (stated is not None and stated is not Exclusion.NO_SIGNAL, stated),
            (group.version not in versions, Exclusion.STALE_VERSION if group.version in known else Exclusion.UNKNOWN_VERSION),
            (group.held_out, Exclusion.HELD_OUT),
            (group.rule_set != rule_set, Exclusion.OTHER_RULE_SET),
            (stated is Exclusion.NO_SIGNAL, Exclusion.NO_SIGNAL),
        ]
        reason = next((reason for applies, reason in reasons if applies), None)
        against[reason or Exclusion.NOT_SAMPLED] += count
    return against


def judge(
    labels: Sequence[LabelledTurn], *, versions: Sequence[str], known: frozenset[str], config: BatchingConfig
) -> dict[str, Exclusion | None]:
    """The reason against each label, by inference id; None where it is eligible."""
    rule_set = newest_rule_set(labels)
    verdicts = {turn.inference_id: _reason(turn, versions, known, rule_set, config) for turn in labels}
    paid = outcomes(labels, config)
    for turn in labels:  # a turn nobody commented on, such as a summary, is paid by its chain
        if verdicts[turn.inference_id] is Exclusion.NO_SIGNAL and turn.episode_id in paid:
            verdicts[turn.inference_id] = None
    return verdicts


def newest_rule_set(labels: Sequence[LabelledTurn]) -> str:
    """The rule set of the newest label; empty without labels."""
    return max(labels, key=lambda turn: (turn.labelled_at, turn.rule_set)).rule_set if labels else ""


def _reason(turn: LabelledTurn, versions: Sequence[str], known: frozenset[str], rule_set: str, config: BatchingConfig) -> Exclusion | None:
    """The first reason that applies; what makes the turn unusable for good comes first, what labelling merely had no opinion on last."""
    stated = Exclusion(turn.exclusion) if turn.exclusion is not None else None
    reasons = [
        (turn.erased, Exclusion.ERASED),
        (not turn.train_consent, Exclusion.NO_CONSENT),
        (turn.imported, Exclusion.IMPORTED),
        (turn.rollout and config.rollout_share == 0, Exclusion.ROLLOUT),
        (stated is not None and stated is not Exclusion.NO_SIGNAL, stated),
        (not turn.has_logprobs, Exclusion.NO_LOGPROBS),
        (turn.completion_tokens == 0, Exclusion.EMPTY_COMPLETION),
        (turn.version not in versions, Exclusion.STALE_VERSION if turn.version in known else Exclusion.UNKNOWN_VERSION),
        (turn.rollout and turn.version not in versions[: config.rollout_staleness + 1], Exclusion.STALE_VERSION),
        (turn.payload_segment is None, Exclusion.PAYLOAD_MISSING),
        (turn.held_out, Exclusion.HELD_OUT),
        (turn.tries >= config.max_tries, Exclusion.HELD_AGAIN),
        (turn.rule_set != rule_set, Exclusion.OTHER_RULE_SET),
        (config.wait_for_episodes and turn.episode_open, Exclusion.EPISODE_OPEN),
        (stated is Exclusion.NO_SIGNAL, Exclusion.NO_SIGNAL),
    ]
    return next((reason for applies, reason in reasons if applies), None)


def choose(
    eligible: Sequence[LabelledTurn], verdicts: dict[str, Exclusion | None], *, slot: int, config: BatchingConfig,
    versions: Sequence[str] = (), heard: Heard | None = None,
) -> list[LabelledTurn]:  # fmt: skip
    """At most so many turns per actor, per rater and in all, each segment in proportion; writes the reason against the others.

    Where the batch is full, what the newest of `versions` (newest first) sampled goes before the rest.
    """
    age = {version: back for back, version in enumerate(versions)}
    ordered = sorted(
        eligible, key=lambda turn: (age.get(turn.version, 0), _lot(slot, turn.episode_id), turn.finished_at, turn.inference_id)
    )
    per_actor: Counter[str] = Counter()
    per_rater: Counter[str] = Counter()
    capped: list[LabelledTurn] = []
    for turn in ordered:
        if turn.actor is not None and per_actor[turn.actor] >= config.max_turns_per_actor:
            verdicts[turn.inference_id] = Exclusion.ACTOR_CAP
            continue
        strangers = {voice.rater for voice in (heard or {}).get(turn.inference_id, ()) if voice.rater not in (None, turn.actor)}
        if any(per_rater[rater] >= config.max_turns_per_rater for rater in strangers):
            verdicts[turn.inference_id] = Exclusion.RATER_CAP
            continue
        per_rater.update(strangers)
        if turn.actor is not None:
            per_actor[turn.actor] += 1
        capped.append(turn)
    inside, waiting = mixed(capped, share=config.rollout_share, most=config.max_turns, slot=slot)
    verdicts.update((turn.inference_id, Exclusion.NOT_SAMPLED) for turn in waiting)
    practised = [turn for turn in inside if turn.rollout]
    segments: defaultdict[str, list[LabelledTurn]] = defaultdict(list)
    for turn in inside:
        if not turn.rollout:
            segments[turn.segment].append(turn)
    quotas = seats({segment: len(turns) for segment, turns in segments.items()}, config.max_turns - len(practised))
    for segment, turns in segments.items():
        for turn in turns[quotas[segment] :]:
            verdicts[turn.inference_id] = Exclusion.NOT_SAMPLED
    return [turn for segment, turns in segments.items() for turn in turns[: quotas[segment]]] + practised


def seats(sizes: dict[str, int], total: int) -> dict[str, int]:
    """Share `total` places among segments in proportion to their size (largest remainders); all that are there, where they fit."""
    everybody = sum(sizes.values())
    if everybody <= total:
        return dict(sizes)
    exact = {name: size * total / everybody for name, size in sizes.items()}
    given = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(sizes, key=lambda name: (given[name] - exact[name], name))
    for name in by_remainder[: total - sum(given.values())]:
        given[name] += 1
    return given


def outcomes(labels: Sequence[LabelledTurn], config: BatchingConfig) -> dict[str, float]:
    """What came of each chain, by episode: the outcome part of its last label that has one, or the mean of them.

    Labels of another rule set do not count: their rewards do not compare.
    """
    if config.episode_reward == "own":
        return {}
    rule_set = newest_rule_set(labels)
    found: defaultdict[str, list[float]] = defaultdict(list)
    for turn in sorted(labels, key=lambda turn: (turn.finished_at, turn.inference_id)):
        if turn.has_outcome and turn.rule_set == rule_set and (turn.exclusion is None or turn.exclusion in STILL_TELLS):
            found[turn.episode_id].append(turn.reward - turn.process)
    return {episode: said[-1] if config.episode_reward == "final" else sum(said) / len(said) for episode, said in found.items()}


def deciding(labels: Sequence[LabelledTurn], config: BatchingConfig) -> dict[str, LabelledTurn]:
    """By episode, the turn whose outcome its chain is paid: the last one that has one. Empty where each turn is paid its own."""
    if config.episode_reward == "own":
        return {}
    told = [turn for turn in labels if turn.has_outcome and (turn.exclusion is None or turn.exclusion in STILL_TELLS)]
    return {turn.episode_id: turn for turn in sorted(told, key=lambda turn: (turn.finished_at, turn.inference_id))}


def pay_chains(chosen: Sequence[LabelledTurn], labels: Sequence[LabelledTurn], config: BatchingConfig) -> list[LabelledTurn]:
    """Each turn is paid what itself did and what came of its chain, so that a good end pays for no broken call on the way."""
    paid = outcomes(labels, config)
    return [replace(turn, reward=turn.process + paid[turn.episode_id]) if turn.episode_id in paid else turn for turn in chosen]


def channels(chosen: Sequence[LabelledTurn], labels: Sequence[LabelledTurn], config: BatchingConfig) -> dict[str, str]:
    """By inference id, the terms that decided what each turn's outcome is paid.

    A term that only ever says one thing (an undo costs 1) tells by speaking at all, so it is no channel: what is usual where it speaks
    would be all it has to say.
    """
    decided = deciding(labels, config)
    told = {turn.inference_id: decided.get(turn.episode_id, turn).spoke for turn in chosen}
    said: defaultdict[str, set[float]] = defaultdict(set)
    for spoke in told.values():
        for name, value in spoke:
            said[name].add(value)
    return {name: ",".join(sorted(term for term, _ in spoke if len(said[term]) > 1)) for name, spoke in told.items()}


def _refuse_useless(chosen: Sequence[LabelledTurn], left_out: Counter[Exclusion], config: BatchingConfig) -> None:
    if len(chosen) < config.min_turns:
        against = ", ".join(f"{count} {reason.value}" for reason, count in left_out.most_common()) or "none left out"
        raise Held(
            HoldReason.TOO_FEW_LABELS,
            f"{len(chosen)} turns are eligible and batching.min_turns is {config.min_turns} ({against}): wait for the next slot",
        )
    rewards = [turn.reward for turn in chosen]
    if max(rewards) - min(rewards) < EQUAL_WITHIN:
        raise Held(
            HoldReason.EQUAL_REWARDS, f"all {len(chosen)} eligible turns have the reward {rewards[0]}: there is nothing to learn from"
        )


def _manifest(
    chosen: Sequence[LabelledTurn], decided_by: Mapping[str, str], left_out: Counter[Exclusion], *, policy: str, slot: int, champion: str,
    anchor: str, rule_set: str, window_from: datetime, now: datetime,
) -> BatchManifest:  # fmt: skip
    items = tuple(
        BatchItem(
            inference_id=turn.inference_id, episode_id=turn.episode_id, reward=turn.reward, label_revision=turn.label_revision,
            segment=turn.segment, actor=turn.actor, version=turn.version, payload_segment=turn.payload_segment or "",
            channels=decided_by[turn.inference_id],
            group=turn.group,
        )
        for turn in sorted(chosen, key=lambda turn: turn.inference_id)
    )  # fmt: skip
    return BatchManifest(
        id=batch_id(policy=policy, champion=champion, rule_set=rule_set, items=items, tries=sum(turn.tries for turn in chosen)),
        policy=policy, slot=slot, champion=champion, anchor=anchor, rule_set=rule_set, window_from=window_from, window_to=now, items=items,
        left_out={reason.value: count for reason, count in sorted(left_out.items())},
    )  # fmt: skip


def _counts(verdicts: Iterable[Exclusion | None]) -> Counter[Exclusion]:
    return Counter(verdict for verdict in verdicts if verdict is not None)


def _lot(slot: int, unit: str) -> bytes:
    """A random-looking order of the units that changes from slot to slot."""
    return hashlib.sha256(f"{slot}\x1f{unit}".encode()).digest()
