"""`--sampling model`: the sampling of a model's generation config, and what `info` shows of that file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import foresay
from foresay.cli import serve
from foresay_lab.workers import processes
from helpers import tiny
from helpers.in_process import InProcess
from helpers.tiny import Shell


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.llama()
    model.generation_config.update(do_sample=True, temperature=3.0, top_k=20, suppress_tokens=list(range(40, 60)))
    model.generation_config.repetition_penalty = 1.25
    return tiny.save(tmp_path_factory.mktemp("model"), model)


def _generated(shell: Shell, folder: Path, *options: str) -> dict[str, Any]:
    code, out, err = shell(
        "generate", "hello", "--model", str(folder), "--dtype", "fp32", "--json", "-n", "8", *options
    )
    assert code == 0, err
    record: dict[str, Any] = json.loads(out)
    return record


def test_generate_samples_as_the_model_does(folder: Path, shell: Shell) -> None:
    own = foresay.load(folder, dtype="fp32")
    greedy = own.generate("hello", max_new_tokens=8).text
    sampled = own.generate("hello", max_new_tokens=8, temperature=3.0, top_k=20, seed=5)
    assert _generated(shell, folder)["text"] == _generated(shell, folder, "--sampling", "foresay")["text"] == greedy
    assert _generated(shell, folder, "--sampling", "model", "--seed", "5")["text"] == sampled.text != greedy
    assert _generated(shell, folder, "--sampling", "model", "-t", "0")["text"] == greedy
    narrow = own.generate("hello", max_new_tokens=8, temperature=3.0, top_k=2, seed=5).text
    assert _generated(shell, folder, "--sampling", "model", "--seed", "5", "--top-k", "2")["text"] == narrow
    compared = ("--sampling", "model", "--rule", "coupled", "--compare", "--drafter", "suffix")
    assert _generated(shell, folder, *compared)["methods"][1]["identical"] is True


def test_workers_receive_what_was_given(folder: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; foresay_lab/workers has tests with others."""
    lines = ("generate", "--lines", "--model", str(folder), "--dtype", "fp32", "-n", "6", "--sampling", "model")
    monkeypatch.setattr(processes, "Processes", InProcess)
    found = []
    for options in (("--seed", "3"), ("-t", "0")):
        alone, shared = (shell(*lines, *options, *more, stdin=b"hello\nworld\n") for more in ((), ("--workers", "1")))
        assert (alone[0], shared[:2]) == (0, alone[:2]), (alone, shared)
        found.append(alone[1])
    assert found[0] != found[1]


def test_the_console_shows_the_models_sampling(folder: Path, shell: Shell) -> None:
    for options, shown in (((), ["greedy"]), (("--sampling", "model"), ["3", "20"])):
        _, out, _ = shell("chat", str(folder), "--no-history", *options, stdin=b"/settings\n/quit\n")
        assert all(f"{name}: {text}" in out for name, text in zip(("temperature", "top-k"), shown, strict=False))


def test_info_shows_the_generation_config(folder: Path, shell: Shell, tmp_path: Path) -> None:
    code, out, _ = shell("info", str(folder))
    assert code == 0
    assert "  generation config: repetition_penalty=1.25, suppress_tokens=(20 entries)\n" in out
    assert "  model's own sampling: temperature=3.0, top_k=20\n" in out
    refused = tiny.llama()
    refused.generation_config.encoder_repetition_penalty = 1.5
    tiny.save(tmp_path, refused)
    assert "encoder_repetition_penalty=1.5" in shell.refused("info", str(tmp_path))


def test_a_server_samples_as_the_model_does(folder: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(*args: Any, **kwargs: Any) -> Any:
        loaded.append(args[0].sampling)
        raise foresay.ConfigError("that is enough")

    monkeypatch.setattr(serve, "load_generator", load)
    for options in ((), ("--sampling", "foresay")):
        assert shell.refused("serve", str(folder), "--port", "0", *options) == "that is enough"
    assert loaded == ["model", "foresay"]


def test_wrong_options(folder: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other engines do not apply the model's constraints."""
    common = ("generate", "hello", "--model", str(folder))
    assert "vllm" in shell.refused(*common, "--sampling", "vllm")
    for greedy in ((), ("--sampling", "model", "-t", "0")):
        assert "--top-k has no effect" in shell.refused(*common, *greedy, "--top-k", "3")
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n", encoding="utf-8")
    against = ("--prompts", "p.jsonl", "--against", "transformers")
    refusal = shell.refused("bench", "b.jsonl", "--model", str(folder), *against)
    assert "--against: other engines lack the model's generation config (repetition_penalty=1.25" in refusal
