"""GGUF files of LFM2, Qwen3-Next and Qwen3.5: on the kernels and dequantized what was written; what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from foresay.decoding.protocols import ModelInput
from foresay.errors import ModelLoadError
from foresay.models.families.table import ARCHITECTURES
from foresay.models.gguf.configs import config_of
from foresay.models.gguf.header import read_header
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from foresay.models.sources.wrapping import LoadedModel
from helpers import gguf_hybrids, tiny
from helpers.families import make
from helpers.gguf_files import write_gguf
from helpers.refusals import refused

PRODUCTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
OF_FAMILY = {
    "lfm2": ("in_proj", "out_proj"),
    "qwen3_5": ("attn_qkv", "attn_gate", "ssm_out"),
    "qwen3_5, all small products": ("attn_qkv", "attn_gate", "ssm_out", "ssm_alpha", "ssm_beta"),
    "qwen3_next": ("attn_qkv", "attn_gate", "ssm_in", "ssm_ba", "ssm_out", "ffn_up_exps", "ffn_down_exps"),
}


def hybrid(name: str, **changes: Any) -> PreTrainedModel:
    """Rows of whole groups, and weights large enough that texts vary."""
    family = name.partition(",")[0].partition(" ")[0]
    sizes: dict[str, Any] = {"vocab_size": len(tiny.tokenizer()), "hidden_size": 64, "intermediate_size": 96}
    if family == "granitemoehybrid":
        sizes |= {"mamba_n_heads": 16, "shared_intermediate_size": 64}
        sizes |= {"num_local_experts": 0} if name.endswith("dense") else {}
    elif family == "lfm2":
        sizes |= {"block_auto_adjust_ff_dim": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    else:
        sizes |= {"head_dim": 16, "linear_value_head_dim": 16, "linear_key_head_dim": 16}
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        sections = {"mrope_section": [4, 0, 0]} if family == "qwen3_5" else {}
        sizes |= {"rope_parameters": {**rope, **sections}, "moe_intermediate_size": 32}
        sizes |= {"shared_expert_intermediate_size": 32} if family == "qwen3_next" else {}
    model = make(family, 4, **{**sizes, **changes})
    for path, weight in model.named_parameters():
        if weight.dim() == 2 and "linear_attn.in_proj" not in path:
            weight.data *= 0.2 / weight.std()
    return model


def scores(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return loaded.model.uncached(torch.tensor([ids]))[0].float()  # type: ignore[attr-defined]


IDS = [5, 9, 3, 17, 8, 11, 4, 6, 30, 2]


@pytest.mark.parametrize(("name", "kind"), [(name, ("Q4_0", "Q4_1")[i % 2]) for i, name in enumerate(OF_FAMILY)])
def test_blocks_score_what_the_dequantized_file_scores(tmp_path: Path, name: str, kind: str) -> None:
    """But for the rounding of other weights to bf16, and of inputs to 8 bits. Control: another model does not."""
    kinds = dict.fromkeys((*PRODUCTS, *OF_FAMILY[name]), kind) | {"token_embd": "Q8_0", "output": "Q8_0"}
    path = write_gguf(tmp_path / "tiny.gguf", hybrid(name), kinds)
    kept, whole = load_model(path), load_model(path, LoadOptions(dtype="fp32"))
    assert kept.weights == "GGUF" and whole.weights == ""
    assert kept.model.batch_invariant  # type: ignore[attr-defined]
    a, b = scores(kept, IDS), scores(whole, IDS)
    assert error(a, b) < 0.1
    other = load_model(
        write_gguf(tmp_path / "other.gguf", hybrid(name, num_attention_heads=2)), LoadOptions(dtype="fp32")
    )
    assert error(scores(other, IDS), b) > 0.3


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of a token's differences as a share of the deviation; the median, as rounding may select other experts."""
    return float((found - wanted).square().mean(-1).sqrt().median() / wanted.std())


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "qwen3_next"])
def test_the_configuration_is_the_models(tmp_path: Path, name: str) -> None:
    model = hybrid(name, tie_word_embeddings=True)
    found = config_of(read_header(write_gguf(tmp_path / "tiny.gguf", model)))
    own, theirs = found.to_dict(), model.config.to_dict()
    unread = {"pad_token_id", "dtype", "rope_parameters", "full_attn_idxs", "_name_or_path", "norm_eps", "rms_norm_eps"}
    names = {*own} & {*theirs} - unread
    assert {one: own[one] for one in names} == {one: theirs[one] for one in names}
    assert gguf_hybrids.eps(found) == pytest.approx(gguf_hybrids.eps(model.config))
    for key in ("rope_theta", "partial_rotary_factor"):
        assert found.rope_parameters.get(key) == model.config.rope_parameters.get(key)


