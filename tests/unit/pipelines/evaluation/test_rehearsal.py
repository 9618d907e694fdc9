"""The champion's half of a comparison, answered while the candidate is being made."""

from collections.abc import AsyncIterator

import pytest

from app.domain.release.gates import Verdict
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from app.domain.telemetry.turns import FinishReason
from pipelines.evaluation.suites.rehearsal import Rehearsal
from tests.unit.pipelines.evaluation.test_offline import AnsweringEngines, gate, solved, suite


def asked(engines: AnsweringEngines) -> list[tuple[str, str, int | None]]:
    return sorted((request.digest, request.messages[0]["content"], request.sampling.seed) for request in engines.asked)


def test_a_champion_that_answered_beside_the_update_is_not_asked_again_and_the_verdict_is_the_same() -> None:
    solves = {"champion": solved(*range(30)), "candidate": solved(*range(5, 35))}
    together, apart, rehearsal = AnsweringEngines(solves), AnsweringEngines(solves), Rehearsal()
    wanted = gate(together, suite()).decide(policy="p", candidate="candidate", champion="champion", batch="b1")
    judging = gate(apart, suite(), rehearsal=rehearsal)
    judging.rehearse(policy="p", champion="champion", batch="b1")
    judging.rehearse(policy="p", champion="champion", batch="b1")  # a resumed slot tells of its batch again
    found = gate(apart, suite(), rehearsal=rehearsal).decide(policy="p", candidate="candidate", champion="champion", batch="b1")
    assert (found.verdict, found.evidence_hash) == (wanted.verdict, wanted.evidence_hash)
    assert asked(apart) == asked(together)
    assert [request.digest for request in apart.asked] == ["champion"] * 80 + ["candidate"] * 80


@pytest.mark.parametrize(("champion", "batch", "rehearse"), [("other", "b1", True), ("champion", "b2", True), ("champion", "b1", False)])
def test_what_was_rehearsed_for_another_comparison_counts_for_none(champion: str, batch: str, rehearse: bool) -> None:
    solves = {name: solved(*range(30)) for name in ("champion", "other", "candidate")}
    engines, rehearsal = AnsweringEngines(solves), Rehearsal()
    gate(engines, suite(), rehearsal=rehearsal, rehearse=rehearse).rehearse(policy="p", champion="champion", batch="b1")
    result = gate(engines, suite(), rehearsal=rehearsal).decide(policy="p", candidate="candidate", champion=champion, batch=batch)
    assert result.verdict is Verdict.PASS
    drawn = {name: {(task, seed) for digest, task, seed in asked(engines) if digest == name} for name in (champion, "candidate")}
    assert len(drawn["candidate"]) == 80
    assert drawn["candidate"] <= drawn[champion], "both were asked for this comparison"


class Dying(AnsweringEngines):
    """Ends the champion's answers with an error, the first time each is asked for."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        first = request.digest == "champion" and not any(before == request for before in self.asked)
        self.finish = FinishReason.ERROR if first else FinishReason.STOP
        async for chunk in super().generate(request):
            yield chunk


def test_a_rehearsal_that_failed_costs_nothing_but_its_answers() -> None:
    engines, rehearsal = Dying({"champion": solved(*range(30)), "candidate": solved(*range(30))}), Rehearsal()
    judging = gate(engines, suite(), rehearsal=rehearsal)
    judging.rehearse(policy="p", champion="champion", batch="b1")
    half = rehearsal._begun["p"][1]
    assert half.exception(timeout=20) is not None
    first = judging.decide(policy="p", candidate="candidate", champion="champion", batch="b1")
    second = judging.decide(policy="p", candidate="candidate", champion="champion", batch="b1")
    assert Verdict.PASS in (first.verdict, second.verdict), "whoever asks anew gets answers"


def test_of_two_comparisons_no_draw_is_shared_and_a_batch_names_its_own() -> None:
    engines = AnsweringEngines({name: solved(*range(30)) for name in ("champion", "candidate")})
    for batch in ("b1", "b2"):
        gate(engines, suite()).decide(policy="p", candidate="candidate", champion="champion", batch=batch)
    seeds = [request.sampling.seed for request in engines.asked if request.digest == "champion"]
    assert len(set(seeds)) == len(seeds) == 160
