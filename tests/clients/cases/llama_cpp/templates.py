"""The prompt that a chat template makes, and reasoning."""

from __future__ import annotations

from clients.cases.bodies import TALK, chat, post
from clients.cases.case import Case, From, refused
from clients.cases.expect import (
    at_least,
    no_more,
    ok,
    text,
)

REASONING = [
    Case(
        "the end of the prompt",
        [post("/tokenize", {"messages": TALK}), post("/detokenize", {"tokens": From(0, "tokens")})],
        ok(text("prompt", "<assistant>$")),
        server="thinks",
    ),
    Case(
        "the prompt of a chat with tools",
        post("/apply-template", {"messages": TALK, "tools": None}),
        ok(text("prompt")),
        refused("/apply-template"),
    ),
    Case(
        "no generation prompt",
        post("/apply-template", {"messages": TALK, "add_generation_prompt": False}),
        ok(text("prompt")),
        refused("/apply-template"),
    ),
    Case(
        "the generation prompt is left out of a chat",
        chat(TALK, max_tokens=4, add_generation_prompt=False),
        ok(text("choices.0.message.content")),
    ),
    Case(
        "the generation prompt is added to a chat",
        chat(TALK, max_tokens=4, add_generation_prompt=True),
        ok(text("choices.0.message.content")),
    ),
]
BUDGET = [
    Case(
        "a budget of thinking tokens",
        chat(TALK, thinking_budget_tokens=5, max_tokens=30),
        ok(text("choices.0.message.reasoning_content")),
        server="thinks",
    ),
    Case(
        "a budget of reasoning tokens",
        chat(TALK, reasoning_budget=4, max_tokens=30),
        ok(),
        refused("reasoning_budget"),
        server="thinks",
    ),
    Case(
        "reasoning in a stream",
        chat(TALK, temperature=0, stream=True),
        ok(
            text("reasoning", "Let me think"),
            text("texts.0", "98"),
            no_more("events.*.choices.*.delta.tool_calls"),
            at_least("events", 3),
        ),
        server="thinks",
    ),
]
SUITES = {"test_template.py": REASONING, "test_reasoning_budget_stream.py": BUDGET}
