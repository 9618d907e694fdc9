"""Text of a completion as it grows: whole characters only, stop strings never shown."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from app.policy.chat import Chat


class TextStream:
    """Feed sampled tokens, get text that may be shown.

    Text lags behind the tokens while a character is incomplete, and while what came may be the beginning of a stop string.
    """

    def __init__(self, chat: Chat, *, stop: Sequence[str] = ()) -> None:
        self._tokenizer = chat.tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._chat = chat
        self._stop = tuple(text for text in stop if text)
        self._tokens: list[int] = []
        self._decoded = ""
        self._shown = 0
        self.stopped = False
        """Whether a stop string was completed; the text ends before it."""

    def push(self, token: int) -> str:
        """Newly showable text after one more token."""
        self._tokens.append(token)
        self._decoded += self._stream.step(self._tokenizer, token) or ""
        found = [at for at in (self._decoded.find(text, self._shown) for text in self._stop) if at >= 0]  # its beginning was held back
        if found:
            self.stopped = True
            self._decoded = self._decoded[: min(found)]
        return self._show(len(self._decoded) if self.stopped else len(self._decoded) - self._held_back())

    def finish(self) -> str:
        """What was held back, when no more tokens come; an incomplete character appears as U+FFFD."""
        if not self.stopped:
            whole = self._chat.decode(self._tokens)
            if whole.startswith(self._decoded):
                self._decoded = whole
        return self._show(len(self._decoded))

    def _show(self, until: int) -> str:
        fresh = self._decoded[self._shown : until]
        self._shown = max(self._shown, until)
        return fresh

    def _held_back(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = max((len(text) for text in self._stop), default=1) - 1
        for length in range(min(longest, len(self._decoded)), 0, -1):
            if any(text.startswith(self._decoded[-length:]) for text in self._stop):
                return length
        return 0
