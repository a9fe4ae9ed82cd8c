"""Drafts in GGUF files, written here with llama.cpp's names, next to the same drafts in safetensors files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from foresay.errors import ForesayError, ModelLoadError, ModelNotFoundError
from foresay.generation.load import load
from foresay.models.drafts.base import StoredDraft
from foresay.models.drafts.block_config import SELECTOR, BlockConfig, PathShape, Sight
from foresay.models.drafts.files import write_draft
from foresay.models.huggingface.causal import CausalModel
from foresay.models.sources.drafts import load_draft
from helpers import tiny
from helpers.assistants import write_gguf
from helpers.blocks import random_block
from helpers.drafting import llama_target as target
from helpers.heads import random_head
from helpers.refusals import refused

NAMES = {
    "fc": "fc",
    "norm": "output_norm",
    "hidden_norm": "enc.output_norm",
    "input_norm": "enc.input_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
    "candidate_selector.predecessor_codebook": "selector_predecessor",
    "candidate_selector.successor_codebook": "selector_successor",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
    "attention_conv.base_kernel": "attn_conv_base",
    "mlp_conv.base_kernel": "ffn_conv_base",
}


def written(
    draft: StoredDraft,
    folder: Path,
    *,
    kinds: Mapping[str, str] | None = None,
    divisors: torch.Tensor | None = None,
    **changes: Any,
) -> Path:
    """A draft as a GGUF file. kinds: types of tensors that are quantized. changes: values without their prefix.

    divisors: of rotary frequencies.
    """
    write_draft(draft, folder)
    config, is_block = draft.config, isinstance(draft.config, BlockConfig)
    arch = "dflash" if is_block else "eagle3"
    layer = config.layer
    values: dict[str, Any] = {
        "block_count": config.num_layers if isinstance(config, BlockConfig) else 1,
        "context_length": layer["max_position_embeddings"],
        "embedding_length": layer["hidden_size"],
        "feed_forward_length": layer["intermediate_size"],
        "attention.head_count": layer["num_attention_heads"],
        "attention.head_count_kv": layer["num_key_value_heads"],
        "attention.key_length": layer["head_dim"],
        "attention.value_length": layer["head_dim"],
        "attention.layer_norm_rms_epsilon": layer["rms_norm_eps"],
        "rope.freq_base": layer["rope_theta"],
        "vocab_size": config.vocab_size,
        "target_layers": list(config.hidden_layers or ()),
    }
    if isinstance(config, BlockConfig):
        windows = [one.window for one in config.sights]
        values |= {"block_size": config.block_size, "attention.causal": config.sights[0].causal}
        if any(windows):
            values |= {"attention.sliding_window": max(filter(None, windows))}
            values |= {"attention.sliding_window_pattern": [one is not None for one in windows]}
        if config.convolution is not None and config.path is not None:
            values |= dict(zip(("conv_kernel_size", "conv_group_size"), config.convolution, strict=True))
            values |= {"selector_rank": config.path.rank, "selector_top_k": config.path.candidates}
        values["tokenizer.ggml.mask_token_id"] = config.mask_token_id
    else:
        values |= {"target_hidden_size": layer["hidden_size"], "norm_before_residual": config.norm_before_residual}
        values |= {"norm_before_fc": config.norm_before_fc}
    tensors = {} if divisors is None else {"rope_freqs.weight": divisors.numpy()}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name == "t2d":
            continue
        if arch == "eagle3" and (".q_proj." in name or ".k_proj." in name):
            heads = layer["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            pairs = weight.view(heads, 2, len(weight) // heads // 2, -1).transpose(1, 2)
            weight = pairs.reshape(weight.shape)
        tensors[_gguf_name(name, arch)] = weight.numpy()
    return write_gguf(folder / "draft.gguf", arch, {**values, **changes}, tensors, kinds)


def _gguf_name(name: str, arch: str) -> str:
    if name == "d2t":
        return name
    stem, _, suffix = name.rpartition(".")
    if suffix.endswith(("codebook", "base_kernel")):
        stem, suffix = name, "" if suffix == "base_kernel" else "weight"
    start = ""
    if stem.startswith("layers."):
        _, number, stem = stem.split(".", 2)
        start = f"blk.{number}."
    short = {**NAMES, "hidden_norm": "attn_norm_2" if arch == "eagle3" else "enc.output_norm"}[stem]
    return f"{start}{short}" + (f".{suffix}" if suffix else "")


CASES: dict[str, dict[str, Any]] = {
    "dflash": {"from_anchor": False},
    "dflash2": {
        "from_anchor": False,
        "path": PathShape(SELECTOR, 6, candidates=5),
        "taps": (2, 8),
        "sights": [Sight(window=4), Sight()],
    },
    "dspark": {},
    "trimmed": {"ids": [1, 5, 6, 30, 41, 89], "normalizes": False, "sights": [Sight(causal=True)] * 2},
}


def same(one: StoredDraft, other: StoredDraft) -> bool:
    weights = one.module.state_dict()
    return all(torch.equal(weights[name], weight) for name, weight in other.module.state_dict().items())


@pytest.mark.parametrize("case", CASES)
def test_a_block_drafter_is_that_of_its_safetensors_file(case: str, tmp_path: Path) -> None:
    made = random_block(target(), **CASES[case])
    found = load_draft(str(written(made, tmp_path)), kind="block")
    assert found.config.layer == pytest.approx(made.config.layer)  # the file has float32
    assert dataclasses.replace(found.config, layer=made.config.layer) == made.config and same(found, made)
    assert (found.token_ids is None) == (made.token_ids is None)
    assert made.token_ids is None or torch.equal(found.token_ids, made.token_ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [{}, {"norm_before_fc": True}])
def test_a_head_is_that_of_its_safetensors_file(parts: dict[str, Any], tmp_path: Path) -> None:
    """Rows of queries and keys come back from llama.cpp's order; control: as they are in the file."""
    made = random_head(target(), ids=[2, 7, 11, 50], parts=parts)
    path = written(made, tmp_path)
    found = load_draft(str(path), kind="head")
    assert same(found, made) and found.config.hidden_layers == made.config.hidden_layers
    stored = {one.name: one for one in gguf.GGUFReader(path).tensors}["blk.0.attn_q.weight"].data
    assert not np.array_equal(stored, made.module.state_dict()["layers.0.self_attn.q_proj.weight"].numpy())


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def divisors(layer: Mapping[str, Any]) -> torch.Tensor:
    """By the published formula of Llama 3's scaling, which llama.cpp's converter writes for each frequency."""
    out = []
    for i in range(layer["head_dim"] // 2):
        length = 2 * math.pi * layer["rope_theta"] ** (2 * i / layer["head_dim"])
        share = (8192 / length - 1) / (4 - 1)
        out.append(1 / ((1 - share) / 8 + share) if 0 < share < 1 else 1.0 if share >= 1 else 8.0)
    return torch.tensor(out)


def test_a_head_with_llama_3s_scaling_is_that_of_its_safetensors_file(tmp_path: Path) -> None:
    made = random_head(target(), rope_theta=500000.0, rope_scaling=LLAMA3, head_dim=32)
    factors = divisors(made.config.layer)
    assert len(set(factors.tolist())) == 3
    found = load_draft(str(written(made, tmp_path, divisors=factors)), kind="head")
    assert same(found, made) and found.config.layer["rope_scaling"] == LLAMA3
    torch.testing.assert_close(found.module.rotary.inv_freq, made.module.rotary.inv_freq)
    plain = load_draft(str(written(made, tmp_path, divisors=torch.ones(16)))).module.rotary.inv_freq
    assert not torch.allclose(plain, made.module.rotary.inv_freq), "control"
    for wrong in (factors * 1.01, factors[:8], factors.flip(0), torch.full((16,), float("nan"))):
        with pytest.raises(
            ModelLoadError, match=r"rope_freqs\.weight' (has other divisors|has 8 divisors|contains nan)"
        ):
            load_draft(str(written(made, tmp_path, divisors=wrong)))


def test_ids_that_ascend_are_no_offsets(tmp_path: Path) -> None:
    """Some converters write the token of each column itself."""
    made = random_block(target(), ids=[1, 5, 6, 30, 41, 89])
    path = written(made, tmp_path)
    data = path.read_bytes()
    offsets = (torch.tensor([1, 5, 6, 30, 41, 89]) - torch.arange(6)).numpy().tobytes()
    assert data.count(offsets) == 1
    path.write_bytes(data.replace(offsets, np.array([1, 5, 6, 30, 41, 89], np.int64).tobytes()))
    found = load_draft(str(path)).token_ids
    assert found is not None and found.tolist() == [1, 5, 6, 30, 41, 89]


def test_quantized_weights_are_those_of_their_blocks(tmp_path: Path) -> None:
    made = random_block(target(), **CASES["dflash2"])
    path = written(made, tmp_path, kinds={"ffn_gate": "Q8_0", "attn_q": "Q8_0"})
    found = load_draft(str(path)).module.state_dict()["layers.1.mlp.gate_proj.weight"]
    stored = {one.name: one for one in gguf.GGUFReader(path).tensors}["blk.1.ffn_gate.weight"]
    wanted = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type))
    assert torch.equal(found, wanted.bfloat16())


