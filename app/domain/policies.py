"""What a deployment declares about each policy (a named model line); the rest of the configuration is each stage's own.

Read from `[policies.NAME]` of the TOML file named by RATCHET_CONFIG. Unknown keys are refused by name.
"""

from enum import StrEnum

import msgspec

from app.domain.errors import BadConfig


class SignalType(StrEnum):
    """Type of a declared observation's value."""

    BOOLEAN = "boolean"
    FLOAT = "float"
    TEXT = "text"


class Level(StrEnum):
    """What an observation is about."""

    TURN = "inference"
    EPISODE = "episode"


class Direction(StrEnum):
    """Which way is good."""

    UP = "max"
    DOWN = "min"


class SignalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An observation name declared beyond the built-in ones; under the name `rating` it declares the scale of ratings."""

    type: SignalType
    level: Level = Level.TURN
    optimize: Direction = Direction.UP
    low: float | None = None
    high: float | None = None
    """Ends of the scale of a float, such as 0 and 5 for stars; without them the number can be reported and gated on, but not paid for."""

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise BadConfig("a signal has both low and high, or neither: give the two ends of its scale")
        if self.low is not None and self.high is not None and not (self.type is SignalType.FLOAT and self.low < self.high):
            raise BadConfig('a signal\'s low and high are the ends of the scale of a float: set type = "float" and low below high')

    def reward(self, value: bool | float) -> float | None:
        """What a value is worth: -1 at the bad end of the scale, 1 at the good one, linear between; None for text and numbers without one.

        >>> SignalConfig(type=SignalType.FLOAT, low=0, high=5).reward(4)
        0.6
        """
        if self.type is SignalType.BOOLEAN:
            good = 1.0 if value else -1.0
        elif self.type is SignalType.FLOAT and self.low is not None and self.high is not None:
            good = min(max(2.0 * (float(value) - self.low) / (self.high - self.low) - 1.0, -1.0), 1.0)
        else:
            return None
        return good if self.optimize is Direction.UP else -good


class SummaryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Self-summarisation by the gateway."""

    trigger_tokens: int = 0
    """Prompt length from which the gateway asks the model to summarise its own context; 0 switches it off."""
    max_tokens: int = 256
    instruction: str = (
        "Summarise the conversation so far so that you can continue from the summary alone. Keep names, decisions, code and open tasks."
    )
    spread: float = 0.5
    """In practice each summary has a trigger of its own, drawn from this share below `trigger_tokens` up to it, so that the model learns to
    go on from summaries of every length. People's conversations are always summarised at `trigger_tokens`. 0 draws nothing."""

    def __post_init__(self) -> None:
        if self.trigger_tokens < 0 or self.max_tokens < 1:
            raise BadConfig("summary.trigger_tokens is at least 0 (off), and summary.max_tokens at least 1")
        if not 0.0 <= self.spread < 1.0:
            raise BadConfig(f"summary.spread is {self.spread}: give a share from 0 to below 1")


class ShadowConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shadow traffic: some requests are asked of another version too, whose answers nobody sees, which no gate hears of and nothing learns
    from. It shows how a version stands real prompts (errors, refusals, seconds, tokens) before anybody is served by it."""

    share: float = 0.0
    """Of the answers; 0 switches it off."""
    version: str = "candidate"
    """The version: `candidate`, the one that engines hold now, or a digest. One that no engine holds is not waited for."""
    max_concurrent: int = 2
    """Shadow answers that one gateway has under way at a time; what would be more is not asked."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise BadConfig(f"shadow.share is {self.share}: set it between 0 and 1")
        if self.version != "candidate" and (len(self.version) != 64 or set(self.version) - set("0123456789abcdef")):
            raise BadConfig("shadow.version is no digest: set it to `candidate`, or to the 64 hexadecimal digits of a version")
        if self.max_concurrent < 1:
            raise BadConfig("shadow.max_concurrent is below 1: set shadow.share = 0 to switch it off")


class DeploymentFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What licences ask about the product; None is "not declared", which blocks where a licence depends on it."""

    monthly_users: int | None = None
    monthly_revenue_usd: float | None = None
    fulfils: tuple[str, ...] = ()
    """Ids of the obligations that the product meets, such as `attribution`."""


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model line."""

    model: str
    """Folder of the base model's snapshot, absolute or relative to the configuration; `ratchet:NAME`: one that `ratchet model` brings."""
    base_name: str
    """Short name used in version names, such as `smollm2-135m`."""
    base_model: str
    """Where the base comes from, such as `HuggingFaceTB/SmolLM2-135M-Instruct`."""
    licence: str = "Apache-2.0"
    label_wait_s: float = 1800.0
    """Every turn is labelled this long after it finished, whether or not anything came."""
    lateness_s: float = 14_400.0
    """Observations later than the deadline plus this are ledgered as `late` and never re-label."""
    max_context_tokens: int = 2048
    max_tokens: int = 512
    """Upper bound and default of `max_tokens` of a request."""
    engine_timeout_s: float = 120.0
    max_concurrent: int = 0
    """Answers of this policy that one gateway has under way at a time, more are refused with 429; 0 is no bound."""
    train_by_default: bool = True
    record_experts: bool = True
    """Log which experts of a mixture-of-experts model ran for each token, so that training can replay them; a dense model has none."""
    redact: bool = False
    """Redact personal data from prompts and completions before anything is stored."""
    segment_tags: tuple[str, ...] = ("task", "language", "tier")
    """Request metadata keys that become the turn's segment."""
    held_out_share: float = 0.1
    """Share of actors whose labels are kept for evaluation and never trained on."""
    signals: dict[str, SignalConfig] = {}
    summary: SummaryConfig = SummaryConfig()
    deployment: DeploymentFacts = DeploymentFacts()
    shadow: ShadowConfig = ShadowConfig()
