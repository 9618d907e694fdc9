"""How labelling runs; what it pays is in the rule set."""

import msgspec


class LabellingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The label process."""

    batch_turns: int = 1000
    """Turns labelled in one transaction."""
    poll_s: float = 1.0
    """How often due turns are looked for when there was nothing to do."""
    rule_set: str | None = None
    """TOML file of the rule set that a policy starts with; None is the default one shipped with the package. Later changes go through
    `ratchet rules activate`."""
    allowed_terms: tuple[str, ...] = ()
    """User-written terms that rule sets may name, as `package.module:attribute`. A rule set is a file that somebody sends round, and
    what it names would be imported and called: so nothing but what stands here is."""
    judge_url: str | None = None
    """OpenAI-compatible endpoint that replaces the follow-up classifier; its key is read from RATCHET_JUDGE_KEY."""
    judge_model: str = ""
    follow_up_model: str | None = None
    """File of a classifier made of a deployment's own messages (`ratchet labels distil`), in place of the shipped one: best an absolute
    path. Where a judge is configured too, the judge reads."""
