"""The page of clients: its recipes, and their execution with the address replaced."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from helpers.client_server import NAME, Served

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "clients.md"
_ADDRESS = "http://127.0.0.1:8000"
_BINARIES = Path(sys.prefix) / "bin"
_OWN = {"instructor": Path(sys.prefix) / "instructor" / "bin"}
"""Programs of clients with an environment of their own."""


def sections() -> dict[str, str]:
    """The text of each client's section."""
    _, *parts = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: text for name, _, text in (part.partition("\n") for part in parts)}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(client: str, *command: str, folder: Path) -> str:
    """Run a command with a client's programs, and return its standard output."""
    binaries = _OWN.get(client, _BINARIES)
    environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "LLM_USER_PATH": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_recipe(client: str, served: Served, folder: Path, **changes: str) -> str:
    """Run a section's blocks in an empty folder, in which the model's name is that of a folder too. Return what they print.

    changes: further texts of the section and their replacements.
    """
    (folder / NAME).parent.mkdir()
    (folder / NAME).symlink_to(served.folder)
    text = sections()[client]
    for old, new in {_ADDRESS: served.root, **changes}.items():
        assert old in text, old
        text = text.replace(old, new)
    for block in blocks(text, "(?:yaml|json)"):
        name = re.search(r"^# (\S+\.yaml)$", block, re.MULTILINE)
        (folder / (name[1] if name else "questions.jsonl")).write_text(block, encoding="utf-8")
    printed = ""
    if python := "\n".join(blocks(text, "python")):
        printed += run(client, "python", "-c", python, folder=folder)
    for line in "".join(blocks(text, "console")).splitlines():
        printed += run(client, "bash", "-c", line.removeprefix("$ "), folder=folder)
    return printed
