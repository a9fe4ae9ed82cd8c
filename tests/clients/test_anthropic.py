"""The package anthropic: the Messages API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from helpers.client_server import LIMA, NAME, PARAMETERS, QUESTION, RAIN, SEA, TALK, City, Served

WEATHER: Any = {"name": "weather", "description": "The weather of a city", "input_schema": PARAMETERS}


@pytest.fixture(scope="module")
def client(writer: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=writer.root, api_key="none", max_retries=0) as one:
        yield one


def create(client: anthropic.Anthropic, messages: list[Any], **more: Any) -> Any:
    return client.messages.create(**{"model": NAME, "messages": messages, "max_tokens": 64, **more})


def prompt_tokens(usage: Any) -> int:
    """Tokens of a prompt: those that were read from the cache are counted apart."""
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_a_whole_answer(client: anthropic.Anthropic) -> None:
    done = create(client, TALK, system="Be brief.", extra_body={"temperature": 0.5})
    assert [(one.type, one.text) for one in done.content] == [("text", SEA)]
    assert (done.type, done.role, done.stop_reason, done.model) == ("message", "assistant", "end_turn", NAME)
    assert prompt_tokens(done.usage) > 0 and done.usage.output_tokens > 0
    assert [one.id for one in client.models.list()] == [NAME]
    cut = create(client, TALK, max_tokens=2)
    assert (cut.content[0].text, cut.stop_reason, cut.usage.output_tokens) == ("The sea is wide", "max_tokens", 2)
    stopped = create(client, TALK, stop_sequences=[" and"])
    assert (stopped.content[0].text, stopped.stop_reason) == ("The sea is wide", "stop_sequence")
    assert stopped.stop_sequence == " and"


def test_a_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=NAME, messages=TALK, max_tokens=64) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 1 and "".join(pieces) == SEA
    assert final.content[0].text == SEA and final.stop_reason == "end_turn"
    whole = create(client, TALK).usage
    assert (prompt_tokens(final.usage), final.usage.output_tokens) == (prompt_tokens(whole), whole.output_tokens)
    kinds = [one.type for one in create(client, TALK, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tools(choice: Any, client: anthropic.Anthropic) -> None:
    """A call, and the answer to its result."""
    done = create(client, RAIN, tools=[WEATHER], tool_choice=choice)
    [call] = done.content
    assert (call.type, call.name, call.input, done.stop_reason) == ("tool_use", "weather", {"city": "Rome"}, "tool_use")
    for content in ("sunny", [{"type": "text", "text": "sunny"}]):
        result = {"type": "tool_result", "tool_use_id": call.id, "content": content}
        talk = [*RAIN, {"role": "assistant", "content": done.content}, {"role": "user", "content": [result]}]
        assert create(client, talk, tools=[WEATHER]).content[0].text == "It is sunny in Rome."


def test_a_stream_of_a_call(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=NAME, messages=RAIN, tools=[WEATHER], max_tokens=64) as stream:
        pieces = [one.partial_json for one in stream if one.type == "input_json"]
        [call] = stream.get_final_message().content
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Rome"})
    assert "".join(pieces) == '{"city": "Rome"}'
    assert create(client, TALK, tools=[WEATHER], tool_choice={"type": "none"}).content[0].text == SEA


def test_counted_tokens(client: anthropic.Anthropic) -> None:
    """The counts are those of an answer's usage."""
    for more in ({}, {"system": "Be brief."}, {"tools": [WEATHER]}):
        counted = client.messages.count_tokens(model=NAME, messages=TALK, **more)
        assert counted.input_tokens == prompt_tokens(create(client, TALK, max_tokens=1, **more).usage)
    assert client.messages.count_tokens(model=NAME, messages=RAIN, tools=[WEATHER]).input_tokens > 100


def test_errors(client: anthropic.Anthropic) -> None:
    """In Anthropic's shape, so that the client raises its own classes with the message."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0.*text") as refused:
        create(client, [{"role": "user", "content": [image]}])
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        create(client, TALK, max_tokens=-1)
    with pytest.raises(anthropic.NotFoundError, match="another"):
        create(client, TALK, model="another")


def test_structured_outputs(client: anthropic.Anthropic) -> None:
    done = client.messages.parse(model=NAME, messages=QUESTION, output_format=City, max_tokens=64)
    assert done.parsed_output == LIMA


def test_a_runner_of_tools(client: anthropic.Anthropic) -> None:
    """The client calls the function and sends its result until the answer is a text. Threads would be stored by the server."""
    called = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return "sunny"

    request: Any = {"model": NAME, "messages": RAIN, "tools": [weather], "max_tokens": 64}
    last = client.beta.messages.tool_runner(thread=False, **request).until_done()
    assert called == ["Rome"] and [one.text for one in last.content] == ["It is sunny in Rome."]
    with pytest.raises(anthropic.BadRequestError, match="thread is not supported"):
        client.beta.messages.tool_runner(**request).until_done()
