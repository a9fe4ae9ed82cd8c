"""Block drafters: their layouts read once more by a few lines, their files, what they draft, and their exactness."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import (
    BlockDrafter,
    Cascade,
    Hybrid,
    PromptLookup,
    SuffixDrafter,
)
from foresay.errors import ModelLoadError, ModelNotFoundError
from foresay.generation.load import load
from foresay.models.drafts.base import StoredDraft, target_rows
from foresay.models.drafts.block import BlockModel
from foresay.models.drafts.block_config import DOMINO, SELECTOR, BlockConfig, PathShape, Sight
from foresay.models.drafts.files import read_draft, write_draft
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import quantizer
from foresay.models.huggingface.recurrent import RecurrentModel
from foresay_lab.training.students import BlockStudent
from helpers import tiny
from helpers.blocks import random_block, reference_block, reference_path
from helpers.families import VOCAB, make
from helpers.refusals import refused
from helpers.support import run

SMALL = 7
"""Tokens of a target whose draft tokens are often right, whatever they are."""


def target(*, fused: bool = True, kernels: bool = True, vocab: int = VOCAB, **changes: Any) -> CausalModel:
    """kernels: False for numbers that no kernel reads."""
    made = make("llama", 3, vocab_size=vocab, tie_word_embeddings=False, **changes)
    model = CausalModel(made if kernels else made.double())
    if fused and kernels:
        model.use_fused()
    return model


def states_of(model: CausalModel, block: BlockModel, tokens: torch.Tensor) -> torch.Tensor:
    """The target's hidden states of one text, [S, L * H]."""
    cache = model.new_cache()
    cache.add_rows(1)
    given = ModelInput(tokens[None], [len(tokens)], logits=Logits.NONE, hidden_layers=block.hidden_layers)
    return block.joined(model.forward(given, cache).hidden)[0]


def outputs_of(block: BlockModel, states: torch.Tensor, anchor: int, length: int | None = None) -> torch.Tensor:
    """The block's outputs after a context, [T, D]."""
    cache = block.new_cache()
    cache.add_rows(1)
    block.add_context([block.features(states)], cache)
    return block.run_block([anchor], [length or block.config.block_size], cache)[0]


GATED, RNN = PathShape("gated", 6), PathShape("rnn", 6)
DOMINO_SHAPE, SELECTOR_SHAPE = PathShape(DOMINO, 6, state=10, free=1), PathShape(SELECTOR, 6, candidates=5)
DFLASH2 = {"from_anchor": False, "path": SELECTOR_SHAPE, "taps": (2, 8)}


def scores_of(block: BlockModel, outputs: torch.Tensor, before: list[int]) -> torch.Tensor:
    """The scores of each token of a block after the tokens before it, [T, K]."""
    state, found = torch.zeros(block.state_size), []
    for i, token in enumerate(before):
        unary = block.scores(outputs[i])
        scores, state = block.after(unary, outputs[i], torch.tensor(token), torch.tensor(i), state)
        found.append(scores)
    return torch.stack(found)


