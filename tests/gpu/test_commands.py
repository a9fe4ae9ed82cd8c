"""The commands and the server with a model on a GPU: generate, record, check, distill, bench, profile, tune, serve."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import foresay
from helpers import tiny
from helpers.serving import Running

TEXT = "one two three one two three one two"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("gpu") / "tiny", tiny.llama(num_hidden_layers=4), chat=True)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> tiny.Shell:
    monkeypatch.chdir(tmp_path)
    lines = [{"id": f"t{i}", "prompt": f"the number {i} and {i + 1}", "category": "ab"[i % 2]} for i in range(24)]
    Path("prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tiny.Shell(monkeypatch, capsys)


def succeeded(shell: tiny.Shell, *args: str) -> str:
    code, out, err = shell(*args)
    assert code == 0, (args, out, err)
    return out


def test_generate_compares_with_plain_decoding(shell: tiny.Shell, folder: Path, device: str) -> None:
    where = ["-m", str(folder), "--device", device, "--dtype", "fp32"]
    out = succeeded(shell, "generate", TEXT, *where, "-n", "48", "--drafter", "suffix", "--compare", "--json")
    assert (
        json.loads(out)["text"] == json.loads(succeeded(shell, "generate", TEXT, *where, "-n", "48", "--json"))["text"]
    )
    assert device in succeeded(shell, "info", str(folder), "--device", device)


def test_what_is_recorded_on_the_gpu_is_checked_on_the_cpu(shell: tiny.Shell, folder: Path, device: str) -> None:
    where = ["--model", str(folder), "--dtype", "fp32"]
    succeeded(shell, "record", "r.jsonl", *where, "--device", device, "--prompts", "prompts.jsonl", "-n", "32")
    for on in (device, "cpu"):
        succeeded(shell, "check", "r.jsonl", "--dtype", "fp32", "--device", on)


@pytest.mark.parametrize("kind", ["head", "block"])
def test_a_draft_trained_on_the_gpu_drafts(kind: str, shell: tiny.Shell, folder: Path, device: str) -> None:
    where = ["--model", str(folder), "--device", device]
    succeeded(shell, "record", "r.jsonl", *where, "--prompts", "prompts.jsonl", "-n", "32")
    for precision in ("fp32", "bf16"):  # each in a process of its own: accelerate keeps the first precision
        name = f"{kind}-{precision}"
        sized = ["--outputs", "r.jsonl", "--batch-tokens", "400", "--sequence-length", "96", "--epochs", "2"]
        trained = tiny.foresay("distill", name, *where, "--kind", kind, *sized, "--precision", precision)
        assert trained.returncode == 0, trained.stderr.decode()
        made = foresay.load(str(folder), drafter=f"{kind}({name})", device=device, dtype="fp32")
        plain = foresay.load(str(folder), drafter="none", device="cpu", dtype="fp32")
        ours, wanted = (one.generate(TEXT, max_new_tokens=32) for one in (made, plain))
        assert ours.token_ids == wanted.token_ids
        assert ours.stats.num_drafted > 0


def test_measuring(shell: tiny.Shell, folder: Path, device: str) -> None:
    where = ["-m", str(folder), "--device", device]
    assert "ms" in succeeded(
        shell, "profile", str(folder), "--device", device, "--batch-size", "1,4", "--fresh", "-o", "profile.json"
    )
    out = succeeded(shell, "bench", "b.jsonl", *where, "--prompts", "prompts.jsonl", "-n", "16", "--drafter", "suffix")
    assert "suffix" in out
    succeeded(shell, "tune", str(folder), "--device", device, "--prompts", "prompts.jsonl", "--count", "4")


def test_a_server_answers_several_clients(folder: Path, device: str) -> None:
    model = foresay.load(str(folder), drafter="suffix", device=device, dtype="fp32")
    plain = foresay.load(str(folder), drafter="none", device="cpu", dtype="fp32")
    running = Running(model)

    def asked(i: int) -> Any:
        body = {"model": "tiny", "prompt": f"{TEXT} {i}", "max_tokens": 24, "temperature": 0}
        return httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]

    try:
        with ThreadPoolExecutor(6) as pool:
            ours = list(pool.map(asked, range(12)))
    finally:
        running.close()
    assert ours == [plain.generate(f"{TEXT} {i}", max_new_tokens=24).text for i in range(12)]


def test_a_server_keeps_to_a_schema(folder: Path, device: str) -> None:
    model = foresay.load(str(folder), drafter="suffix", device=device, dtype="fp32")
    running = Running(model)
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    message = [{"role": "user", "content": "hello"}]
    try:
        for temperature in (0.0, 1.0):
            body = {"model": "tiny", "messages": message, "max_tokens": 40, "temperature": temperature}
            answer = httpx.post(f"{running.url}/v1/chat/completions", json=body | {"response_format": form}, timeout=60)
            assert json.loads(answer.json()["choices"][0]["message"]["content"])["n"] in (1, 2)
    finally:
        running.close()
