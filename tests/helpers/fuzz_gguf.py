"""Damaged and hostile GGUF files made from tiny models, and the one check of each: finite scores, or one of foresay's errors."""

from __future__ import annotations

import copy
import math
import random
import struct
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import gguf
import torch

from foresay.decoding.protocols import ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.models.gguf import packed
from foresay.models.gguf.mtp import mtp_layers_of_file
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers import tiny
from helpers.families import make
from helpers.fuzz_mutators import flip_bytes, mutate_bytes
from helpers.fuzzing import Format, working_folder
from helpers.gguf_files import write_gguf
from helpers.mtp import layers_of_gguf

DENSE = "-dense"
"""End of the names of files that transformers dequantises."""
TOKENS = (5, 9, 70, 9)
LAYERS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
WITH_MTP = ("glm4moe", "qwen35")
"""Architectures whose files have a multi-token-prediction layer."""
ALIGNMENT = 32
COUNTS = (0, 1, 2, 3, 5, 255, 70_000, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1)
FLOATS = (0.0, -1.0, 1e-45, 1e30, -1e30, float("nan"), float("inf"), float("-inf"))
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""struct's letters for the scalar types of GGUF."""


@dataclass(slots=True)
class Tensor:
    """An entry of the table of tensors. offset: None for the next free position."""

    name: bytes
    dims: list[int]
    kind: int
    data: bytes
    offset: int | None = None
    num_dims: int | None = None


@dataclass(slots=True)
class Image:
    """A GGUF file in parts that may contradict each other. values: (key, type, bytes after the type)."""

    values: list[tuple[bytes, int, bytes]]
    tensors: list[Tensor]
    version: int = 3
    num_tensors: int | None = None
    num_values: int | None = None

    def written(self) -> bytes:
        """The bytes of the file."""
        counts = [self.num_tensors, self.num_values]
        counts = [len(one) if n is None else n for n, one in zip(counts, (self.tensors, self.values), strict=True)]
        out = bytearray(struct.pack("<4sIQQ", b"GGUF", self.version & 0xFFFFFFFF, *(n % (1 << 64) for n in counts)))
        for key, kind, value in self.values:
            out += struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value
        data = bytearray()
        for one in self.tensors:
            at = len(data) if one.offset is None else one.offset
            count = len(one.dims) if one.num_dims is None else one.num_dims
            out += struct.pack("<Q", len(one.name)) + one.name + struct.pack("<I", count)
            out += struct.pack(f"<{len(one.dims)}QIQ", *(n % (1 << 64) for n in one.dims), one.kind, at)
            data += one.data + bytes(-len(one.data) % ALIGNMENT)
        return bytes(out + bytes(-len(out) % ALIGNMENT) + data)


@cache
def bases() -> dict[str, Image]:
    """Sound files by name, of several families and types."""
    eights, fours = dict.fromkeys([*LAYERS, "token_embd"], "Q8_0"), dict.fromkeys(LAYERS, "Q4_0")
    made = {
        "llama": ("llama", {}),
        "llama-q4_0": ("llama", {**fours, "token_embd": "Q4_1"}),
        "llama-q8_0": ("llama", eights),
        "llama-mixed": ("llama", {**fours, "attn_v": "Q8_0", "ffn_up": "F16", "output": "BF16"}),
        "qwen2": ("qwen2", fours),
        "qwen3": ("qwen3", {}),
        "gemma2": ("gemma2", fours),
        "gemma3": ("gemma3", eights),
        "phi3": ("phi3", {"attn_qkv": "Q4_1"}),
        "gpt-oss": ("gpt_oss", {**eights, **dict.fromkeys(EXPERTS, "MXFP4")}),
        "glm4moe": ("glm4_moe", {**eights, **dict.fromkeys(EXPERTS, "Q4_0")}),
        "gemma4": ("gemma4", {**eights, "per_layer_token_embd": "Q8_0"}),
        "gemma4-moe": ("gemma4_moe", {**eights, "ffn_gate_up_exps": "Q4_0"}),
        "olmo3": ("olmo3", fours),
        "ministral3": ("ministral3", fours),
        "exaone4": ("exaone4", eights),
        "granitehybrid": ("granitemoehybrid", {**eights, "ssm_in": "Q4_0", "ffn_up_exps": "Q4_1"}),
        "lfm2": ("lfm2", {**fours, "in_proj": "Q4_0"}),
        "qwen35": ("qwen3_5", {**fours, "attn_gate": "Q8_0", "ssm_out": "Q4_1"}),
        "qwen3next": ("qwen3_next", {**fours, "attn_qkv": "Q8_0", "attn_gate": "Q4_1", "ffn_up_exps": "Q4_0"}),
    }
    with working_folder() as folder:
        path = folder / "sound.gguf"
        mtp = {name: layers_of_gguf(model(made[name][0]), made[name][0]) for name in WITH_MTP}
        return {
            name: _image(write_gguf(path, model(family), kinds, mtp=mtp.get(name)))
            for name, (family, kinds) in made.items()
        }


