"""Heads on hidden states: their layout read once more by a few lines, their files, and what they draft."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foresay.decoding.acceptance import Speculative
from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import Cascade, HeadDrafter, PromptLookup, target_features
from foresay.drafters.target_features import TargetFeatures
from foresay.engine import Engine
from foresay.engine.prefixes import PrefixStore
from foresay.errors import ConfigError, ModelLoadError, ModelNotFoundError, UnsupportedModelError
from foresay.generation.load import change, load
from foresay.lengths import ConstantLength
from foresay.models.drafts.base import LAST, NEXT, StoredDraft, target_rows
from foresay.models.drafts.config import HeadConfig, usual_layers
from foresay.models.drafts.files import read_draft, write_draft
from foresay.models.drafts.head import HeadModel
from foresay.models.drafts.layers import RMSNorm
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import quantizer, unquantized
from foresay.models.huggingface.recurrent import RecurrentModel
from foresay.models.sources.load_options import LoadOptions
from helpers import tiny
from helpers.families import VOCAB, make
from helpers.heads import random_head, reference_scores
from helpers.refusals import refused
from helpers.support import run

SMALL = 7
"""Tokens of a target whose draft tokens are often right, whatever they are."""


def target(*, lean: bool = True, kernels: bool = True, vocab: int = VOCAB, **changes: Any) -> CausalModel:
    """kernels: False for numbers that no kernel reads."""
    made = make("llama", 3, vocab_size=vocab, tie_word_embeddings=False, **changes)
    model = CausalModel(made if kernels else made.double())
    if lean and kernels:
        model.use_fused()
    return model


def shown(model: CausalModel, tokens: torch.Tensor) -> dict[int, torch.Tensor]:
    """Hidden states of one text, layer -> [1, S, H]."""
    cache = model.new_cache()
    cache.add_rows(1)
    layers = tuple(range(model.num_layers + 1))
    model_input = ModelInput(tokens[None], [len(tokens)], logits=Logits.NONE, hidden_layers=layers)
    return dict(model.forward(model_input, cache).hidden)


def chain(model: CausalModel, head: HeadModel, text: torch.Tensor, drafts: torch.Tensor) -> list[torch.Tensor]:
    """Scores after a text and after each draft token, [V] each, by passes of the head."""
    features = head.features(head.joined(shown(model, text)))[:, :-1]
    cache = head.new_cache()
    cache.add_rows(1)
    count = len(text) - 1
    out = head.forward(ModelInput(text[None, 1:], [count], logits=Logits.LAST, features=features), cache)
    scores, after = [out.scores()[0, 0]], out.hidden[NEXT][:, -1:]
    for draft_tokens in drafts:
        out = head.forward(ModelInput(draft_tokens.view(1, 1), [1], logits=Logits.LAST, features=after), cache)
        scores, after = [*scores, out.scores()[0, 0]], out.hidden[NEXT]
    return scores


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"before": True, "ids": [1, 5, 6, 30, 41, 89]},
    {"before": True, "parts": {"norm_before_fc": True, "norm_output": True}},  # EAGLE-3.1
    {"parts": {"fc_norm": True, "window": 3}},
]


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("kernels", [True, False])
def test_a_few_lines_that_read_the_layout_compute_the_same(case: dict[str, Any], kernels: bool, tmp_path: Path) -> None:
    """By the tensors of the file; a few lines that read it otherwise do not agree."""
    model, ids = target(kernels=kernels), case.get("ids")
    made = random_head(model, **case)
    write_draft(made, tmp_path)
    assert read_draft(tmp_path).config == dataclasses.replace(made.config, target="")
    head = HeadModel(read_draft(tmp_path), model)
    assert head.capabilities.own_threads is kernels
    text, drafts = torch.tensor([3, 17, 29, 3, 80, 41]), torch.tensor([5, 30, 5])
    hidden = shown(model, text)
    states = torch.cat([hidden[layer][0, :-1] for layer in head.hidden_layers], -1)
    embedded = model.model.get_input_embeddings()(torch.cat([text[1:], drafts]))
    config, weights = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    rows = target_rows(model, None if ids is None else torch.tensor(ids))
    wanted = reference_scores(weights, config, states, embedded, rows)
    found = chain(model, head, text, drafts)
    assert len(found) == len(wanted) == 4
    for ours, theirs in zip(found, wanted, strict=True):
        kept = ours if ids is None else ours[ids]
        torch.testing.assert_close(kept.double(), theirs, atol=2e-4, rtol=1e-3)
        assert ids is None or int((ours > -torch.inf).sum()) == len(ids)
    config["norm_before_residual"] = not config["norm_before_residual"]
    other = reference_scores(weights, config, states, embedded, rows)
    assert not torch.allclose(other[-1], wanted[-1], atol=1e-2)


@pytest.mark.parametrize("case", LAYOUTS)
def test_what_is_trained_is_what_drafts(case: dict[str, Any]) -> None:
    """Unrolled over a whole text, each position is a chain of its own; control: one that sees its neighbours' draft tokens."""
    model = target()
    made = random_head(model, **{**case, "ids": None})
    head = HeadModel(made, model)
    text = torch.randint(2, VOCAB, (12,), generator=torch.Generator().manual_seed(1))
    hidden = shown(model, text)
    states = torch.cat([hidden[layer] for layer in head.hidden_layers], -1)
    embedded = model.model.get_input_embeddings()(text)[None, 1:]
    pairs, steps = 6, 4
    with torch.no_grad():
        unrolled = made.module.unrolled(states[:, :pairs], embedded, steps)
    for last in range(2, pairs):
        found = chain(model, head, text[: last + 2], text[last + 2 : last + 1 + steps])
        for step, scores in enumerate(found):
            wanted = target_rows(model, None) @ unrolled[step][0, last]
            torch.testing.assert_close(scores, wanted, atol=2e-4, rtol=1e-3)
    assert not torch.allclose(unrolled[1][0, 2], unrolled[0][0, 3], atol=1e-2), "a draft token is not what was shown"


