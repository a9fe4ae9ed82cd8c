"""The marks around reasoning, by family: one table for messages, constraints, budgets and prompts.

Owns which marks a chat template has, and whether a prompt ends inside them. Knows no calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_LAST_TOKENS = 64
"""Tokens of a mark and the white space after it, at most."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The marks of one family."""

    begin: str
    end: str
    sign: str = ""
    """A text of every chat template with these marks; "" for `end`."""
    after: str = ""
    """Text between the end of reasoning and the answer: the header of the next message."""

    def is_open(self, tokenizer: Any, prompt: list[int]) -> bool:
        """True if a prompt ends inside reasoning, so that the output begins there."""
        return _last(tokenizer, prompt).endswith(self.begin.rstrip())

    def is_closed(self, tokenizer: Any, prompt: list[int]) -> bool:
        """True if a prompt ends after reasoning, so that the output has none."""
        return _last(tokenizer, prompt).endswith(self.end)


THINK = Reasoning("<think>", "</think>")
REASONING = (
    Reasoning("<|channel|>analysis<|message|>", "<|end|>", "<|channel|>analysis", "<|start|>assistant"),  # gpt-oss
    Reasoning("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    Reasoning("<seed:think>", "</seed:think>"),  # Seed-OSS
    Reasoning("<mm:think>", "</mm:think>"),  # MiniMax M3
    Reasoning("<|channel>thought\n", "<channel|>"),  # Gemma 4
    Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A, Command R7B
    Reasoning("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    Reasoning("<thought>", "</thought>"),  # EXAONE Deep
    Reasoning("Here is my thought process:", "Here is my response:"),  # Granite 3.2
    THINK,  # DeepSeek, GLM, Hunyuan, Kimi, LFM2, MiniMax M2, Nemotron, OLMo 3, Qwen, SmolLM3, Step 3
)
"""The marks by family; of several that a template has, the first count."""


def reasoning_of(tokenizer: Any) -> Reasoning | None:
    """Return the marks of reasoning of a tokenizer's chat template, None if it has none."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return next((one for one in REASONING if (one.sign or one.end) in template), None)


def _last(tokenizer: Any, prompt: list[int]) -> str:
    return str(tokenizer.decode(prompt[-_LAST_TOKENS:])).rstrip()
