"""A limit on the tokens of reasoning: a logits processor that forces the reasoning's end mark once they are used up.

The forced token is a function of the output's own tokens, so it is the same at a draft position as without drafts, wherever the
limit lies. Owns the count. Where reasoning begins and ends is decided by the text, as `MessageParser` does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import Any

import torch

from foresay.errors import ConfigError
from foresay.text.reasoning import THINK, Reasoning
from foresay.text.stream import special_ids

_START = 64
"""Most tokens up to the end of the begin mark: an output of more white space does not reason."""
_WINDOW = 16
_CHARACTER_TOKENS = 3
"""Most tokens by which a character that the limit would cut is completed: it has at most 4 bytes."""


class ThinkingBudget:
    """A limit on the reasoning of a request's outputs. Call `after` once per output; the result processes its logits."""

    def __init__(
        self, budget: int, tokenizer: Any, visible: Collection[int] = (), *, reasoning: Reasoning = THINK
    ) -> None:
        """budget: tokens between the marks of reasoning, at least 0. visible: special tokens with text, besides the marks.

        Raises ConfigError if the tokenizer cannot write the end mark.
        """
        self.budget, self.tokenizer, self.reasoning = budget, tokenizer, reasoning
        both = (reasoning.begin, reasoning.end)
        begin, self.end = ([int(i) for i in tokenizer(one, add_special_tokens=False).input_ids] for one in both)
        self._hidden = special_ids(tokenizer).difference(visible, begin, self.end)
        if reasoning.end not in self.text(self.end):
            raise ConfigError(f"needs {reasoning.end}, which the tokenizer cannot write", param="thinking budget")

    def after(self, prompt: list[int]) -> BudgetProcessor:
        """Return the processor for one output. prompt: token ids, which may end inside reasoning or after it."""
        return BudgetProcessor(self, prompt)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with the marks."""
        shown = [token for token in tokens if token not in self._hidden]
        return str(self.tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def start_of(self, output: Sequence[int]) -> tuple[int, bool]:
        """Return the number of tokens before the reasoning, and True; any number and False without reasoning, or before it."""
        for length in range(min(len(output), _START) + 1):
            text = self.text(output[:length]).lstrip()
            if text.startswith(self.reasoning.begin) or not self.reasoning.begin.startswith(text):
                return length, text.startswith(self.reasoning.begin)
        return len(output), False

    def end_of(self, output: Sequence[int], start: int) -> int | None:
        """Return the number of tokens up to the end mark of reasoning from index `start`; None inside the reasoning."""
        end = self.reasoning.end
        if end not in self.text(output[start:]):
            return None
        return bisect_left(range(len(output)), True, start, key=lambda length: end in self.text(output[start:length]))

    def forced(self, reasoning: Sequence[int]) -> list[int]:
        """Return the tokens of the end mark that must follow reasoning without it."""
        written = next(k for k in range(len(self.end) - 1, -1, -1) if reasoning[len(reasoning) - k :] == self.end[:k])
        cut = len(reasoning) < self.budget + _CHARACTER_TOKENS and self.text(reasoning[-_WINDOW:]).endswith("\ufffd")
        return [] if len(reasoning) < self.budget or (cut and not written) else self.end[written:]


class BudgetProcessor:
    """A LogitsProcessor that limits the reasoning of one output."""

    def __init__(self, limit: ThinkingBudget, prompt: list[int]) -> None:
        self._limit, self._prompt_length = limit, len(prompt)
        reasoning, tokenizer = limit.reasoning, limit.tokenizer
        self._start = 0 if reasoning.is_open(tokenizer, prompt) else None
        self._over: list[int] | None = [] if reasoning.is_closed(tokenizer, prompt) else None
        """The first tokens of an output after which nothing is forced, once it was seen; others may still reason."""
        self.source = f"thinking budget {limit.budget} {limit.end}"
        """See ForcesTokens."""

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [1, V] after token_ids [1, L]: only the next token of the end mark once the budget is used up."""
        if token_ids.shape[1] - self._prompt_length < self._limit.budget:
            return scores
        forced = self.forced_tokens(token_ids[0, self._prompt_length :].tolist())
        if not forced:
            return scores
        out = torch.full_like(scores, -torch.inf)
        out[:, forced[0]] = scores[:, forced[0]]
        return out

    def forced_tokens(self, output: Sequence[int]) -> list[int]:
        """Return the tokens of the end mark that must follow an output's tokens; see ForcesTokens."""
        if len(output) < self._limit.budget:
            return []
        output = list(output)
        if self._over is not None and output[: len(self._over)] == self._over:
            return []
        start, reasons = self._limit.start_of(output) if self._start is None else (self._start, True)
        end = self._limit.end_of(output, start) if reasons else None
        if end is not None:
            self._over = output[:end]
        if end is not None or not reasons:
            return []
        return self._limit.forced(output[start:])
