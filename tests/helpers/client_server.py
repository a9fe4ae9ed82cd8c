"""A server in a process of foresay's own environment, for tests of clients, which run in another one."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel

NAME = "Qwen/Qwen2.5-1.5B-Instruct"
"""The name under which a small model is served: that of the model on the page of clients."""
SEA = "The sea is wide and blue."
TALK: list[Any] = [{"role": "user", "content": "What colour is the sea?"}]
"""A question, and the answer of the model `writer`."""
RAIN: list[Any] = [{"role": "user", "content": "Is it raining in Rome?"}]
QUESTION: list[Any] = [{"role": "user", "content": "How many inhabitants has Lima?"}]
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS},
}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


class City(BaseModel):
    """A city."""

    name: str
    inhabitants: int


LIMA = City(name="Lima", inhabitants=10092000)
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    **dict.fromkeys(("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"), "http://127.0.0.1:9"),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"),
}
"""Settings by which servers and clients reach no other machine: the port of the proxy is closed."""
_TESTS = Path(__file__).parents[1]
_PYTHON = os.environ.get("FORESAY_PYTHON", ".venv/bin/python")


def interpreter() -> Path:
    """The interpreter that has foresay. A relative path is one of the repository."""
    return _TESTS.parent / _PYTHON


def make_models(folder: Path) -> None:
    """Write the folders `writer` and `random`, see client_models.py."""
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(_TESTS)}
    command = [interpreter(), "-m", "helpers.client_models", folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


class Served:
    """`foresay serve` over the model of a folder. `url` ends with /v1, `root` does not."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self._log = folder.with_suffix(".log")
        command = [interpreter(), "-m", "foresay", "serve", folder, "--port", "0", "--name", NAME, *options]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **OFFLINE})
        self.root = self._address()
        self.url = f"{self.root}/v1"

    def _address(self) -> str:
        while self._process.poll() is None:
            if found := re.search(
                r"listening at (http://127\.0\.0\.1:\d+)/v1\n", self._log.read_text(encoding="utf-8")
            ):
                return found[1]
            time.sleep(0.05)
        raise AssertionError(f"the server ended: {self._log.read_text(encoding='utf-8')}")

    def close(self) -> None:
        """Stop it. An internal error of a request, which its log has, is a failure."""
        self._process.terminate()
        self._process.wait(timeout=60)
        log = self._log.read_text(encoding="utf-8")
        assert "Traceback" not in log, log
