"""People judging blind pairs: a vote is one act of one person about one pair, stored before anything is revealed."""

from typing import Protocol

from app.domain.errors import DoneAlready, NotFound, Refused
from app.domain.release.pairs import BlindVote, Choice, part_of
from app.domain.release.releases import ReleaseState
from app.release.ledger import ReleaseLedger
from app.release.people import require_person
from app.release.promotion import terms_of


class Jury(Protocol):
    """Takes votes."""

    def vote(self, release_id: str, pair_id: str, choice: Choice, *, voter: str, shown_to: str, proven: bool) -> BlindVote: ...


class ReleaseJury:
    """Takes votes into the ledger."""

    def __init__(self, ledger: ReleaseLedger) -> None:
        self._ledger = ledger

    def vote(self, release_id: str, pair_id: str, choice: Choice, *, voter: str, shown_to: str, proven: bool) -> BlindVote:
        """Store what somebody said. `shown_to` is whom the sides were drawn for: the voter, but where nobody is signed in.

        Raises `DoneAlready` where the same person voted on the pair before, under whatever name, and `Refused` for programs.
        """
        require_person(voter, "judge answers")
        with self._ledger.transaction(self._ledger.find(release_id).policy) as tx:
            release, pair = tx.release(release_id), tx.pair(pair_id)
            if pair.release_id != release.id:
                raise NotFound("there is no such pair of this release: open the page again")
            if terms_of(release).by_people is not None and release.state is not ReleaseState.JUDGING:
                raise Refused(
                    f"{release.version_name} is {release.state}: what people said of it is evidence by now, and no more votes are taken"
                )
            votes, names = tx.votes(release.id), tx.names_of(voter) | {voter}
            about = [vote for vote in votes if vote.pair_id == pair.id]
            if any(vote.voter in names for vote in about):
                raise DoneAlready(f"{voter} judged this pair before, and nobody votes twice on one pair")
            used = sum(vote.counted and vote.voter in names for vote in votes)
            part = part_of(tx.count_pairs(release.id), judges=terms_of(release).judges)
            vote = BlindVote(
                pair_id=pair.id, voter=voter, favoured=pair.favoured(choice, shown_to), candidate_left=pair.candidate_is_left(shown_to),
                counted=used < part and not any(one.counted for one in about), proven=proven, voted_at=tx.now,
            )  # fmt: skip
            tx.add_vote(pair, vote)
            # what they said stays out of the chain: others who read it have not judged yet
            tx.note(actor=voter, action="release.judged", subject=release.id, detail={"policy": release.policy, "pair": pair.id})
            return vote
