"""Damaged and hostile GGUF files made from tiny models, and the one check of each.

`cases` writes the files, each from its seed and number alone; `check` loads one and accepts finite scores or one of foresay's
errors. `fuzzing.py` runs them.
"""

from __future__ import annotations

import random
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import gguf
import torch

from foresay.decoding.protocols import ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ForesayError
from foresay.models.gguf import packed
from foresay.models.gguf.mtp import mtp_layers_of_file
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model
from helpers import tiny
from helpers.families import make
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
    raw: list[Callable[[bytearray], None]] = field(default_factory=list)
    """Changes to the finished bytes."""

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
            out += struct.pack(f"<{len(one.dims)}QIQ", *one.dims, one.kind, at)
            data += one.data + bytes(-len(one.data) % ALIGNMENT)
        out += bytes(-len(out) % ALIGNMENT) + data
        for change in self.raw:
            change(out)
        return bytes(out)


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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sound.gguf"
        mtp = {name: layers_of_gguf(model(made[name][0]), made[name][0]) for name in WITH_MTP}
        return {
            name: _image(write_gguf(path, model(family), kinds, mtp=mtp.get(name)))
            for name, (family, kinds) in made.items()
        }


def model(family: str, **changes: object) -> torch.nn.Module:
    """A tiny model of a family, for the tiny tokenizer."""
    sizes: dict[str, object] = {"vocab_size": len(tiny.tokenizer()), "hidden_size": 64, "intermediate_size": 96}
    layers = {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 4,
    }
    inputs = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": len(tiny.tokenizer())}
    own: dict[str, dict[str, object]] = {
        "qwen2": {"use_sliding_window": False},
        "phi3": {"sliding_window": None},
        "gpt_oss": {"swiglu_limit": 7.0},
        "glm4_moe": {"moe_intermediate_size": 32},
        "gemma4": {**layers, **inputs},
        "gemma4_moe": {"layer_types": layers["layer_types"][:2], "moe_intermediate_size": 32},
        "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        "granitemoehybrid": {
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 16,
            "shared_intermediate_size": 64,
        },
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


def cases(seed: int, count: int, folder: Path, first: int = 0) -> Iterator[tuple[str, Path]]:
    """(name, path) of `count` files from number `first` on, one at a time: each path is gone when the next is requested."""
    for number in range(first, first + count):
        dice = random.Random(f"gguf {seed} {number}")
        base = dice.choice(list(bases()))
        image = copied(bases()[base])
        done = []
        for _ in range(dice.choice((1, 1, 1, 2, 3))):
            change = dice.choice(CHANGES)
            change(image, dice)
            done.append(change.__name__.strip("_"))
        name = f"{seed}-{number}-{base}-{'+'.join(done)}{DENSE if dice.random() < 0.2 else ''}"
        path = folder / f"{name}.gguf"
        path.write_bytes(image.written())
        yield name, path
        path.unlink(missing_ok=True)


def read(path: Path) -> None:
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


def check(path: Path) -> None:
    """`read`, where a refusal in one line is as good as success."""
    try:
        read(path)
    except ForesayError as error:
        if "\n" in str(error):
            raise AssertionError(f"an error of more than a line: {error!r}") from error


def copied(image: Image) -> Image:
    """The same parts, to be changed."""
    tensors = [Tensor(one.name, list(one.dims), one.kind, one.data) for one in image.tensors]
    return Image(list(image.values), tensors)


# -- changes -----------------------------------------------------------------------------------------------------------


def _flip(image: Image, dice: random.Random) -> None:
    """Some bytes, mostly of the head."""
    head, flips = dice.random() < 0.7, dice.choice((1, 1, 2, 8, 64))
    places = [(dice.random(), dice.randrange(1, 256)) for _ in range(flips)]

    def change(data: bytearray) -> None:
        size = min(len(data), 12_000) if head else len(data)
        for share, bits in places:
            if size:
                data[int(share * size)] ^= bits

    image.raw.append(change)


def _cut(image: Image, dice: random.Random) -> None:
    share = dice.choice((dice.random(), dice.random() * 0.1, 0.999))
    image.raw.append(lambda data: data.__delitem__(slice(int(share * len(data)), None)))


def _lengthen(image: Image, dice: random.Random) -> None:
    size = dice.choice((1, 31, 4096))
    image.raw.append(lambda data: data.extend(dice.randbytes(size)))


def _counts(image: Image, dice: random.Random) -> None:
    which = dice.choice(("version", "num_tensors", "num_values"))
    setattr(image, which, dice.choice(COUNTS))


def _value(image: Image, dice: random.Random) -> None:
    """Another value of the same type; of a list, another type or length."""
    i = dice.randrange(len(image.values))
    if dice.random() < 0.7:  # numbers make a model
        i = dice.choice([j for j, (_, kind, _) in enumerate(image.values) if kind in FORMATS])
    key, kind, _ = image.values[i]
    image.values[i] = (key, kind, _other(kind, image.values[i][2], dice))


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
        text = dice.choice((b"", b"llama", b"qwen2", b"gemma3", b"yarn", b"linear", b"\xff\xfe", b"x" * 70_000))
        return struct.pack("<Q", dice.choice((len(text), *COUNTS[-5:]))) + text
    inner, count = struct.unpack_from("<IQ", value)
    if dice.random() < 0.5:
        return struct.pack("<IQ", inner, dice.choice((*COUNTS, count - 1, count + 1))) + value[12:]
    return struct.pack("<IQ", dice.choice((*range(13), 99)), count) + value[12:]


