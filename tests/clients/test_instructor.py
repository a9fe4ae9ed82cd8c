"""instructor, in its own environment: each mode, and streams of parts of an object."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.client_page import run
from helpers.client_server import NAME, Served

PROGRAM = """
import instructor, openai
from pydantic import BaseModel

class City(BaseModel):
    name: str
    inhabitants: int

mode, url = {mode!r}, {url!r}
inner = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
client = instructor.from_openai(inner, **({{"mode": getattr(instructor.Mode, mode)}} if mode else {{}}))
request = dict(
    model={name!r}, messages=[dict(role="user", content="How many inhabitants has Lima?")], max_tokens=64, max_retries=0
)
print(client.create(response_model=City, **request))
*_, last = client.create_partial(response_model=City, **request)
print(last.name, last.inhabitants)
city, raw = client.create_with_completion(response_model=City, **request)
print(city.name, raw.usage.completion_tokens > 0)
"""


@pytest.mark.parametrize("mode", [None, "TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON"])
def test_a_model_class_is_filled(mode: str | None, writer: Served, tmp_path: Path) -> None:
    program = PROGRAM.format(mode=mode, url=writer.url, name=NAME)
    printed = run("instructor", "python", "-c", program, folder=tmp_path)
    assert printed == "name='Lima' inhabitants=10092000\nLima 10092000\nLima True\n"
