"""The recipes of docs/how-to/clients.md, executed as they are, with only the address replaced."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.client_page import PAGE, blocks, run_recipe, sections
from helpers.client_server import NAME, Served

SEA, CITY = "The sea is wide and blue.\n", '{"name": "Lima", "inhabitants": 10092000}\n'
PRINTED = {
    "openai": SEA + SEA + "10092000\n" + SEA,
    "anthropic": SEA + SEA,
    "LiteLLM": SEA + SEA,
    "LangChain": SEA + SEA + "weather {'city': 'Rome'}\nname='Lima' inhabitants=10092000\n",
    "instructor": "Lima 10092000\n",
    "llm": SEA + CITY + "It is sunny in Rome.\n",
}
"""Standard output of the recipes."""
OTHERS = {
    "lm-evaluation-harness": "test_lm_eval.py",
    "guidellm": "test_guidellm.py",
    "Open WebUI": "../integration/server/test_clients.py",
    "Clients of Ollama": "../integration/server/test_ollama.py",
}
"""Sections whose recipes are executed there."""


def test_every_section_is_executed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert set(sections()) == {*PRINTED, *OTHERS}
    assert all((Path(__file__).parent / name).is_file() for name in OTHERS.values())
    assert set(re.findall(r"^```(\w+)$", text, re.MULTILINE)) == {"bash", "python", "yaml", "json", "console"}
    assert blocks(text, "bash") == [f'pip install ".[server]"\nforesay serve {NAME}\n']


@pytest.mark.parametrize("client", PRINTED)
def test_a_recipe_prints_the_answers(client: str, writer: Served, tmp_path: Path) -> None:
    assert run_recipe(client, writer, tmp_path) == PRINTED[client]


@pytest.mark.parametrize("client", sorted({*PRINTED} - {"openai"}))
def test_a_wrong_name_of_the_model_is_an_error(client: str, writer: Served, tmp_path: Path) -> None:
    """Negative control."""
    with pytest.raises(AssertionError, match="another/model"):
        run_recipe(client, writer, tmp_path, **{NAME: "another/model"})
