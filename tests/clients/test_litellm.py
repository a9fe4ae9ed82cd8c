"""LiteLLM: the providers `openai`, `text-completion-openai` and `anthropic` with the server's address."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

from helpers.client_server import LIMA, NAME, NAMED, QUESTION, RAIN, SEA, TALK, WEATHER, City, Served


@pytest.fixture(params=["openai", "anthropic"])
def server(request: pytest.FixtureRequest, writer: Served) -> dict[str, Any]:
    """Arguments for one of the two APIs."""
    address = {"openai": writer.url, "anthropic": writer.root}[request.param]
    own = {"model": f"{request.param}/{NAME}", "api_base": address, "api_key": "none"}
    return {**own, "max_tokens": 64, "num_retries": 0}


def calls(message: Any) -> list[tuple[str, Any]]:
    return [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls or ()]


def test_a_whole_answer(server: dict[str, Any]) -> None:
    done: Any = litellm.completion(messages=TALK, temperature=0.5, top_p=0.9, stop=["never"], **server)
    assert done.choices[0].message.content == SEA and done.choices[0].finish_reason == "stop"
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    cut: Any = litellm.completion(messages=TALK, **{**server, "max_tokens": 2})
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("The sea is wide", "length")


def test_a_stream(server: dict[str, Any]) -> None:
    events: list[Any] = list(litellm.completion(messages=TALK, stream=True, **server))
    pieces = [one.choices[0].delta.content for one in events if one.choices[0].delta.content]
    assert len(pieces) > 1 and "".join(pieces) == SEA and events[-1].choices[0].finish_reason == "stop"
    counted: list[Any] = list(
        litellm.completion(messages=TALK, stream=True, stream_options={"include_usage": True}, **server)
    )
    assert counted[-1].usage.completion_tokens >= 5


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_tools(choice: Any, server: dict[str, Any]) -> None:
    """A call, and the answer to its result."""
    done: Any = litellm.completion(messages=RAIN, tools=[WEATHER], tool_choice=choice, **server)
    message = done.choices[0].message
    assert calls(message) == [("weather", {"city": "Rome"})] and done.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "name": "weather", "content": "sunny"}
    answer: Any = litellm.completion(messages=[*RAIN, message, result], tools=[WEATHER], **server)
    assert answer.choices[0].message.content == "It is sunny in Rome."
    events = list(litellm.completion(messages=RAIN, tools=[WEATHER], tool_choice=choice, stream=True, **server))
    assert calls(litellm.stream_chunk_builder(events).choices[0].message) == [("weather", {"city": "Rome"})]  # type: ignore[union-attr]


def test_structured_outputs(server: dict[str, Any]) -> None:
    done: Any = litellm.completion(messages=QUESTION, response_format=City, **server)
    assert City.model_validate_json(done.choices[0].message.content) == LIMA


def test_completions_and_responses(writer: Served) -> None:
    where: dict[str, Any] = {"api_base": writer.url, "api_key": "none"}
    done: Any = litellm.text_completion(model=f"text-completion-openai/{NAME}", prompt="The sea", max_tokens=2, **where)
    assert done.choices[0].text == " is wide and"
    done = litellm.responses(model=f"openai/{NAME}", input="What colour is the sea?", max_output_tokens=64, **where)
    assert done.output[0].content[0].text == SEA


def test_an_error_has_the_servers_message(server: dict[str, Any]) -> None:
    with pytest.raises(litellm.exceptions.BadRequestError, match="top_p"):
        litellm.completion(messages=TALK, top_p=7, **server)
