"""Heads on hidden states: their layout read once more by a few lines, their files, and what they draft."""

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
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, HeadDrafter, PromptLookup, target_features
from foresay.drafters.target_features import TargetFeatures
from foresay.engine.prefixes import PrefixStore
from foresay.errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError
from foresay.generation.load import change, load
from foresay.lengths import ConstantLength
from foresay.models.drafts.base import NEXT, target_rows
from foresay.models.drafts.config import HeadConfig, usual_layers
from foresay.models.drafts.files import read_draft, write_draft
from foresay.models.drafts.head import HeadModel
from foresay.models.drafts.layers import RMSNorm
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import quantizer, unquantized
from foresay.models.sources.load_options import LoadOptions
from helpers import heads, tiny
from helpers.blocks import random_block
from helpers.drafting import OTHER_DRAFT, PROMPTS, SMALL, accepted, compared, decoded, recurrent_target, stored
from helpers.drafting import llama_target as target
from helpers.families import VOCAB, make
from helpers.heads import Layout, random_head
from helpers.passes import hidden_states
from helpers.refusals import refused
from helpers.support import run


def shown(head: HeadModel, tokens: torch.Tensor) -> torch.Tensor:
    """Hidden states of one text, [S, L * H]."""
    return head.joined(hidden_states(head.target, tokens, head.hidden_layers))


def chain(head: HeadModel, text: torch.Tensor, drafts: torch.Tensor) -> list[torch.Tensor]:
    """Scores after a text and after each draft token, [V] each, by passes of the head."""
    return heads.chain(head, text[1:], head.features(shown(head, text))[:-1], drafts.tolist())


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "trimmed": {"before": True, "ids": [1, 5, 6, 30, 41, 89]},
    "EAGLE-3.1": {"before": True, "parts": {"norm_before_fc": True, "norm_output": True}},
    "norms and a window": {"parts": {"fc_norm": True, "window": 3}},
}


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("kernels", [True, False])
def test_a_few_lines_that_read_the_layout_compute_the_same(case: str, kernels: bool, tmp_path: Path) -> None:
    """By the tensors of the file; a few lines that read it otherwise do not agree."""
    model, ids = target(kernels=kernels), LAYOUTS[case].get("ids")
    made = random_head(model, **LAYOUTS[case])
    again, config, weights = stored(made, tmp_path)
    assert again.config == dataclasses.replace(made.config, target="")
    head = HeadModel(again, model)
    assert head.capabilities.own_threads is kernels
    text, drafts = torch.tensor([3, 17, 29, 3, 80, 41]), torch.tensor([5, 30, 5])
    states = shown(head, text)[:-1]
    embedded = model.model.get_input_embeddings()(torch.cat([text[1:], drafts]))
    rows = target_rows(model, None if ids is None else torch.tensor(ids))
    wanted, found = Layout(weights, config).chain(states, embedded, rows), chain(head, text, drafts)
    for ours, theirs in zip(found, wanted, strict=True):
        kept = ours if ids is None else ours[ids]
        torch.testing.assert_close(kept.double(), theirs, atol=2e-4, rtol=1e-3)
        assert ids is None or int((ours > -torch.inf).sum()) == len(ids)
    config["norm_before_residual"] = not config["norm_before_residual"]
    other = Layout(weights, config).chain(states, embedded, rows)
    assert not torch.allclose(other[-1], wanted[-1], atol=1e-2)


@pytest.mark.parametrize("case", LAYOUTS)
def test_what_is_trained_is_what_drafts(case: str) -> None:
    """Unrolled over a whole text, each position is a chain of its own; control: one that sees its neighbours' draft tokens."""
    model, pairs, steps = target(), 6, 4
    made = random_head(model, **{**LAYOUTS[case], "ids": None})
    head = HeadModel(made, model)
    text = torch.randint(2, VOCAB, (12,), generator=torch.Generator().manual_seed(1))
    states = shown(head, text)[None]
    embedded = model.model.get_input_embeddings()(text)[None, 1:]
    with torch.no_grad():
        unrolled = made.module.unrolled(states[:, :pairs], embedded, steps)
    for last in range(2, pairs):
        found = chain(head, text[: last + 2], text[last + 2 : last + 1 + steps])
        for step, scores in enumerate(found):
            wanted = target_rows(model, None) @ unrolled[step][0, last]
            torch.testing.assert_close(scores, wanted, atol=2e-4, rtol=1e-3)
    assert not torch.allclose(unrolled[1][0, 2], unrolled[0][0, 3], atol=1e-2), "a draft token is not what was shown"