CASES: list[dict[str, Any]] = [
    {},
    {"from_anchor": False},
    {**DFLASH2, "sights": [Sight(window=4)] * 2},
    {**DFLASH2, "taps": (3, 4), "ids": [1, 5, 6, 30, 41, 89], "scales": {"embedding_scale": 2.0, "logits_scale": 0.5}},
    {"from_anchor": False, "path": DOMINO_SHAPE, "scales": {"softcap": 3.0}},
    {"path": GATED, "sights": [Sight(window=3, causal=True), Sight()]},
    {"path": RNN, "sights": [Sight(causal=True)] * 2},
    {"rank": 0, "confidence": False},
    {"normalizes": False},
    {"ids": [1, 5, 6, 30, 41, 89]},
    {"depth": 1, "layers": (0, 3), "size": 8},
    {"from_anchor": False, "sights": [Sight(causal=True)] * 2},
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernels", [True, False])
def test_a_few_lines_that_read_the_layout_compute_the_same(case: dict[str, Any], kernels: bool, tmp_path: Path) -> None:
    model = target(kernels=kernels)
    write_draft(random_block(model, **case), tmp_path)
    block = BlockModel(read_draft(tmp_path), model)
    assert block.capabilities.own_threads is kernels
    text = torch.tensor([3, 17, 29, 3, 80, 41, 5])
    states = states_of(model, block, text)
    found = outputs_of(block, states[:-1], int(text[-1]))
    config, weights = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    mask = config.get("mask_token_id", config.get("dflash_config", {}).get("mask_token_id"))
    ids = torch.tensor([int(text[-1]), *[mask] * (config["block_size"] - 1)])
    embedded = model.model.get_input_embeddings()(ids)
    wanted = reference_block(weights, config, states[:-1], embedded)
    torch.testing.assert_close(found.double(), wanted, atol=2e-4, rtol=1e-3)
    other = reference_block(weights, {**config, "rope_theta": 17.0}, states[:-1], embedded)
    assert not torch.allclose(other, wanted, atol=1e-2)
    rows = target_rows(model, None if case.get("ids") is None else torch.tensor(case["ids"])).double()
    unary = block.config.scaled(wanted @ rows.T)
    torch.testing.assert_close(block.scores(found).double(), unary, atol=2e-3, rtol=1e-2)
    if block.config.path is not None:
        before = [
            int(text[-1]),
            *torch.randint(2, VOCAB, (len(found) - 1,), generator=torch.Generator().manual_seed(3)).tolist(),
        ]
        shown = model.model.get_input_embeddings()(torch.tensor(before))
        scores = reference_path(weights, config, unary, wanted, before, shown)
        torch.testing.assert_close(scores_of(block, found, before).double(), scores, atol=5e-3, rtol=1e-2)
        swapped = reference_path(weights, config, unary, wanted, before[::-1], shown.flip(0))
        assert not torch.allclose(swapped, scores, atol=1e-2)
    if block.config.has_confidence:
        w1 = (
            weights["markov_head.markov_w1.weight"].double()
            if block.config.confidence_reads_markov
            else torch.zeros(99, 0)
        )
        w, bias = weights["confidence_head.proj.weight"][0].double(), weights["confidence_head.proj.bias"].double()
        accepted = block.acceptance(found[2], torch.tensor(9))
        assert accepted is not None
        assert float(accepted) == pytest.approx(
            float(torch.sigmoid(torch.cat([wanted[2], w1[9]]) @ w + bias).detach()), abs=1e-4
        )


def reread(
    made: StoredDraft, folder: Path, change: Callable[[dict[str, Any]], None]
) -> tuple[StoredDraft, dict[str, Any]]:
    """A drafter whose config.json was changed."""
    write_draft(made, folder)
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))
    return read_draft(folder), values


@pytest.mark.parametrize("kernels", [True, False])
def test_neighbouring_pairs_are_turned_where_a_file_states_it(kernels: bool, tmp_path: Path) -> None:
    model, text = target(kernels=kernels), torch.tensor([3, 17, 29, 3, 80, 41, 5])
    made, values = reread(random_block(model), tmp_path, lambda one: one.update(rope_is_neox_style=False))
    block = BlockModel(made, model)
    states, weights = states_of(model, block, text), load_file(tmp_path / "model.safetensors")
    ids = torch.tensor([5, *[values["mask_token_id"]] * (values["block_size"] - 1)])
    embedded = model.model.get_input_embeddings()(ids)
    found = outputs_of(block, states[:-1], 5).double()
    torch.testing.assert_close(found, reference_block(weights, values, states[:-1], embedded), atol=2e-4, rtol=1e-3)
    halves = reference_block(weights, {**values, "rope_is_neox_style": True}, states[:-1], embedded)
    assert not torch.allclose(halves, found, atol=1e-2)


