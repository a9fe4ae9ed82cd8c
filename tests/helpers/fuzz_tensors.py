"""Tables, heads, checkpoints and tokenizers, as `helpers.fuzzing` wants them: sound ones to mutate, and a use of each."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from transformers import LlamaConfig

from foresay.drafters.ngram_table import NgramTable
from foresay.errors import ModelLoadError
from foresay.json_files import parse_object
from foresay.lengths.acceptance_head import AcceptanceHead
from foresay.models.drafts.base import StoredDraft
from foresay.models.drafts.block_config import BlockConfig, PathShape, Sight
from foresay.models.drafts.block_module import BlockModule
from foresay.models.drafts.config import HeadConfig
from foresay.models.drafts.files import read_draft, write_draft
from foresay.models.drafts.head import HeadModule
from foresay.models.sources.loading import load_tokenizer
from foresay.models.sources.quantization import stated_by
from foresay.models.sources.quantized_forms import form_of, matrix_of
from foresay.tensor_files import load_tensors, stored_tensors
from foresay.text.prompts import encode
from foresay.text.tokenizer import token_bytes, tokenizer_fingerprint
from foresay_lab.training.checkpoints import State, load_checkpoint, save_checkpoint
from helpers import tables, tiny
from helpers.fuzz_mutators import (
    Tensors,
    dump,
    joined,
    mutate_bytes,
    mutate_json,
    mutate_tensors,
    mutate_value,
    safetensors,
)
from helpers.fuzzing import Format, one_file, working_folder
from helpers.quantized import CASES, EXPANDED

QUANTIZED = CASES | EXPANDED
LAYER = (64, 128)
"""Rows and columns of a quantized layer."""
FIELDS: dict[str, Any] = {
    "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}  # fmt: skip
"""Fields of the layer of a draft."""
Weights = tuple[Tensors, dict[str, str] | None]
"""The tensors and the metadata of a file."""


def _stored(path: Path) -> Weights:
    kinds = {"float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32", "bool": "BOOL"}
    arrays = load_file(path)
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    return {
        n: (kinds[str(a.dtype)], tuple(a.shape), np.ascontiguousarray(a).tobytes()) for n, a in arrays.items()
    }, metadata


def _write(place: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (place / name).write_bytes(data)
    return place


def _config(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())
    return found


Made = Callable[[random.Random], tuple[dict[str, Any], Weights]]
"""The configuration and the weights of a sound folder."""
Files = dict[str, bytes]


def _folder(made: Made) -> Callable[[Path, random.Random], Path]:
    """Folders whose configuration, weights or both are changed."""

    def write(place: Path, rng: random.Random) -> Path:
        (config, weights), which = made(rng), rng.random()
        files = _sound(config, weights)
        if which < 0.55:
            files["config.json"] = mutate_json(config, rng)
        if which > 0.45:
            files["model.safetensors"] = mutate_tensors(*weights, rng)
        return _write(place, files)

    return write


def _sound(config: Mapping[str, Any], weights: Weights) -> Files:
    return {"config.json": dump(config).encode(), "model.safetensors": joined(*safetensors(*weights))}


def _one_of(made: Callable[[], tuple[list[dict[str, Any]], list[Weights]]]) -> Made:
    return lambda rng: (rng.choice(made()[0]), rng.choice(made()[1]))


# -- tables, heads, checkpoints ---------------------------------------------------------------------------------


@cache
def _table() -> Weights:
    with working_folder() as folder:
        tables.small().save(folder / "t.safetensors")
        return _stored(folder / "t.safetensors")


def _fact(text: str, rng: random.Random) -> str:
    return dump(mutate_value(json.loads(text), rng))


def _read_table(path: Path) -> None:
    table = NgramTable.load(next(path.iterdir()))
    table.continuation([0, 1], 3)
    table.check(tables.MARK, table.vocab_size)


@cache
def _head() -> tuple[list[dict[str, Any]], list[Weights]]:
    """config.json of both layouts, and the weights."""
    sizes: dict[str, Any] = {"vocab_size": 40, "draft_vocab_size": 10, "target_hidden_size": 12}
    config = HeadConfig(layer=FIELDS, **sizes, hidden_layers=(0, 1, 2), norm_before_residual=False, target="tiny")
    module = HeadModule(config, 3)
    module.embed_tokens = torch.nn.Embedding(40, 16)
    head, configs = StoredDraft(config, module, torch.arange(0, 40, 4)), []
    with working_folder() as folder:
        for layout in ("plain", "speculators"):
            write_draft(head, folder, layout=layout, lm_head=torch.zeros(10, 16))
            configs.append(_config(folder))
        return configs, [_stored(folder / "model.safetensors")]


def _read_head(path: Path) -> None:
    head = read_draft(path)
    states = torch.zeros(1, 2, head.module.fc.in_features)
    head.module.float().unrolled(states, torch.zeros(1, 2, head.config.hidden_size), 1)  # drafting converts weights too


@cache
def _block() -> tuple[list[dict[str, Any]], list[Weights]]:
    """config.json of all layouts, and the weights."""
    sizes: dict[str, Any] = {"vocab_size": 40, "draft_vocab_size": 10, "block_size": 4, "mask_token_id": 39}
    more: dict[str, Any] = {"hidden_layers": (0, 1, 2), "has_confidence": True, "confidence_reads_markov": True}
    shape = PathShape("gated", 6)
    config = BlockConfig(layer=FIELDS, sights=(Sight(window=3), Sight()), path=shape, **sizes, **more)
    block = StoredDraft(config, BlockModule(config), torch.arange(0, 40, 4))
    with working_folder() as folder:
        write_draft(block, folder, lm_head=torch.zeros(10, 16), embeddings=torch.zeros(40, 16))
        plain, weights = _config(folder), _stored(folder / "model.safetensors")
    names = ("model_type", "num_hidden_layers", "vocab_size", "layer_types", *FIELDS)
    dflash = {**plain, "dflash_config": {n: plain.pop(n) for n in ("mask_token_id", "target_layer_ids")}}
    plain |= dflash["dflash_config"]
    speculators = {
        "speculators_model_type": "dspark",
        "transformer_layer_config": {n: plain[n] for n in names},
        "aux_hidden_state_layer_ids": [0, 1, 2],
        "speculators_config": {"verifier": {"name_or_path": "org/name", "architectures": ["A"]}},
        **{n: v for n, v in plain.items() if n not in (*names, "architectures", "target_layer_ids")},
    }
    return [plain, {**dflash, "sample_from_anchor": True}, speculators], [weights]


def _read_block(path: Path) -> None:
    block = read_draft(path)
    module, width = block.module.float(), block.config.hidden_size
    states = torch.zeros(1, 3, module.fc.in_features)
    module.blocks(states, torch.zeros(1, 1, block.config.block_size, width), torch.tensor([[2]]))


@cache
def _acceptance() -> tuple[list[dict[str, Any]], list[Weights]]:
    """config.json; our weights, and weights named as in published heads."""
    with working_folder() as folder:
        AcceptanceHead(8, 2).save(folder)
        config, (ours, _) = _config(folder), _stored(folder / "model.safetensors")
    theirs = {}
    for name, tensor in ours.items():
        for own, other in (("blocks.0.", "0.linear."), ("blocks.1.", "1.linear."), ("out.", "2.")):
            name = name.replace(own, other)
        theirs[name] = tensor
    return [config], [(ours, None), (theirs, None)]


def _read_acceptance(path: Path) -> None:
    head = AcceptanceHead.load(path)
    head.accepted(torch.zeros(1, head.hidden_size))


@cache
def _quantized(case: str) -> tuple[dict[str, Any], Weights]:
    """The quantization_config of a case, and the tensors of a layer."""
    make_layer, given, values = QUANTIZED[case]
    kinds = {torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.float16: "F16", torch.float32: "F32"}
    kinds[torch.float8_e4m3fn] = "F8_E4M3"
    stored = {}
    for name, one in make_layer(torch.Size(LAYER), torch.Generator().manual_seed(0), **given)[1].items():
        data = one.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        stored[name] = (kinds[one.dtype], tuple(one.shape), data)
    return {"quantization_config": values}, (stored, None)


def _write_quantized(place: Path, rng: random.Random) -> Path:
    if rng.random() < 0.2:
        (place / "hf_quant_config.json").write_bytes(mutate_json({"quantization": {"quant_algo": "FP8"}}, rng))
    return _folder(lambda rng: _quantized(rng.choice(sorted(QUANTIZED))))(place, rng)


def _read_quantized(path: Path) -> None:
    values = parse_object((path / "config.json").read_bytes(), "config.json")
    config = LlamaConfig()
    config.quantization_config = stated_by(str(path), values, {})
    form = form_of(config)
    if form is None:
        raise ModelLoadError("left to transformers")
    stored = load_tensors(stored_tensors([path / "model.safetensors"]))
    tensors = {name: one.float() if one.dtype == torch.float16 else one for name, one in stored.items()}
    try:
        matrix_of(form, tensors, config.quantization_config, LAYER).dense()
    except ValueError as error:
        raise ModelLoadError(str(error)) from None


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters())


def _step(model: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimiser.step()


PLAN = {"model": "tiny", "epochs": 2, "processes": 1}


@cache
def _checkpoint() -> tuple[Any, dict[str, Weights]]:
    model, optimiser = _trained()
    _step(model, optimiser)
    with working_folder() as folder:
        save_checkpoint(folder / "c", State(step=3), PLAN, model, [optimiser])
        weights = {n: _stored(folder / "c" / n) for n in ("weights.safetensors", "optimiser.safetensors")}
        return json.loads((folder / "c" / "state.json").read_text()), weights


def _sound_checkpoint() -> Files:
    state, weights = _checkpoint()
    return {"state.json": dump(state).encode(), **{n: joined(*safetensors(*one)) for n, one in weights.items()}}


def _write_checkpoint(place: Path, rng: random.Random) -> Path:
    files, (state, weights) = _sound_checkpoint(), _checkpoint()
    which = rng.choice(("", *sorted(files)))  # a sound one now and then, since few others are read
    if which:
        files[which] = mutate_json(state, rng) if which == "state.json" else mutate_tensors(*weights[which], rng)
    return _write(place, files)


def _read_checkpoint(path: Path) -> None:
    model, optimiser = _trained()
    load_checkpoint(path, PLAN, model, [optimiser])
    _step(model, optimiser)


# -- tokenizers ------------------------------------------------------------------------------------------------------------


@cache
def _tokenizer() -> Files:
    with working_folder() as folder:
        tiny.tokenizer(chat=True).save_pretrained(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def _write_tokenizer(place: Path, rng: random.Random) -> Path:
    files = _tokenizer()
    which = rng.choice(sorted(files))
    change = mutate_json(json.loads(files[which]), rng) if which.endswith(".json") else mutate_bytes(files[which], rng)
    return _write(place, {**files, which: change})


def _read_tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    ids = tokenizer("hello, world \u00e9").input_ids
    tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    tokenizer_fingerprint(tokenizer)
    encode([{"role": "user", "content": "hi"}], tokenizer)
    for i in ids[:3]:
        token_bytes(tokenizer, i)


SOUND: dict[str, Callable[[], Files]] = {
    "head": lambda: _sound(_head()[0][0], _head()[1][0]),
    "checkpoint": _sound_checkpoint,
    "tokenizer": _tokenizer,
}
"""Files of a sound case."""
FORMATS: dict[str, Format] = {
    "ngram": Format(one_file("t.safetensors", lambda rng: mutate_tensors(*_table(), rng, _fact)), _read_table),
    "ngram-list": Format(one_file("t.json", lambda rng: mutate_json([1, 2, None, 4, 0, -1], rng)), _read_table),
    "head": Format(_folder(_one_of(_head)), _read_head),
    "block": Format(_folder(_one_of(_block)), _read_block),
    "acceptance-head": Format(_folder(_one_of(_acceptance)), _read_acceptance),
    "quantized": Format(_write_quantized, _read_quantized),
    "checkpoint": Format(_write_checkpoint, _read_checkpoint),
    "tokenizer": Format(_write_tokenizer, _read_tokenizer),
}
