"""POST /v1/embeddings: transformers' hidden states as unit vectors, in OpenAI's shapes, between the steps of running requests."""

from __future__ import annotations

import base64
import itertools
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import foresay
from foresay.decoding.protocols import KVCache, ModelInput, ModelOutput
from foresay.generation.scoring import TextEmbedder
from foresay.models.huggingface.causal import CausalModel
from helpers.families import make
from helpers.serving import Running, assert_refused

TEXTS = ["hello there", "the number 7 and 8 and 7", "x"]
PATH = "/v1/embeddings"
POOLINGS = pytest.mark.parametrize("pooling", ["mean", "last"])


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    with Running(foresay.load(str(folder), dtype="float32")) as one:
        yield one


def reference(model: PreTrainedModel, ids: list[int], pooling: str) -> torch.Tensor:
    """The embedding by transformers in float32, without our code."""
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states[-1][0]
    return torch.nn.functional.normalize(states.mean(0) if pooling == "mean" else states[-1], dim=0)


def vectors(running: Running, inputs: Any, **body: Any) -> list[torch.Tensor]:
    answer = running.post(PATH, input=inputs, **body)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return [torch.tensor(one["embedding"]) for one in data]


@POOLINGS
def test_they_are_those_of_transformers(running: Running, folder: Path, pooling: str) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    assert model.dtype is torch.float32
    long = "the number 7 and 8 and " * 20
    found = vectors(running, [*TEXTS, long], pooling=pooling)
    other = vectors(running, [*TEXTS, long], pooling={"mean": "last", "last": "mean"}[pooling])
    for text, vector, wrong in zip([*TEXTS, long], found, other, strict=True):
        ids = tokenizer(text).input_ids
        expected = reference(model, ids, pooling)
        assert torch.allclose(vector, expected, atol=2e-6), text
        assert abs(float(vector.norm()) - 1) < 1e-6
        assert len(ids) == 1 or not torch.allclose(wrong, expected, atol=1e-3), "negative control"
    assert torch.equal(vectors(running, TEXTS[0], pooling=pooling)[0], found[0]), "alone, to the bit"


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen3", "mamba2"])
@POOLINGS
def test_families(family: str, pooling: str) -> None:
    generator = foresay.load(make(family), drafter="none")
    ids = [2, 9, 4, 30, 7, 7, 12, 5, 21]
    embedder = TextEmbedder(generator.target.model, ids, pooling)
    while embedder.step():
        pass
    assert torch.allclose(embedder.embedding(), reference(make(family), ids, pooling), atol=1e-5)


