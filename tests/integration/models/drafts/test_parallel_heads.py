"""Parallel heads (P-EAGLE): their layers read once more by a few lines, their files, what they draft, and their exactness."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import BlockDrafter, Cascade, Hybrid, PromptLookup, SuffixDrafter
from foresay.errors import ModelLoadError
from foresay.generation.load import load
from foresay.models.drafts.base import StoredDraft, target_rows
from foresay.models.drafts.files import LAYOUTS, read_draft, write_draft
from foresay.models.drafts.kinds import kind_of, reader
from foresay.models.drafts.parallel_config import ParallelHeadConfig
from foresay.models.drafts.parallel_head import ParallelHeadModel
from foresay.models.huggingface.causal import CausalModel
from foresay_lab.training.new_drafts import kind_of as trained_kind
from helpers.families import make
from helpers.heads import random_head
from helpers.refusals import refused
from helpers.support import run

VOCAB = 7
"""Tokens of a target whose draft tokens are often right, whatever they are."""
PROMPTS = [[3, 1, 4, 1, 5], [2, 6], [5, 3, 5, 3, 5, 3, 2, 4]]


def target(*, kernels: bool = True, **changes: Any) -> CausalModel:
    """kernels: False for numbers that no kernel reads."""
    made = make("llama", 3, vocab_size=VOCAB, tie_word_embeddings=False, **changes)
    model = CausalModel(made if kernels else made.double())
    if kernels:
        model.use_fused()
    return model


def parallel_head(model: CausalModel, *, depth: int = 2, **parts: Any) -> StoredDraft:
    """depth: number of layers."""
    given = {"num_hidden_layers": depth, "mask_token_id": 6, "block_size": 5, **parts}
    return random_head(model, layers=(0, 2, 3), before=depth > 1, seed=1, parts=given, kind=ParallelHeadConfig)


def states_of(model: CausalModel, head: ParallelHeadModel, tokens: torch.Tensor) -> torch.Tensor:
    """The target's hidden states of one text, [S, L * H]."""
    cache = model.new_cache()
    cache.add_rows(1)
    given = ModelInput(tokens[None], [len(tokens)], logits=Logits.NONE, hidden_layers=head.hidden_layers)
    return head.joined(model.forward(given, cache).hidden)[0]


def outputs_of(
    head: ParallelHeadModel, states: list[torch.Tensor], texts: list[list[int]], lengths: list[int]
) -> torch.Tensor:
    """The blocks after texts, [B, T, D]; states: of all positions of each text but the last."""
    cache = head.new_cache()
    cache.add_rows(len(texts))
    counts = [len(text) - 1 for text in texts]
    tokens = torch.zeros(len(texts), max(counts), dtype=torch.int64)
    features = torch.zeros(*tokens.shape, head.width, dtype=head.dtype)
    for i, (text, own) in enumerate(zip(texts, states, strict=True)):
        tokens[i, : counts[i]] = torch.tensor(text[1:])
        features[i, : counts[i]] = head.features(own)
    out = head.run_after(ModelInput(tokens, counts, features=features), lengths, cache)
    assert list(cache.lengths) == counts, "mask tokens leave the cache"
    return out