def _kind(image: Image, dice: random.Random) -> None:
    """A value of another type."""
    i = dice.randrange(len(image.values))
    kind = dice.choice((*FORMATS, 8))
    value = struct.pack("<Q3s", 3, b"two") if kind == 8 else struct.pack("<" + FORMATS[kind], 1)
    image.values[i] = (image.values[i][0], kind, value)


def _nested(image: Image, dice: random.Random) -> None:
    """Lists in lists."""
    depth = dice.choice((1, 10, 5000))
    i = dice.randrange(len(image.values))
    value = struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQI", 4, 1, 7)
    image.values[i] = (image.values[i][0], 9, value)


def _missing_value(image: Image, dice: random.Random) -> None:
    del image.values[dice.randrange(len(image.values))]


def _double_value(image: Image, dice: random.Random) -> None:
    image.values.insert(dice.randrange(len(image.values)), dice.choice(image.values))


def _added_value(image: Image, dice: random.Random) -> None:
    """Values that a sound file need not have."""
    family = next((value[8:] for key, _, value in image.values if key == b"general.architecture"), b"llama")
    key = dice.choice(
        (
            b"attention.key_length",
            b"attention.value_length",
            b"rope.scaling.factor",
            b"rope.scale_linear",
            b"rope.dimension_count",
            b"attention.sliding_window",
            b"final_logit_softcapping",
            b"expert_count",
        )
    )
    kind = dice.choice((4, 5, 6, 6))
    old = struct.pack("<" + FORMATS[kind], 16)
    image.values.append((family + b"." + key, kind, _other(kind, old, dice)))
    if dice.random() < 0.2:
        image.values.append((b"general.alignment", 4, struct.pack("<I", dice.choice((0, 1, 3, 8, 64, 1 << 31)))))


def _dims(image: Image, dice: random.Random) -> None:
    """Another shape over the same bytes."""
    one = dice.choice(image.tensors)
    way = dice.randrange(4)
    if way == 0 and one.dims:
        one.dims[dice.randrange(len(one.dims))] = dice.choice(COUNTS)
    elif way == 1:
        one.dims.reverse()
    elif way == 2:
        one.num_dims = dice.choice(COUNTS) % (1 << 32)
    else:
        one.dims = [dice.choice((1, 2, 32, 64, 1 << 32, 1 << 63)) for _ in range(dice.choice((0, 1, 3, 4, 5, 70_000)))]


def _sizes(image: Image, dice: random.Random) -> None:
    """Another shape, and as many bytes as it takes."""
    one = dice.choice(image.tensors)
    if not one.dims or one.kind not in set(gguf.GGMLQuantizationType):  # after earlier changes
        return
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(one.kind)]
    i = dice.randrange(len(one.dims))
    one.dims[i] = dice.choice((1, 32, 64, 96, 128, 2 * one.dims[i], one.dims[i] + 1, max(1, one.dims[i] - 1), 1 << 20))
    if dice.random() < 0.2:
        one.dims.append(2)
    count = 1
    for n in one.dims:
        count *= n
    if count < 1 << 19:
        one.data = (one.data * (count // numbers * size // len(one.data) + 1))[: count // numbers * size]


def _stored(image: Image, dice: random.Random) -> None:
    """Another type."""
    dice.choice(image.tensors).kind = dice.choice((*range(45), 1 << 31))


def _offset(image: Image, dice: random.Random) -> None:
    one, other = dice.choice(image.tensors), dice.randrange(40_000)
    one.offset = dice.choice((*COUNTS, other, other // 32 * 32))


def _missing_tensor(image: Image, dice: random.Random) -> None:
    image.tensors.remove(dice.choice(image.tensors))


def _double_tensor(image: Image, dice: random.Random) -> None:
    one = dice.choice(image.tensors)
    image.tensors.append(Tensor(one.name, list(one.dims), one.kind, one.data))


def _swapped(image: Image, dice: random.Random) -> None:
    one, other = dice.choice(image.tensors), dice.choice(image.tensors)
    one.name, other.name = other.name, one.name


def _renamed(image: Image, dice: random.Random) -> None:
    names = (
        b"",
        b"rope_freqs.weight",
        b"output.weight",
        b"blk.99999999999.attn_q.weight",
        b"blk.0.attn_q.bias",
        b"\xff",
    )
    dice.choice(image.tensors).name = dice.choice((*names, b"x" * 100_000))


def _added_tensor(image: Image, dice: random.Random) -> None:
    names = (b"rope_freqs.weight", b"output.weight", b"blk.0.attn_q.bias", b"blk.7.attn_q.weight", b"other")
    count = dice.choice((1, 8, 64, 5))
    numbers = struct.pack(f"<{count}f", *(dice.choice((*FLOATS, 1.0, 1.0)) for _ in range(count)))
    image.tensors.append(Tensor(dice.choice(names), [count], 0, numbers))


CHANGES = (
    _flip,
    _flip,
    _cut,
    _lengthen,
    _counts,
    _value,
    _value,
    _value,
    _value,
    _kind,
    _nested,
    _missing_value,
    _double_value,
    _added_value,
    _added_value,
    _dims,
    _dims,
    _sizes,
    _sizes,
    _sizes,
    _stored,
    _offset,
    _missing_tensor,
    _double_tensor,
    _swapped,
    _renamed,
    _added_tensor,
)
