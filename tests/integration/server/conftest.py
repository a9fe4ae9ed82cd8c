"""Tiny models, and servers over them: those of the session, which tests leave as they are, and those that end with a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import foresay
from helpers import chains, tiny
from helpers.serving import Running
from helpers.tool_chats import PIECES, TEMPLATE

Make = pytest.TempPathFactory


@pytest.fixture(scope="session")
def model(chat_folder: Path) -> foresay.Generator:
    """A model whose chat template has no tools."""
    return foresay.load(str(chat_folder), num_draft_tokens=3)


@pytest.fixture
def serve(model: foresay.Generator) -> Iterator[Callable[..., Running]]:
    begun: list[Running] = []

    def start(generator: foresay.Generator = model, **settings: Any) -> Running:
        begun.append(Running(generator, **settings))
        return begun[-1]

    yield start
    for one in begun:
        one.end()  # all of them at the same time
    for one in begun:
        one.close()


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: Make) -> Path:
    return tiny.save(tmp_path_factory.mktemp("random"), chat=TEMPLATE)


@pytest.fixture(scope="session")
def server(random_model: Path) -> Iterator[Running]:
    """A model that writes noise, whose template has tools."""
    with Running(foresay.load(str(random_model), drafter="suffix", num_draft_tokens=3, dtype="fp32")) as running:
        yield running


@pytest.fixture(scope="session")
def chain(tmp_path_factory: Make) -> Iterator[Running]:
    """A model that reasons, answers, and makes two calls; its context has room for an agent's prompt."""
    special = ["<tool_call>", "<think>", "</think>"]
    template = TEMPLATE + "{# </think> #}"
    folder = chains.save(tmp_path_factory.mktemp("chain"), PIECES, template, special=special, context=1 << 15)
    with Running(foresay.load(str(folder), num_draft_tokens=3)) as running:
        yield running


@pytest.fixture(scope="session")
def filler(tmp_path_factory: Make) -> Iterator[Running]:
    """A model whose tokenizer has tokens for filling in."""
    with Running(foresay.load(str(tiny.save_filling(tmp_path_factory.mktemp("filler"))))) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Running) -> openai.OpenAI:
    return server.client
