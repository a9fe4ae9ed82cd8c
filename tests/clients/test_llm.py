"""Simon Willison's llm, by its command line: options, conversations, and its log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.client_page import blocks, run, sections
from helpers.client_server import NAME, Served

SEA = "The sea is wide and blue.\n"


@pytest.fixture
def folder(writer: Served, tmp_path: Path) -> Path:
    """A user's folder with the models of the page."""
    [models] = blocks(sections()["llm"], "yaml")
    text = models.replace("http://127.0.0.1:8000", writer.root)
    (tmp_path / "extra-openai-models.yaml").write_text(text, encoding="utf-8")
    return tmp_path


def llm(folder: Path, *arguments: str) -> str:
    return run("llm", "llm", *arguments, folder=folder)


@pytest.mark.parametrize("stream", [[], ["--no-stream"]])
def test_a_prompt(stream: list[str], folder: Path) -> None:
    options = ["-o", "temperature", "0.5", "-o", "max_tokens", "64", "-o", "seed", "7", "--system", "Be brief."]
    assert llm(folder, "-m", "qwen", *stream, *options, "What colour is the sea?") == SEA
    cut = llm(folder, "-m", "qwen", *stream, "-o", "max_tokens", "2", "What colour is the sea?")
    assert cut == "The sea is wide\n"
    [last] = json.loads(llm(folder, "logs", "-n", "1", "--json"))
    assert (last["response"], last["output_tokens"]) == ("The sea is wide", 2)
    assert last["response_json"]["model"] == NAME and last["input_tokens"] > 0


def test_a_conversation(folder: Path) -> None:
    assert "OpenAI Chat: qwen" in llm(folder, "models", "list", "-q", "qwen")
    assert llm(folder, "-m", "qwen", "What colour is the sea?") == SEA
    assert llm(folder, "-c", "And the sky?") == SEA
    last, first = (one["input_tokens"] for one in json.loads(llm(folder, "logs", "-n", "2", "--json")))
    assert max(last, first) > min(last, first) + 10, "the second prompt has the first answer"


def test_json(folder: Path) -> None:
    printed = llm(folder, "-m", "qwen", "-o", "json_object", "true", "How many inhabitants has Lima? Answer in JSON.")
    assert json.loads(printed) == {"name": "Lima", "inhabitants": 10092000}


def test_a_tool_is_called_once(folder: Path) -> None:
    function = "def weather(city: str) -> str:\n    '''The weather of a city.'''\n    return 'sunny in ' + city"
    assert llm(folder, "-m", "qwen", "--functions", function, "Is it raining in Rome?") == "It is sunny in Rome.\n"
    logs = json.loads(llm(folder, "logs", "-n", "5", "--json"))
    calls = [(call["name"], call["arguments"]) for one in logs for call in one["tool_calls"]]
    assert calls == [("weather", {"city": "Rome"})]
    assert [one["output"] for log in logs for one in log["tool_results"]] == ["sunny in Rome"]
