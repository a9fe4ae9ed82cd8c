"""Statements of folders about their quantization, wherever they are: read, compared, refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foresay.errors import ModelLoadError, UnsupportedModelError
from foresay.models.sources import quantization
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers import tiny
from helpers.families import make
from helpers.quantized import CASES, EXPANDED, VOCAB, Change, edit, folder_of

FP32 = LoadOptions(dtype="fp32")


# -- where it is stated ----------------------------------------------------------------------------------------------


def to_file(name: str, inner: str = "") -> Callable[[Path, dict[str, Any]], None]:
    def move(folder: Path, values: dict[str, Any]) -> None:
        stated = values.pop("quantization_config")
        stated.pop("quant_method")
        (folder / name).write_text(json.dumps({inner: stated} if inner else stated))

    return move


def to_field(name: str) -> Callable[[Path, dict[str, Any]], None]:
    return lambda folder, values: values.update({name: values.pop("quantization_config")})


def renamed(**names: str) -> Callable[[Path, dict[str, Any]], None]:
    def change(folder: Path, values: dict[str, Any]) -> None:
        stated = values["quantization_config"]
        values["quantization_config"] = {names.get(key, key): value for key, value in stated.items()}

    return change


def nested(folder: Path, values: dict[str, Any]) -> None:
    """As ModelOpt nests its own file's fields; with a file whose method is named in config.json alone."""
    stated = values["quantization_config"]
    method = stated.pop("quant_method")
    values["quantization_config"] = {"quant_method": f"{method}_fp8", "quantization": stated}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))


PLACES: dict[str, tuple[str, Callable[[Path, dict[str, Any]], None]]] = {
    "an object in the field": ("ModelOpt FP8", nested),
    "ModelOpt's file": ("ModelOpt FP8", to_file("hf_quant_config.json", "quantization")),
    "GPTQ's file": ("GPTQ", to_file("quantize_config.json")),
    "AWQ's file": ("AWQ", to_file("quant_config.json")),
    "the old field of compressed-tensors": ("compressed-tensors int4", to_field("compression_config")),
    "second names of AWQ's fields": ("AWQ", renamed(bits="w_bit", group_size="q_group_size", version="format")),
    "the second name of GPTQ's version": ("GPTQ, second version", renamed(checkpoint_format="format")),
}


@pytest.mark.parametrize("place", PLACES)
@torch.inference_mode()
def test_a_statement_is_read_where_its_format_writes_it(place: str, tmp_path: Path) -> None:
    case, move = PLACES[place]
    folder, reference = folder_of(tmp_path / "tiny", case, layers=1)
    edit(folder, lambda values: move(folder, values))
    ids = torch.arange(24)[None] % VOCAB
    loaded: Any = load_model(folder, FP32).model
    torch.testing.assert_close(loaded.model(ids).logits, reference(ids).logits, rtol=1e-3, atol=1e-3)


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown method": ({"quant_method": "quark_like", "bits": 8}, "quant_method='quark_like'"),
    "ModelOpt's NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4'"),
    "ModelOpt in several forms": ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"),
    "one of our own readers": ({"quant_method": "foresay_layers"}, "'foresay_layers'"),
    "MLX": ({"group_size": 64, "bits": 4}, r"bits=4\) without its quant_method"),
    "a list": ([1], r"quantization_config of config\.json is \[1\]; it must be an object"),  # type: ignore[dict-item]
    "two sizes of bitsandbytes": ({"load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit and load_in_8bit"),
}


def test_a_method_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    """Its weights were loaded as they lie. With device_map, which transformers handles, too. Control: what transformers reads."""
    folder, _ = folder_of(tmp_path / "tiny", "ModelOpt int8", layers=1)
    for stated, message in UNKNOWN.values():
        edit(folder, lambda values, stated=stated: values.update(quantization_config=stated))
        for options in (LoadOptions(), LoadOptions(device_map="cpu")):
            with pytest.raises((ModelLoadError, UnsupportedModelError), match=message):
                load_model(folder, options)
    for method in ("awq", "gptq", "fp8", "compressed-tensors", "mxfp4", "bitsandbytes", "torchao", "quark"):
        quantization.refuse_unknown("tiny", {"quant_method": method})


