"""Gemma 4's assistants: transformers' own drafting as the reference, the same output for every batch, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import AssistantDrafter, Cascade, Hybrid, PromptLookup
from foresay.errors import ModelLoadError, UnsupportedModelError
from foresay.generation.load import change, load
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.drafts.assistant import Assistant, AssistantModule
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import quantizer
from foresay.models.sources.assistants import load_assistant, load_gguf_assistant
from helpers import tiny
from helpers.assistants import assistant_model, read, written
from helpers.drafting import OTHER_DRAFT, PROMPTS, SMALL, accepted, compared, decoded
from helpers.families import make
from helpers.refusals import refused
from helpers.support import run


def target(*, kernels: bool = False) -> CausalModel:
    model = CausalModel(plain_target())
    if kernels:
        model.use_fused()
    return model


def plain_target() -> Any:
    return make("gemma4", 3, vocab_size=SMALL, vocab_size_per_layer_input=SMALL)


def chain(model: Any, assistant: Any, tokens: torch.Tensor, count: int) -> list[int]:
    """The likeliest tokens after a text as transformers drafts them, from one pass of the target over all but its last token."""
    with torch.inference_mode():
        before = tokens[None, :-1]
        out = model(before, output_hidden_states=True, return_shared_kv_states=True)
        hidden, token, drafted = out.hidden_states[-1][:, -1:], tokens[None, -1:], []
        for _ in range(count):
            pair = torch.cat([model.get_input_embeddings()(token), hidden], -1)
            position = torch.tensor([[len(tokens) - 1]])
            step = assistant(inputs_embeds=pair, position_ids=position, shared_kv_states=out.shared_kv_states)
            token, hidden = step.logits.argmax(-1), step.last_hidden_state
            drafted.append(int(token))
    return drafted


def in_transformers(model: CausalModel, assistant: Assistant, theirs: Any, batch: int = 3) -> None:
    """Each draft must be that of transformers' own code."""
    whole = plain_target().eval()
    drafter = compared(AssistantDrafter(assistant, SMALL), lambda text, draft: chain(whole, theirs, text, len(draft)))
    steps = decoded(model, drafter, prompts=PROMPTS[:4], new=4, max_batch_size=batch)
    assert len({step.num_accepted for step in steps}) > 1 and drafter.compared > 60


@pytest.mark.parametrize(
    ("ordered", "batch", "kernels"), [(False, 1, True), (False, 3, False), (True, 3, True)], ids=str
)
def test_each_draft_is_that_of_transformers(ordered: bool, batch: int, kernels: bool) -> None:
    model, theirs = target(kernels=kernels), assistant_model(ordered=ordered)
    in_transformers(model, Assistant(read(theirs), model), theirs, batch)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_a_pass_is_that_of_transformers(kind: str, ordered: bool) -> None:
    """Over more keys than the window, with scores of tokens outside the chosen groups, which transformers makes the lowest."""
    theirs = assistant_model(kind, ordered=ordered, vocab_size=12)
    pairs, ours = torch.randn(3, 64), read(theirs)
    shared = {
        layer: (torch.randn(1, 2, 21, dim), torch.randn(1, 2, 21, dim))
        for layer, dim in (("sliding_attention", 8), ("full_attention", 16))
    }
    with torch.inference_mode():
        scores, outputs = ours(pairs, 21, shared)
        for i in range(3):
            one = theirs(
                inputs_embeds=pairs[i].view(1, 1, -1), position_ids=torch.tensor([[21]]), shared_kv_states=shared
            )
            chosen = scores[i] > -torch.inf
            assert int(chosen.sum()) == (3 if ordered else 12)
            assert torch.allclose(scores[i][chosen], one.logits[0, 0][chosen], atol=1e-4)
            assert torch.allclose(outputs[i], one.last_hidden_state[0, 0], atol=1e-4)