@pytest.mark.parametrize(("kind", "fused"), [("tree", True), ("cascade", False), ("after", True)])
def test_greedy_output_by_other_drafters_of_a_head(kind: str, fused: bool) -> None:
    """Some draft tokens are right, some wrong."""
    model = target(fused=fused, vocab=SMALL)
    # a tree follows one wrong path where a head is sure of it
    head = HeadModel(random_head(model, seed=5, gain=1.0) if kind == "tree" else random_head(model), model)
    drafter = HeadDrafter(head, SMALL, nodes=9 if kind == "tree" else 0)
    if kind != "tree":
        members = [drafter, PromptLookup(min_ngram=1)]
        drafter = Cascade(members if kind == "cascade" else members[::-1], [[2, 2], [0, 0]])  # type: ignore[assignment]
    found = accepted(decoded(model, drafter, gamma=9 if kind == "tree" else 5))
    assert 0 in found and max(found) >= 2


def in_passes(head: HeadModel) -> Any:
    """A drafter, each of whose drafts must be that of passes over the whole text."""

    def wanted(text: torch.Tensor, draft: torch.Tensor) -> list[int]:
        return [int(one.argmax()) for one in chain(head, text, draft[:-1])]

    return compared(HeadDrafter(head, SMALL), wanted)


def feeds_again() -> CausalModel:
    return recurrent_target("qwen3_5", fused=False)


TARGETS: dict[str, Callable[[], CausalModel]] = {
    "llama": lambda: target(vocab=SMALL),
    "feeds again": feeds_again,
    "qwen3_5": lambda: recurrent_target("qwen3_5"),
    "lfm2": lambda: recurrent_target("lfm2"),
    "latent attention": lambda: CausalModel(make("deepseek_v3", 3, vocab_size=SMALL, tie_word_embeddings=False)),
}


@pytest.mark.parametrize(("made", "batch"), [("llama", 1), *((made, 3) for made in TARGETS)])
def test_each_draft_is_that_of_passes_over_the_whole_text(made: str, batch: int) -> None:
    """Whatever was accepted, rewound, missed or moved before it; alone, a row drafts in one call."""
    model = TARGETS[made]()
    drafter = in_passes(HeadModel(random_head(model, seed=7 if made == "lfm2" else 8), model))
    assert len(accepted(decoded(model, drafter, max_batch_size=batch))) > 2 and drafter.compared > 150


class _Pausing(ConstantLength):
    """Drafts in every fifth step only."""

    steps = 0

    def budget(self, rows: Any) -> list[int]:
        self.steps += 1
        return [0 if self.steps % 5 else n for n in super().budget(rows)]


def paused(model: CausalModel) -> int:
    """Number of draft tokens compared."""
    drafter = in_passes(HeadModel(random_head(model, seed=2), model))
    decoded(model, drafter, new=40, policy=_Pausing(4))
    return int(drafter.compared)


