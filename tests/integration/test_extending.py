"""docs/extending.md, run: its signal, its term, its rule set and its metric."""

import re
import sys
from pathlib import Path

import msgspec
import pytest

from app.domain.policies import SignalConfig
from pipelines.evaluation.config import GatesConfig
from pipelines.labelling.rule_set import parse_rule_set
from tests.fakes.labelling import facts, observed

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text()
SIGNAL, RULES, METRIC = re.findall(r"```(?:toml|ini)\n(.*?)```", PAGE, flags=re.DOTALL)
(TERM,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_signal_pays_along_its_scale() -> None:
    declared = msgspec.toml.decode(SIGNAL)["policies"]["composer"]["signals"]["minutes_saved"]
    signal = msgspec.convert(declared, SignalConfig)
    assert [signal.reward(value) for value in (0.0, 15.0, 30.0)] == [-1.0, 0.0, 1.0]
    rules = 'name = "paid"\n[[terms]]\nname = "signal:minutes_saved"\nweight = 1.0\n'
    ((term, weight),) = parse_rule_set(rules, signals={"minutes_saved": signal}).terms
    assert term.score(facts(), [observed("minutes_saved", 7.5)], weight=weight).value == -0.5


def test_the_term_is_found_where_the_rule_set_says_and_only_if_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_terms.py").write_text(TERM)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Exception, match="allowed_terms"):
        parse_rule_set(RULES)
    assert "shop_terms" not in sys.modules, "a rule set that is refused runs nothing"
    brevity, weight = parse_rule_set(RULES, allowed={"shop_terms:Brevity"}).terms[1]
    assert weight == 0.2
    assert brevity.score(facts(completion="four words, no more"), [], weight=weight).value == -4 / 200
    assert brevity.score(facts(completion=" "), [], weight=weight).abstained == "no_words"


def test_the_metric_is_one_of_the_gates() -> None:
    given = msgspec.toml.decode(METRIC)["gates"]
    (metric,) = msgspec.convert(given, GatesConfig).metrics
    assert metric.required
    assert metric.source == "observation:minutes_saved"
