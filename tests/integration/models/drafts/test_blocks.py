"""Block drafters: their layouts read once more by a few lines, their files, what they draft, and their exactness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import BlockDrafter
from foresay.errors import ModelNotFoundError
from foresay.generation.load import load
from foresay.models.drafts.base import target_rows
from foresay.models.drafts.block import BlockModel
from foresay.models.drafts.block_config import DOMINO, SELECTOR, BlockConfig, PathShape, Sight
from foresay.models.drafts.files import read_draft, write_draft
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import quantizer
from foresay_lab.training.students import BlockStudent
from helpers import tiny
from helpers.blocks import random_block, reference_block, reference_path
from helpers.drafting import KINDS, PROMPTS, SMALL, accepted, compared, decoded, recurrent_target, stored
from helpers.drafting import llama_target as target
from helpers.families import VOCAB, make
from helpers.passes import hidden_states, started
from helpers.refusals import refused
from helpers.support import run

TEXT = torch.tensor([3, 17, 29, 3, 80, 41, 5])


def states_of(block: BlockModel, tokens: torch.Tensor) -> torch.Tensor:
    """The target's hidden states of one text, [S, L * H]."""
    return block.joined(hidden_states(block.target, tokens, block.hidden_layers))


def outputs_of(block: BlockModel, states: torch.Tensor, anchor: int, length: int | None = None) -> torch.Tensor:
    """The block's outputs after a context, [T, D]."""
    cache = started(block)
    block.add_context([block.features(states)], cache)
    return block.run_block([anchor], [length or block.config.block_size], cache)[0]


GATED, RNN = PathShape("gated", 6), PathShape("rnn", 6)
DOMINO_SHAPE, SELECTOR_SHAPE = PathShape(DOMINO, 6, state=10, free=1), PathShape(SELECTOR, 6, candidates=5)
DFLASH2 = {"from_anchor": False, "path": SELECTOR_SHAPE, "taps": (2, 8)}
IDS = [1, 5, 6, 30, 41, 89]


def scores_of(block: BlockModel, outputs: torch.Tensor, before: list[int]) -> torch.Tensor:
    """The scores of each token of a block after the tokens before it, [T, K]."""
    state, found = torch.zeros(block.state_size), []
    for i, token in enumerate(before):
        unary = block.scores(outputs[i])
        scores, state = block.after(unary, outputs[i], torch.tensor(token), torch.tensor(i), state)
        found.append(scores)
    return torch.stack(found)


CASES: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dflash": {"from_anchor": False},
    "dflash2 in windows": {**DFLASH2, "sights": [Sight(window=4)] * 2},
    "scaled": {**DFLASH2, "taps": (3, 4), "ids": IDS, "scales": {"embedding_scale": 2.0, "logits_scale": 0.5}},
    "domino": {"from_anchor": False, "path": DOMINO_SHAPE, "scales": {"softcap": 3.0}},
    "gated": {"path": GATED, "sights": [Sight(window=3, causal=True), Sight()]},
    "rnn": {"path": RNN, "sights": [Sight(causal=True)] * 2},
    "DSpark's parts with DFlash's positions": {"from_anchor": False, "path": PathShape("vanilla", 6)},
    "no path": {"rank": 0, "confidence": False},
    "not normalized": {"normalizes": False},
    "trimmed": {"ids": IDS},
    "one layer": {"depth": 1, "layers": (0, 3), "size": 8},
    "causal": {"from_anchor": False, "sights": [Sight(causal=True)] * 2},
}


