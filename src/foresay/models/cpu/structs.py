"""The structs of kernels.cpp, the types of its functions, and the conversion of their errors.

Owns the addresses of tensors, which are returned only after a check of shape, dtype and layout. checks.h verifies at each call
that the sizes in a struct are consistent. Knows nothing of the purpose of the functions.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from foresay.errors import OutOfMemoryError

_POINTER, _NUMBER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class ProductStruct(ctypes.Structure):
    """The struct of the same name in products.h."""

    _fields_ = [
        *_fields(_NUMBER, "format outputs depth bits scaling activations"),
        *_fields(_POINTER, "weights scales bias next"),
    ]


class GateStruct(ctypes.Structure):
    """The struct of the same name in layer.h."""

    _fields_ = [("kind", _NUMBER), *_fields(_REAL, "alpha limit")]


class ExpertsStruct(ctypes.Structure):
    """The struct of the same name in experts.h."""

    _fields_ = [
        *_fields(_NUMBER, "count active inner renormalized sigmoid groups active_groups shared_inner"),
        ("gate", GateStruct),
        ("router", ProductStruct),
        *_fields(ctypes.POINTER(ProductStruct), "gate_up down shared_gate_up shared_down shared_gate"),
        ("correction", _POINTER),
        ("scale", _REAL),
    ]


class ConvolutionStruct(ctypes.Structure):
    """The struct of the same name in convolution.h."""

    _fields_ = [*_fields(_NUMBER, "taps groups"), ("projection", ProductStruct), ("base", _POINTER)]


class AttentionStruct(ctypes.Structure):
    """The struct of the same name in attention.h."""

    _fields_ = [
        *_fields(
            _NUMBER,
            "tokens columns queries keys dim rotated wide window offset store_rows gated source value_norm scale_length",
        ),
        *_fields(
            _POINTER,
            "blocks capacities rows slots starts positions ends ancestors cosines sines query_norm key_norm sinks",
        ),
        *_fields(_REAL, "eps scaling softcap scale_rate"),
    ]


class VectorStruct(ctypes.Structure):
    """The struct of the same name in model.h."""

    _fields_ = [("values", _POINTER), *_fields(_NUMBER, "size is_bf16 from_one")]


class LayerInputStruct(ctypes.Structure):
    """The struct of the same name in model.h."""

    _fields_ = [*_fields(ProductStruct, "gate projection"), ("norm", VectorStruct), *_fields(_NUMBER, "width index")]


class ExpertNormsStruct(ctypes.Structure):
    """The struct of the same name in model.h."""

    _fields_ = [*_fields(VectorStruct, "before router after dense scales"), ("factor", _REAL)]


class MixerStruct(ctypes.Structure):
    """The struct of the same name in states.h."""

    _fields_ = [
        *_fields(_NUMBER, "kind key_heads value_heads key_dim value_dim taps order state entry"),
        *_fields(VectorStruct, "convolution bias decays steps norm skips"),
        ("side", ProductStruct),
        ("tiled", _NUMBER),
        ("eps", _REAL),
    ]


class StateRowStruct(ctypes.Structure):
    """The struct of the same name in states.h."""

    _fields_ = [
        *_fields(_NUMBER, "first count length base from_ end next"),
        *_fields(_POINTER, "at_base before at_end ring"),
    ]


class StateRowsStruct(ctypes.Structure):
    """The struct of the same name in states.h."""

    _fields_ = [*_fields(_NUMBER, "count slots tail state_size entry_size"), ("rows", ctypes.POINTER(StateRowStruct))]


class LayerStruct(ctypes.Structure):
    """The struct of the same name in model.h."""

    _fields_ = [
        *_fields(ProductStruct, "qkv output gate_up down"),
        *_fields(VectorStruct, "before_attention after_attention before_mlp after_mlp query_norm key_norm sinks"),
        ("attention", AttentionStruct),
        ("turn", _NUMBER),
        ("experts", ctypes.POINTER(ExpertsStruct)),
        ("causal", _NUMBER),
        *_fields(ctypes.POINTER(ConvolutionStruct), "attention_conv mlp_conv"),
        ("mixer", ctypes.POINTER(MixerStruct)),
        ("input", ctypes.POINTER(LayerInputStruct)),
        ("expert_norms", ctypes.POINTER(ExpertNormsStruct)),
        ("scale", _REAL),
    ]


class ModelStruct(ctypes.Structure):
    """The struct of the same name in model.h."""

    _fields_ = [
        *_fields(_NUMBER, "layers hidden inner"),
        ("gate", GateStruct),
        *_fields(_REAL, "eps residual_scale"),
        ("last_norm", VectorStruct),
        ("layer", ctypes.POINTER(LayerStruct)),
        ("input_norms", VectorStruct * 2),
        ("second_is_residual", _NUMBER),
    ]


class PassStruct(ctypes.Structure):
    """The struct of the same name in model.h."""

    _fields_ = [
        *_fields(_NUMBER, "tokens columns threads cache_kind turns store_rows store_width"),
        *_fields(_POINTER, "rows slots starts positions ends ancestors"),
        *_fields(_POINTER, "cosines sines rotated blocks capacities"),
        *_fields(_POINTER, "x normed states read"),
        ("mixed", ctypes.POINTER(StateRowsStruct)),
        ("inputs", _POINTER),
        ("input_width", _NUMBER),
    ]


class ChainStruct(ctypes.Structure):
    """The struct of the same name in chain.h."""

    _fields_ = [
        *_fields(_POINTER, "embeddings scores token_ids cosines sines"),
        *_fields(_NUMBER, "rotated positions feeds_norm is_bf16"),
        ("known", _POINTER),
        ("most", _NUMBER),
        ("ends", _POINTER),
        ("num_ends", _NUMBER),
        *_fields(ctypes.c_double, "probability threshold"),
        *_fields(_POINTER, "weights tokens confidences"),
    ]


STRUCTS = (
    *(
        ProductStruct,
        GateStruct,
        ExpertsStruct,
        ExpertNormsStruct,
        ConvolutionStruct,
        AttentionStruct,
        VectorStruct,
        LayerInputStruct,
        LayerStruct,
        ModelStruct,
        PassStruct,
        ChainStruct,
    ),
    *(MixerStruct, StateRowStruct, StateRowsStruct),
)
"""All structs, in the order of `foresay_struct_size`."""


def address(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the address of a contiguous CPU tensor. Raises ValueError for another shape, dtype, layout or device."""
    if (
        tensor.shape != shape
        or tensor.dtype is not dtype
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or not tensor.is_contiguous()
    ):
        found = f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        raise ValueError(f"the kernels need a contiguous CPU tensor {list(shape)} of {dtype}, not {found}")
    return tensor.data_ptr()


