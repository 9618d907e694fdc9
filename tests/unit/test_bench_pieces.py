"""A long bench in pieces: what one run found the next one has, and nothing of other code is mixed in."""

import argparse
from pathlib import Path

import pytest

from tests.bench import ha
from tests.bench.common.pieces import COME_AGAIN, Pieces, add_pieces, pieces_of


def bench(pieces: Pieces, made: list[str]) -> int:
    def make(name: str) -> dict[str, str]:
        made.append(name)
        return {"of": name}

    found = [pieces.get(name, lambda name=name: make(name)) for name in ("a", "b", "a")]
    assert found == [{"of": "a"}, {"of": "b"}, {"of": "a"}]
    return 0


def test_a_run_out_of_time_asks_to_be_run_again_and_the_next_one_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, made = tmp_path / "new" / "pieces.jsonl", list[str]()
    pieces = Pieces(file, minutes=1)
    pieces.get("a", lambda: {"of": "a"})
    assert Pieces(file, minutes=0).in_turn(lambda pieces: bench(pieces, made)) == COME_AGAIN
    assert "1 pieces are in" in capsys.readouterr().out
    assert made == []
    assert Pieces(file, minutes=1).in_turn(lambda pieces: bench(pieces, made)) == 0
    assert made == ["b"]
    assert Pieces(file, minutes=0).in_turn(lambda pieces: bench(pieces, made)) == 0
    assert made == ["b"], "all of it was there"


def test_without_a_file_time_is_never_up(tmp_path: Path) -> None:
    made = list[str]()
    assert Pieces(None, minutes=0).in_turn(lambda pieces: bench(pieces, made)) == 0
    assert made == ["a", "b"]
    assert not list(tmp_path.iterdir())


def test_what_other_code_found_is_not_mixed_in(tmp_path: Path) -> None:
    file = tmp_path / "pieces.jsonl"
    Pieces(file, minutes=1, code="old").get("a", lambda: 1)
    with pytest.raises(SystemExit, match="name another file"):
        Pieces(file, minutes=1, code="new")
    parser = argparse.ArgumentParser()
    add_pieces(parser)
    asked = parser.parse_args(["--resume", str(tmp_path / "mine.jsonl")])
    pieces_of(asked, __file__).get("a", lambda: 1)
    assert pieces_of(asked, __file__).get("a", lambda: 2) == 1, "the same code"
    with pytest.raises(SystemExit, match="name another file"):
        pieces_of(asked, str(Path(__file__).with_name("test_benches.py")))


def test_the_days_of_the_bench_of_replicas_add_up_and_every_bound_is_judged() -> None:
    calm = dict.fromkeys(ha.ADDED, 1) | {"failed_requests": 0, "lost": 0, "doubled": 0, "slots_lost": 0, "unlabelled": 0}
    calm |= {"failovers": {"api:kill": 2.0}, "unserved": [], "first_failed": [], "first_lost": [], "slots": [], "busy": 1.0}
    other = calm | {"failovers": {"relay:cut": 31.0}, "lost": 1, "first_lost": ["i"], "unserved": ["relay:cut"], "busy": 3.0}
    found = ha.together([calm, other])
    assert (found["killed"], found["lost"], found["failover_s"], found["busy"]) == (2, 1, 31.0, 3.0)
    assert found["first_lost"] == ["i"]
    assert ha.missed(ha.together([calm])) == []
    assert [line.split()[0] for line in ha.missed(found)] == ["lost", "nothing", "failover_s"]
    assert ha.missed(ha.together([calm, calm | {"not_cut": "not root"}])) == ["no cut was tried: not root"]


def test_every_process_meets_every_fault_once_in_a_piece_of_its_own_and_the_quick_run_leaves_a_third_out() -> None:
    plan = ha.chosen(("api", "relay", "loop"), ha.FAULTS, quick=False)
    assert list(plan) == ["api", "relay", "loop", "servers"]
    assert plan["relay"] == [("relay", fault) for fault in ha.FAULTS]
    quick = ha.chosen(("api", "relay", "loop"), ha.FAULTS, quick=True)
    assert sum(map(len, quick.values())) - len(quick["servers"]) == 8
    assert quick["servers"] == plan["servers"]