LAYOUTS = [("ssm_in",), ("gate_up_exps",), ("ssm_in", "gate_up_exps")]


@pytest.mark.parametrize("joint", LAYOUTS)
@pytest.mark.parametrize("kind", [None, "Q8_0"])
def test_tensors_that_join_several_are_read_as_these(tmp_path: Path, kind: str | None, joint: tuple[str, ...]) -> None:
    """In older files, and in newer ones: the same bits, from numbers and from blocks."""
    model, options = hybrid("qwen3_next"), LoadOptions(dtype="auto" if kind else "fp32")
    split = load_model(write_gguf(tmp_path / "split.gguf", model, kind=kind), options)
    path = write_gguf(tmp_path / "joint.gguf", model, kind=kind, joint=joint)
    names = {one.name.split(".")[-2] for one in gguf.GGUFReader(path).tensors}
    assert ("ssm_in" in joint) == ("ssm_in" in names) == ("attn_gate" not in names)
    assert ("gate_up_exps" in joint) == ("ffn_gate_up_exps" in names) == ("ffn_up_exps" not in names)
    found = load_model(path, options)
    assert found.weights == split.weights and found.model.batch_invariant  # type: ignore[attr-defined]
    tokens = torch.tensor([IDS])
    ours = [one.model.forward(ModelInput(tokens, [len(IDS)]), started(one)).scores() for one in (split, found)]
    assert torch.equal(*ours)


def started(loaded: LoadedModel) -> Any:
    cache = loaded.model.new_cache()
    cache.add_rows(1)
    return cache