_OUT_OF_MEMORY, _BAD_SIZE = 1, 2
"""Values of the enum Status in kernels.cpp."""


def declare_functions(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of the library's functions and return it.

    Raises AttributeError if a function is missing, or if a struct has another size than here.

    The functions raise OutOfMemoryError if memory runs out, ValueError for inconsistent sizes, and RuntimeError for any other
    failure.
    """
    p, n, r = _POINTER, _NUMBER, _REAL
    functions: dict[str, list[type]] = {
        "check": [ctypes.POINTER(ModelStruct)],
        "pass": [ctypes.POINTER(ModelStruct), ctypes.POINTER(PassStruct)],
        "chain": [
            ctypes.POINTER(ModelStruct),
            ctypes.POINTER(PassStruct),
            ctypes.POINTER(ChainStruct),
            ctypes.POINTER(n),
        ],
        "multiply": [ctypes.POINTER(ProductStruct), p, p, n, n, n],
        "pack": [n, p, n, n, p, p, n],
        "rows": [ctypes.POINTER(ProductStruct), p, n, p],
        "add_norm": [p, p, p, r, p, p, n, n, r],
        "gate": [ctypes.POINTER(GateStruct), p, p, n, n],
        "attend": [ctypes.POINTER(AttentionStruct), p, p, p, n, n],
        "mix": [ctypes.POINTER(MixerStruct), ctypes.POINTER(StateRowsStruct), p, p, p, n, n],
    }
    library.foresay_bf16_dots.argtypes, library.foresay_bf16_dots.restype = [], n
    library.foresay_tiles.argtypes, library.foresay_tiles.restype = [], n
    library.foresay_struct_size.argtypes, library.foresay_struct_size.restype = [n], n
    for index, struct in enumerate(STRUCTS):
        if library.foresay_struct_size(index) != ctypes.sizeof(struct):
            raise AttributeError(f"its struct {struct.__name__} has another size")
    library.foresay_instructions.argtypes, library.foresay_instructions.restype = [], ctypes.c_char_p
    library.foresay_message.argtypes, library.foresay_message.restype = [], ctypes.c_char_p

    def check_status(status: int, function: Any, arguments: Any) -> None:
        if status == 0:
            return
        message = library.foresay_message().decode(errors="replace")
        if status == _OUT_OF_MEMORY:
            raise OutOfMemoryError(
                f"memory ran out in the compiled kernels ({message}); decode fewer or shorter rows at once"
            )
        raise (ValueError if status == _BAD_SIZE else RuntimeError)(f"the compiled kernels refused a call: {message}")

    for name, types in functions.items():
        function = getattr(library, f"foresay_{name}")
        function.argtypes, function.restype, function.errcheck = types, n, check_status
    return library
