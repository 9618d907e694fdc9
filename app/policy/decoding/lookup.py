"""Drafts by prompt lookup: what followed the last time the same few tokens came. Edits repeat most of what they edit.

A draft costs nothing to make and something to verify, so it is made where it has paid: after drafts that were not drawn, nothing is drafted
for a while, twice as long each time.
"""

from collections.abc import Sequence

NGRAM = 3
"""Tokens that must have come before in the same order: two are found by chance in any chat."""
FIRST_DRAFT, LONGEST_DRAFT = 3, 7
REST_TOKENS, LONGEST_REST = 8, 256


class PromptLookup:
    """The context of one answer, by its runs of `NGRAM` tokens."""

    def __init__(self, context: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        """Where the newest run of these tokens but the last one ends."""
        self._length, self._rest, self._resting = FIRST_DRAFT, REST_TOKENS, 0
        for token in context:
            self._append(token)

    def draft(self, most: int) -> list[int]:
        """The tokens that may come next, `most` at most; often none."""
        if self._resting or most < 1 or len(self._tokens) < NGRAM:
            return []
        start = self._after.get(tuple(self._tokens[-NGRAM:]))
        return [] if start is None else self._tokens[start : start + min(most, self._length)]

    def emitted(self, tokens: Sequence[int], *, drafted: int) -> None:
        """These tokens were drawn, of which all but the last were drafted, among `drafted`."""
        for token in tokens:
            self._append(token)
        self._resting = max(0, self._resting - len(tokens))
        if not drafted:
            return
        right = len(tokens) - 1
        if right == 0:
            self._resting, self._rest, self._length = self._rest, min(2 * self._rest, LONGEST_REST), FIRST_DRAFT
        elif right == drafted:
            self._rest, self._length = REST_TOKENS, LONGEST_DRAFT

    def _append(self, token: int) -> None:
        # the run that ends before this token is complete now: what comes after it begins here
        if len(self._tokens) >= NGRAM:
            self._after[tuple(self._tokens[-NGRAM:])] = len(self._tokens)
        self._tokens.append(token)