def model(family: str, **changes: object) -> torch.nn.Module:
    """A tiny model of a family, for the tiny tokenizer."""
    vocabulary = len(tiny.tokenizer())
    sizes: dict[str, object] = {"vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 96}
    kinds = ["sliding_attention", "full_attention"]
    inputs = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": vocabulary}
    mamba = {"layer_types": ["mamba", "attention"], "mamba_n_heads": 16, "shared_intermediate_size": 64}
    own: dict[str, dict[str, object]] = {
        "qwen2": {"use_sliding_window": False},
        "phi3": {"sliding_window": None},
        "gpt_oss": {"swiglu_limit": 7.0},
        "glm4_moe": {"moe_intermediate_size": 32},
        "gemma4": {"layer_types": kinds * 2, "num_kv_shared_layers": 2, "num_hidden_layers": 4, **inputs},
        "gemma4_moe": {"layer_types": kinds, "moe_intermediate_size": 32},
        "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        "granitemoehybrid": mamba,
        "qwen3_5": {"num_hidden_layers": 4},
        "qwen3_next": {"num_hidden_layers": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    }
    return make(family, 0, **{**sizes, "num_hidden_layers": 2, **own.get(family, {}), **changes})


def _image(path: Path) -> Image:
    reader = gguf.GGUFReader(path)
    values = []
    for key, one in reader.fields.items():
        if not key.startswith("GGUF."):
            parts = [part.tobytes() for part in one.parts]
            values.append((parts[1], int(one.parts[2][0]), b"".join(parts[3:])))
    tensors = [
        Tensor(one.name.encode(), [int(n) for n in one.shape], int(one.tensor_type), one.data.tobytes())
        for one in reader.tensors
    ]
    return Image(values, tensors)


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

TEXTS = (b"", b"llama", b"qwen2", b"gemma3", b"yarn", b"linear", b"\xff\xfe", b"x" * 70_000)
KEYS = (
    b"attention.key_length attention.value_length rope.scaling.factor rope.scale_linear rope.dimension_count "
    b"attention.sliding_window final_logit_softcapping expert_count"
).split()
"""Keys that a sound file need not have."""
RENAMED = (
    b"",
    b"rope_freqs.weight",
    b"output.weight",
    b"blk.99999999999.attn_q.weight",
    b"blk.0.attn_q.bias",
    b"\xff",
    b"x" * 100_000,
)
ADDED = (b"rope_freqs.weight", b"output.weight", b"blk.0.attn_q.bias", b"blk.7.attn_q.weight", b"other")
OF_VALUES = ("counts", *["value"] * 4, "kind", "nested", "missing", "double", *["added"] * 2)
OF_TENSORS = (*["dims"] * 2, *["sizes"] * 3, "stored", "offset", "missing", "double", "swapped", "renamed", "added")
OF_BYTES = ("bytes", "bytes", "cut", "lengthen")


def write(place: Path, dice: random.Random) -> Path:
    """A file with one to three changes, which its name lists."""
    base = dice.choice(list(bases()))
    image, kinds, last = copy.deepcopy(bases()[base]), [], []
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        kind = dice.choice(
            [*OF_BYTES, *(f"value_{one}" for one in OF_VALUES), *(f"tensor_{one}" for one in OF_TENSORS)]
        )
        kinds.append(kind)
        if kind in OF_BYTES:
            last.append(kind)
        elif kind.startswith("value_") and image.values:
            _change_values(image, kind.removeprefix("value_"), dice)
        elif kind.startswith("tensor_") and image.tensors:
            _change_tensors(image, kind.removeprefix("tensor_"), dice)
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
            kind = dice.choice((*FORMATS, 8))
            image.values[i] = (
                key,
                kind,
                struct.pack("<Q3s", 3, b"two") if kind == 8 else struct.pack("<" + FORMATS[kind], 1),
            )
        case "nested":  # lists in lists
            inner = struct.pack("<IQ", 9, 1) * dice.choice((1, 10, 5000)) + struct.pack("<IQI", 4, 1, 7)
            image.values[i] = (key, 9, inner)
        case "missing":
            del image.values[i]
        case "double":
            image.values.insert(i, dice.choice(image.values))
        case "added":
            family = next((value[8:] for key, _, value in image.values if key == b"general.architecture"), b"llama")
            kind = dice.choice((4, 5, 6, 6))
            value = _other(kind, struct.pack("<" + FORMATS[kind], 16), dice)
            image.values.append((family + b"." + dice.choice(KEYS), kind, value))
            if dice.random() < 0.2:
                alignment = struct.pack("<I", dice.choice((0, 1, 3, 8, 64, 1 << 31)))
                image.values.append((b"general.alignment", 4, alignment))


def _change_tensors(image: Image, what: str, dice: random.Random) -> None:
    one, other = dice.choice(image.tensors), dice.choice(image.tensors)
    match what:
        case "dims":
            _change_dims(one, dice)
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
            one.name = dice.choice(RENAMED)
        case "added":
            count = dice.choice((1, 8, 64, 5))
            numbers = struct.pack(f"<{count}f", *(dice.choice((*FLOATS, 1.0, 1.0)) for _ in range(count)))
            image.tensors.append(Tensor(dice.choice(ADDED), [count], 0, numbers))


def _change_dims(one: Tensor, dice: random.Random) -> None:
    """Another shape over the same bytes."""
    way = dice.randrange(4)
    if way == 0 and one.dims:
        one.dims[dice.randrange(len(one.dims))] = dice.choice(COUNTS)
    elif way == 1:
        one.dims.reverse()
    elif way == 2:
        one.num_dims = dice.choice(COUNTS) % (1 << 32)
    else:
        one.dims = [dice.choice((1, 2, 32, 64, 1 << 32, 1 << 63)) for _ in range(dice.choice((0, 1, 3, 4, 5, 70_000)))]


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
        with warnings.catch_warnings():
            return struct.pack("<" + FORMATS[kind], dice.choice(FLOATS))
    if kind in FORMATS:
        size = struct.calcsize(FORMATS[kind])
        old = int.from_bytes(value, "little")
        new = dice.choice((*COUNTS, old + 1, old - 1, 2 * old, old // 2, old * 1000, 7, 13))
        return (new % (1 << 8 * size)).to_bytes(size, "little")
    if kind == 8:
        text = dice.choice(TEXTS)
        return struct.pack("<Q", dice.choice((len(text), *COUNTS[-5:]))) + text
    inner, count = struct.unpack_from("<IQ", value)
    if dice.random() < 0.5:
        return struct.pack("<IQ", inner, dice.choice((*COUNTS, count - 1, count + 1))) + value[12:]
    return struct.pack("<IQ", dice.choice((*range(13), 99)), count) + value[12:]
