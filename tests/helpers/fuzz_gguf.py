"""Damaged and hostile GGUF files made from tiny models, and the one check of each: finite scores, or one of foresay's errors."""

from __future__ import annotations

import copy
import math
import random
import struct
from functools import cache
from pathlib import Path

import gguf
import torch
from transformers import PreTrainedModel

from foresay.decoding.protocols import ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.models.gguf import packed
from foresay.models.gguf.mtp import mtp_layers_of_file
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers.fuzz_mutators import flip_bytes, mutate_bytes
from helpers.fuzzing import Format
from helpers.gguf_cases import MODELS, model_of
from helpers.gguf_image import FORMATS, LIST, TEXT, Image, Tensor, image_of, typed
from helpers.mtp import layers_of_gguf

DENSE = "-dense"
"""End of the names of files that transformers dequantises."""
TOKENS = (5, 9, 70, 9)
LAYERS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
WITH_MTP = {"glm4moe": "glm4_moe", "qwen35": "qwen3_5"}
"""Architectures whose files have a multi-token-prediction layer, and their families."""
COUNTS = (0, 1, 2, 3, 5, 255, 70_000, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1)
FLOATS = (0.0, -1.0, 1e-45, 1e30, -1e30, float("nan"), float("inf"), float("-inf"))


@cache
def bases() -> dict[str, Image]:
    """Sound files by name, of several families and types."""
    eights, fours = dict.fromkeys([*LAYERS, "token_embd"], "Q8_0"), dict.fromkeys(LAYERS, "Q4_0")
    kinds = {
        "llama": {},
        "llama-q4_0": {**fours, "token_embd": "Q4_1"},
        "llama-q8_0": eights,
        "llama-mixed": {**fours, "attn_v": "Q8_0", "ffn_up": "F16", "output": "BF16"},
        "qwen3": {},
        "phi3": {"attn_qkv": "Q4_1"},
        "gpt-oss": {**eights, **dict.fromkeys(EXPERTS, "MXFP4")},
        "glm4moe": {**eights, **dict.fromkeys(EXPERTS, "Q4_0")},
        "gemma4": {**eights, "per_layer_token_embd": "Q8_0"},
        "gemma4-moe": {**eights, "ffn_gate_up_exps": "Q4_0"},
        "granitehybrid": {**eights, "ssm_in": "Q4_0", "ffn_up_exps": "Q4_1"},
        "lfm2": {**fours, "in_proj": "Q4_0"},
        "qwen35": {**fours, "attn_gate": "Q8_0", "ssm_out": "Q4_1"},
        "qwen3next": {**fours, "attn_qkv": "Q8_0", "attn_gate": "Q4_1", "ffn_up_exps": "Q4_0"},
        **dict.fromkeys(("qwen2", "gemma2", "olmo3", "ministral3"), fours),
        **dict.fromkeys(("gemma3", "exaone4"), eights),
    }
    made = {name: model_of("llama" if name.startswith("llama") else name) for name in kinds}
    mtp = {name: layers_of_gguf(made[name], family) for name, family in WITH_MTP.items()}
    return {name: image_of(made[name], kinds[name], mtp=mtp.get(name)) for name in kinds}


def model(family: str) -> PreTrainedModel:
    """A tiny model of a family, for the tiny tokenizer."""
    return model_of(next(case for case, (name, _) in MODELS.items() if name == family))


def check(path: Path) -> None:
    """Load a file with its multi-token-prediction layers, and score four tokens.

    Raises what loading raises, and AssertionError for scores that are not finite.
    """
    options = LoadOptions(dtype="fp32") if path.stem.endswith(DENSE) else LoadOptions()
    loaded = load_model(path, options)
    rows = Rows([Row(0, list(TOKENS), SamplingParams(), limit=len(TOKENS) + 1)])
    kept = loaded.model.new_cache()
    loaded.model.admit(rows, 0, kept)
    scores = loaded.model.forward(ModelInput(torch.tensor([TOKENS]), [len(TOKENS)]), kept).scores()
    assert bool(torch.isfinite(scores).all()), "scores that are not finite"
    body = getattr(loaded.model, "model", None)
    if body is not None and getattr(body.config, "num_mtp_layers", 0):
        mtp_layers_of_file(body, in_blocks=loaded.weights == "GGUF")
    packed.settle()  # no thread stays that waits until it may write to the disk


