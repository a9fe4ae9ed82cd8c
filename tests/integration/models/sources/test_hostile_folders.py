"""Model folders whose configuration no model has, or that disagrees with their weights: an error in a line, in little time.

Tensors that no layer reads are left out where they are known to have no effect, and refused elsewhere by name.
"""

from __future__ import annotations

import copy
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foresay.errors import ModelLoadError, UnsupportedModelError
from foresay.models.huggingface import left_out
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model, load_tokenizer, load_weights
from helpers import tiny
from helpers.families import FAMILIES, SEQ2SEQ, make, make_seq2seq
from helpers.quantized import VOCAB, edit, folder_of

FP32 = LoadOptions(dtype="fp32")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder, and the configuration that it had."""
    folder = tiny.save(tmp_path_factory.mktemp("hostile") / "tiny")
    return folder, json.loads((folder / "config.json").read_text())


def refusal(folder: Path, load: Callable[..., Any] = load_model) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder, FP32) if load is load_model else load(folder)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600 and str(folder) in message
    return message


NAN, INF = float("nan"), float("inf")
HOSTILE: dict[str, list[Any]] = {
    "num_hidden_layers": [0, -1, 10**9, 1 << 63, "3", 3.0, True, NAN],
    "hidden_size": [0, -32, 10**9, "32", {}],
    "intermediate_size": [0, 10**9],
    "num_attention_heads": [0, -4, 10**9, "4"],
    "num_key_value_heads": [0, 3, 8, -2],
    "head_dim": [0, -8, 10**9],
    "vocab_size": [0, -1, 1 << 40, "264"],
    "max_position_embeddings": [0, -1, 1 << 40, "long"],
    "rms_norm_eps": [0.0, -1e-6, NAN, INF, "1e-6"],
    "partial_rotary_factor": [1e6, 0.0, -1.0, NAN],
    "rope_theta": [0.0, NAN, -1.0],
    "rope_parameters.factor": [0.0, NAN, -1.0, "8"],
}


@pytest.mark.parametrize("key", HOSTILE)
def test_a_value_that_no_model_has(sound: tuple[Path, dict[str, Any]], key: str) -> None:
    """Named with what is allowed; the tokenizer alone and the weights alone refuse it too."""
    (folder, values), (name, _, inner) = sound, key.partition(".")
    for value in HOSTILE[key]:
        given = {"rope_type": "linear", "rope_theta": 10000.0, inner: value} if inner else value
        (folder / "config.json").write_text(json.dumps({**values, name: given}))
        for load in (load_model, load_tokenizer, load_weights):
            message = refusal(folder, load)
            named = (f" {key} in its", " num_key_value_heads in its")  # heads that do not divide each other
            assert any(f"{one} config.json is " in message for one in named) and "; allowed is a" in message, value


LARGER = {
    "num_hidden_layers": 100,
    "vocab_size": 1 << 30,
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 24,
    "head_dim": 1 << 16,
}
OTHERS = {"num_attention_heads": 2, "intermediate_size": 47, "vocab_size": 263}


def test_sizes_that_disagree_with_the_weights(sound: tuple[Path, dict[str, Any]]) -> None:
    """transformers makes what is missing, and fills it with noise, before it states so."""
    folder, values = sound
    for table, wanted in ((LARGER, ("its config.json describes a model of ",)), (OTHERS, ("weights", "size"))):
        for name, value in table.items():
            (folder / "config.json").write_text(json.dumps({**values, name: value}))
            message = refusal(folder)
            assert any(one in message for one in wanted), (name, message)


def test_a_configuration_that_nests_or_has_many_megabytes(sound: tuple[Path, dict[str, Any]]) -> None:
    folder, values = sound
    text = json.dumps(values)
    for more, wanted in (
        (f'"x": {"[" * 40}{"]" * 40}', "allowed is at most 32 nested objects"),
        (f'"x": {"[" * 100_000}{"]" * 100_000}', "RecursionError"),
        (f'"x": "{" " * (17 << 20)}"', "config.json' has 178"),
    ):
        (folder / "config.json").write_text(f"{{{more}, {text[1:]}")
        assert wanted in refusal(folder)


def test_numbers_that_only_a_pass_meets(tmp_path: Path) -> None:
    """No rule names them: the pass after loading does."""
    folder = tiny.save(tmp_path, make("deepseek_v3", 0, vocab_size=264))
    assert load_model(folder, FP32).model.vocab_size == 264
    values = json.loads((folder / "config.json").read_text())
    for change, wanted in (({"n_group": 0}, "ZeroDivisionError"), ({"routed_scaling_factor": 1e39}, "not finite")):
        (folder / "config.json").write_text(json.dumps({**values, **change}))
        assert wanted in refusal(folder)


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    model = tiny.llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    folder = tiny.save(tmp_path / "tiny", model)
    for dtype in ("fp32", "bf16"):
        with pytest.raises((ModelLoadError, UnsupportedModelError), match="gives scores that are not finite"):
            load_model(folder, LoadOptions(dtype=dtype))


@pytest.mark.parametrize("family", [*FAMILIES, *SEQ2SEQ])
def test_every_family_is_within_the_ranges(tmp_path: Path, family: str) -> None:
    paired = family in SEQ2SEQ
    model = make_seq2seq(family) if paired else make(family, 0)
    assert load_model(tiny.save(tmp_path, model), FP32).model.capabilities.reads_source == paired


def test_a_billion_layers_take_neither_time_nor_memory(tmp_path: Path) -> None:
    """Qwen2's configuration lists the kind of each; a process with a gigabyte to spare refuses it at once."""
    folder = tiny.save(tmp_path / "tiny", make("qwen2", 0, vocab_size=264, use_sliding_window=False))
    load_model(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 10**9}))
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), hard))
    try:
        assert "num_hidden_layers in its config.json is 1000000000; allowed is" in refusal(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


# -- tensors that no layer reads ---------------------------------------------------------------------------------------


def add(folder: Path, **tensors: torch.Tensor) -> Path:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
    return folder


WITHOUT_EFFECT = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    "model.layers.0.attn.masked_bias": torch.tensor(-1e9),
    "model.layers.0.self_attn.k_scale": torch.tensor(0.1),
    "model.layers.0.self_attn.v_proj.v_scale": torch.tensor(0.1),
    "model.layers.0.self_attn.k_proj.output_scale": torch.tensor(0.1),
    "mtp.layers.0.mlp.up_proj.weight": torch.ones(4, 4),
    "model.layers.3.mlp.up_proj.weight": torch.ones(4, 4),
    "v_head.summary.weight": torch.ones(1, 4),
}
UNREAD = (
    "model.layers.0.mlp.up_proj.weight_scale",
    "model.layers.0.mlp.up_proj.pre_quant_scale",
    "model.layers.0.mlp.up_proj.weight.absmax",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.4.mlp.up_proj.weight",
    "model.vision_tower.patch.weight",
    "adapter.weight",
)


