"""Start a server, stream a chat from it with the standard library alone, and stop it.

python examples/server_and_client.py MODEL
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def server(model: str) -> Iterator[str]:
    """Run `foresay serve` on a free port; yield the base URL of its API once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    child = subprocess.Popen(
        [sys.executable, "-m", "foresay", "serve", model, "--port", url.rpartition(":")[2], "--drain", "1"]
    )
    try:
        while not is_ready(url):
            if child.poll() is not None:
                sys.exit(child.returncode)  # the server has printed the reason
            time.sleep(0.2)
        yield f"{url}/v1"
    finally:
        child.terminate()
        child.wait(timeout=30)


def is_ready(url: str) -> bool:
    """Return True if the server accepts requests."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False  # not started, or the model is being loaded


def chat(url: str, question: str, **fields: object) -> Iterator[str]:
    """Yield the pieces of an answer as they arrive."""
    body = {"messages": [{"role": "user", "content": question}], "stream": True, **fields}
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as events:
        for event in events:
            data = event.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                for choice in json.loads(data)["choices"]:
                    yield choice["delta"].get("content") or ""


def main(model: str, tokens: int = 48) -> None:
    """Send one question with the server's drafter and once more without a drafter."""
    with server(model) as url:
        for drafting in ({}, {"drafter": "none"}):
            for piece in chat(url, "Name three colours.", temperature=0, max_tokens=tokens, foresay=drafting):
                print(piece, end="", flush=True)
            print()


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["smollm2-135m"])
