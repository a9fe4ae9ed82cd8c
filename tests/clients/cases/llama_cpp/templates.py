"""The prompt that a chat template makes, and reasoning."""

from __future__ import annotations

from clients.cases.bodies import TALK, chat, post
from clients.cases.case import NO_ROUTE, From, cases, refused
from clients.cases.expect import at_least, no_more, text

REASONING = cases({
    "the end of the prompt": ([post("/tokenize", {"messages": TALK}),
        post("/detokenize", {"tokens": From(0, "tokens")})], text("prompt", "<assistant>$"), "thinks"),
    "the prompt of a chat with tools": (post("/apply-template", {"messages": TALK, "tools": None}), NO_ROUTE),
    "no generation prompt": (post("/apply-template", {"messages": TALK, "add_generation_prompt": False}), NO_ROUTE),
    "the generation prompt is left out of a chat": (chat(TALK, max_tokens=4, add_generation_prompt=False),
        text("choices.0.message.content")),
    "the generation prompt is added to a chat": (chat(TALK, max_tokens=4, add_generation_prompt=True),
        text("choices.0.message.content")),
})  # fmt: skip
BUDGET = cases({
    "a budget of thinking tokens": (chat(TALK, thinking_budget_tokens=5, max_tokens=30),
        text("choices.0.message.reasoning_content"), "thinks"),
    "a budget of reasoning tokens": (chat(TALK, reasoning_budget=4, max_tokens=30), refused("reasoning_budget"),
        "thinks"),
    "reasoning in a stream": (chat(TALK, temperature=0, stream=True), text("reasoning", "Let me think"),
        text("texts.0", "98"), no_more("events.*.choices.*.delta.tool_calls"), at_least("events", 3), "thinks"),
})  # fmt: skip
SUITES = {"test_template.py": REASONING, "test_reasoning_budget_stream.py": BUDGET}
