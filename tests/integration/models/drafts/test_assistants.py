"""Gemma 4's assistants: transformers' own drafting as the reference, the same output for every batch, and what is refused."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4TextConfig
from transformers.models.gemma4_assistant.configuration_gemma4_assistant import Gemma4AssistantConfig
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantForCausalLM

from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import AssistantDrafter, Cascade, Hybrid, PromptLookup
from foresay.errors import ConfigError, ModelLoadError, UnsupportedModelError
from foresay.generation.load import load
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.drafts.assistant import Assistant, AssistantModule
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import quantizer
from foresay.models.sources.assistants import load_assistant
from helpers import tiny
from helpers.families import FAMILIES, make
from helpers.support import run

SMALL = 7
"""Tokens of a target whose draft tokens are often right, whatever they are."""
PROMPTS = [[5, 6, 1, 2, 3, 4, 5], [2], [1, 2, 1], [6] * 9, [3, 1] * 8]


@pytest.fixture(autouse=True)
def _shared_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.23 refuses a configuration in which all layers share keys, which is every assistant's."""
    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(lambda self: modes(self)))


def modes(config: Gemma4TextConfig) -> list[str | None]:
    count, shared = config.num_hidden_layers, config.num_kv_shared_layers
    return ["reuse"] * count if shared == count else MODES.__get__(config)


MODES = Gemma4TextConfig.kv_sharing_modes


def assistant_model(*, ordered: bool = False, vocab_size: int = SMALL, **changes: Any) -> Gemma4AssistantForCausalLM:
    """A tiny assistant for the tiny target, whose weights are large enough that draft tokens differ."""
    own = {
        **FAMILIES["gemma4"][1],
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "tie_word_embeddings": True,
        "vocab_size": vocab_size,
        **changes,
    }
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**own),
        backbone_hidden_size=FAMILIES["gemma4"][1]["hidden_size"],
        use_ordered_embeddings=ordered,
        num_centroids=vocab_size,
        centroid_intermediate_top_k=3,
    )
    torch.manual_seed(5)
    model = Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight *= 4.0
        if ordered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(vocab_size))
    return model


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
            read = torch.cat([model.get_input_embeddings()(token), hidden], -1)
            position = torch.tensor([[len(tokens) - 1]])
            step = assistant(inputs_embeds=read, position_ids=position, shared_kv_states=out.shared_kv_states)
            token, hidden = step.logits.argmax(-1), step.last_hidden_state
            drafted.append(int(token))
    return drafted


def read(theirs: Gemma4AssistantForCausalLM) -> AssistantModule:
    """The assistant by way of files."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return load_assistant(Path(folder), json.loads((Path(folder) / "config.json").read_text()))


class _Reference(AssistantDrafter):
    """Compares each chain it proposes with the one that transformers drafts."""

    compared = 0
    whole: Any
    theirs: Gemma4AssistantForCausalLM

    def propose(self, rows: Any, budget: Any, policy: Any) -> Any:
        proposal = super().propose(rows, budget, policy)
        for i, row in enumerate(rows):
            drafts = proposal.token_ids[i, : proposal.num_tokens[i]].tolist()
            if drafts:
                tokens = torch.from_numpy(row.tokens.copy())
                assert drafts == chain(self.whole, self.theirs, tokens, len(drafts))
                self.compared += len(drafts)
        return proposal


def compared(
    model: CausalModel, assistant: Assistant, theirs: Gemma4AssistantForCausalLM, batch: int = 3
) -> tuple[int, set[int]]:
    """Number of draft tokens compared, and the numbers accepted per step, while rows join, leave and are rewound."""
    drafter = _Reference(assistant, SMALL)
    drafter.theirs, drafter.whole = theirs, plain_target().eval()
    params = [SamplingParams(max_new_tokens=10 + 6 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    _, steps, engine = run(model, PROMPTS, params, drafter=drafter, gamma=4, join_later=2, max_batch_size=batch)
    assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
    return drafter.compared, {step.num_accepted for step in steps}


@pytest.mark.parametrize(("batch", "kernels"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("ordered", [False, True])
def test_each_draft_is_that_of_transformers(ordered: bool, batch: int, kernels: bool) -> None:
    model = target(kernels=kernels)
    theirs = assistant_model(ordered=ordered)
    count, accepted = compared(model, Assistant(read(theirs), model), theirs, batch)
    assert count > 150 and len(accepted) > 1


@pytest.mark.parametrize("change", ["position", "layer", "row"])
def test_what_is_read_wrongly_would_be_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: keys of one position too few, of another layer, and of another row."""
    model = target()
    theirs = assistant_model()
    assistant = Assistant(read(theirs), model)
    keys_of, row_of = SlotCache.read, Assistant._row
    if change == "layer":
        assistant._layers = {**assistant._layers, "sliding_attention": 0}
    elif change == "row":
        monkeypatch.setattr(SlotCache, "read", lambda cache, layer, row, *sizes: keys_of(cache, layer, 0, *sizes))
    else:

        def shorter(self: Assistant, ids: torch.Tensor, features: torch.Tensor, row: int) -> Any:
            assert self._source is not None
            self._source.lengths[row] -= 1
            try:
                return row_of(self, ids, features, row)
            finally:
                self._source.lengths[row] += 1

        monkeypatch.setattr(Assistant, "_row", shorter)
    with pytest.raises(AssertionError):
        compared(model, assistant, theirs)


