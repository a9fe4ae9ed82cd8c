"""A tiny model, and servers over it that end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import foresay
from helpers import chains, tiny
from helpers.serving import Running
from helpers.tool_chats import PIECES, TEMPLATE


@pytest.fixture(scope="module")
def model(chat_folder: Path) -> foresay.Generator:
    return foresay.load(str(chat_folder), num_draft_tokens=3)


@pytest.fixture
def serve(model: foresay.Generator) -> Iterator[Any]:
    begun: list[Running] = []

    def start(generator: foresay.Generator = model, **settings: Any) -> Running:
        begun.append(Running(generator, **settings))
        return begun[-1]

    yield start
    for one in begun:
        one.close()


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that reasons, answers, and makes two calls."""
    special = ["<tool_call>", "<think>", "</think>"]
    folder = chains.save(tmp_path_factory.mktemp("chain"), PIECES, TEMPLATE + "{# </think> #}", special=special)
    with Running(foresay.load(str(folder), num_draft_tokens=3)) as running:
        yield running


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.save(tmp_path_factory.mktemp("random"))
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(random_model: Path) -> Iterator[Running]:
    with Running(foresay.load(str(random_model), drafter="suffix", num_draft_tokens=3)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as one:
        yield one


@pytest.fixture(scope="module")
def raw(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as one:
        yield one
