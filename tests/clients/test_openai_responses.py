"""The package openai: the Responses API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from helpers.client_server import LIMA, NAME, PARAMETERS, RAIN, SEA, TALK, City, Served

WEATHER: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS}


@pytest.fixture(scope="module")
def client(writer: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=writer.url, api_key="none", max_retries=0) as one:
        yield one


def respond(client: openai.OpenAI, question: Any, **more: Any) -> Any:
    return client.responses.create(model=NAME, input=question, max_output_tokens=64, **more)


def test_a_text(client: openai.OpenAI) -> None:
    done = respond(client, "What colour is the sea?", instructions="Be brief.")
    assert done.output_text == SEA and done.status == "completed" and done.error is None
    assert [one.type for one in done.output] == ["message"] and done.instructions == "Be brief."
    assert done.usage.output_tokens > 0
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    longer = respond(client, "What colour is the sea, if one may know?", instructions="Be brief.")
    assert longer.usage.input_tokens > done.usage.input_tokens
    done = client.responses.create(model=NAME, input="What colour is the sea?", max_output_tokens=2)
    assert done.output_text == "The sea is wide" and done.status == "incomplete"
    assert done.incomplete_details is not None and done.incomplete_details.reason == "max_output_tokens"


def test_a_stream(client: openai.OpenAI) -> None:
    events = list(respond(client, "What colour is the sea?", stream=True))
    assert [one.sequence_number for one in events] == list(range(len(events)))
    kinds = [one.type for one in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    for kind in ("response.output_item.added", "response.content_part.added", "response.output_text.done",
                 "response.content_part.done", "response.output_item.done"):  # fmt: skip
        assert kinds.count(kind) == 1, kind
    deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert len(deltas) > 1 and "".join(deltas) == SEA and events[-1].response.output_text == SEA
    with client.responses.stream(model=NAME, input="What colour is the sea?", max_output_tokens=64) as stream:
        snapshots = [one.snapshot for one in stream if one.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == SEA
    assert snapshots[-1] == SEA and all(SEA.startswith(one) for one in snapshots)


def test_structured_outputs(client: openai.OpenAI) -> None:
    question = "How many inhabitants has Lima?"
    done = client.responses.parse(model=NAME, input=question, text_format=City, max_output_tokens=64)
    assert done.output_parsed == LIMA
    with client.responses.stream(model=NAME, input=question, text_format=City, max_output_tokens=64) as stream:
        assert stream.get_final_response().output_parsed == LIMA


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "weather"}])
def test_tools(choice: Any, client: openai.OpenAI) -> None:
    """A call, and the answer to its result: the whole conversation is sent again."""
    done = respond(client, RAIN, tools=[WEATHER], tool_choice=choice)
    [call] = done.output
    assert call.type == "function_call" and call.name == "weather" and json.loads(call.arguments) == {"city": "Rome"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    assert respond(client, [*RAIN, call, result], tools=[WEATHER]).output_text == "It is sunny in Rome."
    sent_back = [*RAIN, *(one.model_dump() for one in done.output), result]
    assert respond(client, sent_back, tools=[WEATHER]).output_text == "It is sunny in Rome."


def test_a_stream_of_a_call(client: openai.OpenAI) -> None:
    events = list(respond(client, "Is it raining in Rome?", tools=[WEATHER], stream=True))
    deltas = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == {"city": "Rome"}
    [done] = [one for one in events if one.type == "response.function_call_arguments.done"]
    assert json.loads(done.arguments) == {"city": "Rome"}
    [item] = events[-1].response.output
    assert (item.type, item.name, item.status) == ("function_call", "weather", "completed")


def test_a_talk_goes_on_and_has_log_probabilities(client: openai.OpenAI) -> None:
    turn = {"role": "user", "content": [{"type": "input_text", "text": "And the sky?"}]}
    assert respond(client, [*TALK, *respond(client, TALK).output, turn]).output_text == SEA
    done = respond(client, "What colour is the sea?", include=["message.output_text.logprobs"], top_logprobs=2)
    tokens = done.output[0].content[0].logprobs
    assert "".join(one.token for one in tokens).startswith(SEA) and all(len(one.top_logprobs) == 2 for one in tokens)