@pytest.mark.parametrize("centres", [False, True])
def test_a_gguf_file_is_read_as_the_folder_is(centres: bool, tmp_path: Path) -> None:
    """Groups of tokens, of which llama.cpp chooses none, are left out."""
    theirs = assistant_model(ordered=centres)
    path = written(theirs, tmp_path / "draft.gguf", centres=centres)
    found, folder = load_gguf_assistant(path), read(theirs)
    weights = folder.state_dict()
    assert all(torch.equal(one, weights[name]) for name, one in found.state_dict().items())
    assert {*weights} - {*found.state_dict()} == {one for one in weights if one.startswith("masked_embedding")}
    names = ("layer_types", "sliding_window", "rope_parameters", "hidden_activation", "per_layer_config")
    mine, wanted = (one.config.to_dict() for one in (found, folder))
    assert [mine[name] for name in names] == [wanted[name] for name in names]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nextn_predict_layers": 1}, "nextn_predict_layers is 1; allowed is the number of layers"),
        ({"embedding_length_out": 0}, "backbone_hidden_size=0"),
        ({"embedding_length_out": 64}, "pre_projection.weight of .* is .16, 64., and"),
        ({"attention.sliding_window_pattern": [True, True]}, "sliding_window_pattern"),
        ({"expert_count": 4}, r"gemma4-assistant\.expert_used_count"),
        ({"rope.freq_base_swa": 0.0}, "freq_base_swa"),
        (
            {"attention.key_length": 8},
            r"gemma4-assistant\.attention\.value_length is 16; allowed is 8, the length of keys",
        ),
    ],
)
def test_gguf_files_that_contradict_themselves_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = written(assistant_model(), tmp_path / "draft.gguf", **changes)
    with pytest.raises(ModelLoadError, match=message):
        load_gguf_assistant(path)


@pytest.mark.parametrize("wrong", ["position", "layer", "row"])
def test_what_is_read_wrongly_would_be_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: keys of one position too few, of another layer, and of another row."""
    model = target()
    theirs = assistant_model()
    assistant = Assistant(read(theirs), model)
    keys_of, forward = SlotCache.read, AssistantModule.forward
    if wrong == "layer":
        assistant._layers = {**assistant._layers, "sliding_attention": 0}
    elif wrong == "row":
        monkeypatch.setattr(SlotCache, "read", lambda cache, layer, row, *sizes: keys_of(cache, layer, 0, *sizes))
    else:

        def shorter(self: AssistantModule, pairs: torch.Tensor, position: int, shared: Any) -> Any:
            fewer = {kind: tuple(one[:, :, : position - 1] for one in pair) for kind, pair in shared.items()}
            return forward(self, pairs, position - 1, fewer)

        monkeypatch.setattr(AssistantModule, "forward", shorter)
    with pytest.raises(OTHER_DRAFT):
        in_transformers(model, assistant, theirs)


@pytest.mark.parametrize("kind", ["tree", "hybrid", "cascade"])
def test_greedy_output_by_other_drafters_of_an_assistant(kind: str) -> None:
    model = target()
    drafter: Any = AssistantDrafter(Assistant(read(assistant_model()), model), SMALL, nodes=9 * (kind == "tree"))
    if kind == "hybrid":
        drafter = Hybrid(PromptLookup(min_ngram=2), drafter, min_match=2)
    elif kind == "cascade":
        drafter = Cascade([drafter, PromptLookup(min_ngram=1)], [[2, 2], [0, 0]])
    found = accepted(decoded(model, drafter, prompts=PROMPTS[:4], new=4, gamma=5))
    assert 0 in found and max(found) >= 1


@pytest.mark.parametrize("ordered", [False, True])
def test_products_are_rounded_on_request(ordered: bool) -> None:
    assistant = Assistant(read(assistant_model(ordered=ordered)), target(), make=quantizer(8))
    kinds = {
        name: type(part) for name, part in assistant._module.named_modules() if "proj" in name or name == "lm_head"
    }
    plain = {name for name, kind in kinds.items() if kind is torch.nn.Linear}
    assert len(kinds) >= 12 and plain == ({"lm_head"} if ordered else set())  # chosen rows are read directly


def test_two_engines_read_their_own_caches() -> None:
    assistant = Assistant(read(assistant_model()), target())
    first, second = (AssistantDrafter(assistant, SMALL) for _ in range(2))
    first.use_cache_of_target(assistant.target.new_cache())
    assert second._assistant._source is None and first._assistant._source is not None


def test_the_targets_cache_is_read_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each token of a draft: a read copies the whole context."""
    model = target(kernels=True)
    reads, keys_of = [], SlotCache.read
    monkeypatch.setattr(
        SlotCache,
        "read",
        lambda cache, *where: reads.append(where) or keys_of(cache, *where),  # type: ignore[func-returns-value]
    )
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    drafter = AssistantDrafter(Assistant(read(assistant_model()), model), SMALL)
    _, steps, engine = run(model, PROMPTS[:1], params, drafter=drafter, gamma=4)
    assert engine.draft_failures == 0 and max(step.num_drafted for step in steps) == 4
    assert 0 < len(reads) <= 2 * len(steps)


