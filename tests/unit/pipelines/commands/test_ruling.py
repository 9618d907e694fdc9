"""A rule set that pays nothing for practice is refused where batches take practice, and nowhere else."""

import pytest

from app.domain.errors import BadConfig
from pipelines.commands.ruling import require_practice
from pipelines.config import loop_config
from pipelines.labelling.rule_set import default_toml, parse_rule_set

PAYS = '[[terms]]\nname = "practice"\nweight = 1.0\n'


@pytest.mark.parametrize(
    ("share", "pays", "refused"), [(0.0, False, False), (0.01, False, True), (1.0, False, True), (0.01, True, False), (1.0, True, False)]
)
def test_where_batches_take_practice_it_is_paid(share: float, pays: bool, refused: bool) -> None:
    loop = loop_config({"batching": {"rollout_share": share}})
    rule_set = parse_rule_set(f"{default_toml()}\n{PAYS if pays else ''}")
    if not refused:
        require_practice(rule_set, loop)
        return
    with pytest.raises(BadConfig, match="the rule set 'default' pays nothing for practice: add the term `practice`"):
        require_practice(rule_set, loop)
