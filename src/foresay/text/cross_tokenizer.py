"""Between a draft's tokenizer and the target's: the tokens of a text in one vocabulary, given those in the other.

Owns which tokens both share, where a text may be cut, and the text of special tokens. Knows no model and no law.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_INCOMPLETE = "\ufffd"
_SETTLE = 96
"""Committed tokens in the tail after which its beginning is settled, so that a long text is not tokenized anew each time."""
_KEEP = 32
"""Tokens of the tail that may still be tokenized differently when more text follows."""


class TokenizerPair:
    """A draft's tokenizer and the target's; a Retokenizer for `CrossTokenizerDrafter`."""

    def __init__(self, target: Any, draft: Any) -> None:
        self.target, self.draft = target, draft
        ours, theirs = draft.get_vocab(), target.get_vocab()
        common = sorted((ours[token], theirs[token]) for token in ours.keys() & theirs.keys())
        pairs = torch.tensor(common, dtype=torch.int64).view(-1, 2)
        self.shared = (pairs[:, 0].contiguous(), pairs[:, 1].contiguous())
        added = getattr(target, "added_tokens_decoder", {})  # a chat's marks may be named nowhere else
        special = {*target.all_special_ids, *(i for i, token in added.items() if token.special)}
        self._special = {i: token for token, i in theirs.items() if i in special}
        self._known = ours

    def opening(self) -> list[int]:
        """The token ids that the draft's tokenizer puts before every text: [bos] or []."""
        bos = self.draft.bos_token_id
        return [bos] if bos is not None and self.draft("a").input_ids[:1] == [bos] else []

    def reader(self) -> TextReader:
        """A reader of one row's growing text."""
        return TextReader(self)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of the target's tokens; special ones only where the draft has them too."""
        parts: list[str] = []
        plain: list[int] = []
        for token in tokens:
            if token not in self._special:
                plain.append(token)
                continue
            parts.append(self._decoded(self.target, plain))
            plain = []
            if self._special[token] in self._known:
                parts.append(self._special[token])
        parts.append(self._decoded(self.target, plain))
        return "".join(parts)

    @staticmethod
    def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        text: str = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def text_from(self, tokens: Sequence[int], start: int) -> str:
        """The text of tokens[start:] as it follows the token before: alone, some decoders drop the space it begins with."""
        if start == 0 or tokens[start - 1] in self._special:
            return self.text(tokens[start:])
        before, both = self.text(tokens[start - 1 : start]), self.text(tokens[start - 1 :])
        return both[len(before) :] if both.startswith(before) else self.text(tokens[start:])

    def draft_tokens(self, text: str, *, behind: bool) -> list[int]:
        """The draft's tokens of a text. behind: it follows other text, so that no space may be put before it."""
        if behind:
            letter: list[int] = self.draft("a", add_special_tokens=False).input_ids
            both: list[int] = self.draft("a" + text, add_special_tokens=False).input_ids
            if both[: len(letter)] == letter:
                return both[len(letter) :]
        ids: list[int] = self.draft(text, add_special_tokens=False).input_ids
        return ids

    def to_target(self, context: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """The target's tokens of the drafted text, split as it would split context and draft together.

        context: the target's tokens. drafted: the draft's tokens that follow it.
        """
        new = self._decoded(self.draft, drafted).rstrip(_INCOMPLETE)
        if not new:
            return []
        begin = self._boundary(context)
        tail = list(context[begin:])
        known = self._decoded(self.target, tail)
        whole: list[int] = self.target(known + new, add_special_tokens=False).input_ids
        if whole[: len(tail)] == tail:
            return whole[len(tail) :]
        alone: list[int] = self.target(new, add_special_tokens=False).input_ids
        return alone

    def _boundary(self, tokens: Sequence[int]) -> int:
        """An index into the tokens where a word begins, so that the text from there splits as it does in the whole text."""
        for place in range(max(0, len(tokens) - 8), 0, -1):
            if self.begins_word(tokens[place]):
                return place
        return 0

    def may_cut(self, tokens: Sequence[int], place: int) -> bool:
        """Whether a word or a run of white space begins at tokens[place]: such runs are split as a whole."""
        return self.begins_word(tokens[place]) and not self.text(tokens[place - 1 : place])[-1:].isspace()

    def begins_word(self, token: int) -> bool:
        """Whether a target token begins with white space (or is special), so that texts may be cut before it."""
        if token in self._special:
            return True
        piece = str(self.target.convert_ids_to_tokens(token))
        return piece[:1] in ("\u0120", "\u010a", "\u2581", " ", "\n") or piece == "<0x0A>"


class TextReader:
    """One row's text in the draft's tokens: the beginning is settled, the tail is tokenized anew as it grows."""

    def __init__(self, retokenizer: TokenizerPair) -> None:
        self._translator = retokenizer
        self._settled: list[int] = retokenizer.opening()
        self._place = 0

    def read(self, tokens: Sequence[int], committed: int) -> list[int]:
        """The draft's tokens of the whole text. tokens: the target's, of which the first `committed` never change."""
        retokenizer = self._translator
        while committed - self._place > _SETTLE:
            stop = max(self._place + 1, min(committed - _KEEP, self._place + 4 * _SETTLE))
            cut = next((i for i in range(stop, self._place, -1) if retokenizer.may_cut(tokens, i)), stop)
            chunk = retokenizer.text_from(tokens[:cut], self._place)
            self._settled += retokenizer.draft_tokens(chunk, behind=self._place > 0)
            self._place = cut
        tail = retokenizer.text_from(tokens, self._place).rstrip(_INCOMPLETE)
        out = self._settled + retokenizer.draft_tokens(tail, behind=self._place > 0)
        # a context cannot be empty: the first shared token stands in for a text without tokens
        return out or [int(retokenizer.shared[0][0]) if len(retokenizer.shared[0]) else 0]