@POOLINGS
def test_the_bits_do_not_depend_on_the_passes(pooling: str) -> None:
    """However long a pass takes; a mean that is summed pass by pass in another order would differ."""
    model, ids = CausalModel(make("llama", max_position_embeddings=1024)), [(7 * i) % 60 + 2 for i in range(300)]

    def embedding(wait_s: float) -> tuple[torch.Tensor, int]:
        embedder, passes = TextEmbedder(model, ids, pooling, wait_s), 1
        while embedder.step():
            passes += 1
        return embedder.embedding(), passes

    (short, many), (long, few) = embedding(1e-9), embedding(1e9)
    assert (many, few) == (1 + -(-(300 - 64) // 16), 2) and torch.equal(short, long)


def test_openais_client(running: Running) -> None:
    """Its default is base64, which it decodes itself."""
    client = running.client()
    found = client.embeddings.create(model="tiny", input=TEXTS)
    assert found.model == "tiny" and [one.index for one in found.data] == [0, 1, 2]
    expected = vectors(running, TEXTS)
    assert all(torch.equal(torch.tensor(a.embedding), b) for a, b in zip(found.data, expected, strict=True))
    count = sum(len(running.post("/tokenize", prompt=one).json()["tokens"]) for one in TEXTS)
    assert found.usage.prompt_tokens == found.usage.total_tokens == count


def test_shapes_of_inputs_and_encodings(running: Running) -> None:
    ids = [running.post("/tokenize", prompt=one).json()["tokens"] for one in TEXTS]
    expected = vectors(running, TEXTS)
    for inputs in (ids, [ids[0], TEXTS[1], ids[2]]):
        assert all(torch.equal(a, b) for a, b in zip(vectors(running, inputs), expected, strict=True))
    assert torch.equal(vectors(running, ids[1])[0], expected[1])
    answer = running.post(PATH, input=TEXTS[1], encoding_format="base64", user="me", dimensions=len(expected[1])).json()
    raw = base64.b64decode(answer["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == expected[1].tolist()
    assert answer["object"] == "list" and answer["data"][0]["object"] == "embedding" and answer["pooling"] == "mean"


def test_the_servers_pooling(folder: Path, running: Running) -> None:
    with Running(foresay.load(str(folder), dtype="float32"), pooling="last") as other:
        assert other.post(PATH, input=TEXTS[1]).json()["pooling"] == "last"
        assert torch.equal(vectors(other, TEXTS[1])[0], vectors(running, TEXTS[1], pooling="last")[0])
        assert torch.equal(vectors(other, TEXTS[1], pooling="mean")[0], vectors(running, TEXTS[1])[0])
    with pytest.raises(foresay.ConfigError, match="pooling='max' must be one of mean, last"):
        Running(foresay.load(str(folder)), pooling="max")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": TEXTS[0], "dimensions": 7}, "dimensions", "7"),
        ({"input": TEXTS[0], "dimensions": "x"}, "dimensions", "integer"),
        ({"input": TEXTS[0], "encoding_format": "int8"}, "encoding_format", "float"),
        ({"input": TEXTS[0], "pooling": "cls"}, "pooling", "mean"),
        ({"input": TEXTS[0], "normalize": False}, "normalize", "not supported"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [[]]}, "input.0", "at least 1"),
        ({"input": [1, 10**6]}, "input", "vocabulary"),
        ({"input": [TEXTS[0], [-1]]}, "input", "vocabulary"),
        ({}, "input", "required"),
        ({"input": ["x"] * 1025}, "input", "at most 1024"),
        ({"input": [5] * 4096}, "input", "4096"),
        ({"input": "number 7 " * 4096}, "input", "context is 4096"),
    ],
)  # fmt: skip
def test_refusals(running: Running, body: dict[str, Any], param: str, words: str) -> None:
    assert_refused(running.post(PATH, **body), param, words)
    assert running.post(PATH, model="other", input="x").status_code == 404


def test_models_without_hidden_states_are_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = CausalModel.capabilities
    closed = property(lambda self: replace(real.fget(self), num_layers=None))
    monkeypatch.setattr(CausalModel, "capabilities", closed)
    assert_refused(running.post(PATH, input="x"), "model", "hidden states")
    with pytest.raises(foresay.ConfigError, match="hidden states"):
        TextEmbedder(running.model.generator.target.model, [3])


def test_decoding_goes_on(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two passes over texts, of whatever requests, every running request makes a step."""
    kinds: list[str] = []
    forward = CausalModel.forward

    def observed(self: CausalModel, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        kinds.append("text" if model_input.hidden_layers else "step")
        return forward(self, model_input, cache)

    monkeypatch.setattr(CausalModel, "forward", observed)
    with running.client() as client:
        stream = client.completions.create(model="tiny", prompt="and", max_tokens=3900, temperature=0, stream=True)
        next(iter(stream))
        begun = len(kinds)
        asked = [threading.Thread(target=vectors, args=(running, ["and 7 " * 60] * 3)) for _ in range(2)]
        for one in asked:
            one.start()
        for one in asked:
            one.join()
        stream.close()
    seen = kinds[begun:]
    texts = [i for i, kind in enumerate(seen) if kind == "text"]
    assert len(texts) >= 6
    assert all(b - a > 1 for a, b in itertools.pairwise(texts)), "never two in a row"
