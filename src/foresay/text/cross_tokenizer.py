"""Conversion of token ids between a draft model's tokenizer and the target's.

Owns the shared tokens, the points where a text may be cut, and the text of special tokens. Knows no model and no distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_INCOMPLETE = "\ufffd"
_FIX_AFTER = 96
"""Committed tokens in the tail beyond which its beginning is fixed, so that a long text is not retokenized on every call."""
_KEEP = 32
"""Last tokens of the tail, which may still be tokenized differently when more text follows."""


class TokenizerPair:
    """The draft model's tokenizer and the target's; the Retokenizer of `CrossTokenizerDrafter`."""

    def __init__(self, target: Any, draft: Any) -> None:
        self.target, self.draft = target, draft
        draft_vocab, target_vocab = draft.get_vocab(), target.get_vocab()
        common = sorted((draft_vocab[token], target_vocab[token]) for token in draft_vocab.keys() & target_vocab.keys())
        pairs = torch.tensor(common, dtype=torch.int64).view(-1, 2)
        self.shared = (pairs[:, 0].contiguous(), pairs[:, 1].contiguous())
        added = getattr(target, "added_tokens_decoder", {})  # chat markers may be listed only here
        special = {*target.all_special_ids, *(i for i, token in added.items() if token.special)}
        self._special = {i: token for token, i in target_vocab.items() if i in special}
        self._known = draft_vocab

    def opening(self) -> list[int]:
        """Return the token ids that the draft's tokenizer puts before every text: [bos] or []."""
        bos = self.draft.bos_token_id
        return [bos] if bos is not None and self.draft("a").input_ids[:1] == [bos] else []

    def reader(self) -> TextReader:
        """Return a reader for the growing text of one row."""
        return TextReader(self)

    def text(self, tokens: Sequence[int]) -> str:
        """Decode target tokens; special tokens are kept only if the draft's vocabulary has them too."""
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
        """Decode tokens[start:] as a continuation: decoded alone, some decoders drop the leading space."""
        if start == 0 or tokens[start - 1] in self._special:
            return self.text(tokens[start:])
        before, both = self.text(tokens[start - 1 : start]), self.text(tokens[start - 1 :])
        return both[len(before) :] if both.startswith(before) else self.text(tokens[start:])

    def draft_tokens(self, text: str, *, continues: bool) -> list[int]:
        """Encode a text with the draft's tokenizer. continues: the text follows other text, so no space may be put before it."""
        if continues:
            letter: list[int] = self.draft("a", add_special_tokens=False).input_ids
            both: list[int] = self.draft("a" + text, add_special_tokens=False).input_ids
            if both[: len(letter)] == letter:
                return both[len(letter) :]
        ids: list[int] = self.draft(text, add_special_tokens=False).input_ids
        return ids

    def to_target(self, context: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """Convert draft tokens to target tokens, split as the target's tokenizer splits context and draft together.

        context: target token ids. drafted: draft token ids that follow it.
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
        """Return an index where a word begins, so that the text from there is split as it is within the whole text."""
        for index in range(max(0, len(tokens) - 8), 0, -1):
            if self.begins_word(tokens[index]):
                return index
        return 0

    def may_cut(self, tokens: Sequence[int], index: int) -> bool:
        """True if a word or a run of white space begins at tokens[index]; a run is always tokenized as a whole."""
        return self.begins_word(tokens[index]) and not self.text(tokens[index - 1 : index])[-1:].isspace()

    def begins_word(self, token: int) -> bool:
        """True if a target token begins with white space or is special, so that a text may be cut before it."""
        if token in self._special:
            return True
        piece = str(self.target.convert_ids_to_tokens(token))
        return piece[:1] in ("\u0120", "\u010a", "\u2581", " ", "\n") or piece == "<0x0A>"


class TextReader:
    """The text of one row in draft tokens: its beginning is fixed, its tail is retokenized as it grows."""

    def __init__(self, pair: TokenizerPair) -> None:
        self._pair = pair
        self._fixed: list[int] = pair.opening()
        self._start = 0

    def read(self, tokens: Sequence[int], committed: int) -> list[int]:
        """Return the draft tokens of the whole text. tokens: target token ids; the first `committed` of them never change."""
        pair = self._pair
        while committed - self._start > _FIX_AFTER:
            stop = max(self._start + 1, min(committed - _KEEP, self._start + 4 * _FIX_AFTER))
            cut = next((i for i in range(stop, self._start, -1) if pair.may_cut(tokens, i)), stop)
            chunk = pair.text_from(tokens[:cut], self._start)
            self._fixed += pair.draft_tokens(chunk, continues=self._start > 0)
            self._start = cut
        tail = pair.text_from(tokens, self._start).rstrip(_INCOMPLETE)
        out = self._fixed + pair.draft_tokens(tail, continues=self._start > 0)
        # a context cannot be empty: the first shared token replaces an empty text
        return out or [int(pair.shared[0][0]) if len(pair.shared[0]) else 0]