def test_drafting_by_a_file(tmp_path: Path) -> None:
    """The output is that of plain decoding, and the drafts are those of the safetensors file."""
    folder = tiny.save(tmp_path / "model")
    loaded = load(str(folder), drafter="none", dtype="fp32")
    assert isinstance(loaded.target.model, CausalModel)
    made = random_block(loaded.target.model, layers=(0, 1), **CASES["dflash2"])
    path = written(made, tmp_path)
    plain = loaded.generate("abcabcabc", max_new_tokens=20).token_ids
    counts = []
    for drafter in (f"block({path})", f"block({tmp_path})", f"hybrid(suffix, block={path}; k=3)"):
        found = load(str(folder), drafter=drafter, dtype="fp32", length=3).generate("abcabcabc", max_new_tokens=20)
        assert found.token_ids == plain
        counts.append(found.stats["num_passes"] if isinstance(found.stats, dict) else found.stats.num_passes)
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type"),
        ({"expert_count": 4}, "expert_count"),
        ({"hyper_connection.count": 4}, "hyper_connection.count"),
        ({"rope.dimension_sections": [2, 2, 0, 0]}, "rope.dimension_sections"),
        ({"block_size": 1}, "block_size"),
        ({"target_layers": []}, "target_layer_ids"),
        ({"selector_top_k": 0}, "selector_top_k"),
        ({"embedding_length": 31}, "embedding_length|hidden_size|head"),
        ({"attention.head_count": 0}, r"dflash\.attention\.head_count=0"),
        ({"vocab_size": 96}, "mask_token_id|vocab"),
    ],
)
def test_files_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = written(random_block(target(), **CASES["dflash2"]), tmp_path, **changes)
    with pytest.raises(ForesayError, match=message):
        load_draft(str(path))


def test_files_that_are_no_drafts_and_drafts_that_are_no_models(tmp_path: Path) -> None:
    path = written(random_block(target()), tmp_path)
    with pytest.raises(ModelLoadError, match=r"is a draft \(dflash\), not a language model; .*drafter='block\("):
        load(str(path))
    with refused("path"):
        load_draft(str(path), kind="head")
    with pytest.raises(ModelNotFoundError, match="no such file"):
        load_draft(str(tmp_path / "other.gguf"))
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:900])
    with pytest.raises(ModelLoadError, match="damaged"):
        load_draft(str(tmp_path / "cut.gguf"))
