"""The real llama.cpp under foresay's loop, on SmolLM2's Q4_1 file: `make test-engines`."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import foresay
from foresay.decoding.protocols import ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.errors import ConfigError, ModelLoadError
from foresay.models.sources.packaged import packaged_file

MODEL = "smollm2-135m"
TASKS = (
    "Name three colours.",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue?",
    "List the planets, then list them again.",
    "What is 12 * 13? Think step by step.",
    "Write hello ten times.",
    "Write a recipe for bread.",
    "Translate 'good morning' into French.",
)
PROMPTS = [[{"role": "user", "content": one}] for one in TASKS]
NEAR = 0.1
"""Largest change of scores by another width of a pass, as a share of their spread."""


@pytest.fixture(scope="module")
def plain() -> foresay.Generator:
    return foresay.load(MODEL, backend="llama.cpp", drafter="none")


def scores_behind(generator: foresay.Generator, token_ids: list[int]) -> torch.Tensor:
    model = generator.target.model
    cache = model.new_cache()
    model.admit(Rows([Row(0, token_ids, foresay.SamplingParams(), limit=model.max_length)]), 0, cache)
    return model.forward(ModelInput(torch.tensor([token_ids]), [len(token_ids)]), cache).scores()[0, -1]


def assert_same_but_for_ties(generator: foresay.Generator, wanted: list[Any], found: list[Any]) -> int:
    """Texts part only where two tokens were as likely as each other. How many are the same to the end."""
    same = 0
    for one, other in zip(wanted, found, strict=True):
        a, b = one.token_ids, other.token_ids
        place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if place is None:
            same += a == b
            continue
        scores = scores_behind(generator, [*one.prompt_token_ids, *a[:place]])
        apart = abs(float(scores[a[place]] - scores[b[place]])) / float(scores.std())
        assert apart < NEAR and max(scores[a[place]], scores[b[place]]) >= scores.max() - NEAR * scores.std()
    return same


@pytest.mark.parametrize("drafter", ["suffix", "max_gram", "prompt_lookup", f"model({MODEL})"])
@pytest.mark.parametrize("batch", [1, 8])
def test_speculation_writes_what_plain_decoding_writes(plain: foresay.Generator, drafter: str, batch: int) -> None:
    """A draft model is llama.cpp's too: here the target itself, nearly all of whose draft tokens hold."""
    params = foresay.SamplingParams(max_new_tokens=48)
    wanted = foresay.change(plain, max_batch_size=1).generate(PROMPTS, params)
    guessing = foresay.change(plain, drafter=drafter, num_draft_tokens=4, max_batch_size=batch)
    found = guessing.generate(PROMPTS, params)
    same = assert_same_but_for_ties(plain, wanted, found)
    assert same >= (6 if batch == 1 else 1)
    drafted = sum(one.stats.num_drafted for one in found)
    held = sum(one.stats.num_accepted for one in found)
    assert drafted > 0
    if drafter.startswith("model"):
        assert held > 0.8 * drafted


def test_the_same_tokens_as_llama_cpps_own_loop(plain: foresay.Generator) -> None:
    from llama_cpp import Llama

    own = Llama(str(packaged_file(MODEL)), n_ctx=512, n_batch=256, verbose=False)
    ours = foresay.change(plain, max_batch_size=1).generate(PROMPTS, foresay.SamplingParams(max_new_tokens=32))
    theirs = []
    for one in ours:
        own.reset()
        steps = own.generate(list(one.prompt_token_ids), temp=0.0, repeat_penalty=1.0, top_k=1)
        theirs.append(
            dataclasses.replace(one, token_ids=[token for token, _ in zip(steps, one.token_ids, strict=False)])
        )
    assert assert_same_but_for_ties(plain, ours, theirs) >= 1, "all others part at a tie"


def test_its_laws_are_nearly_ours(plain: foresay.Generator) -> None:
    """The same file through our own kernels: the same weights, other roundings of activations."""
    ours = foresay.load(str(packaged_file(MODEL)), drafter="none")
    ids = list(plain.generate(PROMPTS[2], foresay.SamplingParams(max_new_tokens=1)).prompt_token_ids)
    assert ids == list(ours.generate(PROMPTS[2], foresay.SamplingParams(max_new_tokens=1)).prompt_token_ids)
    theirs, own = (scores_behind(one, ids).float().softmax(-1) for one in (plain, ours))
    assert float((theirs - own).abs().sum()) / 2 < 0.05
    assert theirs.argmax() == own.argmax()


def test_sampled_texts_repeat_with_their_seed(plain: foresay.Generator) -> None:
    params = foresay.SamplingParams(max_new_tokens=24, temperature=1.0, seed=5)
    texts = [plain.generate(PROMPTS[0], params).text for _ in range(2)]
    assert texts[0] == texts[1] != plain.generate(PROMPTS[0], params, seed=6).text


def test_a_chat_goes_on_from_what_is_held(plain: foresay.Generator) -> None:
    session = plain.session(prefix_bytes=1 << 28)
    params, prompt = foresay.SamplingParams(max_new_tokens=8), list(range(5, 105))
    seen = []
    for _ in range(2):
        session.submit(prompt, params)
        while session.has_work:
            seen += [chunk.generation for chunk in session.step() if chunk.generation is not None]
    assert seen[1].num_cached >= 99 and seen[0].token_ids == seen[1].token_ids


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "bf16"}, "dtype='bf16'"),
        ({"weights": "int8"}, "weights='int8'"),
        ({"device_map": "auto"}, "device_map='auto'"),
        ({"gpu_layers": 3, "device": "cpu"}, "contradict"),
    ],
)
def test_what_it_cannot_honour_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        foresay.load(MODEL, backend="llama.cpp", **options)


def test_what_needs_hidden_states_is_refused(plain: foresay.Generator) -> None:
    for drafter in (f"head({MODEL})", "self(3)"):
        with pytest.raises(foresay.UnsupportedModelError):
            foresay.change(plain, drafter=drafter)


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(packaged_file(MODEL).read_bytes()[: 1 << 22])
    with pytest.raises(ModelLoadError):
        foresay.load(str(file), backend="llama.cpp")
    with pytest.raises(ConfigError, match="reads GGUF files"):
        foresay.load(str(tmp_path), backend="llama.cpp")


def command(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "foresay", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_commands_take_it(tmp_path: Path) -> None:
    """info, generate, record, replay, profile and bench on llama.cpp's passes."""
    backend = ("--backend", "llama.cpp")
    assert "computed by llama.cpp" in (said := command("info", MODEL, *backend)) and "same bits" in said
    assert len(command("generate", "Name a colour.", "-n", "8", *backend).split()) > 1
    recording = tmp_path / "r.jsonl"
    command("record", str(recording), "--count", "4", "-n", "24", *backend)
    assert json.loads(recording.read_text().splitlines()[0])["model"] == MODEL
    assert "suffix" in command("replay", str(recording), "--drafter", "suffix")
    profile = ["--batch-size", "1,2", "--length", "0,3", "--context", "64", "--fresh"]
    command("profile", "-o", str(tmp_path / "p.json"), *profile, *backend)
    bench = ("bench", str(tmp_path / "b.jsonl"), "--drafter", "suffix", "--count", "2", "-n", "16", "--repeats", "1")
    assert "suffix" in command(*bench, *backend)