PROMPTS = [[5, 6, 1, 2, 3, 4, 5], [2], [1, 2, 1], [6] * 9, [3, 1] * 8]


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("kind", ["chain", "tree", "cascade", "behind"])
def test_greedy_output_is_that_of_plain_decoding(kind: str, lean: bool) -> None:
    """Batched, ragged, joining late; some draft tokens right, some wrong."""
    model = target(lean=lean, vocab=SMALL)
    # a tree follows one wrong path where a head is sure of it
    head = HeadModel(random_head(model, seed=5, gain=1.0) if kind == "tree" else random_head(model), model)
    drafter = {
        "chain": lambda: HeadDrafter(head, SMALL),
        "tree": lambda: HeadDrafter(head, SMALL, nodes=9),
        "cascade": lambda: Cascade([HeadDrafter(head, SMALL), PromptLookup(min_ngram=1)], [[2, 2], [0, 0]]),
        "behind": lambda: Cascade([PromptLookup(min_ngram=1), HeadDrafter(head, SMALL)], [[2, 3], [0, 0]]),
    }[kind]()
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    plain, _, _ = run(model, PROMPTS, params, drafter=None, gamma=0)
    ours, steps, engine = run(
        model, PROMPTS, params, drafter=drafter, gamma=9 if kind == "tree" else 5, join_later=2, max_batch_size=3
    )
    assert engine.draft_failures == 0 and ours == plain
    accepted = {step.num_accepted for step in steps if step.num_drafted}
    assert 0 in accepted and max(accepted) >= 2


class _Reference(HeadDrafter):
    """Compares each chain it proposes with the one that a pass over the whole text gives."""

    compared = 0

    def propose(self, rows: Any, budget: Any, policy: Any) -> Any:
        proposal = super().propose(rows, budget, policy)
        head = self.context.reader
        for i, row in enumerate(rows):
            tokens = torch.from_numpy(row.tokens.copy())
            drafts = proposal.token_ids[i, : proposal.num_tokens[i]]
            if len(tokens) < 2 or not len(drafts):
                continue
            scores = chain(head.target, head, tokens, drafts[:-1])
            assert [int(one.argmax()) for one in scores] == drafts.tolist()
            self.compared += len(drafts)
        return proposal


def recurrent_target() -> RecurrentModel:
    """A target that feeds tokens again after a rejection, so that it returns hidden states which the head has read before."""
    return RecurrentModel(make("qwen3_5", 3, vocab_size=SMALL, tie_word_embeddings=False))


def fused_target(family: str) -> CausalModel:
    """A target over kernels that keep a state for each position; latent attention runs its family's own code."""
    weights = make(family, 3, vocab_size=SMALL, tie_word_embeddings=False)
    made = CausalModel(weights) if family == "deepseek_v3" else RecurrentModel(weights)
    if isinstance(made, RecurrentModel):
        made.use_fused()
        assert made.fused is not None and made.fused.is_native
    return made