@pytest.mark.parametrize("states_scale", [True, False])
def test_embeddings_of_a_gemma_target_have_the_factor_that_a_file_means(states_scale: bool, tmp_path: Path) -> None:
    """DFlash's own files read the target's module, with its factor, unless they state another one."""
    model, text = CausalModel(make("gemma2", 3, vocab_size=VOCAB)), torch.tensor([3, 17, 29, 3, 80, 41, 5])

    def change(values: dict[str, Any]) -> None:
        if not states_scale:
            del values["dflash_config"]["input_embedding_scale"]

    made, values = reread(random_block(model, from_anchor=False), tmp_path, change)
    block = BlockModel(made, model)
    states, weights = states_of(model, block, text), load_file(tmp_path / "model.safetensors")
    ids = torch.tensor([5, *[values["dflash_config"]["mask_token_id"]] * (values["block_size"] - 1)])
    with_factor = model.model.get_input_embeddings()(ids)
    plain = torch.nn.functional.embedding(ids, model.model.get_input_embeddings().weight)
    assert not torch.allclose(plain, with_factor)
    wanted, other = (
        reference_block(weights, values, states[:-1], one)
        for one in ((plain, with_factor) if states_scale else (with_factor, plain))
    )
    found = outputs_of(block, states[:-1], 5).double()
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-3)
    assert not torch.allclose(found, other, atol=1e-2)
    student = BlockStudent(made, model, decay=1.0, anchors=None)
    assert torch.equal(student._embedded(ids), plain if states_scale else with_factor), "trained as it drafts"


@pytest.mark.parametrize("case", CASES[:7])
def test_what_is_trained_is_what_drafts(case: dict[str, Any]) -> None:
    """Blocks of a whole text in one pass equal each block alone; control: a block that sees its own anchor's state."""
    model = target()
    made = random_block(model, **case)
    block = BlockModel(made, model)
    text = torch.randint(2, VOCAB, (12,), generator=torch.Generator().manual_seed(1))
    states = states_of(model, block, text)
    anchors = torch.tensor([[2, 5, 9]])
    ids = torch.full((1, 3, made.config.block_size), made.config.mask_token_id)
    ids[0, :, 0] = text[anchors[0]]
    with torch.no_grad():
        embedded = model.model.get_input_embeddings()(ids) * made.config.embedding_scale
        trained = made.module.blocks(states[None], embedded, anchors)[0]
    for i, anchor in enumerate(anchors[0].tolist()):
        alone = outputs_of(block, states[:anchor], int(text[anchor]))
        torch.testing.assert_close(alone, trained[i], atol=2e-4, rtol=1e-3)
    assert not torch.allclose(outputs_of(block, states[:6], int(text[5])), trained[1], atol=1e-2)


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[5]])
def test_a_shorter_block_is_another_one_and_a_batch_changes_nothing(case: dict[str, Any]) -> None:
    for kernels in (True, False):
        model = target(kernels=kernels)
        block = BlockModel(random_block(model, **case), model)
        text = torch.randint(2, VOCAB, (9,), generator=torch.Generator().manual_seed(2))
        states = states_of(model, block, text)
        alone = [outputs_of(block, states[:n], int(text[n]), length) for n, length in ((3, 5), (7, 5), (5, 2))]
        cache = block.new_cache()
        cache.add_rows(4)
        block.add_context([block.features(states[:n]) for n in (3, 7, 5)], cache)
        together = block.run_block([int(text[n]) for n in (3, 7, 5)] + [1], [5, 5, 2, 0], cache)
        for i, one in enumerate(alone):
            same = torch.equal if kernels else torch.allclose  # a module's bits depend on the batch
            assert same(one, together[i, : len(one)])
        longer = outputs_of(block, states[:5], int(text[5]))[:2]
        assert torch.allclose(alone[2], longer, atol=1e-3) is all(one.causal for one in block.config.sights)


