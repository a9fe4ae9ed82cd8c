"""POST /v1/embeddings: transformers' hidden states as unit vectors, in OpenAI's shapes, between the steps of running requests."""

from __future__ import annotations

import base64
import itertools
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import foresay
from foresay.decoding.protocols import KVCache, ModelInput, ModelOutput
from foresay.generation.scoring import TextEmbedder
from foresay.models.huggingface.causal import CausalModel
from helpers import tiny
from helpers.families import make
from helpers.serving import Running, assert_refused, sent

TEXTS = ["hello there", "the number 7 and 8 and 7", "x", "the number 7 and 8 and " * 20]
PATH = "/v1/embeddings"
POOLINGS = pytest.mark.parametrize("pooling", ["mean", "last"])


def reference(model: PreTrainedModel, ids: list[int], pooling: str) -> torch.Tensor:
    """The embedding by transformers in float32, without our code."""
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states[-1][0]
    return torch.nn.functional.normalize(states.mean(0) if pooling == "mean" else states[-1], dim=0)


def vectors(running: Running, inputs: Any, **body: Any) -> list[torch.Tensor]:
    data = running.answer(PATH, input=inputs, **body)["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return [torch.tensor(one["embedding"]) for one in data]


@POOLINGS
def test_vectors_are_those_of_transformers(server: Running, random_model: Path, pooling: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_model).eval()
    assert model.dtype is torch.float32
    found = vectors(server, TEXTS, pooling=pooling)
    other = vectors(server, TEXTS, pooling={"mean": "last", "last": "mean"}[pooling])
    for text, vector, wrong in zip(TEXTS, found, other, strict=True):
        ids = tiny.tokenizer()(text).input_ids
        expected = reference(model, ids, pooling)
        assert torch.allclose(vector, expected, atol=2e-6), text
        assert abs(float(vector.norm()) - 1) < 1e-6
        assert len(ids) == 1 or not torch.allclose(wrong, expected, atol=1e-3), "negative control"
    assert torch.equal(vectors(server, TEXTS[0], pooling=pooling)[0], found[0]), "alone, to the bit"


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


def test_shapes_of_inputs_and_encodings(server: Running) -> None:
    """Base64 is the default of OpenAI's client, which decodes it itself."""
    ids, expected = [server.answer("/tokenize", prompt=one)["tokens"] for one in TEXTS], vectors(server, TEXTS)
    found = server.client.embeddings.create(model="tiny", input=TEXTS)
    assert found.model == "tiny" and [one.index for one in found.data] == [0, 1, 2, 3]
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
    for same in ([torch.tensor(one.embedding) for one in found.data], vectors(server, [ids[0], *TEXTS[1:3], ids[3]])):
        assert all(torch.equal(a, b) for a, b in zip(same, expected, strict=True))
    assert torch.equal(vectors(server, ids[1])[0], expected[1])
    more = {"encoding_format": "base64", "user": "me", "dimensions": len(expected[1])}
    answer = server.answer(PATH, input=TEXTS[1], **more)
    raw = base64.b64decode(answer["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == expected[1].tolist()
    assert answer["object"] == "list" and answer["data"][0]["object"] == "embedding" and answer["pooling"] == "mean"


def test_the_servers_pooling(server: Running, serve: Any) -> None:
    other = serve(server.model.generator, pooling="last")
    assert other.answer(PATH, input=TEXTS[1])["pooling"] == "last"
    assert torch.equal(vectors(other, TEXTS[1])[0], vectors(server, TEXTS[1], pooling="last")[0])
    assert torch.equal(vectors(other, TEXTS[1], pooling="mean")[0], vectors(server, TEXTS[1])[0])


def test_models_without_hidden_states_are_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = CausalModel.capabilities
    closed = property(lambda self: replace(real.fget(self), num_layers=None))
    monkeypatch.setattr(CausalModel, "capabilities", closed)
    assert_refused(server.post(PATH, input="x"), "model", "hidden states")
    with pytest.raises(foresay.ConfigError, match="hidden states"):
        TextEmbedder(server.model.generator.target.model, [3])


def test_decoding_goes_on(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two passes over texts, of whatever requests, every running request makes a step."""
    kinds: list[str] = []
    forward = CausalModel.forward

    def observed(self: CausalModel, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        kinds.append("text" if model_input.hidden_layers else "step")
        return forward(self, model_input, cache)

    monkeypatch.setattr(CausalModel, "forward", observed)
    with sent(server.port, {"prompt": "and", "max_tokens": 3900, "temperature": 0, "stream": True}) as stream:
        assert stream.recv(10)
        begun = len(kinds)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda _: vectors(server, ["and 7 " * 60] * 3), range(2)))
        seen = kinds[begun:]
    texts = [i for i, kind in enumerate(seen) if kind == "text"]
    assert len(texts) >= 6
    assert all(b - a > 1 for a, b in itertools.pairwise(texts)), "never two in a row"
