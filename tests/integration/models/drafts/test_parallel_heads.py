"""Parallel heads (P-EAGLE): their layers read once more by a few lines, their files, what they draft, and their exactness."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from foresay.decoding.protocols import ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import BlockDrafter
from foresay.errors import ModelLoadError
from foresay.generation.load import load
from foresay.models.drafts.base import StoredDraft, target_rows
from foresay.models.drafts.files import LAYOUTS, read_draft
from foresay.models.drafts.kinds import kind_of, reader
from foresay.models.drafts.parallel_config import ParallelHeadConfig
from foresay.models.drafts.parallel_head import ParallelHeadModel
from foresay.models.huggingface.causal import CausalModel
from foresay_lab.training.new_drafts import kind_of as trained_kind
from helpers.drafting import KINDS, accepted, compared, decoded, llama_target, stored
from helpers.drafting import SMALL as VOCAB
from helpers.heads import Layout, random_head
from helpers.passes import hidden_states, started
from helpers.refusals import refused
from helpers.support import run

target = partial(llama_target, vocab=VOCAB)
PROMPTS = [[3, 1, 4, 1, 5], [2, 6], [5, 3, 5, 3, 5, 3, 2, 4]]


def parallel_head(model: CausalModel, *, depth: int = 2, **parts: Any) -> StoredDraft:
    """depth: number of layers."""
    given = {"num_hidden_layers": depth, "mask_token_id": 6, "block_size": 5, **parts}
    return random_head(model, layers=(0, 2, 3), before=depth > 1, seed=1, parts=given, kind=ParallelHeadConfig)


def states_of(head: ParallelHeadModel, text: Sequence[int]) -> torch.Tensor:
    """The target's hidden states of all positions of a text but the last, [S, L * H]."""
    return head.joined(hidden_states(head.target, text, head.hidden_layers))[:-1]


def outputs_of(head: ParallelHeadModel, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> torch.Tensor:
    """The blocks after texts, [B, T, D]."""
    cache, counts = started(head, len(texts)), [len(text) - 1 for text in texts]
    tokens = torch.zeros(len(texts), max(counts), dtype=torch.int64)
    features = torch.zeros(*tokens.shape, head.width, dtype=head.dtype)
    for i, text in enumerate(texts):
        tokens[i, : counts[i]] = torch.tensor(text[1:])
        features[i, : counts[i]] = head.features(states_of(head, text))
    out = head.run_after(ModelInput(tokens, counts, features=features), list(lengths), cache)
    assert list(cache.lengths) == counts, "mask tokens leave the cache"
    return out


def reference(weights: dict[str, torch.Tensor], config: dict[str, Any], states: torch.Tensor, rows: Any) -> Any:
    """The outputs of the last pair and the mask tokens, read once more. rows: [S, D], embeddings of all inputs."""
    layout = Layout(weights, config)
    masks = layout.weights["mask_hidden"].flatten().expand(len(rows) - len(states), -1)
    outputs = layout.outputs(layout.features(torch.cat([states.double(), masks])), rows)
    return layout.norm(outputs, "norm")[len(states) - 1 :]


@pytest.mark.parametrize("case", [{}, {"depth": 1}, {"depth": 3, "window": 3}], ids=["two", "one", "window"])
@pytest.mark.parametrize("kernels", [True, False])
def test_a_few_lines_that_read_the_layout_compute_the_same(case: dict[str, Any], kernels: bool, tmp_path: Path) -> None:
    model = target(kernels=kernels)
    made, config, weights = stored(parallel_head(model, **case), tmp_path)
    head = ParallelHeadModel(made, model)
    assert head.capabilities.own_threads is kernels
    text = [3, 1, 2, 3, 5, 4, 1]
    states, found = states_of(head, text), outputs_of(head, [text], [5])[0].double()
    embedded = model.model.get_input_embeddings()(torch.tensor([*text[1:], *[6] * 4]))
    wanted = reference(weights, config, states, embedded)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-3)
    without = reference({**weights, "mask_hidden": torch.zeros_like(weights["mask_hidden"])}, config, states, embedded)
    assert not torch.allclose(without[1:], wanted[1:], atol=1e-2), "control: mask tokens without their features"
    torch.testing.assert_close(
        head.scores(found.to(head.dtype)).double(), wanted @ target_rows(model, None).double().T, atol=2e-3, rtol=1e-2
    )