PROMPTS = [[5, 6, 1, 2, 3, 4, 5], [2], [1, 2, 1], [6] * 9, [3, 1] * 8]
KINDS: dict[str, Callable[[BlockModel], Any]] = {
    "chain": lambda block: BlockDrafter(block, SMALL),
    "confident": lambda block: BlockDrafter(block, SMALL, confidence=0.5 * block.config.has_confidence),
    "best first": lambda block: BlockDrafter(block, SMALL, sample=False, nodes=9),
    "cascade": lambda block: Cascade([BlockDrafter(block, SMALL), PromptLookup(min_ngram=1)], [[2, 2], [0, 0]]),
    "after lookup": lambda block: Cascade([PromptLookup(min_ngram=1), BlockDrafter(block, SMALL)], [[2, 3], [0, 0]]),
    "hybrid": lambda block: Hybrid(SuffixDrafter(), BlockDrafter(block, SMALL), min_match=3, k=4),
}


DECODED: dict[str, dict[str, Any]] = {
    "dspark": {"seed": 7},
    "dflash": {"from_anchor": False, "seed": 7},
    "dflash2": {**DFLASH2, "path": PathShape(SELECTOR, 6, candidates=4), "sights": [Sight(window=6)] * 2},
    "domino": {"from_anchor": False, "path": DOMINO_SHAPE},
    "rnn": {"path": RNN, "seed": 1},
    "jetspec": {"from_anchor": False, "sights": [Sight(causal=True)] * 2, "seed": 7},
}
"""Drafters of whose draft tokens some are right, whatever the method."""
CHECKED = [
    (kind, (i + j) % 2 == 0, ("dspark", "dflash")[(i // 2 + j) % 2]) for i, kind in enumerate(KINDS) for j in range(2)
]
CHECKED += [
    (kind, kind == "chain", made)
    for made, other in {"dflash2": "hybrid", "domino": "cascade", "rnn": "after lookup", "jetspec": "hybrid"}.items()
    for kind in ("chain", "best first", other)
]
"""Each kind with two methods, fused and not; each method draws chains and trees, and drafts with another drafter."""


@pytest.mark.parametrize(("kind", "fused", "made"), CHECKED)
def test_greedy_output_is_that_of_plain_decoding(kind: str, fused: bool, made: str) -> None:
    """Batched, ragged, joining late; some draft tokens right, some wrong."""
    model = target(fused=fused, vocab=SMALL)
    block = BlockModel(random_block(model, **DECODED[made]), model)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    plain, _, _ = run(model, PROMPTS, params, drafter=None, gamma=0)
    ours, steps, engine = run(
        model, PROMPTS, params, drafter=KINDS[kind](block), gamma=5, join_later=2, max_batch_size=3
    )
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert ours == plain
    accepted = {step.num_accepted for step in steps if step.num_drafted}
    assert 0 in accepted and max(accepted) >= 2


@pytest.mark.parametrize("fused", [False, True])
def test_greedy_output_over_a_recurrent_target(fused: bool) -> None:
    """Fused layers keep a state for each position; the family's own code feeds tokens again."""
    model = RecurrentModel(make("qwen3_5", 3, vocab_size=SMALL, tie_word_embeddings=False))
    if fused:
        model.use_fused()
        assert model.fused is not None and model.fused.is_native
    block = BlockModel(random_block(model), model)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    plain, _, _ = run(model, PROMPTS, params, drafter=None, gamma=0)
    ours, steps, engine = run(model, PROMPTS, params, drafter=_Reference(block, SMALL), gamma=5, join_later=2)
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert sum(one == two for one, two in zip(ours, plain, strict=True)) == len(PROMPTS)
    assert len({step.num_accepted for step in steps}) > 2


class _Reference(BlockDrafter):
    """Compares each chain that it proposes with the one that a pass over the whole text gives."""

    compared = 0

    def propose(self, rows: Any, budget: Any, policy: Any) -> Any:
        proposal = super().propose(rows, budget, policy)
        block = self.context.block
        for i, row in enumerate(rows):
            tokens = torch.from_numpy(row.tokens.copy())
            drafts = proposal.token_ids[i, : proposal.num_tokens[i]]
            if len(tokens) < 2 or not len(drafts):
                continue
            states = states_of(block.target, block, tokens)
            outputs = outputs_of(block, states[:-1], int(tokens[-1]))
            outputs = outputs[block.config.block_size - block.config.num_draft_tokens :]
            before = [int(tokens[-1]), *drafts.tolist()][: len(drafts)]
            assert scores_of(block, outputs, before).argmax(-1).tolist() == drafts.tolist()
            self.compared += len(drafts)
        return proposal


@pytest.mark.parametrize("made", DECODED)
def test_each_draft_token_is_that_of_a_pass_over_the_whole_text(made: str) -> None:
    """Whatever was accepted, rewound, missed or moved before it."""
    model = target(vocab=SMALL)
    drafter = _Reference(BlockModel(random_block(model, **DECODED[made]), model), SMALL)
    params = [SamplingParams(max_new_tokens=10 + 6 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    _, steps, engine = run(model, PROMPTS, params, drafter=drafter, gamma=4, join_later=2, max_batch_size=3)
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert drafter.compared > 150 and len({step.num_accepted for step in steps}) > 2


def test_a_long_prompt() -> None:
    model = target(vocab=SMALL, max_position_embeddings=2048)
    drafter = _Reference(BlockModel(random_block(model, seed=2), model), SMALL)
    prompts = [[(3 * i + i // 7) % SMALL for i in range(n)] for n in (600, 5, 300)]
    _, _, engine = run(model, prompts, SamplingParams(max_new_tokens=8, ignore_eos=True), drafter=drafter, gamma=3)
    assert engine.draft_failures == 0 and drafter.compared > 20


def test_a_block_ends_at_the_context_limit() -> None:
    model = target(vocab=SMALL, max_position_embeddings=32)
    block = BlockModel(random_block(model), model)
    params = SamplingParams(max_new_tokens=64, ignore_eos=True)
    plain, _, _ = run(model, PROMPTS, params, drafter=None, gamma=0)
    ours, _, engine = run(model, PROMPTS, params, drafter=BlockDrafter(block, SMALL), gamma=5)
    assert engine.draft_failures == 0 and ours == plain


def test_confidence_ends_blocks() -> None:
    """A higher bound drafts fewer tokens, of which more are accepted if the prediction means something."""
    model = target(vocab=SMALL)
    block = BlockModel(random_block(model), model)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    drafted = []
    for least in (0.0, 0.3, 0.6, 1.0):
        _, steps, _ = run(model, PROMPTS, params, drafter=BlockDrafter(block, SMALL, confidence=least), gamma=5)
        drafted.append(sum(step.num_drafted for step in steps) / len(steps))
    assert drafted == sorted(drafted, reverse=True) and drafted[0] > drafted[1] > drafted[2] >= drafted[3]
    without = BlockModel(random_block(model, confidence=False), model)
    with refused("confidence", 0.3):
        BlockDrafter(without, SMALL, confidence=0.3)


def test_weights_in_8_bits_draft_as_well() -> None:
    model = target()
    made = random_block(model)
    states = states_of(model, BlockModel(made, model), torch.arange(2, 12))
    whole, rounded = (outputs_of(BlockModel(made, model, **more), states, 5) for more in ({}, {"make": quantizer(8)}))
    assert not torch.equal(whole, rounded)
    assert float((whole - rounded).abs().mean()) < 0.05 * float(whole.abs().mean())


def test_published_layouts(tmp_path: Path) -> None:
    """Fields of DFlash's, DSpark's and the speculators layout; layers are counted from one more in the last."""
    model = target()
    dspark = random_block(model, layers=(0, 2)).config
    values = dspark.as_plain()
    assert values["architectures"] == ["Qwen3DSparkModel"] and values["target_layer_ids"] == [-1, 1]
    assert BlockConfig.read(values) == dspark
    dflash = random_block(model, from_anchor=False).config
    values = dflash.as_plain()
    assert values["dflash_config"] == {
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": [0, 1],
        "block_size": 5,
        "causal": False,
        "input_embedding_scale": 1.0,
    }
    assert BlockConfig.read(values) == dflash and dflash.num_draft_tokens == 4
    for case in CASES:
        config = random_block(model, **case).config
        assert BlockConfig.read(config.as_plain()) == config
    layer = {
        k: v
        for k, v in dspark.as_plain().items()
        if k in (*dspark.layer, "model_type", "num_hidden_layers", "vocab_size")
    }
    speculators = {
        "speculators_model_type": "dspark",
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": [0, 2],
        **{k: dspark.as_plain()[k] for k in ("block_size", "mask_token_id", "markov_rank", "draft_vocab_size")},
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "speculators_config": {"verifier": {"name_or_path": "org/target", "architectures": ["X"]}},
    }
    mixed = replace(dspark, from_anchor=False)  # DSpark's parts with DFlash's positions
    assert BlockConfig.read(mixed.as_plain()) == mixed
    read = BlockConfig.read(speculators)
    assert (read.hidden_layers, read.target, read.from_anchor) == ((0, 2), "org/target", True)
    assert read.layer == dspark.layer and read.path == dspark.path
    write_draft(
        random_block(model),
        tmp_path,
        lm_head=target_rows(model, None),
        embeddings=model.model.get_input_embeddings().weight,
    )
    with_copies = read_draft(tmp_path)
    assert with_copies.module.lm_head is not None and with_copies.module.embed_tokens is not None
    text = torch.arange(2, 9)
    states = states_of(model, BlockModel(with_copies, model), text)
    torch.testing.assert_close(
        outputs_of(BlockModel(with_copies, model), states, 3),
        outputs_of(BlockModel(random_block(model), model), states, 3),
    )


def test_unknown_fields_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    values = random_block(target(), from_anchor=False).config.as_plain()
    BlockConfig.read(values)
    assert not caplog.records
    BlockConfig.read({**values, "dflash_config": {**values["dflash_config"], "new_part": 3, "num_anchors": 512}})
    assert "not known are ignored: new_part" in caplog.text


def test_rotated_pairs_that_are_neighbours(tmp_path: Path) -> None:
    """A file whose rotary positions turn neighbouring numbers of a head (LFM2.5) reads as the same drafter."""
    made = random_block(target())
    write_draft(made, tmp_path)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    for name, weight in tensors.items():
        heads = {"q_proj": 4, "k_proj": 2, "q_norm": 1, "k_norm": 1}.get(name.split(".")[-2])
        if heads is not None:
            pairs = weight.view(heads, 2, len(weight) // heads // 2, -1).transpose(1, 2)
            tensors[name] = pairs.reshape(weight.shape).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_is_neox_style": False}))
    found, wanted = read_draft(tmp_path).module.state_dict(), made.module.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
    (tmp_path / "config.json").write_text(json.dumps(config))
    as_halves = read_draft(tmp_path).module.state_dict()
    assert not torch.equal(as_halves["layers.0.self_attn.q_proj.weight"], wanted["layers.0.self_attn.q_proj.weight"])


@pytest.mark.parametrize(
    ("changes", "param", "value"),
    [
        ({"block_size": 1}, "the block drafter's config.json: block_size", 1),
        ({"block_size": None}, "the block drafter's config.json: block_size", None),
        ({"mask_token_id": VOCAB}, "mask_token_id", 97),
        ({"target_layer_ids": None}, "target_layer_ids", None),
        ({"target_layer_ids": [-2]}, "the block drafter's config.json: target_layer_ids", [-2]),
        ({"markov_head_type": "fir"}, "the block drafter's config.json: markov_head_type", "fir"),
        ({"selector_rank": 8}, "selector_top_k", None),
        ({"selector_rank": 8, "selector_top_k": 4}, "config.json", None),
        ({"conv_kernel_size": 2}, "conv_group_size", None),
        ({"conv_kernel_size": 2, "conv_group_size": 7}, "conv_group_size", 7),
        ({"projector_type": "domino", "emb_dim": 8}, "gru_hidden_dim", None),
        ({"projector_type": "other"}, "projector_type", "other"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window", None),
        ({"layer_types": ["full_attention"]}, "layer_types", ["full_attention"]),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types", "linear_attention"),
        ({"is_causal": False, "causal": True}, "causal", True),
        ({"layer_types": 3}, "the block drafter's config.json: layer_types", 3),
        ({"model_type": "gemma3"}, "model_type", "gemma3"),
        ({"hidden_size": None}, "the block drafter's config.json: hidden_size", None),
        ({"target_hidden_size": 64}, "target_hidden_size", 64),
        ({"num_key_value_heads": 3}, "num_key_value_heads", 3),
        ({"attention_bias": True}, "attention_bias", True),
        ({"markov_rank": -1}, "the block drafter's config.json: markov_rank", -1),
        (
            {"rope_parameters": {"rope_type": "odd"}},
            "the block drafter's config.json: rope_parameters.rope_type",
            "odd",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "the block drafter's config.json: rope_parameters.partial_rotary_factor",
            0.5,
        ),
        ({"partial_rotary_factor": 0.5}, "the block drafter's config.json: partial_rotary_factor", 0.5),
        ({"layer_types": None, "use_sliding_window": True}, "sliding_window", None),
        ({"num_draft_layers": 7}, "num_draft_layers", 7),
        ({"logits_scaling": 8.0}, "logits_scaling", 8.0),
        ({"attention_multiplier": 0.5}, "attention_multiplier", 0.5),
    ],
)
def test_configurations_that_are_refused(changes: dict[str, Any], param: str, value: Any) -> None:
    values = {**random_block(target()).config.as_plain(), **changes}
    with refused(param, value):
        BlockConfig.read({k: v for k, v in values.items() if v is not None})


def test_files_that_are_refused(tmp_path: Path) -> None:
    model = target()
    made = random_block(model, ids=[1, 5, 9])
    write_draft(made, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")

    def unread(changed: dict[str, torch.Tensor], message: str) -> None:
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ModelLoadError, match=message):
            read_draft(tmp_path)

    unread({k: v for k, v in tensors.items() if k != "norm.weight"}, "norm.weight")
    unread({**tensors, "fc.weight": tensors["fc.weight"][:, :-1].contiguous()}, "fc.weight")
    unread({**tensors, "extra": torch.zeros(1)}, "extra")
    unread({k: v for k, v in tensors.items() if k != "d2t"}, "no d2t")
    unread({**tensors, "d2t": torch.tensor([5, 1, 0])}, "d2t must be")
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        read_draft(tmp_path / "nothing")
    for wrong, param, value in (
        (target(vocab=SMALL), "vocabulary", 97),
        (target(hidden_size=40, head_dim=10), "hidden size", 32),
    ):
        with refused(param, value):
            BlockModel(made, wrong)
    deep = StoredDraft(random_block(model, layers=(1, 3)).config, random_block(model, layers=(1, 3)).module, None)
    narrow = target()
    narrow.model.lm_head = torch.nn.Linear(32, VOCAB - 7, bias=False)
    with refused("draft_vocab_size", 97):
        BlockModel(random_block(model), narrow, name="narrow")
    with refused("hidden_layers", 3):
        BlockModel(deep, target(num_hidden_layers=2))


def test_by_name(tmp_path: Path) -> None:
    """As a drafter's expression, alone, in a hybrid and as a tree; the output is that of plain decoding."""
    folder = tiny.save(tmp_path / "model")
    loaded = load(str(folder), drafter="none", dtype="fp32")
    assert isinstance(loaded.target.model, CausalModel)
    write_draft(random_block(loaded.target.model, layers=(0, 1)), tmp_path)
    plain = loaded.generate("abcabcabc", max_new_tokens=20).token_ids
    for drafter in (
        f"block({tmp_path})",
        f"block({tmp_path}, confidence=0.2)",
        f"block({tmp_path}, nodes=6)",
        f"hybrid(suffix, block={tmp_path}; k=3)",
    ):
        other = load(str(folder), drafter=drafter, dtype="fp32", length=3)
        assert other.generate("abcabcabc", max_new_tokens=20).token_ids == plain
    with pytest.raises(ModelNotFoundError, match="block drafter"):
        load(str(folder), drafter="block(./nowhere)")
