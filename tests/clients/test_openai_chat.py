"""The package openai: models, chat completions and completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from helpers.client_server import LIMA, NAME, NAMED, QUESTION, RAIN, SEA, TALK, WEATHER, City, Served


@pytest.fixture(scope="module")
def client(writer: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=writer.url, api_key="none", max_retries=0) as one:
        yield one


def chat(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=messages, max_tokens=64, **more)


def calls(message: Any) -> list[tuple[str, Any]]:
    return [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls or ()]


def test_models(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).object == "model"
    with pytest.raises(openai.NotFoundError, match="another"):
        client.models.retrieve("another")


def test_a_whole_answer(client: openai.OpenAI) -> None:
    done = chat(client, TALK, logprobs=True, top_logprobs=2)
    assert done.choices[0].message.content == SEA and done.choices[0].finish_reason == "stop"
    tokens = done.choices[0].logprobs.content
    assert "".join(one.token for one in tokens).startswith(SEA) and len(tokens[0].top_logprobs) == 2
    assert done.usage.completion_tokens == len(tokens)
    cut = client.chat.completions.create(model=NAME, messages=TALK, max_completion_tokens=2, n=2)
    assert [(one.message.content, one.finish_reason) for one in cut.choices] == [("The sea is wide", "length")] * 2


def test_a_stream(client: openai.OpenAI) -> None:
    events = list(chat(client, TALK, stream=True, stream_options={"include_usage": True}))
    assert "".join(one.choices[0].delta.content or "" for one in events[:-1]) == SEA
    assert events[-2].choices[0].finish_reason == "stop" and not events[-1].choices
    assert events[-1].usage.completion_tokens == chat(client, TALK).usage.completion_tokens
    with client.chat.completions.stream(model=NAME, messages=TALK, max_tokens=64) as stream:
        assert stream.get_final_completion().choices[0].message.content == SEA


def test_an_asynchronous_client(writer: Served) -> None:
    async def streamed() -> str:
        async with openai.AsyncOpenAI(base_url=writer.url, api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(model=NAME, messages=TALK, max_tokens=64, stream=True)
            return "".join([one.choices[0].delta.content or "" async for one in stream])

    assert asyncio.run(streamed()) == SEA


def test_structured_outputs(client: openai.OpenAI) -> None:
    done = client.chat.completions.parse(model=NAME, messages=QUESTION, response_format=City, max_tokens=64)
    assert done.choices[0].message.parsed == LIMA
    with client.chat.completions.stream(model=NAME, messages=QUESTION, response_format=City, max_tokens=64) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == LIMA
    anything = chat(client, QUESTION, response_format={"type": "json_object"})
    assert json.loads(anything.choices[0].message.content) == {"name": "Lima", "inhabitants": 10092000}
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=NAME, messages=QUESTION, response_format=City, max_tokens=1)


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_tools(choice: Any, client: openai.OpenAI) -> None:
    """A call, and the answer to its result."""
    done = chat(client, RAIN, tools=[WEATHER], tool_choice=choice)
    message = done.choices[0].message
    assert calls(message) == [("weather", {"city": "Rome"})] and done.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    answer = chat(client, [*RAIN, message, result], tools=[WEATHER]).choices[0]
    assert answer.message.content == "It is sunny in Rome." and answer.message.tool_calls is None
    more: Any = {"messages": RAIN, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 64}
    with client.chat.completions.stream(model=NAME, **more) as stream:
        events = list(stream)
        assert calls(stream.get_final_completion().choices[0].message) == [("weather", {"city": "Rome"})]
    assert any(one.type == "tool_calls.function.arguments.delta" for one in events)


def test_tools_of_a_model_class_and_none(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(City)]
    done = client.chat.completions.parse(model=NAME, messages=QUESTION, tools=tools, max_tokens=64)
    [call] = done.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == LIMA
    message = chat(client, TALK, tools=[WEATHER], tool_choice="none").choices[0].message
    assert message.content == SEA and not message.tool_calls


def test_completions(client: openai.OpenAI) -> None:
    done = client.completions.create(model=NAME, prompt="The sea", max_tokens=2, echo=True, logprobs=1)
    choice = done.choices[0]
    assert choice.text == "The sea is wide and" and choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["The sea", " is wide", " and"] and choice.logprobs.text_offset == [0, 7, 15]
    assert choice.logprobs.token_logprobs == [None, pytest.approx(0, abs=1e-3), pytest.approx(0, abs=1e-3)]
    scored = client.completions.create(
        model=NAME, prompt=["The sea is wide", " blue."], max_tokens=0, echo=True, logprobs=0
    )
    assert [one.text for one in scored.choices] == ["The sea is wide", " blue."]
    stream = client.completions.create(model=NAME, prompt="The sea", max_tokens=16, stream=True)
    assert "".join(one.choices[0].text for one in stream if one.choices) == " is wide and blue."


def test_refusals(client: openai.OpenAI) -> None:
    for more in ({"web_search_options": {}}, {"functions": [{"name": "f"}]}):
        with pytest.raises(openai.BadRequestError, match=next(iter(more))):
            chat(client, TALK, **more)
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="The sea")


def test_embeddings_are_those_of_plain_requests(client: openai.OpenAI) -> None:
    """The client requests base64, and decodes it."""
    texts = ["The sea", "One two three"]
    found, plain = (
        client.embeddings.create(model=NAME, input=texts, **one) for one in ({}, {"encoding_format": "float"})
    )
    assert [one.index for one in found.data] == [0, 1] and found.usage.prompt_tokens > 0
    for one, other in zip(found.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, rel=1e-6)
    assert found.data[0].embedding != found.data[1].embedding
