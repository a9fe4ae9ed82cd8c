"""transformers as a peer, on tiny models saved as a user's folders, against foresay's own plain decoding."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Engine
from foresay.errors import ConfigError, ForesayError
from foresay.lab.bench.peers import Peer, open_peer
from foresay.lengths import ConstantLength
from helpers import tiny

one_thread = pytest.fixture(autouse=True)(tiny.one_thread)
PROMPTS = [[40, 41, 42], [50] * 9, [60, 61, 60, 61, 60, 61, 60], [70]]
NEW = 24
WRITE = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.llama(context=128)
    model.generation_config.repetition_penalty = 3.0  # of the model's own, and nothing that was asked for
    return tiny.save(tmp_path_factory.mktemp("target"), model)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("assistant"), tiny.llama(seed=1, num_hidden_layers=1, context=128))


@pytest.fixture(scope="module")
def ours(folder: Path) -> list[list[int]]:
    """foresay's plain greedy outputs."""
    return plain(folder, PROMPTS)


def plain(folder: Path, prompts: Sequence[Sequence[int]], **params: Any) -> list[list[int]]:
    spec = foresay.load(str(folder), drafter="none", dtype="fp32", device="cpu")
    engine = Engine(spec.target.model, None, spec.rule, ConstantLength(0), max_batch_size=1)
    wanted = SamplingParams(**{"max_new_tokens": NEW, "ignore_eos": True, **params})
    eos = spec.target.eos_token_ids
    outputs: dict[int, list[int]] = {engine.submit(prompt, wanted, eos=eos): [] for prompt in prompts}
    while engine.has_work:
        for step in engine.step():
            outputs[step.request_id] += step.token_ids
    return list(outputs.values())


@pytest.fixture(scope="module")
def peer(folder: Path) -> Iterator[Peer]:
    opened = open_peer("transformers", model=str(folder), dtype="fp32", threads=None)
    yield opened
    opened.close()


@pytest.mark.parametrize("batch", [1, 3, 4, 9])
def test_greedy_outputs_are_ours_in_every_batch(peer: Peer, ours: list[list[int]], batch: int) -> None:
    run = peer.run(PROMPTS, WRITE, batch)
    assert run.outputs == ours
    assert run.seconds > 0


@pytest.mark.parametrize("setting", ["lookup=5", "cache=static", "assistant"])
def test_its_other_methods_write_the_same(folder: Path, other: Path, ours: list[list[int]], setting: str) -> None:
    setting = f"assistant={other}" if setting == "assistant" else setting
    opened = open_peer(f"transformers({setting})", model=str(folder), dtype="fp32", threads=1)
    for _ in range(2):
        assert opened.run(PROMPTS, WRITE, 1).outputs == ours
    if "cache" not in setting:
        with pytest.raises(ConfigError, match="one prompt at a time, not 2; use batch size 1"):
            opened.run(PROMPTS, WRITE, 2)
    key, value = setting.split("=")
    key = {"lookup": "prompt_lookup_num_tokens"}.get(key, key)
    assert opened.describe()[key] == value
    assert opened.name == f"transformers+{'static' if key == 'cache' else setting.split('=')[0]}"
    opened.close()
    opened.close()
    with pytest.raises(ForesayError, match="is closed; open it again"):
        opened.run(PROMPTS, WRITE, 1)


def test_sampling_is_repeated_by_its_seed_and_leaves_the_generator_alone(peer: Peer, ours: list[list[int]]) -> None:
    def draw(seed: int | None) -> list[list[int]]:
        return peer.run(PROMPTS, replace(WRITE, temperature=1.5, top_p=0.95, top_k=50, seed=seed), 4).outputs

    before = torch.get_rng_state()
    first = draw(1)
    assert first == draw(1) != draw(2)
    assert first != ours and all(len(row) == NEW for row in first)
    assert torch.equal(torch.get_rng_state(), before)
    assert draw(None) != draw(None)


def test_an_output_ends_at_its_end_token(tmp_path: Path, ours: list[list[int]]) -> None:
    model = tiny.llama(context=128)
    end = ours[0][5]
    model.generation_config.eos_token_id = [end]
    saved = tiny.save(tmp_path, model)
    opened = open_peer("transformers", model=str(saved), dtype="fp32", threads=None)
    for batch in (1, 4):
        assert opened.run(PROMPTS, WRITE, batch).outputs == ours
        ended = opened.run(PROMPTS, replace(WRITE, ignore_eos=False), batch).outputs
        assert ended == [row[: row.index(end) + 1] if end in row else row for row in ours]
        assert len(ended[0]) <= 6
    assert ended == plain(saved, PROMPTS, ignore_eos=False)


def test_what_it_says_of_itself(peer: Peer, folder: Path) -> None:
    about = peer.describe()
    assert peer.name == "transformers"
    assert about["engine"].startswith("transformers 5.") and about["dtype"] == "float32"
    assert about["model"] == str(folder) and about["attention"] == "sdpa" and about["cache"] == "dynamic"
    assert all(isinstance(value, str) for value in about.values())


def test_threads_are_its_own_for_a_run_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Any = open_peer("transformers", model=str(folder), dtype="fp32", threads=2)
    seen: list[int] = []
    before = torch.get_num_threads()
    assert before != 2
    monkeypatch.setattr(opened, "_batch", lambda *_: seen.append(torch.get_num_threads()) or [[1]])
    opened.run([[1]], replace(WRITE, max_new_tokens=1), 1)
    assert seen == [2] and torch.get_num_threads() == before


def test_what_it_cannot_do_is_one_line(peer: Peer, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prompt and output have 129 tokens, the context 128; use fewer"):
        peer.run([[1] * 100], replace(WRITE, max_new_tokens=29), 1)
    with pytest.raises(ForesayError, match=r"^transformers failed: IndexError") as caught:
        peer.run([[100_000]], replace(WRITE, max_new_tokens=4), 1)
    assert "\n" not in str(caught.value)
    with pytest.raises(ForesayError, match=re.escape(str(tmp_path))):
        open_peer("transformers", model=str(tmp_path), dtype="fp32", threads=None)
    with pytest.raises(ForesayError, match="no model 'smol'"):
        open_peer("transformers(assistant=smol)", model=str(folder), dtype="fp32", threads=None)


def test_opening_it_leaves_foresays_model_alone(folder: Path, ours: list[list[int]]) -> None:
    """Both in one process, each with its own attention."""
    opened: Any = open_peer("transformers", model=str(folder), dtype="fp32", threads=None)
    assert plain(folder, PROMPTS) == ours
    assert opened._model.config._attn_implementation == "sdpa"
    assert opened.run(PROMPTS, WRITE, 4).outputs == ours