TARGETS: dict[str, Callable[[], CausalModel]] = {
    "llama": lambda: target(vocab=SMALL),
    "feeds again": recurrent_target,
    **{family: partial(fused_target, family) for family in ("qwen3_5", "lfm2", "deepseek_v3")},
}


@pytest.mark.parametrize(("made", "batch"), [("llama", 1), *((made, 3) for made in TARGETS)])
def test_each_guess_is_that_of_a_pass_over_the_whole_text(made: str, batch: int) -> None:
    """Whatever was accepted, rewound, missed or moved before it; alone, a row drafts in one call."""
    model = TARGETS[made]()
    drafter = _Reference(HeadModel(random_head(model, seed=7 if made == "lfm2" else 8), model), SMALL)
    params = [SamplingParams(max_new_tokens=10 + 6 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    _, steps, engine = run(model, PROMPTS, params, drafter=drafter, gamma=4, join_later=2, max_batch_size=batch)
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert drafter.compared > 150 and len({step.num_accepted for step in steps}) > 2


class _Pausing(ConstantLength):
    """Drafts in every fifth step only."""

    def __init__(self, num_draft_tokens: int) -> None:
        super().__init__(num_draft_tokens)
        self.steps = 0

    def budget(self, rows: Any) -> list[int]:
        self.steps += 1
        return [0 if self.steps % 5 else n for n in super().budget(rows)]


def _paused(model: CausalModel | None = None) -> _Reference:
    model = model or target(vocab=SMALL)
    drafter = _Reference(HeadModel(random_head(model, seed=2), model), SMALL)
    params = [SamplingParams(max_new_tokens=40 + 6 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    policy = _Pausing(4)
    _, _, engine = run(model, PROMPTS, params, drafter=drafter, policy=policy, join_later=2, max_batch_size=3)
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    return drafter


@pytest.mark.parametrize("kept", [0, 2000, target_features._MAX_BYTES])
def test_hidden_states_that_wait_for_a_draft_give_the_same(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether their features are computed in each pass, after some, or when they are read; while rows join and leave."""
    monkeypatch.setattr(target_features, "_MAX_BYTES", kept)
    assert _paused().compared > 60


def test_hidden_states_of_a_recurrent_target_wait_as_well() -> None:
    assert _paused(recurrent_target()).compared > 60


def test_states_at_wrong_positions_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a recurrent target's hidden states read from the start of its pass, where tokens are fed again."""
    intact = target_features._pass_positions
    monkeypatch.setattr(
        target_features,
        "_pass_positions",
        lambda missing, again, verification, output: intact(missing, [0] * len(missing), verification, output),
    )
    with pytest.raises(AssertionError):
        _paused(recurrent_target())


def test_a_pass_that_is_lost_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    distribute = TargetFeatures._distribute

    def losing(self: TargetFeatures) -> None:
        if len(self._passes) > 3:
            self._passes[1] = self._passes[0]
        distribute(self)

    monkeypatch.setattr(TargetFeatures, "_distribute", losing)
    with pytest.raises(AssertionError):
        _paused()


def test_a_rows_draft_is_the_same_alone_and_in_a_batch() -> None:
    """Bit for bit, so that a seed's text is."""
    model = target()
    head = HeadModel(random_head(model), model)
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(2, VOCAB, (5, 3), generator=generator)
    features = head.features(
        head.joined({layer: torch.randn(5, 3, 32, generator=generator) for layer in head.hidden_layers})
    )
    counts = [3, 1, 2, 3, 1]

    def scores(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        cache = head.new_cache()
        cache.add_rows(len(rows))
        some = [counts[i] for i in rows]
        width = max(some)
        first = head.forward(
            ModelInput(tokens[rows, :width], some, logits=Logits.LAST, features=features[rows, :width]), cache
        )
        last = torch.tensor(some) - 1
        after = first.hidden[NEXT][torch.arange(len(rows)), last][:, None]
        again = head.forward(ModelInput(tokens[rows, :1], [1] * len(rows), logits=Logits.LAST, features=after), cache)
        return first.scores(), again.scores()

    together = scores([0, 1, 2, 3, 4])
    for i in range(5):
        alone = scores([i])
        assert torch.equal(alone[0][0], together[0][i]) and torch.equal(alone[1][0], together[1][i])


def test_a_long_prompt_is_filled_in_pieces() -> None:
    model = target(vocab=SMALL, max_position_embeddings=2048)
    drafter = _Reference(HeadModel(random_head(model, seed=2), model), SMALL)
    prompts = [[(3 * i + i // 7) % SMALL for i in range(n)] for n in (600, 5, 300)]
    _, _, engine = run(model, prompts, SamplingParams(max_new_tokens=8, ignore_eos=True), drafter=drafter, gamma=3)
    assert engine.draft_failures == 0 and drafter.compared > 20


def test_a_drafter_that_failed_leaves_rows_alone_that_were_never_shown() -> None:
    """A row that was there before cannot be drafted for again; one that comes after can."""
    model = target(vocab=SMALL)
    head = HeadModel(random_head(model), model)
    drafter = HeadDrafter(head, SMALL)
    forward, calls = head.forward, []

    def failing(model_input: ModelInput, cache: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("once")
        return forward(model_input, cache)

    head.forward = failing  # type: ignore[method-assign]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    plain, _, _ = run(model, PROMPTS, params, drafter=None, gamma=0)
    ours, steps, engine = run(model, PROMPTS, params, drafter=drafter, gamma=3, max_batch_size=2)
    assert ours == plain and engine.draft_failures == 1
    assert any(step.num_drafted for step in steps if step.request_id >= 2)


def without(values: dict[str, Any], name: str) -> dict[str, Any]:
    """A config.json without a field, in any of its sections."""
    return {key: without(one, name) if isinstance(one, dict) else one for key, one in values.items() if key != name}


def within(values: dict[str, Any], part: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A config.json with fields in a section."""
    return {**values, part: {**values.get(part, {}), **fields}}


class TestFiles:
    @pytest.mark.parametrize("layout", ["plain", "speculators"])
    @pytest.mark.parametrize("ids", [None, [0, 4, 9]])
    def test_either_layout_comes_back(self, layout: Any, ids: list[int] | None, tmp_path: Path) -> None:
        head = random_head(target(), ids=ids, before=True)
        write_draft(head, tmp_path, layout=layout)
        again = read_draft(tmp_path)
        assert again.config.layer == head.config.layer and again.config.hidden_layers == head.config.hidden_layers
        assert again.config.norm_before_residual and again.config.draft_vocab_size == (3 if ids else VOCAB)
        assert (again.token_ids is None) == (ids is None) and (ids is None or again.token_ids.tolist() == ids)
        for name, weight in head.module.state_dict().items():
            assert torch.equal(weight, again.module.state_dict()[name])

    def test_what_a_file_means_that_does_not_say(self) -> None:
        plain = random_head(target()).config.as_plain()
        theirs = random_head(target()).config.as_speculators()
        for values in (plain, theirs):
            del values["norm_before_residual"]
        plain["eagle_config"] = {}
        assert not HeadConfig.read(plain).norm_before_residual and HeadConfig.read(plain).hidden_layers is None
        assert HeadConfig.read(theirs).norm_before_residual
        assert usual_layers(32) == (2, 16, 29)

    def test_a_field_is_read_from_each_section_that_has_it(self) -> None:
        """Other engines read these in `eagle_config`, next to it, and among the layer's fields."""
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
        layouts = (
            (config.as_plain(), ("eagle_config",)),
            (config.as_speculators(), ("transformer_layer_config", "eagle_config")),
        )
        for layout, parts in layouts:
            for name, value in fields.items():
                bare = without(layout, name)
                usual, wanted = (repr(HeadConfig.read(one)) for one in (bare, {**bare, name: value}))
                assert wanted != usual or name == "norm_before_residual"
                assert {repr(HeadConfig.read(within(bare, part, {name: value}))) for part in parts} == {wanted}, name
                if name == "norm_before_residual":
                    off = {repr(HeadConfig.read(within(bare, part, {name: False}))) for part in parts}
                    assert off == {repr(HeadConfig.read({**bare, name: False}))} != {wanted}

    def test_two_values_of_a_field_are_refused(self) -> None:
        config = random_head(target()).config
        for layout, part in (
            (config.as_plain(), "eagle_config"),
            (config.as_speculators(), "transformer_layer_config"),
        ):
            for name, value in (("norm_before_residual", True), ("vocab_size", 96), ("draft_vocab_size", 9)):
                wrong = within({"vocab_size": VOCAB, **layout}, part, {name: value})
                with pytest.raises(ConfigError, match=rf"{name}=.* in {part} contradicts {name}=.* in config\.json"):
                    HeadConfig.read(wrong)
        linear = {"rope_type": "linear", "factor": 2.0}
        twice: list[dict[str, Any]] = [
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {"rope_scaling": {**linear, "type": "yarn"}},
            {"rope_scaling": linear, "rope_parameters": {**linear, "factor": 4.0}},
            {"norm_output": False, "return_hidden_post_norm": True},
        ]
        for changes in twice:
            with pytest.raises(ConfigError, match="contradicts"):
                HeadConfig.read({**config.as_plain(), **changes})
        HeadConfig.read({**config.as_plain(), "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})

    def test_fields_that_nothing_reads_are_named(self, caplog: pytest.LogCaptureFixture) -> None:
        config = random_head(target()).config
        for layout in (config.as_plain(), config.as_speculators()):
            caplog.clear()
            HeadConfig.read({**layout, "torch_dtype": "bfloat16", "initializer_range": 0.02, "use_cache": True})
            assert not caplog.text
            HeadConfig.read(within({**layout, "new_gate": 2}, "eagle_config", {"new_part": 1}))
            assert "not known are ignored: new_gate, new_part" in caplog.text

    def test_an_output_layer_that_is_the_own_embedding(self, tmp_path: Path) -> None:
        """By `tie_word_embeddings`, if the file has no output layer; a stored one counts."""
        head = random_head(target())
        head.module.embed_tokens = torch.nn.Embedding(VOCAB, head.config.hidden_size)
        write_draft(head, tmp_path)
        path = tmp_path / "config.json"
        values = json.loads(path.read_text())
        assert read_draft(tmp_path).module.lm_head is None
        path.write_text(json.dumps(values | {"tie_word_embeddings": True}))
        found: Any = read_draft(tmp_path).module
        assert torch.equal(found.lm_head.weight, head.module.embed_tokens.weight)
        own = torch.randn(VOCAB, head.config.hidden_size)
        write_draft(head, tmp_path, lm_head=own)
        path.write_text(json.dumps(values | {"tie_word_embeddings": True}))
        found = read_draft(tmp_path).module
        assert torch.equal(found.lm_head.weight, own)

    def test_other_engines_names_of_tensors(self, tmp_path: Path) -> None:
        write_draft(random_head(target()), tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        save_file(renamed, tmp_path / "model.safetensors")
        assert torch.equal(read_draft(tmp_path).module.fc.weight, tensors["fc.weight"])

    def test_an_output_layer_and_embeddings_of_its_own(self, tmp_path: Path) -> None:
        model = target()
        head = random_head(model)
        head.module.lm_head = torch.nn.Linear(head.config.hidden_size, VOCAB, bias=False)
        head.module.embed_tokens = torch.nn.Embedding(VOCAB, head.config.hidden_size)
        write_draft(head, tmp_path)
        text = torch.tensor([4, 5, 6])
        own, shared = read_draft(tmp_path), random_head(model)
        found, plain = (chain(model, HeadModel(one, model), text, text[:0])[0] for one in (own, shared))
        assert not torch.allclose(found, plain, atol=1e-2)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"num_hidden_layers": 2}, "one layer"),
            ({"norm_before_fc": 3.5}, "norm_before_fc"),
            ({"attention_bias": True}, "attention_bias"),
            ({"kv_lora_rank": 512}, "kv_lora_rank"),
            ({"logits_scaling": 8.0}, "logits_scaling"),
            ({"layer_types": ["sliding_attention"]}, "sliding_window"),
            ({"layer_types": ["linear_attention"]}, "layer_types"),
            ({"hidden_size": None}, "hidden_size"),
            ({"draft_vocab_size": 1000}, "draft_vocab_size"),
            ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
            ({"use_aux_hidden_state": False}, "use_aux_hidden_state"),
            ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm"),
            ({"eagle_config": {"eh_proj_before_attn": True}}, "eh_proj_before_attn"),
            ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step"),
            ({"eagle_config": 3}, "eagle_config"),
        ],
    )
    def test_configurations_that_are_not_read(self, change: dict[str, Any], says: str, tmp_path: Path) -> None:
        write_draft(random_head(target()), tmp_path)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(ConfigError, match=says):
            read_draft(tmp_path)

    def test_files_that_are_not_whole(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFoundError, match=r"config\.json"):
            read_draft(tmp_path)
        write_draft(random_head(target(), ids=[1, 2, 3]), tmp_path)
        weights = tmp_path / "model.safetensors"
        tensors = load_file(weights)
        for name, says in (("norm.weight", "lacks norm.weight"), ("d2t", "d2t"), ("fc.weight", "fc.weight")):
            save_file({n: t for n, t in tensors.items() if n != name}, weights)
            with pytest.raises(ModelLoadError, match=says):
                read_draft(tmp_path)
        save_file(tensors | {"norm.weight": torch.ones(3)}, weights)
        with pytest.raises(ModelLoadError, match=r"norm.weight.*\[3\]"):
            read_draft(tmp_path)
        save_file(tensors | {"extra": torch.ones(3)}, weights)
        with pytest.raises(ModelLoadError, match="extra"):
            read_draft(tmp_path)
        weights.write_bytes(b"nothing")
        with pytest.raises(ModelLoadError, match="cannot read"):
            read_draft(tmp_path)
        weights.rename(tmp_path / "pytorch_model.bin")
        with pytest.raises(ModelNotFoundError, match="pickled"):
            read_draft(tmp_path)

    @pytest.mark.parametrize(
        ("changes", "says"),
        [({"vocab_size": 90}, "vocabulary"), ({"hidden_size": 40}, "hidden size"), ({"num_hidden_layers": 2}, "layer")],
    )
    def test_another_target_is_refused_by_name(self, changes: dict[str, int], says: str) -> None:
        head = random_head(target(), layers=(0, 1, 3))
        other = CausalModel(make("llama", 0, **({"vocab_size": VOCAB} | changes)))
        with pytest.raises(ConfigError, match=says):
            HeadModel(head, other, name="other")


def test_a_head_reads_what_its_file_names() -> None:
    model = target()
    head = random_head(model, layers=(1, 2))
    wrong = StoredDraft(
        dataclasses.replace(head.config, hidden_layers=(1,)),
        head.module,
        None,
    )
    with refused("hidden_layers", (1,)):
        HeadModel(wrong, model)
    assert LAST != NEXT


@pytest.mark.parametrize("max_bytes", [0, 1 << 20])
def test_prompts_that_begin_alike_share_what_was_shown(max_bytes: int) -> None:
    """Live rows and rows that ended: each draft token is that of a pass over the whole text."""
    model = target(vocab=SMALL)
    drafter = _Reference(HeadModel(random_head(model, seed=2), model), SMALL)
    store = PrefixStore(max_bytes)
    engine = Engine(model, drafter, Speculative(), ConstantLength(3), max_batch_size=2, prefixes=store)
    begin = [(5 * i + i // 3) % SMALL for i in range(40)]
    outputs: dict[int, list[int]] = {}
    cached = set()
    for end in ([1, 2], [3], [1, 2, 4, 4], [6, 6], [3, 3]):
        engine.submit([*begin, *end], SamplingParams(max_new_tokens=9, ignore_eos=True))
    while engine.has_work:
        for step in engine.step():
            outputs.setdefault(step.request_id, []).extend(step.token_ids)
            cached.add(step.num_cached)
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    assert max(cached) >= 40 and drafter.compared > 30
    prompts = [[*begin, *end] for end in ([1, 2], [3], [1, 2, 4, 4], [6, 6], [3, 3])]
    plain, _, _ = run(model, prompts, SamplingParams(max_new_tokens=9, ignore_eos=True), gamma=0)
    assert [outputs[i] for i in range(5)] == plain


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
    text = torch.arange(10, 30)
    drafts = torch.tensor([40, 41])
    wanted, found = (torch.stack(chain(model, one, text, drafts)) for one in (plain, head))
    assert torch.equal(wanted, found)
    if bits is not None:
        exact = torch.stack(chain(model, HeadModel(read_draft(out), model), text, drafts))
        assert not torch.equal(exact, found) and (exact - found).std() < 0.5 * exact.std()
    assert (
        drafted.generate("the number 7", max_new_tokens=12).text
        == generator.generate("the number 7", max_new_tokens=12).text
    )


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
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    plain, _, _ = run(model, PROMPTS, params, drafter=None, gamma=0)
    ours, _, engine = run(model, PROMPTS, params, drafter=HeadDrafter(head, SMALL), gamma=3)
    assert engine.draft_failures == 0 and ours == plain