def embedded(model: CausalModel, values: dict[str, Any], anchor: int = int(TEXT[-1])) -> torch.Tensor:
    """Embeddings of a block: its anchor, then masks."""
    mask = values.get("mask_token_id", values.get("dflash_config", {}).get("mask_token_id"))
    ids = torch.tensor([anchor, *[mask] * (values["block_size"] - 1)])
    found: torch.Tensor = model.model.get_input_embeddings()(ids)
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernels", [True, False])
def test_a_few_lines_that_read_the_layout_compute_the_same(case: str, kernels: bool, tmp_path: Path) -> None:
    model, ids = target(kernels=kernels), CASES[case].get("ids")
    made, config, weights = stored(random_block(model, **CASES[case]), tmp_path)
    block = BlockModel(made, model)
    assert block.capabilities.own_threads is kernels and BlockConfig.read(made.config.as_plain()) == made.config
    states, masks = states_of(block, TEXT)[:-1], embedded(model, config)
    found = outputs_of(block, states, int(TEXT[-1]))
    wanted = reference_block(weights, config, states, masks)
    torch.testing.assert_close(found.double(), wanted, atol=2e-4, rtol=1e-3)
    other = reference_block(weights, {**config, "rope_theta": 17.0}, states, masks)
    assert not torch.allclose(other, wanted, atol=1e-2), "control"
    rows = target_rows(model, None if ids is None else torch.tensor(ids)).double()
    unary = block.config.scaled(wanted @ rows.T)
    torch.testing.assert_close(block.scores(found).double(), unary, atol=2e-3, rtol=1e-2)
    if block.config.path is not None:
        others = torch.randint(2, VOCAB, (len(found) - 1,), generator=torch.Generator().manual_seed(3)).tolist()
        before = [int(TEXT[-1]), *others]
        shown = model.model.get_input_embeddings()(torch.tensor(before))
        scores = reference_path(weights, config, unary, wanted, before, shown)
        torch.testing.assert_close(scores_of(block, found, before).double(), scores, atol=5e-3, rtol=1e-2)
        swapped = reference_path(weights, config, unary, wanted, before[::-1], shown.flip(0))
        assert not torch.allclose(swapped, scores, atol=1e-2), "control"
    if block.config.has_confidence:
        w, read = weights["confidence_head.proj.weight"][0].double(), wanted[2]
        if block.config.confidence_reads_markov:
            read = torch.cat([read, weights["markov_head.markov_w1.weight"][9].double()])
        share = torch.sigmoid(read @ w + weights["confidence_head.proj.bias"].double())
        assert float(block.acceptance(found[2], torch.tensor(9))) == pytest.approx(share.item(), abs=1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernels", [True, False])
def test_neighbouring_pairs_are_turned_where_a_file_states_it(kernels: bool, tmp_path: Path) -> None:
    """As LFM2.5's files do. A file whose rows of queries and keys are in that order reads as the same drafter."""
    model, original = target(kernels=kernels), random_block(target())
    made, values, weights = stored(original, tmp_path, rope_is_neox_style=False)
    block = BlockModel(made, model)
    states, masks = states_of(block, TEXT)[:-1], embedded(model, values)
    found = outputs_of(block, states, int(TEXT[-1])).double()
    torch.testing.assert_close(found, reference_block(weights, values, states, masks), atol=2e-4, rtol=1e-3)
    halves = reference_block(weights, {**values, "rope_is_neox_style": True}, states, masks)
    assert not torch.allclose(halves, found, atol=1e-2), "control"
    for name, weight in weights.items():
        heads = {"q_proj": 4, "k_proj": 2, "q_norm": 1, "k_norm": 1}.get(name.split(".")[-2])
        if heads is not None:
            pairs = weight.view(heads, 2, len(weight) // heads // 2, -1).transpose(1, 2)
            weights[name] = pairs.reshape(weight.shape).contiguous()
    save_file(weights, tmp_path / "model.safetensors")
    same, wanted = read_draft(tmp_path).module.state_dict(), original.module.state_dict()
    assert all(torch.equal(same[name], weight) for name, weight in wanted.items())


@pytest.mark.parametrize("states_scale", [True, False])
def test_embeddings_of_a_gemma_target_have_the_factor_that_a_file_means(states_scale: bool, tmp_path: Path) -> None:
    """DFlash's own files read the target's module, with its factor, unless they state another one."""
    model = CausalModel(make("gemma2", 3, vocab_size=VOCAB))
    original = random_block(model, from_anchor=False)
    changes = {}
    if not states_scale:
        own = original.config.as_plain()["dflash_config"]
        changes = {"dflash_config": {name: one for name, one in own.items() if name != "input_embedding_scale"}}
    made, values, weights = stored(original, tmp_path, **changes)
    block, embedding = BlockModel(made, model), model.model.get_input_embeddings()
    states, ids = states_of(block, TEXT)[:-1], torch.tensor([5, *[VOCAB - 1] * 4])
    both = torch.nn.functional.embedding(ids, embedding.weight), embedding(ids)
    assert not torch.allclose(*both)
    wanted, other = (reference_block(weights, values, states, one) for one in (both if states_scale else both[::-1]))
    found = outputs_of(block, states, 5).double()
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-3)
    assert not torch.allclose(found, other, atol=1e-2)
    student = BlockStudent(made, model, decay=1.0, anchors=None)
    assert torch.equal(student._embedded(ids), both[not states_scale]), "trained as it drafts"


@pytest.mark.parametrize("case", [*CASES][:7])
def test_what_is_trained_is_what_drafts(case: str) -> None:
    """Blocks of a whole text in one pass equal each block alone; control: a block that sees its own anchor's state."""
    model = target()
    made = random_block(model, **CASES[case])
    block = BlockModel(made, model)
    text = torch.randint(2, VOCAB, (12,), generator=torch.Generator().manual_seed(1))
    states, anchors = states_of(block, text), torch.tensor([[2, 5, 9]])
    ids = torch.full((1, 3, made.config.block_size), made.config.mask_token_id)
    ids[0, :, 0] = text[anchors[0]]
    with torch.no_grad():
        shown = model.model.get_input_embeddings()(ids) * made.config.embedding_scale
        trained = made.module.blocks(states[None], shown, anchors)[0]
    for i, anchor in enumerate(anchors[0].tolist()):
        alone = outputs_of(block, states[:anchor], int(text[anchor]))
        torch.testing.assert_close(alone, trained[i], atol=2e-4, rtol=1e-3)
    assert not torch.allclose(outputs_of(block, states[:6], int(text[5])), trained[1], atol=1e-2)


@pytest.mark.parametrize("case", ["dspark", "dflash2 in windows", "gated"])
def test_a_shorter_block_is_another_one_and_a_batch_changes_nothing(case: str) -> None:
    for kernels in (True, False):
        model = target(kernels=kernels)
        block = BlockModel(random_block(model, **CASES[case]), model)
        text = torch.randint(2, VOCAB, (9,), generator=torch.Generator().manual_seed(2))
        states = states_of(block, text)
        alone = [outputs_of(block, states[:n], int(text[n]), length) for n, length in ((3, 5), (7, 5), (5, 2))]
        cache = started(block, 4)
        block.add_context([block.features(states[:n]) for n in (3, 7, 5)], cache)
        together = block.run_block([int(text[n]) for n in (3, 7, 5)] + [1], [5, 5, 2, 0], cache)
        for i, one in enumerate(alone):
            same = torch.equal if kernels else torch.allclose  # a module's bits depend on the batch
            assert same(one, together[i, : len(one)])
        longer = outputs_of(block, states[:5], int(text[5]))[:2]
        assert torch.allclose(alone[2], longer, atol=1e-3) is all(one.causal for one in block.config.sights)


def in_passes(block: BlockModel) -> Any:
    """A drafter, each of whose drafts must be that of a pass over the whole text."""

    def wanted(text: torch.Tensor, draft: torch.Tensor) -> list[int]:
        outputs = outputs_of(block, states_of(block, text)[:-1], int(text[-1]))
        outputs = outputs[block.config.block_size - block.config.num_draft_tokens :]
        found: list[int] = scores_of(block, outputs, [int(text[-1]), *draft[:-1].tolist()]).argmax(-1).tolist()
        return found

    return compared(BlockDrafter(block, SMALL), wanted)


METHODS: dict[str, dict[str, Any]] = {
    "dspark": {"seed": 7},
    "dflash": {"from_anchor": False, "seed": 7},
    "dflash2": {**DFLASH2, "path": PathShape(SELECTOR, 6, candidates=4), "sights": [Sight(window=6)] * 2},
    "domino": {"from_anchor": False, "path": DOMINO_SHAPE},
    "rnn": {"path": RNN, "seed": 1},
    "jetspec": {"from_anchor": False, "sights": [Sight(causal=True)] * 2, "seed": 7},
}
"""Drafters of whose draft tokens some are right."""


@pytest.mark.parametrize("method", [*METHODS, "unfused"])
def test_each_draft_is_that_of_a_pass_over_the_whole_text(method: str) -> None:
    """Whatever was accepted, rewound, missed or moved before it; of different rows of a batch."""
    model = target(fused=method != "unfused", vocab=SMALL)
    drafter = in_passes(BlockModel(random_block(model, **METHODS.get(method, METHODS["dflash"])), model))
    assert len(accepted(decoded(model, drafter))) > 2 and drafter.compared > 150


@pytest.mark.parametrize("fused", [False, True])
def test_drafts_for_a_recurrent_target(fused: bool) -> None:
    """Fused layers keep a state for each position; the family's own code feeds tokens again."""
    model = recurrent_target("qwen3_5", fused)
    assert len(accepted(decoded(model, in_passes(BlockModel(random_block(model), model)), new=16, gamma=5))) > 2


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *(("best first", method) for method in METHODS),
        ("confident", "dspark"),
        ("cascade", "domino"),
        ("after lookup", "rnn"),
        ("hybrid", "dflash2"),
    ],
)
def test_greedy_output_is_that_of_plain_decoding(kind: str, method: str) -> None:
    """Some draft tokens are right, some wrong."""
    model = target(fused=kind == "best first", vocab=SMALL)
    block = BlockModel(random_block(model, **METHODS[method]), model)
    found = accepted(decoded(model, KINDS[kind](block), gamma=5))
    assert 0 in found and max(found) >= 2