def test_a_cache_in_8_bits_is_refused_by_name() -> None:
    model = CausalModel(plain_target())
    model.use_fused(torch.int8)
    drafter = AssistantDrafter(Assistant(read(assistant_model()), model), SMALL)
    with pytest.raises(UnsupportedModelError, match=r"8 bits \(kv_cache_dtype\)"):
        drafter.use_cache_of_target(model.new_cache())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_and_a_file_draft_by_name(dtype: str, tmp_path: Path) -> None:
    """The file is quantized, too."""
    model = make("gemma4", 3, vocab_size=264, vocab_size_per_layer_input=264)
    folder, draft, theirs = tiny.save(tmp_path / "target", model), tmp_path / "draft", assistant_model(vocab_size=264)
    theirs.save_pretrained(draft)
    wide = assistant_model(vocab_size=264, hidden_size=32)
    plain, q8 = written(wide, tmp_path / "a.gguf"), {"attn_q": "Q8_0", "token_embd": "Q8_0"}
    rounded = written(wide, tmp_path / "b.gguf", kinds=q8)
    drafters = [f"head({draft})", f"head({draft},nodes=9)", f"hybrid(suffix,head={draft})", f"head({plain})"]
    loaded = load(str(folder), drafter="none", dtype=dtype)
    generators = [change(loaded, drafter=one) for one in (*drafters, f"hybrid(suffix, head={rounded})")]
    generators.append(load(str(folder), drafter=drafters[0], draft_weights="int8", dtype=dtype))
    texts = [one.generate("hello", max_new_tokens=20).text for one in generators]
    assert set(texts) == {loaded.generate("hello", max_new_tokens=20).text}
    for path, message in ((draft, "an assistant"), (plain, r"is a draft \(gemma4-assistant\), .*drafter='head\(")):
        with pytest.raises(ModelLoadError, match=message):
            load(str(path))


def test_another_targets_assistant() -> None:
    for changes, param in (
        ({"vocab_size": 14}, "vocabulary"),
        ({"head_dim": 4}, "head_dim"),
        ({"num_key_value_heads": 1}, "num_key_value_heads"),
    ):
        with refused(param, *changes.values()):
            Assistant(read(assistant_model(**changes)), target())
    with refused("layer_types", "full_attention"):
        Assistant(read(assistant_model()), CausalModel(make("gemma3", 3, vocab_size=SMALL)))


def test_a_folder_that_lacks_weights_or_describes_more_than_it_has(tmp_path: Path) -> None:
    assistant_model().save_pretrained(tmp_path)
    path, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    weights = load_file(path)
    config["text_config"]["intermediate_size"] = 1 << 24
    with pytest.raises(ModelLoadError, match=r"its config\.json gives"):
        load_assistant(tmp_path, config)
    config["text_config"]["intermediate_size"] = 48
    del weights["pre_projection.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks pre_projection\.weight"):
        load_assistant(tmp_path, config)
