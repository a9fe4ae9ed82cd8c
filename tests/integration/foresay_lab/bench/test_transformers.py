"""transformers in a benchmark, on tiny models saved as a user's folders, against foresay's own plain decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ForesayError
from foresay.generation.method import Method
from foresay_lab.bench.runners import MethodRunner, PromptBlock
from foresay_lab.bench.transformers import TransformersRunner
from foresay_lab.data.items import PromptItem
from foresay_lab.data.requests import PromptRequest
from helpers import tiny
from helpers.refusals import refused

ASKS = [
    PromptRequest(str(i), "", ids, PromptItem(str(i), "x"))
    for i, ids in enumerate([(40, 41, 42), (50,) * 9, (60, 61, 60, 61, 60, 61, 60), (70,)])
]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> foresay.Generator:
    folder = tiny.save(tmp_path_factory.mktemp("target"), tiny.llama(context=128))
    return foresay.load(str(folder), drafter="none", dtype="fp32", device="cpu")


def outputs(runner: Any, batch: int = 1, params: SamplingParams = GREEDY) -> list[list[int]]:
    block = PromptBlock("set", ASKS, batch, params)
    runner.prepare(block)
    found: list[list[int]] = runner.run(block, ASKS).outputs
    return found


@pytest.fixture(scope="module")
def ours(target: foresay.Generator) -> list[list[int]]:
    return outputs(MethodRunner(target, Method("none")))


def test_greedy_outputs_are_ours_in_every_batch(target: Any, ours: list[list[int]]) -> None:
    runner = TransformersRunner("transformers", target)
    assert runner.name == "transformers"
    assert all(outputs(runner, batch) == ours for batch in (1, 3, 9))
    assert outputs(MethodRunner(target, Method("none"))) == ours, "foresay's model was not changed"


@pytest.mark.parametrize("setting", ["lookup=5", "cache=static", "assistant={}"])
def test_its_other_methods_give_the_same(target: Any, ours: list[list[int]], setting: str, tmp_path: Path) -> None:
    assistant = tiny.save(tmp_path, tiny.llama(seed=1, num_hidden_layers=1, context=128))
    runner = TransformersRunner(f"transformers({setting.format(assistant)})", target)
    assert outputs(runner) == ours
    if setting != "cache=static":
        with refused("batch_size", 2):
            outputs(runner, 2)


def test_samples_are_repeated_by_their_seed_and_leave_the_generator_alone(target: Any, ours: list[list[int]]) -> None:
    runner, params = TransformersRunner("transformers", target), replace(GREEDY, temperature=1.5, top_p=0.95, top_k=50)
    before = torch.get_rng_state()
    first, again, other = (outputs(runner, 4, replace(params, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other and first != ours
    assert torch.equal(torch.get_rng_state(), before)


def test_an_output_ends_at_its_end_token(ours: list[list[int]], tmp_path: Path) -> None:
    """The model's own generation settings, other than its end token, have no effect."""
    model, end = tiny.llama(context=128), ours[0][5]
    model.generation_config.repetition_penalty = 3.0
    model.generation_config.eos_token_id = [end]
    target = foresay.load(str(tiny.save(tmp_path, model)), drafter="none", dtype="fp32", device="cpu")
    ended = outputs(TransformersRunner("transformers", target), 4, replace(GREEDY, ignore_eos=False))
    assert ended == [row[: row.index(end) + 1] if end in row else row for row in ours]


def test_what_is_refused(target: Any) -> None:
    for expression, words in (
        ("vllm", ["engine", "'vllm'"]),
        ("transformers(lookups=3)", ["lookups"]),
        ("transformers(lookup=0)", ["lookup=0"]),
        ("transformers(cache=paged)", ["cache='paged'", "static"]),
        ("transformers(cache=static, lookup=3)", ["cache", "lookup"]),
        ("transformers(assistant=smol)", ["smol"]),
    ):
        with pytest.raises(ForesayError) as error:
            TransformersRunner(expression, target)
        assert all(word in str(error.value) for word in words)
    with refused("min_p", 0.5):
        outputs(TransformersRunner("transformers", target), params=replace(GREEDY, temperature=1.0, min_p=0.5))