# -- changes -----------------------------------------------------------------------------------------------------------

TEXTS = ("", "llama", "qwen2", "gemma3", "yarn", "linear", "x" * 70_000, (TEXT, struct.pack("<Q", 2) + b"\xff\xfe"))
KEYS = (
    "attention.key_length", "attention.value_length", "rope.scaling.factor", "rope.scale_linear", "rope.dimension_count",
    "general.alignment", "attention.sliding_window", "final_logit_softcapping", "expert_count",
)  # fmt: skip
"""Keys that a sound file need not have."""
NAMES = (
    "rope_freqs.weight", "output.weight", "blk.99999999999.attn_q.weight", "blk.0.attn_q.bias", "blk.7.attn_q.weight", "other",
    "", "x" * 100_000,
)  # fmt: skip
OF_VALUES = ("counts", *["value"] * 4, "kind", "nested", "missing", "double", *["added"] * 2)
OF_TENSORS = (*["dims"] * 2, *["sizes"] * 3, "stored", "offset", "missing", "double", "swapped", "renamed", "added")
OF_BYTES = ("bytes", "bytes", "cut", "lengthen")


def write(place: Path, dice: random.Random) -> Path:
    """A file with one to three changes, which its name lists."""
    base = dice.choice(list(bases()))
    image, kinds, last = copy.deepcopy(bases()[base]), [], []
    values, tensors = (
        [f"{of}_{one}" for one in all_of] for of, all_of in (("value", OF_VALUES), ("tensor", OF_TENSORS))
    )
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        kind = dice.choice([*OF_BYTES, *values, *tensors])
        kinds.append(kind)
        of, _, what = kind.partition("_")
        if kind in OF_BYTES:
            last.append(kind)
        elif of == "value" and image.values:
            _change_values(image, what, dice)
        elif of == "tensor" and image.tensors:
            _change_tensors(image, what, dice)
    data = image.written()
    for kind in last:
        data = _change_bytes(data, kind, dice)
    path = place / f"{base}-{'+'.join(kinds)}{DENSE if dice.random() < 0.2 else ''}.gguf"
    path.write_bytes(data)
    return path


FORMAT = Format(write, check)


def _change_bytes(data: bytes, kind: str, dice: random.Random) -> bytes:
    """Return the finished file with bytes changed, mostly of its head."""
    if kind == "cut":
        return data[: int(len(data) * dice.choice((dice.random(), dice.random() * 0.1, 0.999)))]
    if kind == "lengthen":
        return data + dice.randbytes(dice.choice((1, 31, 4096)))
    head = 12_000 if dice.random() < 0.7 else len(data)
    change = dice.choice((flip_bytes, mutate_bytes))  # most others move the head, and such a file is refused at once
    return change(data[:head], dice) + data[head:]


def _change_values(image: Image, what: str, dice: random.Random) -> None:
    i = dice.randrange(len(image.values))
    numbers = [j for j, (_, kind, _) in enumerate(image.values) if kind in FORMATS]
    if what == "value" and numbers and dice.random() < 0.7:  # numbers make a model
        i = dice.choice(numbers)
    key, kind, value = image.values[i]
    match what:
        case "counts":
            setattr(image, dice.choice(("version", "num_tensors", "num_values")), dice.choice(COUNTS))
        case "value":  # of the same type; of a list, another type or length
            image.values[i] = (key, kind, _other(kind, value, dice))
        case "kind":
            image.values[i] = (
                key,
                *dice.choice((typed(True), typed(1), typed(-1), typed(1.5), typed(1 << 40), typed("two"))),
            )
        case "nested":  # lists in lists
            inner = struct.pack("<IQ", LIST, 1) * dice.choice((1, 10, 5000)) + struct.pack("<IQI", 4, 1, 7)
            image.values[i] = (key, LIST, inner)
        case "missing":
            del image.values[i]
        case "double":
            image.values.insert(i, dice.choice(image.values))
        case "added" if any(key == b"general.architecture" for key, _, _ in image.values):
            image.put(dice.choice(KEYS), dice.choice((*COUNTS, *FLOATS, 8, 16, 64)))