@pytest.mark.parametrize("kind", ["chain", "tree", "hybrid", "cascade"])
def test_greedy_output_is_that_of_plain_decoding(kind: str) -> None:
    model = target()
    assistant = Assistant(read(assistant_model()), model)
    drafter: Any = {
        "chain": lambda: AssistantDrafter(assistant, SMALL),
        "tree": lambda: AssistantDrafter(assistant, SMALL, nodes=9),
        "hybrid": lambda: Hybrid(PromptLookup(min_ngram=2), AssistantDrafter(assistant, SMALL), min_match=2),
        "cascade": lambda: Cascade([AssistantDrafter(assistant, SMALL), PromptLookup(min_ngram=1)], [[2, 2], [0, 0]]),
    }[kind]()
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    plain, _, _ = run(model, PROMPTS, params, drafter=None, gamma=0)
    ours, steps, engine = run(model, PROMPTS, params, drafter=drafter, gamma=5, join_later=2, max_batch_size=3)
    assert engine.draft_failures == 0 and ours == plain
    accepted = {step.num_accepted for step in steps if step.num_drafted}
    assert 0 in accepted and max(accepted) >= 1


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


class TestFolders:
    def write(self, folder: Path, **changes: Any) -> Path:
        assistant_model(**changes).save_pretrained(folder)
        return folder

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_folder_drafts_by_name(self, dtype: str, tmp_path: Path) -> None:
        vocab = len(tiny.tokenizer())
        big = make("gemma4", 3, vocab_size=vocab, vocab_size_per_layer_input=vocab)
        folder = tiny.save(tmp_path / "target", big)
        draft = self.write(tmp_path / "draft", vocab_size=vocab)
        plain = load(str(folder), drafter="none", dtype=dtype).generate("hello", max_new_tokens=20)
        for expression in (f"head({draft})", f"head({draft},nodes=9)", f"hybrid(suffix,head={draft})"):
            found = load(str(folder), drafter=expression, dtype=dtype).generate("hello", max_new_tokens=20)
            assert found.text == plain.text
        rounded = load(str(folder), drafter=f"head({draft})", draft_weights="int8", dtype=dtype)
        assert rounded.generate("hello", max_new_tokens=20).text == plain.text
        with pytest.raises(ModelLoadError, match="an assistant"):
            load(str(draft))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"vocab_size": 14}, "vocabulary of 14"),
            ({"head_dim": 4}, "a head_dim of 4"),
            ({"num_key_value_heads": 1}, "num_key_value_heads of 1"),
        ],
    )
    def test_another_targets_assistant(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Assistant(read(assistant_model(**changes)), target())

    def test_a_target_without_such_layers(self) -> None:
        model = CausalModel(make("gemma3", 3, vocab_size=SMALL))
        with pytest.raises(ConfigError, match="full_attention"):
            Assistant(read(assistant_model()), model)

    def test_a_folder_that_lacks_weights(self, tmp_path: Path) -> None:
        folder = self.write(tmp_path / "draft")
        weights = load_file(folder / "model.safetensors")
        weights.pop("pre_projection.weight")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match=r"lacks pre_projection\.weight"):
            load_assistant(folder, json.loads((folder / "config.json").read_text()))

    def test_a_folder_that_describes_more_than_it_has(self, tmp_path: Path) -> None:
        folder = self.write(tmp_path / "draft")
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["intermediate_size"] = 1 << 24
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelLoadError, match=r"its config\.json gives"):
            load_assistant(folder, config)