def test_tensors_that_are_known_to_have_no_effect_are_left_out(tmp_path: Path) -> None:
    """A layer after the last one is left out if the configuration names it as one that predicts further tokens."""
    folder = add(tiny.save(tmp_path / "tiny"), **WITHOUT_EFFECT)
    edit(folder, lambda values: values.update(num_nextn_predict_layers=1, num_hidden_layers=3))
    load_model(folder, FP32)
    edit(folder, lambda values: values.pop("num_nextn_predict_layers"))
    with pytest.raises(ModelLoadError, match=r"\(model\.layers\.3\.mlp\.up_proj\.weight\)"):
        load_model(folder, FP32)


def test_other_tensors_and_adapters_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.save(tmp_path / "tiny")
    sound = (folder / "model.safetensors").read_bytes()
    for name in UNREAD:
        (folder / "model.safetensors").write_bytes(sound)
        add(folder, **{name: torch.ones(4)})
        with pytest.raises(ModelLoadError, match=rf"has 1 tensors that no layer of a llama model reads \({name}\)"):
            load_model(folder, FP32)
    monkeypatch.setattr(left_out, "WITHOUT_EFFECT", {"": "control: everything is left out"})
    load_model(folder, FP32)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ModelLoadError, match=r"has an adapter .* which would not be applied"):
        load_model(folder, FP32)


def test_tensors_of_experts_and_of_pairs_are_refused_too(tmp_path: Path) -> None:
    mixture = tiny.save(tmp_path / "mixture", make("mixtral", 0, vocab_size=264))
    pair = tmp_path / "pair"
    make_seq2seq("t5").save_pretrained(pair)
    tiny.tokenizer().save_pretrained(pair)
    for folder in (mixture, pair):
        load_model(folder, FP32)
        with pytest.raises(ModelLoadError, match=r"reads \(.*w1\.weight_scale\)"):
            load_model(add(folder, **{"model.layers.0.mlp.w1.weight_scale": torch.ones(4)}), FP32)


@torch.inference_mode()
def test_a_bias_that_the_configuration_does_not_state_is_read(tmp_path: Path) -> None:
    """Some writers of GPTQ store one for every layer."""
    name = "model.layers.0.mlp.up_proj"
    bias = torch.randn(192, generator=torch.Generator().manual_seed(2)).bfloat16()
    change: Any = lambda tensors: tensors.update({f"{name}.bias": bias})  # noqa: E731
    folder, shared = folder_of(tmp_path / "tiny", "GPTQ", change, layers=1)
    ids, reference = torch.arange(24)[None] % VOCAB, copy.deepcopy(shared)
    reference.get_submodule(name).bias = torch.nn.Parameter(bias.float())
    loaded: Any = load_model(folder, FP32).model
    with_bias = reference(ids).logits
    torch.testing.assert_close(loaded.model(ids).logits, with_bias, rtol=1e-3, atol=1e-3)
    assert (with_bias - shared(ids).logits).abs().max() > 0.01


@torch.inference_mode()
def test_an_output_layer_that_is_stated_to_be_the_embedding_is_read_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers uses it; only its log, which is silenced, mentions that."""
    folder = tiny.save(tmp_path / "tiny", make("llama", 0, vocab_size=264))
    untied: Any = load_model(folder, FP32).model
    edit(folder, lambda values: values.update(tie_word_embeddings=True))
    found: Any = load_model(folder, FP32).model
    assert "states tie_word_embeddings, but stores an output layer of other numbers" in caplog.text
    ids = torch.arange(24)[None]
    assert torch.equal(found.model(ids).logits, untied.model(ids).logits)
    tied = tiny.save(tmp_path / "tied", make("llama", 0, vocab_size=264, tie_word_embeddings=True))
    caplog.clear()
    load_model(tied, FP32)
    assert not caplog.text