def _change_tensors(image: Image, what: str, dice: random.Random) -> None:
    one, other = dice.choice(image.tensors), dice.choice(image.tensors)
    match what:
        case "dims" if one.dims:  # another shape over the same bytes
            sizes = [dice.choice((1, 2, 32, 64, 1 << 32, 1 << 63)) for _ in range(dice.choice((0, 1, 3, 4, 5, 70_000)))]
            changed = [*one.dims[1:], dice.choice(COUNTS)]
            one.dims = dice.choice((changed, one.dims[::-1], sizes))
            one.num_dims = dice.choice((None, None, None, dice.choice(COUNTS) % (1 << 32)))
        case "sizes" if one.dims and one.data and one.kind in set(gguf.GGMLQuantizationType):  # earlier changes
            _change_sizes(one, dice)
        case "stored":
            one.kind = dice.choice((*range(45), 1 << 31))
        case "offset":
            at = dice.randrange(40_000)
            one.offset = dice.choice((*COUNTS, at, at // 32 * 32))
        case "missing":
            image.tensors.remove(one)
        case "double":
            image.tensors.append(copy.deepcopy(one))
        case "swapped":
            one.name, other.name = other.name, one.name
        case "renamed":
            one.name = dice.choice((b"\xff", *(name.encode() for name in NAMES)))
        case "added":
            count = dice.choice((1, 8, 64, 5))
            numbers = struct.pack(f"<{count}f", *(dice.choice((*FLOATS, 1.0, 1.0)) for _ in range(count)))
            image.tensors.append(Tensor(dice.choice(NAMES).encode(), [count], 0, numbers))


def _change_sizes(one: Tensor, dice: random.Random) -> None:
    """Another shape, and as many bytes as it takes."""
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(one.kind)]
    i = dice.randrange(len(one.dims))
    one.dims[i] = dice.choice((1, 32, 64, 96, 128, 2 * one.dims[i], one.dims[i] + 1, max(1, one.dims[i] - 1), 1 << 20))
    if dice.random() < 0.2:
        one.dims.append(2)
    count = math.prod(one.dims)
    if count < 1 << 19:
        one.data = (one.data * (count // numbers * size // len(one.data) + 1))[: count // numbers * size]


def _other(kind: int, value: bytes, dice: random.Random) -> bytes:
    if kind in (6, 12):
        return struct.pack("<" + FORMATS[kind], dice.choice(FLOATS))
    if kind in FORMATS:
        size, old = struct.calcsize(FORMATS[kind]), int.from_bytes(value, "little")
        new = dice.choice((*COUNTS, old + 1, old - 1, 2 * old, old // 2, old * 1000, 7, 13))
        return (new % (1 << 8 * size)).to_bytes(size, "little")
    if kind == TEXT:
        text = typed(dice.choice(TEXTS))[1]
        return dice.choice((text, text, struct.pack("<Q", dice.choice(COUNTS[-5:])) + text[8:]))
    inner, count = struct.unpack_from("<IQ", value)
    count, inner = dice.choice(
        ((dice.choice((*COUNTS, count - 1, count + 1)), inner), (count, dice.choice((*range(13), 99))))
    )
    return struct.pack("<IQ", inner, count % (1 << 64)) + value[12:]
