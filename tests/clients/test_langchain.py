"""LangChain's ChatOpenAI."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from helpers.client_server import LIMA, NAME, SEA, City, Served


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def model(writer: Served, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model=NAME, base_url=writer.url, api_key="none", max_tokens=64, max_retries=0, **more)


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def chat(request: pytest.FixtureRequest, writer: Served) -> ChatOpenAI:
    return model(writer, use_responses_api=request.param)


def test_invoke(chat: ChatOpenAI) -> None:
    done = chat.invoke([SystemMessage("Be brief."), HumanMessage("What colour is the sea?")])
    assert done.text == SEA and done.usage_metadata is not None and done.usage_metadata["output_tokens"] >= 5
    assert [one.text for one in chat.batch(["What colour is the sea?"] * 3)] == [SEA] * 3


def test_asynchronous_calls(writer: Served) -> None:
    async def both() -> tuple[str, str]:
        chat = model(writer)
        pieces = [one.text async for one in chat.astream("What colour is the sea?")]
        return (await chat.ainvoke("What colour is the sea?")).text, "".join(pieces)

    assert asyncio.run(both()) == (SEA, SEA)


def test_stream(chat: ChatOpenAI) -> None:
    pieces = [one.text for one in chat.stream("What colour is the sea?")]
    assert len([one for one in pieces if one]) > 1 and "".join(pieces) == SEA


@pytest.mark.parametrize("choice", [None, "auto", "any", "weather"])
def test_bind_tools(choice: str | None, chat: ChatOpenAI) -> None:
    """A call, its execution, and the answer."""
    bound = chat.bind_tools([weather], tool_choice=choice)
    question = HumanMessage("Is it raining in Rome?")
    called = bound.invoke([question])
    assert [(one["name"], one["args"]) for one in called.tool_calls] == [("weather", {"city": "Rome"})]
    result = weather.invoke(called.tool_calls[0])
    assert isinstance(result, ToolMessage) and result.content == "sunny in Rome"
    assert chat.bind_tools([weather]).invoke([question, called, result]).text == "It is sunny in Rome."
    streamed: Any = None
    for piece in bound.stream([question]):
        streamed = piece if streamed is None else streamed + piece
    assert [(one["name"], one["args"]) for one in streamed.tool_calls] == [("weather", {"city": "Rome"})]


@pytest.mark.parametrize("method", [None, "json_schema", "function_calling", "json_mode"])
def test_structured_output(method: Any, chat: ChatOpenAI) -> None:
    more = {} if method is None else {"method": method}
    answer = chat.with_structured_output(City, **more).invoke("How many inhabitants has Lima? Answer in JSON.")
    assert answer == LIMA
    both: Any = chat.with_structured_output(City, include_raw=True, strict=None, **more).invoke(
        "Lima's inhabitants? JSON."
    )
    assert both["parsed"] == answer and isinstance(both["raw"], AIMessage) and both["parsing_error"] is None


def test_completions_and_log_probabilities(writer: Served) -> None:
    older = OpenAI(model=NAME, base_url=writer.url, api_key="none", max_tokens=8, max_retries=0)
    assert older.invoke("The sea") == " is wide and blue."
    assert "".join(older.stream("The sea")) == " is wide and blue."
    done = model(writer, logprobs=True, top_logprobs=2).invoke("What colour is the sea?")
    assert "".join(one["token"] for one in done.response_metadata["logprobs"]["content"]).startswith(SEA)