@pytest.mark.parametrize("joint", [(), ("ssm_in",)])
def test_kinds_are_told_from_key_heads(tmp_path: Path, joint: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: betas and alphas, or all inputs, read in the file's order; queries, keys, values and gates written in another."""
    model = hybrid("qwen3_next")
    path = write_gguf(tmp_path / "tiny.gguf", model, joint=joint)
    with torch.inference_mode():
        wanted = model(torch.tensor([IDS])).logits[0]

    def difference(path: Path) -> float:
        found = scores(load_model(path, LoadOptions(dtype="fp32")), IDS)
        return float((found - wanted).abs().max() / (wanted.max() - wanted.min()))

    assert difference(path) < 1e-5
    with monkeypatch.context() as patch:
        patch.setitem(ARCHITECTURES, "qwen3next", replace(ARCHITECTURES["qwen3next"], row_order=None))
        assert difference(path) > 1e-2
    if not joint:
        cut, intact = 2 * 2 * 16 + 4 * 16, gguf_hybrids.by_kind  # queries and keys of 2 heads, values of 4

        def wrong(config: Any, weights: Any) -> dict[str, torch.Tensor]:
            own = intact(config, weights)
            for name in [one for one in weights if one.endswith("in_proj_qkvz.weight")]:
                own[name.replace("qkvz", "qkv")], own[name.replace("qkvz", "z")] = weights[name].tensor_split([cut])
            return own

        monkeypatch.setattr(gguf_hybrids, "by_kind", wrong)
        assert difference(write_gguf(tmp_path / "other.gguf", model)) > 1e-2


def stating(monkeypatch: pytest.MonkeyPatch, architecture: str, interval: int | None, flags: list[bool] | None) -> None:
    """Files with another interval of layers with attention, or a list of the others."""
    intact = gguf.GGUFWriter.add_full_attention_interval

    def add(self: gguf.GGUFWriter, usual: int) -> None:
        if interval is not None:
            intact(self, interval)
        if flags is not None:
            self.add_array(f"{architecture}.attention.recurrent_layers", flags)

    monkeypatch.setattr(gguf.GGUFWriter, "add_full_attention_interval", add)


@pytest.mark.parametrize(
    ("name", "interval", "flags"),
    [
        ("qwen3_next", None, None),
        ("qwen3_next", None, [True, True, True, False]),
        ("qwen3_5", 2, [True, True, True, False]),
    ],
)
def test_kinds_of_layers(
    tmp_path: Path, name: str, interval: int | None, flags: list[bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older files of Qwen3-Next do not state the interval, which is 4; a list comes first."""
    stating(monkeypatch, name.replace("_5", "5").replace("_", ""), interval, flags)
    found = config_of(read_header(write_gguf(tmp_path / "tiny.gguf", hybrid(name))))
    assert found.layer_types == ["linear_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize("flags", [[True] * 4, [True, False], [True, True, True, False, False]])
def test_other_lists_of_kinds_are_refused(tmp_path: Path, flags: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    stating(monkeypatch, "qwen3next", 4, flags)
    with pytest.raises(ModelLoadError, match=r"qwen3next\.attention\.recurrent_layers"):
        load_model(write_gguf(tmp_path / "tiny.gguf", hybrid("qwen3_next")))


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method", "value", "named"),
    [
        *[("lfm2", "head_count_kv", value, "head_count_kv") for value in (2, [0, 2, 1], [0, 2], [0, 3, 0])],
        ("lfm2", "shortconv_l_cache", None, "shortconv.l_cache"),
        ("lfm2", "rope_freq_base", None, "rope.freq_base"),
        ("lfm2", "layer_norm_rms_eps", None, "layer_norm_rms_epsilon"),
        ("qwen3_5", "ssm_group_count", None, "ssm.group_count"),
        ("qwen3_5", "ssm_group_count", 3, "ssm.time_step_rank"),
        ("qwen3_5", "ssm_inner_size", 65, "ssm.inner_size"),
        ("qwen3_5", "ssm_state_size", 1 << 40, "ssm.state_size"),
        *[("qwen3_5", "full_attention_interval", value, "full_attention_interval") for value in (0, None)],
        ("qwen3_5", "rope_dimension_count", 64, "rope.dimension_count"),
        *[
            ("qwen3_5", "rope_dimension_sections", value, "dimension_sections")
            for value in ([1, 1, 1, 0], [3, 0, 0, 1], None)
        ],
        ("granitemoehybrid", "ssm_group_count", None, "ssm.group_count"),
        ("granitemoehybrid", "ssm_group_count", 3, "ssm.time_step_rank"),
        ("granitemoehybrid", "ssm_inner_size", 65, "ssm.inner_size"),
        ("granitemoehybrid", "ssm_inner_size", 192, "has shape"),
        ("granitemoehybrid", "ssm_conv_kernel", None, "ssm.conv_kernel"),
        ("granitemoehybrid dense", "expert_shared_feed_forward_length", 65, "expert_shared_feed_forward_length"),
        *[("granitemoehybrid", "expert_used_count", value, "expert_used_count") for value in (None, 0, 99)],
        ("granitemoehybrid", "head_count_kv", 2, "head_count_kv"),
        ("granitemoehybrid", "expert_shared_feed_forward_length", None, "expert_shared_feed_forward_length"),
        ("granitemoehybrid", "expert_shared_feed_forward_length", 65, "has shape"),
    ],
)
def test_values_that_contradict_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str, value: Any, named: str
) -> None:
    intact = getattr(gguf.GGUFWriter, f"add_{method}")
    if value is None:
        write: Any = lambda *given: None  # noqa: E731
    elif value == 1 << 40:
        write = lambda self, given: self.add_uint64("qwen35.ssm.state_size", value)  # noqa: E731
    else:
        write = lambda self, given: intact(self, value)  # noqa: E731
    monkeypatch.setattr(gguf.GGUFWriter, f"add_{method}", write)
    path = write_gguf(tmp_path / "tiny.gguf", hybrid(name))
    with pytest.raises(ModelLoadError, match=named):
        load_model(path)


def test_decays_that_grow_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, intact = hybrid("qwen3_5"), gguf_hybrids.converted

    def grown(config: Any, name: str, weight: torch.Tensor) -> Any:
        found = intact(config, name, weight)
        return (found[0], found[1].abs()) if found is not None and name.endswith("A_log") else found

    monkeypatch.setattr(gguf_hybrids, "converted", grown)
    with pytest.raises(ModelLoadError, match=r"ssm_a' contains numbers that are not negative"):
        load_model(write_gguf(tmp_path / "tiny.gguf", model))


def test_options_of_transformers_loader_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", hybrid("qwen3_5"))
    with refused("device_map", "cpu"):
        load_model(path, LoadOptions(device_map="cpu"))
