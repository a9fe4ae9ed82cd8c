"""Weights that change between rounds: outputs are those of the new weights, in every mode and with any draft."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

import foresay
from helpers import tiny
from helpers.refusals import refuses

PROMPTS = ["hello, hello " * 12, "one two one two", "abc abc"]


def texts(generator: foresay.Generator) -> list[list[int]]:
    return [list(one.token_ids) for one in generator.generate(PROMPTS, max_new_tokens=24, ignore_eos=True)]


def streamed(generator: foresay.Generator) -> list[int]:
    async def tokens() -> list[int]:
        chunks = [one async for one in generator.astream(PROMPTS[0], max_new_tokens=24, ignore_eos=True)]
        assert chunks[-1].generation is not None
        return list(chunks[-1].generation.token_ids)

    return asyncio.run(tokens())


def loaded(seed: int = 0, **options: Any) -> foresay.Generator:
    return foresay.load(tiny.llama(seed), tokenizer=tiny.tokenizer(), **options)


@pytest.mark.parametrize("drafter", ["none", "suffix", "self(1)"])
def test_outputs_are_those_of_the_new_weights(drafter: str) -> None:
    """Twice, and what `astream` keeps of a prompt is dropped."""
    with loaded(drafter=drafter) as generator:
        for seed in (1, 2):
            other, before = tiny.llama(seed), streamed(generator)
            assert generator.update_weights(other.named_parameters()) == len(list(other.parameters()))
            wanted = texts(loaded(seed, drafter="none"))
            assert texts(generator) == wanted and streamed(generator) == wanted[0] != before


def test_what_is_kept_of_a_prompt_would_be_old() -> None:
    """Control: weights that change otherwise while `astream` keeps the keys and values of a prompt."""
    with loaded(drafter="none") as generator:
        streamed(generator)
        module: Any = generator.target.model
        module.model.load_state_dict(tiny.llama(1).state_dict())
        assert streamed(generator) != texts(loaded(1, drafter="none"))[0]


def test_what_does_not_fit_is_refused(tmp_path: Path, folder: Path) -> None:
    generator, name = loaded(), "model.layers.0.self_attn.q_proj.weight"
    weight = tiny.llama().get_parameter(name).detach()
    for given, value in (("nowhere.weight", weight), (name, weight[1:]), (name, weight * torch.nan)):
        refuses(lambda given=given, value=value: generator.update_weights([(given, value)]), "weights", given)
    refuses(lambda: foresay.load(folder).update_weights([(name, weight)]), "weights")
    kept = loaded(keep_prompts=tmp_path)
    refuses(lambda: kept.update_weights([(name, weight)]), "weights")
    session = generator.session()
    session.submit([5, 6, 7], foresay.SamplingParams(max_new_tokens=4))
    refuses(lambda: generator.update_weights([(name, weight)]), "weights")
    while session.has_work:
        session.step()
    assert generator.update_weights([(name, weight)]) == 1