def test_a_long_prompt_and_a_block_at_the_context_limit() -> None:
    model = target(vocab=SMALL, max_position_embeddings=2048)
    drafter = in_passes(BlockModel(random_block(model, seed=2), model))
    prompts = [[(3 * i + i // 7) % SMALL for i in range(n)] for n in (600, 5, 300)]
    decoded(model, drafter, prompts=prompts, new=2, gamma=3, join_later=0)
    assert drafter.compared > 20
    model = target(vocab=SMALL, max_position_embeddings=32)
    decoded(model, BlockDrafter(BlockModel(random_block(model), model), SMALL), new=64, gamma=5)


def test_confidence_ends_blocks() -> None:
    """A higher bound drafts fewer tokens, of which more are accepted if the prediction means something."""
    model = target(vocab=SMALL)
    block, params = BlockModel(random_block(model), model), SamplingParams(max_new_tokens=40, ignore_eos=True)
    drafted = []
    for least in (0.0, 0.3, 0.6, 1.0):
        _, steps, _ = run(model, PROMPTS, params, drafter=BlockDrafter(block, SMALL, confidence=least), gamma=5)
        drafted.append(sum(step.num_drafted for step in steps) / len(steps))
    assert drafted == sorted(drafted, reverse=True) and drafted[0] > drafted[1] > drafted[2] >= drafted[3]
    with refused("confidence", 0.3):
        BlockDrafter(BlockModel(random_block(model, confidence=False), model), SMALL, confidence=0.3)


def test_weights_in_8_bits_draft_as_well() -> None:
    model = target()
    made = random_block(model)
    states = states_of(BlockModel(made, model), torch.arange(2, 12))
    whole, rounded = (outputs_of(BlockModel(made, model, **more), states, 5) for more in ({}, {"make": quantizer(8)}))
    assert not torch.equal(whole, rounded)
    assert float((whole - rounded).abs().mean()) < 0.05 * float(whole.abs().mean())


# -- files -------------------------------------------------------------------------------------------------------------


def test_published_layouts(caplog: pytest.LogCaptureFixture) -> None:
    """Fields as DFlash's and DSpark's files have them; what tests/unit/models/drafts reads is theirs. Unknown ones are noted."""
    values = random_block(target(), layers=(0, 2)).config.as_plain()
    assert values["architectures"] == ["Qwen3DSparkModel"] and values["target_layer_ids"] == [-1, 1]
    dflash = random_block(target(), from_anchor=False).config
    values, own = dflash.as_plain(), {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 1], "block_size": 5}
    assert values["dflash_config"] == {**own, "causal": False, "input_embedding_scale": 1.0}
    assert dflash.num_draft_tokens == 4 and BlockConfig.read(values) == dflash and not caplog.records
    BlockConfig.read({**values, "dflash_config": {**values["dflash_config"], "new_part": 3, "num_anchors": 512}})
    assert "not known are ignored: new_part" in caplog.text


def test_copies_of_the_targets_layers_in_a_file(tmp_path: Path) -> None:
    model = target()
    made, embeddings = random_block(model), model.model.get_input_embeddings().weight
    write_draft(made, tmp_path, lm_head=target_rows(model, None), embeddings=embeddings)
    found = read_draft(tmp_path)
    assert found.module.lm_head is not None and found.module.embed_tokens is not None
    states = states_of(BlockModel(made, model), torch.arange(2, 9))
    torch.testing.assert_close(*(outputs_of(BlockModel(one, model), states, 3) for one in (found, made)))


FILE = "the block drafter's config.json: "


@pytest.mark.parametrize(
    ("changes", "param", "value"),
    [
        ({"block_size": 1}, f"{FILE}block_size", 1),
        ({"block_size": None}, f"{FILE}block_size", None),
        ({"mask_token_id": VOCAB}, "mask_token_id", 97),
        ({"target_layer_ids": None}, "target_layer_ids", None),
        ({"target_layer_ids": [-2]}, f"{FILE}target_layer_ids", [-2]),
        ({"markov_head_type": "fir"}, f"{FILE}markov_head_type", "fir"),
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
        ({"layer_types": 3}, f"{FILE}layer_types", 3),
        ({"model_type": "gemma3"}, "model_type", "gemma3"),
        ({"hidden_size": None}, f"{FILE}hidden_size", None),
        ({"target_hidden_size": 64}, "target_hidden_size", 64),
        ({"num_key_value_heads": 3}, "num_key_value_heads", 3),
        ({"attention_bias": True}, "attention_bias", True),
        ({"markov_rank": -1}, f"{FILE}markov_rank", -1),
        ({"rope_parameters": {"rope_type": "odd"}}, f"{FILE}rope_parameters.rope_type", "odd"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            f"{FILE}rope_parameters.partial_rotary_factor",
            0.5,
        ),
        ({"partial_rotary_factor": 0.5}, f"{FILE}partial_rotary_factor", 0.5),
        ({"layer_types": None, "use_sliding_window": True}, "sliding_window", None),
        ({"num_draft_layers": 7}, "num_draft_layers", 7),
        ({"logits_scaling": 8.0}, "logits_scaling", 8.0),
        ({"attention_multiplier": 0.5}, "attention_multiplier", 0.5),
    ],
    ids=str,
)
def test_configurations_that_are_refused(changes: dict[str, Any], param: str, value: Any) -> None:
    values = {**random_block(target()).config.as_plain(), **changes}
    with refused(param, value):
        BlockConfig.read({k: v for k, v in values.items() if v is not None})


def test_another_target_is_refused_by_name() -> None:
    """Files that are not whole are in test_heads.py."""
    model = target()
    made = random_block(model, ids=[1, 5, 9])
    narrow = CausalModel(make("llama", 3, tie_word_embeddings=False))
    narrow.model.lm_head = torch.nn.Linear(32, VOCAB - 7, bias=False)
    for draft, wrong, param, value in (
        (made, target(vocab=SMALL), "vocabulary", 97),
        (made, target(hidden_size=40, head_dim=10), "hidden size", 32),
        (random_block(model), narrow, "draft_vocab_size", 97),
        (random_block(model, layers=(1, 3)), target(num_hidden_layers=2), "hidden_layers", 3),
    ):
        with refused(param, value):
            BlockModel(draft, wrong, name="other")


def test_by_name(tmp_path: Path) -> None:
    """As a drafter's expression, alone, in a hybrid and as a tree; the output is that of plain decoding."""
    folder = tiny.save(tmp_path / "model")
    loaded = load(str(folder), drafter="none", dtype="fp32")
    assert isinstance(loaded.target.model, CausalModel)
    write_draft(random_block(loaded.target.model, layers=(0, 1)), tmp_path)
    plain = loaded.generate("abcabcabc", max_new_tokens=20).token_ids
    alone = [f"block({tmp_path}{more})" for more in ("", ", confidence=0.2", ", nodes=6")]
    for drafter in (*alone, f"hybrid(suffix, block={tmp_path}; k=3)"):
        other = load(str(folder), drafter=drafter, dtype="fp32", length=3)
        assert other.generate("abcabcabc", max_new_tokens=20).token_ids == plain
    with pytest.raises(ModelNotFoundError, match="block drafter"):
        load(str(folder), drafter="block(./nowhere)")