def test_a_mixture_of_a_form_that_is_read_in_dense_models_is_refused(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "tiny", make("mixtral", 0, vocab_size=264))
    edit(folder, lambda values: values.update(quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"}))
    with pytest.raises(UnsupportedModelError, match="quant_method='modelopt', quant_algo='FP8'"):
        load_model(folder)


CONTRADICTIONS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bits": ("GPTQ", "quantize_config.json", {"bits": 8}, "bits is 4 in .* and 8 in quantize_config"),
    "versions": ("GPTQ, second version", "quantize_config.json", {"bits": 4, "checkpoint_format": "gptq"}, "format is"),
    "groups": ("AWQ", "quant_config.json", {"w_bit": 4, "q_group_size": 128}, "group_size is 64 in .* and 128 in quant_config"),
    "algorithms": ("ModelOpt FP8", "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "quant_algo is 'FP8' in"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_files_that_contradict_config_json_are_refused(case: str, tmp_path: Path) -> None:
    kind, name, stated, message = CONTRADICTIONS[case]
    folder, _ = folder_of(tmp_path / "tiny", kind, layers=1)
    same = {"w_bit": 4, "q_group_size": 64} if kind == "AWQ" else (CASES | EXPANDED)[kind][2]
    (folder / name).write_text(json.dumps(same))
    load_model(folder)  # control: a file that agrees
    (folder / name).write_text(json.dumps(stated))
    with pytest.raises(ModelLoadError, match=message):
        load_model(folder)


# -- fields and tensors that state the same fact -----------------------------------------------------------------------


def to(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """A change of the tensors with a last name."""

    def changed(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: change(one) for name, one in tensors.items() if name.endswith(f".{part}")})

    return changed


def added(part: str, make_one: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Another tensor for each layer, made of its scales."""

    def changed(tensors: dict[str, torch.Tensor]) -> None:
        scales = {name: one for name, one in tensors.items() if name.rpartition(".")[2].startswith("weight_scale")}
        tensors.update({f"{name.rpartition('.')[0]}.{part}": make_one(one) for name, one in scales.items()})

    return changed


def without(part: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(f".{part}")]


def same(tensors: dict[str, torch.Tensor]) -> None:
    pass


def group(**changes: Any) -> dict[str, Any]:
    """Changes of a scheme of compressed-tensors."""
    return {"config_groups": {"group_0": changes}}


def weights(**changes: Any) -> dict[str, Any]:
    return group(weights=changes)


INT4, ROWS, BLOCKS = "compressed-tensors int4", "FP8 of rows", "FP8 of blocks"
ZEROS, ORDERED, PUBLIC = "GPTQ with levels of zero", "GPTQ in the order of activations", "ModelOpt FP8"
PER_ROW = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}


def first(one: torch.Tensor) -> torch.Tensor:
    return one.flatten()[0].clone()


FACTS: dict[str, tuple[str, dict[str, Any], Change, str]] = {
    "GPTQ: bits": ("GPTQ", {"bits": 8}, same, "sym with bits=8"),
    "GPTQ: groups": ("GPTQ", {"group_size": 32}, same, "group_size is 32, and there are scales of 2 groups"),
    "GPTQ: version and symmetry": ("GPTQ", {"checkpoint_format": "gptq_v2"}, same, "'gptq_v2' .* level 8 .* one is 7"),
    "GPTQ: symmetry": (ZEROS, {"sym": True}, same, "sym with bits=4 .* level 8"),
    "GPTQ: two versions": ("GPTQ", {"checkpoint_format": "gptq", "format": "gptq_v2"}, same, "'gptq' and format"),
    "GPTQ: Marlin": ("GPTQ", {"checkpoint_format": "gptq", "is_marlin_format": True}, same, "is_marlin_format true"),
    "GPTQ: writers of zero": (ZEROS, {}, to("qzeros", lambda one: one | 15), "15, which stands for 0 or 16"),
    "GPTQ: order": (ORDERED, {"desc_act": False}, same, "desc_act is false, and g_idx"),
    "AWQ: two names": ("AWQ", {"w_bit": 8}, same, "bits is 4 and w_bit 8"),
    "GPTQ: layers": ("GPTQ", {"dynamic": {"+:.*up.*": {"bits": 8}}}, same, "dynamic changes bits"),
    "GPTQ: words": ("GPTQ", {"pack_dtype": "int8"}, same, "pack_dtype is 'int8'"),
    "GPTQ: adapter": ("GPTQ", {"adapter": {"rank": 4}}, same, "adapter is set"),
    "AWQ: no levels of zero": ("AWQ", {}, without("qzeros"), "zero_point states levels of zero, and none"),
    "AWQ: levels of zero": ("AWQ", {"zero_point": False}, same, "zero_point states that level 8 stands for 0"),
    "AWQ: groups": ("AWQ", {"group_size": 128}, same, "group_size is 128, and there are scales of 2 groups"),
    "format of a group": (INT4, group(format="int-quantized"), same, "format is 'pack-quantized', and"),
    "strategy and group_size": (INT4, weights(strategy="channel"), same, "strategy is 'channel', and group_size 64"),
    "num_bits": (INT4, weights(num_bits=8), same, r"weight_shape is \[.*\], and weight_packed has"),
    "a shape": (INT4, {}, to("weight_shape", lambda one: one + 8), "weight_shape is"),
    "symmetric": (f"{INT4} with levels of zero", weights(symmetric=True), same, "symmetric states that level 8"),
    "not symmetric": (INT4, weights(symmetric=False), same, "symmetric states levels of zero, and none"),
    "no order": (INT4, weights(actorder="group"), same, "actorder is 'group', and no weight_g_idx"),
    "an order": (INT4, {}, added("weight_g_idx", lambda one: torch.arange(one.shape[1]).repeat(64)), "actorder is None, and"),
    "a preset": (INT4, {"config_groups": {"W4A16": ["Linear"]}}, same, r"config_groups\.W4A16=\['Linear'\]"),
    "dynamic weights": (INT4, weights(dynamic=True), same, "dynamic is true for weights"),
    "strategy and scales": (ROWS, weights(strategy="tensor"), same, "strategy is 'tensor', and .* 'channel'"),
    "strategy and blocks": (ROWS, weights(block_structure="64x32"), same, "'channel', and block_structure '64x32'"),
    "a text that is no block": (f"{BLOCKS} in a text", weights(block_structure="64"), same, "block_structure is '64'"),
    "scales of inputs": (ROWS, {}, added("input_scale", first), "input_scale is stored, and"),
    "FP8: inputs": ("FP8", {}, added("activation_scale", first), "activation_scale is stored, and"),
    "FP8: blocks": ("FP8", {"weight_block_size": [32, 32]}, same, "for blocks of 32 x 32"),
    "FP8: a matrix as blocks": ("FP8 of a matrix", {"weight_block_size": [32, 32]}, same, r"\[1, 1\] for blocks of 32 x 32"),
    "FP8: two scales": ("FP8", {}, added("weight_scale", lambda one: one * 2), "weight_scale_inv and weight_scale differ"),
    "FP8: type": ("FP8", {"fmt": "e5m2"}, same, "fmt is 'e5m2'"),
    "ModelOpt: rows": (PUBLIC, PER_ROW, without("input_scale"), "strategy is 'channel', and"),
    "ModelOpt: groups": (PUBLIC, weights(type="int"), same, "quant_algo is 'FP8', and config_groups"),
    "modules": ("GPTQ", {"modules_to_not_convert": ["model.layers.0.mlp.up_proj"]}, same, "up_proj is quantized, and modules"),
}  # fmt: skip
"""Contradictions: a case, other values of its quantization_config, a change of its tensors, and a part of the refusal."""


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(values[key], one) for key, one in changes.items() if isinstance(values.get(key), dict) and one}
    return {**values, **changes, **both}


def changed(path: Path, case: str, changes: dict[str, Any], change: Change) -> Path:
    folder, _ = folder_of(path, case, change, layers=1)
    edit(folder, lambda values: values.update(quantization_config=merged(values["quantization_config"], changes)))
    return folder


@pytest.mark.parametrize("name", FACTS)
def test_statements_of_one_fact_that_contradict_are_refused(name: str, tmp_path: Path) -> None:
    """The cases of test_quantized_layers.py are the controls, which agree; without a statement one is read."""
    *case, message = FACTS[name]
    folder = changed(tmp_path / "tiny", *case)
    with pytest.raises(ModelLoadError, match=message):
        load_model(folder, FP32)
    if name == "GPTQ: version and symmetry":
        edit(folder, lambda values: values["quantization_config"].pop("sym"))
        load_model(folder, FP32)


MIDDLE = torch.tensor(-2004318072).int()
"""Eight times 8."""
AGREE: dict[str, tuple[str, dict[str, Any], Change]] = {
    "a writer whose words wrap": (ZEROS, {"meta": {"quantizer": ["gptqmodel:4.0"]}}, to("qzeros", lambda one: one | 15)),
    "AWQ without levels of zero": ("AWQ", {"zero_point": False}, without("qzeros")),
    "an order that is unset": (INT4, {}, added("weight_g_idx", lambda one: torch.full((one.shape[1] * 64,), -1))),
    "the usual order": (INT4, {}, added("weight_g_idx", lambda one: torch.arange(one.shape[1]).repeat_interleave(64))),
    "a level of zero": (INT4, {}, added("weight_zero_point", lambda one: MIDDLE.repeat(len(one) // 8, one.shape[1]))),
    "static scales of inputs": (ROWS, group(input_activations={"dynamic": False}), added("input_scale", first)),
    "a rule that changes nothing": ("GPTQ", {"dynamic": {"+:.*up.*": {"bits": 4}, "-:.*gate.*": {}}}, same),
}  # fmt: skip


@pytest.mark.parametrize("name", AGREE)
def test_statements_that_agree_are_read(name: str, tmp_path: Path) -> None:
    load_model(changed(tmp_path / "tiny", *AGREE[name]), FP32)
