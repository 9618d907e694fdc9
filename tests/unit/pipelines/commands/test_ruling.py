"""A rule set that pays nothing for practice is refused where batches take practice, and nowhere else."""

import pytest

from app.domain.errors import BadConfig
from app.domain.policies import PolicyConfig
from pipelines.commands.ruling import parsed, require_practice, usable
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


POLICY = PolicyConfig(model="m", base_name="b", base_model="B")
RATED = 'name = "rated"\n[[terms]]\nname = "rating"\nweight = 1.0\n'
ALL_GOLD = 'name = "greedy"\n[[terms]]\nname = "task_success"\nweight = 1.0\n[[terms]]\nname = "edit_persistence"\nweight = 1.0\n'


def test_a_rule_set_is_read_for_a_policy_and_used_where_the_gates_still_have_something_to_judge_by() -> None:
    loop = loop_config({})
    for read in (parsed, usable):
        found = read(RATED, policy=POLICY, loop=loop)
        assert (found.config.name, [term.name for term, _ in found.terms]) == ("rated", ["rating"])
    assert parsed(ALL_GOLD, policy=POLICY, loop=loop).config.name == "greedy"
    with pytest.raises(BadConfig, match="gold"):
        usable(ALL_GOLD, policy=POLICY, loop=loop)
    with pytest.raises(BadConfig, match="pays nothing for practice"):
        usable(RATED, policy=POLICY, loop=loop_config({"batching": {"rollout_share": 0.5}}))
    with pytest.raises(BadConfig, match="no term is named 'vibes'"):
        parsed(RATED.replace('"rating"', '"vibes"'), policy=POLICY, loop=loop)