def reference(weights: dict[str, torch.Tensor], config: dict[str, Any], states: torch.Tensor, rows: Any) -> Any:
    """The outputs of the last pair and the mask tokens, read once more, in float64. rows: [S, D], embeddings of all inputs."""
    w = {name: value.double() for name, value in weights.items()}
    q_heads, k_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    count, known = len(rows), len(states)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(count)[:, None, None] / config["rope_theta"] ** (torch.arange(0, dim, 2).double() / dim)
        low, high = x.chunk(2, -1)
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)

    at = torch.arange(count)
    hidden = (at > at[:, None]) | (at <= at[:, None] - (config.get("sliding_window") or 1 << 30))
    joint = torch.cat([states.double(), w["mask_hidden"].flatten().expand(count - known, -1)])
    x = joint @ w["fc.weight"].T
    for i in range(config["num_hidden_layers"]):
        at_layer = f"layers.{i}"
        read = norm(x, f"{at_layer}.input_layernorm" if i else f"{at_layer}.hidden_norm")
        residual = read if not i and config["norm_before_residual"] else x
        read = read if i else torch.cat([norm(rows.double(), "layers.0.input_layernorm"), read], -1)
        q, k, v = (
            (read @ w[f"{at_layer}.self_attn.{part}_proj.weight"].T).view(count, heads, dim)
            for part, heads in (("q", q_heads), ("k", k_heads), ("v", k_heads))
        )
        k, v = (one.repeat_interleave(q_heads // k_heads, 1) for one in (rotate(k), v))
        scores = torch.einsum("qhd,khd->hqk", rotate(q), k) / dim**0.5
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(1)
        x = residual + attended @ w[f"{at_layer}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at_layer}.post_attention_layernorm")
        gate, up = (y @ w[f"{at_layer}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ w[f"{at_layer}.mlp.down_proj.weight"].T
    return norm(x, "norm")[known - 1 :]


@pytest.mark.parametrize("case", [{}, {"depth": 1}, {"depth": 3, "window": 3}], ids=["two", "one", "window"])
@pytest.mark.parametrize("kernels", [True, False])
def test_a_few_lines_that_read_the_layout_compute_the_same(case: dict[str, Any], kernels: bool, tmp_path: Path) -> None:
    model = target(kernels=kernels)
    write_draft(parallel_head(model, **case), tmp_path)
    head = ParallelHeadModel(read_draft(tmp_path), model)
    assert head.capabilities.own_threads is kernels
    text = [3, 1, 2, 3, 5, 4, 1]
    states = states_of(model, head, torch.tensor(text))[:-1]
    found = outputs_of(head, [states], [text], [5])[0].double()
    config, weights = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
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
    states = [states_of(model, head, torch.tensor(text))[:-1] for text in PROMPTS]
    together = outputs_of(head, states, PROMPTS, [5, 2, 5])
    for i, (text, length) in enumerate(zip(PROMPTS, (5, 2, 3), strict=True)):
        alone = outputs_of(head, [states[i]], [text], [length])[0]
        assert torch.equal(alone, together[i, :length])


class _Reference(BlockDrafter):
    """Compares each draft with that of one pass over the whole text."""

    compared = 0

    def propose(self, rows: Any, budget: Any, policy: Any) -> Any:
        proposal = super().propose(rows, budget, policy)
        head: Any = self.context.block
        for i, row in enumerate(rows):
            count, tokens = int(proposal.num_tokens[i]), row.tokens.tolist()
            if count and len(tokens) > 1:
                states = states_of(head.target, head, torch.tensor(tokens))[:-1]
                outputs = outputs_of(head, [states], [tokens], [count])[0]
                assert head.scores(outputs).argmax(-1).tolist() == proposal.token_ids[i, :count].tolist()
                self.compared += count
        return proposal


DRAFTERS: dict[str, Callable[[ParallelHeadModel], Any]] = {
    "chain": lambda head: _Reference(head, VOCAB),
    "tree": lambda head: BlockDrafter(head, VOCAB, sample=False, nodes=9),
    "cascade": lambda head: Cascade([BlockDrafter(head, VOCAB), PromptLookup(min_ngram=1)], [[2, 2], [0, 0]]),
    "after lookup": lambda head: Cascade([PromptLookup(min_ngram=1), BlockDrafter(head, VOCAB)], [[2, 3], [0, 0]]),
    "hybrid": lambda head: Hybrid(SuffixDrafter(), BlockDrafter(head, VOCAB), min_match=3, k=4),
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("kernels", [True, False])
def test_greedy_output_is_that_of_plain_decoding(kind: str, kernels: bool) -> None:
    """Whatever was accepted, rewound or moved before; prompts longer than a chunk, and a text at the context limit."""
    model = target(kernels=kernels, max_position_embeddings=512)
    drafter = DRAFTERS[kind](ParallelHeadModel(parallel_head(model), model))
    prompts = [*PROMPTS, [(3 * i + i // 7) % VOCAB for i in range(480)]]
    params = [SamplingParams(max_new_tokens=14 + 6 * i, ignore_eos=True) for i in range(len(prompts))]
    plain, _, _ = run(model, prompts, params, drafter=None, gamma=0)
    ours, steps, engine = run(model, prompts, params, drafter=drafter, gamma=4, join_later=2, max_batch_size=3)
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert ours == plain and {0, 1} <= {step.num_accepted for step in steps}
    assert kind != "chain" or drafter.compared > 100


def rewritten(
    folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], made: StoredDraft, **how: Any
) -> Path:
    """A head's folder whose config.json and tensors were changed."""
    folder.mkdir(exist_ok=True)
    write_draft(made, folder, **how)
    values, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(values, tensors)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("layout", LAYOUTS.values())
def test_published_layouts(layout: Any, tmp_path: Path) -> None:
    made = parallel_head(target())

    def published(values: dict[str, Any], tensors: dict[str, Any]) -> None:
        if layout == "plain":  # as AWS's files, whose users name the way of drafting to their engine
            values["pard_token"] = values.pop("ptd_token_id")
            del values["parallel_drafting"]
        tensors["mask_hidden"] = tensors["mask_hidden"].view(1, -1)

    read = read_draft(rewritten(tmp_path / "a", published, made, layout=layout))
    assert dataclasses.replace(read.config, target="tiny", target_architectures=()) == made.config
    assert (read.config.mask_token_id, read.config.block_size, read.config.num_hidden_layers) == (6, 5, 2)
    values = json.loads((tmp_path / "a" / "config.json").read_text())
    zero = {**values, "mask_token_id" if layout == "speculators" else "pard_token": 0}
    assert kind_of(values) == kind_of(zero) == "peagle" and reader(zero).read(zero).mask_token_id == 0
    assert torch.equal(read.module.mask_hidden, made.module.mask_hidden)


SLIDES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
REFUSALS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "no mask": ({"ptd_token_id": None, "parallel_drafting": True}, "mask_token_id", None),
    "mask": ({"ptd_token_id": VOCAB}, "mask_token_id", VOCAB),
    "two masks": ({"pard_token": 5}, "pard_token", 5),
    "not parallel": ({"parallel_drafting": False}, "parallel_drafting", False),
    "depths": ({"num_depths": 1}, "block_size", 1),
    "windows": (SLIDES, "layer_types", SLIDES["layer_types"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_files_that_are_refused(case: str) -> None:
    change, param, value = REFUSALS[case]
    with refused(param, value, at="the parallel head's config.json" if case in ("no mask", "depths") else ""):
        ParallelHeadConfig.read({**parallel_head(target()).config.as_plain(), **change})


def test_it_is_not_trained_as_a_head() -> None:
    with refused("draft", None):
        trained_kind(parallel_head(target()).config)


def test_by_name(tmp_path: Path) -> None:
    model = target()
    folder = rewritten(tmp_path / "head", lambda values, tensors: None, parallel_head(model))
    generator = load(model, drafter=f"block({folder})")
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    plain, _, _ = run(model, PROMPTS, params, drafter=None, gamma=0)
    assert [one.token_ids for one in generator.generate(PROMPTS, params)] == plain
    with refused("path", str(folder)):
        load(model, drafter=f"head({folder})").generate([PROMPTS[0]], params)
    missing = rewritten(tmp_path / "none", lambda values, tensors: tensors.pop("mask_hidden"), parallel_head(model))
    with pytest.raises(ModelLoadError, match="mask_hidden"):
        read_draft(missing)