@pytest.mark.parametrize("kept", [0, 2000, target_features.MAX_BYTES])
def test_hidden_states_that_wait_for_a_draft_give_the_same(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether their features are computed in each pass, after some, or when they are read; while rows join and leave."""
    monkeypatch.setattr(target_features, "MAX_BYTES", kept)
    assert paused(target(vocab=SMALL)) > 60
    if kept > 2000:
        assert paused(feeds_again()) > 60


def test_wrong_positions_and_lost_passes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: hidden states read from the start of a pass, where tokens are fed again; and those of another pass."""
    add, compute = TargetFeatures.add, TargetFeatures.compute

    def losing(self: TargetFeatures, features: Any) -> None:
        if len(self._passes) > 3:
            self._passes[1] = self._passes[0]
        compute(self, features)

    def from_the_start(self: TargetFeatures, rows: Rows, verification: Any, target: Any) -> None:
        add(self, rows, verification, target and dataclasses.replace(target, starts=()))

    for name, wrong, model in (
        ("add", from_the_start, feeds_again()),
        ("compute", losing, target(vocab=SMALL)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(TargetFeatures, name, wrong)
            with pytest.raises(OTHER_DRAFT):
                paused(model)


def test_a_rows_draft_is_the_same_alone_and_in_a_batch() -> None:
    """Bit for bit, so that a seed's text is."""
    model = target()
    head = HeadModel(random_head(model), model)
    generator = torch.Generator().manual_seed(4)
    tokens, counts = torch.randint(2, VOCAB, (5, 3), generator=generator), [3, 1, 2, 3, 1]
    states = {layer: torch.randn(5, 3, 32, generator=generator) for layer in head.hidden_layers}
    features = head.features(head.joined(states))

    def scores(rows: list[int]) -> torch.Tensor:
        """The scores of two passes, [B, 2, V]."""
        cache, some = head.new_cache(), [counts[i] for i in rows]
        cache.add_rows(len(rows))
        given = ModelInput(tokens[rows, : max(some)], some, logits=Logits.LAST, features=features[rows, : max(some)])
        first = head.forward(given, cache)
        after = first.hidden[NEXT][torch.arange(len(rows)), torch.tensor(some) - 1][:, None]
        given = ModelInput(tokens[rows, :1], [1] * len(rows), logits=Logits.LAST, features=after)
        return torch.cat([first.scores(), head.forward(given, cache).scores()], 1)

    together = scores([0, 1, 2, 3, 4])
    assert all(torch.equal(scores([i])[0], together[i]) for i in range(5))


def test_a_long_prompt_is_filled_in_pieces() -> None:
    model = target(vocab=SMALL, max_position_embeddings=2048)
    drafter = in_passes(HeadModel(random_head(model, seed=2), model))
    prompts = [[(3 * i + i // 7) % SMALL for i in range(n)] for n in (600, 5, 300)]
    decoded(model, drafter, prompts=prompts, new=2, gamma=3, join_later=0)
    assert drafter.compared > 20


@pytest.mark.parametrize("max_bytes", [0, 1 << 20])
def test_prompts_that_begin_alike_share_what_was_shown(max_bytes: int) -> None:
    """Live rows and rows that ended."""
    model, begin = target(vocab=SMALL), [(5 * i + i // 3) % SMALL for i in range(40)]
    drafter = in_passes(HeadModel(random_head(model, seed=2), model))
    prompts = [[*begin, *end] for end in ([1, 2], [3], [1, 2, 4, 4], [6, 6], [3, 3])]
    store = PrefixStore(max_bytes)
    steps = decoded(model, drafter, prompts=prompts, new=4, gamma=3, join_later=0, max_batch_size=2, prefixes=store)
    assert max(step.num_cached or 0 for step in steps) >= 40 and drafter.compared > 30


def test_a_drafter_that_failed_leaves_rows_alone_that_were_never_shown() -> None:
    """A row that was there before cannot be drafted for again; one that comes after can."""
    model = target(vocab=SMALL)
    head, calls = HeadModel(random_head(model), model), list[int]()
    forward = head.forward

    def failing(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 8:
            raise RuntimeError("once")
        return forward(*given)

    head.forward = failing  # type: ignore[method-assign]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    plain, _, _ = run(model, PROMPTS, params, gamma=0)
    ours, steps, engine = run(model, PROMPTS, params, drafter=HeadDrafter(head, SMALL), gamma=3, max_batch_size=2)
    assert ours == plain and engine.draft_failures == 1
    assert any(step.num_drafted for step in steps if step.request_id >= 2)


# -- files -------------------------------------------------------------------------------------------------------------


def without(values: dict[str, Any], name: str) -> dict[str, Any]:
    """A config.json without a field, in any of its sections."""
    return {key: without(one, name) if isinstance(one, dict) else one for key, one in values.items() if key != name}


def within(values: dict[str, Any], part: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A config.json with fields in a section."""
    return {**values, part: {**values.get(part, {}), **fields}}


@pytest.mark.parametrize("ids", [None, [0, 4, 9]])
def test_either_layout_comes_back(ids: list[int] | None, tmp_path: Path) -> None:
    head = random_head(target(), ids=ids, before=True)
    for layout in ("plain", "speculators"):
        write_draft(head, tmp_path, layout=layout)  # type: ignore[arg-type]
        again = read_draft(tmp_path)
        assert again.config.layer == head.config.layer and again.config.hidden_layers == head.config.hidden_layers
        assert again.config.norm_before_residual and again.config.draft_vocab_size == (3 if ids else VOCAB)  # type: ignore[attr-defined]
        assert (None if again.token_ids is None else again.token_ids.tolist()) == ids
        weights = again.module.state_dict()
        assert all(torch.equal(weight, weights[name]) for name, weight in head.module.state_dict().items())
        values = without(json.loads((tmp_path / "config.json").read_text()), "norm_before_residual")
        assert HeadConfig.read(values).norm_before_residual == (layout == "speculators"), "what a file means without it"
    assert HeadConfig.read({**head.config.as_plain(), "eagle_config": {}}).hidden_layers is None
    assert usual_layers(32) == (2, 16, 29)


def test_a_field_is_read_from_each_section_that_has_it(caplog: pytest.LogCaptureFixture) -> None:
    """Other engines read these in `eagle_config`, next to it, and among the layer's fields; of unknown ones there is a note."""
    fields: dict[str, Any] = {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": True,
        "norm_output": True,
        "draft_vocab_size": 7,
        "target_hidden_size": 48,
        "eagle_aux_hidden_state_layer_ids": [1, 2],
        "rope_theta": 7e5,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rms_norm_eps": 1e-3,
    }
    config = random_head(target()).config
    for layout, parts in (
        (config.as_plain(), ("eagle_config",)),
        (config.as_speculators(), ("transformer_layer_config", "eagle_config")),
    ):
        for name, value in fields.items():
            bare = without(layout, name)
            usual, wanted = (repr(HeadConfig.read(one)) for one in (bare, {**bare, name: value}))
            assert wanted != usual or name == "norm_before_residual"
            assert {repr(HeadConfig.read(within(bare, part, {name: value}))) for part in parts} == {wanted}, name
            if name == "norm_before_residual":
                off = {repr(HeadConfig.read(within(bare, part, {name: False}))) for part in parts}
                assert off == {repr(HeadConfig.read({**bare, name: False}))} != {wanted}
        caplog.clear()
        HeadConfig.read({**layout, "torch_dtype": "bfloat16", "initializer_range": 0.02, "use_cache": True})
        assert not caplog.text
        HeadConfig.read(within({**layout, "new_gate": 2}, "eagle_config", {"new_part": 1}))
        assert "new_gate, new_part" in caplog.text


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "param", "value"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers", 2),
        ({"norm_before_fc": 3.5}, "the head's config.json: norm_before_fc", 3.5),
        ({"attention_bias": True}, "attention_bias", True),
        ({"kv_lora_rank": 512}, "kv_lora_rank", 512),
        ({"logits_scaling": 8.0}, "logits_scaling", 8.0),
        ({"layer_types": ["sliding_attention"]}, "sliding_window", None),
        ({"layer_types": ["linear_attention"]}, "layer_types", "linear_attention"),
        ({"hidden_size": None}, "the head's config.json: hidden_size", None),
        ({"draft_vocab_size": 1000}, "draft_vocab_size", 1000),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state", False),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state", True),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm", False),
        ({"eagle_config": {"eh_proj_before_attn": True}}, "eh_proj_before_attn", True),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step", 4),
        ({"eagle_config": 3}, "eagle_config", 3),
        # two values of a field
        ({"norm_before_residual": False, "eagle_config": {"norm_before_residual": True}}, "norm_before_residual", True),
        ({"eagle_config": {"vocab_size": 96}}, "vocab_size", 96),
        ({"eagle_config": {"draft_vocab_size": 9}}, "draft_vocab_size", 9),
        ({"transformer_layer_config": {"vocab_size": 96}, "vocab_size": VOCAB}, "vocab_size", 96),
        ({"transformer_layer_config": {"draft_vocab_size": 9}}, "draft_vocab_size", 9),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta", 10000.0),
        ({"rope_scaling": {**LINEAR, "type": "yarn"}}, "rope_type", "yarn"),
        ({"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 4.0}}, "factor", 2.0),
        ({"norm_output": False, "return_hidden_post_norm": True}, "return_hidden_post_norm", True),
    ],
    ids=str,
)
def test_configurations_that_are_refused(changes: dict[str, Any], param: str, value: Any) -> None:
    config = random_head(target()).config
    values = config.as_speculators() if "transformer_layer_config" in changes else config.as_plain()
    for name, one in changes.items():
        values = within(values, name, one) if name == "transformer_layer_config" else {**values, name: one}
    with refused(param, value):
        HeadConfig.read(values)


def test_equal_values_of_a_field_are_read() -> None:
    values = random_head(target()).config.as_plain()
    HeadConfig.read({**values, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})


def test_tensors_that_other_engines_write(tmp_path: Path) -> None:
    """Other names; an output layer and embeddings of its own, which are one by `tie_word_embeddings` if the file has no other."""
    model, path, text = target(), tmp_path / "config.json", torch.tensor([4, 5, 6])
    head = random_head(model)
    write_draft(head, tmp_path)
    tensors, values = load_file(tmp_path / "model.safetensors"), json.loads(path.read_text())
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    assert torch.equal(read_draft(tmp_path).module.fc.weight, tensors["fc.weight"])
    [shared] = chain(HeadModel(head, model), text, text[:0])
    head.module.embed_tokens = torch.nn.Embedding(VOCAB, head.config.hidden_size)
    write_draft(head, tmp_path)
    assert read_draft(tmp_path).module.lm_head is None
    path.write_text(json.dumps(values | {"tie_word_embeddings": True}))
    tied: Any = read_draft(tmp_path).module
    assert torch.equal(tied.lm_head.weight, head.module.embed_tokens.weight)
    own = torch.randn(VOCAB, head.config.hidden_size)
    write_draft(head, tmp_path, lm_head=own)
    path.write_text(json.dumps(values | {"tie_word_embeddings": True}))
    found = read_draft(tmp_path)
    assert torch.equal(found.module.lm_head.weight, own)  # type: ignore[union-attr, arg-type]
    assert not torch.allclose(chain(HeadModel(found, model), text, text[:0])[0], shared, atol=1e-2)


@pytest.mark.parametrize("make_one", [random_head, random_block])
def test_files_that_are_not_whole(make_one: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        read_draft(tmp_path)
    _, _, tensors = stored(make_one(target(), ids=[1, 2, 3]), tmp_path)
    weights = tmp_path / "model.safetensors"
    lacking = {name: {n: t for n, t in tensors.items() if n != name} for name in ("norm.weight", "d2t", "fc.weight")}
    wrong = {
        r"norm.weight.*\[3\]": {"norm.weight": torch.ones(3)},
        r"fc\.weight": {"fc.weight": tensors["fc.weight"][:, :-1].contiguous()},
        "d2t must be": {"d2t": torch.tensor([5, 1, 0])},
        "extra": {"extra": torch.ones(3)},
    }
    for message, some in {**lacking, **{name: tensors | one for name, one in wrong.items()}}.items():
        save_file(some, weights)
        with pytest.raises(ModelLoadError, match=message):
            read_draft(tmp_path)
    weights.write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match="cannot read"):
        read_draft(tmp_path)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match="pickled"):
        read_draft(tmp_path)


def test_another_target_is_refused_by_name() -> None:
    for changes, param, value in (
        ({"vocab_size": 90}, "vocabulary", VOCAB),
        ({"hidden_size": 40}, "hidden size", 32),
        ({"num_hidden_layers": 2}, "hidden_layers", 3),
    ):
        with refused(param, value):
            HeadModel(random_head(target(), layers=(0, 1, 3)), CausalModel(make("llama", **changes)), name="other")
    head = random_head(target(), layers=(1, 2))
    with refused("hidden_layers", (1,)):
        HeadModel(dataclasses.replace(head, config=dataclasses.replace(head.config, hidden_layers=(1,))), target())


# -- by name -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "bits"),
    [({}, 8), ({"draft_weights": "bf16"}, None), ({"draft_weights": "int4"}, 4), ({"dtype": "float32"}, None)],
)
def test_a_head_is_rounded_unless_its_weights_are_named(
    options: dict[str, Any], bits: int | None, tmp_path: Path
) -> None:
    """Scores are those of the same head with its matrices rounded; the output is the target's all the same."""
    folder, out = tiny.save(tmp_path / "model"), tmp_path / "head"
    generator = load(str(folder), dtype=options.get("dtype", "bfloat16"))
    model: Any = generator.target.model
    out.mkdir()
    write_draft(random_head(model), out)
    drafted = load(str(folder), drafter=f"head({out})", **{"dtype": "bfloat16", **options})
    (head,) = drafted.resources.drafts.values()  # type: ignore[union-attr]
    plain = HeadModel(read_draft(out), model, make=unquantized if bits is None else quantizer(bits))
    text, drafts = torch.arange(10, 30), torch.tensor([40, 41])
    wanted, found = (torch.stack(chain(one, text, drafts)) for one in (plain, head))
    assert torch.equal(wanted, found)
    if bits is not None:
        exact = torch.stack(chain(HeadModel(read_draft(out), model), text, drafts))
        assert not torch.equal(exact, found) and (exact - found).std() < 0.5 * exact.std()
    one, other = (each.generate("the number 7", max_new_tokens=12).text for each in (drafted, generator))
    assert one == other


def test_a_head_is_where_its_target_is_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device, or a target that processes share, is refused and not ignored."""
    folder, out = tiny.save(tmp_path / "model"), tmp_path / "head"
    generator = load(str(folder), dtype="fp32", device="cpu", draft_device="cpu", drafter="none")
    model: Any = generator.target.model
    out.mkdir()
    write_draft(random_head(model), out)
    heads = (f"head({out})", f"hybrid(suffix, head={out}; k=2)", f"head({out}, nodes=9)")
    for one in heads:
        change(generator, drafter=one)
    assert generator.resources is not None
    generator.resources.drafts.clear()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    generator.resources.options = LoadOptions(dtype="fp32", device="cpu", draft_device="cuda:1")
    for one in heads:
        with refused("draft_device", "cuda:1"):
            change(generator, drafter=one)
    generator.resources.options = LoadOptions(dtype="fp32")
    model.is_shared = True
    with pytest.raises(UnsupportedModelError, match="split by tp_plan"):
        change(generator, drafter=heads[0])


def test_a_norm_has_the_precision_of_its_input() -> None:
    """PyTorch warns of two precisions, and computes slowly."""
    norm, x = RMSNorm(8, 1e-5), torch.randn(3, 8)
    assert norm(x.bfloat16()).dtype is torch.bfloat16
    assert torch.equal(norm(x), torch.nn.functional.rms_norm(x, (8,), norm.weight, 1e-5))


@pytest.mark.parametrize("family", ["gemma", "gemma3"])
def test_a_head_reads_embeddings_without_gemmas_factor(family: str) -> None:
    """As other engines do, which share the weights of the target alone; the output is that of plain decoding."""
    model = CausalModel(make(family, 4, vocab_size=SMALL))
    model.use_fused()
    head = HeadModel(random_head(model, layers=(0, 2)), model)
    ids, embedding = torch.tensor([2, 5]), model.model.get_input_embeddings()
    assert torch.equal(head._embed(ids), embedding.weight[ids])
    assert not torch.allclose(embedding(ids), embedding.weight[ids], rtol=0.5)
    decoded(model, HeadDrafter(head, SMALL), new=4, gamma=3)