def test_other_rows_and_the_length_of_a_block_change_no_bit() -> None:
    model = target()
    head = ParallelHeadModel(parallel_head(model), model)
    together = outputs_of(head, PROMPTS, [5, 2, 5])
    for i, (text, length) in enumerate(zip(PROMPTS, (5, 2, 3), strict=True)):
        assert torch.equal(outputs_of(head, [text], [length])[0], together[i, :length])


def in_passes(head: ParallelHeadModel) -> Any:
    """A drafter, each of whose drafts must be that of one pass over the whole text."""

    def wanted(text: torch.Tensor, draft: torch.Tensor) -> list[int]:
        found: list[int] = head.scores(outputs_of(head, [text.tolist()], [len(draft)])[0]).argmax(-1).tolist()
        return found

    return compared(BlockDrafter(head, VOCAB), wanted)


@pytest.mark.parametrize(
    ("kind", "kernels"),
    [
        ("chain", True),
        ("chain", False),
        ("best first", True),
        ("cascade", False),
        ("after lookup", True),
        ("hybrid", False),
    ],
)
def test_greedy_output_is_that_of_plain_decoding(kind: str, kernels: bool) -> None:
    """Whatever was accepted, rewound or moved before; prompts longer than a chunk, and a text at the context limit."""
    model = target(kernels=kernels, max_position_embeddings=512)
    drafter = {**KINDS, "chain": in_passes}[kind](ParallelHeadModel(parallel_head(model), model))
    steps = decoded(model, drafter, prompts=[*PROMPTS, [(3 * i + i // 7) % VOCAB for i in range(480)]], new=14)
    assert {0, 1} <= accepted(steps) and (kind != "chain" or drafter.compared > 100)


@pytest.mark.parametrize("layout", LAYOUTS.values())
def test_published_layouts(layout: Any, tmp_path: Path) -> None:
    made = parallel_head(target())
    _, values, tensors = stored(made, tmp_path, layout=layout)
    if layout == "plain":  # as AWS's files, whose users name the way of drafting to their engine
        values["pard_token"] = values.pop("ptd_token_id")
        del values["parallel_drafting"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(tensors | {"mask_hidden": tensors["mask_hidden"].view(1, -1)}, tmp_path / "model.safetensors")
    read = read_draft(tmp_path)
    assert dataclasses.replace(read.config, target="tiny", target_architectures=()) == made.config
    assert (read.config.mask_token_id, read.config.block_size, read.config.num_hidden_layers) == (6, 5, 2)
    zero = {**values, "mask_token_id" if layout == "speculators" else "pard_token": 0}
    assert kind_of(values) == kind_of(zero) == "peagle" and reader(zero).read(zero).mask_token_id == 0
    assert torch.equal(read.module.mask_hidden, made.module.mask_hidden)


SLIDES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
REFUSALS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "no mask": ({"ptd_token_id": None, "parallel_drafting": True}, "mask_token_id", None),
    "mask": ({"ptd_token_id": VOCAB}, "mask_token_id", VOCAB),
    "two masks": ({"pard_token": 5}, "pard_token", 5),
    "not parallel": ({"parallel_drafting": False}, "parallel_drafting", False),
    "depths": ({"num_depths": 1}, "num_depths", 1),
    "other depths": ({"num_depths": None, "para_depths": 65}, "para_depths", 65),
    "windows": (SLIDES, "layer_types", SLIDES["layer_types"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_files_that_are_refused(case: str) -> None:
    change, param, value = REFUSALS[case]
    with refused(
        param, value, at="the parallel head's config.json" if case in ("no mask", "depths", "other depths") else ""
    ):
        ParallelHeadConfig.read({**parallel_head(target()).config.as_plain(), **change})


def test_it_is_not_trained_as_a_head() -> None:
    with refused("draft", None):
        trained_kind(parallel_head(target()).config)


def test_by_name(tmp_path: Path) -> None:
    model = target()
    _, _, tensors = stored(parallel_head(model), tmp_path)
    generator = load(model, drafter=f"block({tmp_path})")
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    plain, _, _ = run(model, PROMPTS, params, drafter=None, gamma=0)
    assert [one.token_ids for one in generator.generate(PROMPTS, params)] == plain
    with refused("path", str(tmp_path)):
        load(model, drafter=f"head({tmp_path})").generate([PROMPTS[0]], params)
    del tensors["mask_hidden"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="mask_hidden"):
        read_draft(tmp_path)
