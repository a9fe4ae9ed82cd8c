"""The structs of kernels.cpp, and the types of its functions. Knows nothing of what they are for."""

from __future__ import annotations

import ctypes

_POINTER, _NUMBER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Product(ctypes.Structure):
    """The struct of the same name in products.h."""

    _fields_ = [*_fields(_NUMBER, "format outputs depth"), *_fields(_POINTER, "weights scales bias")]


class Attention(ctypes.Structure):
    """The struct of the same name in layer.h."""

    _fields_ = [
        *_fields(_NUMBER, "tokens columns queries keys dim rotated wide window row_stride"),
        *_fields(_POINTER, "rows slots starts positions ancestors cosines sines query_norm key_norm"),
        *_fields(_REAL, "eps scaling softcap"),
    ]


class Vector(ctypes.Structure):
    """The struct of the same name in kernels.cpp."""

    _fields_ = [("values", _POINTER), *_fields(_NUMBER, "size is_bf16 from_one")]


class Layer(ctypes.Structure):
    """The struct of the same name in kernels.cpp."""

    _fields_ = [
        *_fields(Product, "qkv output gate_up down"),
        *_fields(Vector, "before_attention after_attention before_mlp after_mlp query_norm key_norm"),
        ("attention", Attention),
        ("turn", _NUMBER),
    ]


class Model(ctypes.Structure):
    """The struct of the same name in kernels.cpp."""

    _fields_ = [
        *_fields(_NUMBER, "layers hidden inner activation"),
        *_fields(_REAL, "eps residual_scale"),
        ("last_norm", Vector),
        ("layer", ctypes.POINTER(Layer)),
        ("beside", Vector * 2),
        ("from_beside", _NUMBER),
    ]


class Pass(ctypes.Structure):
    """The struct of the same name in kernels.cpp."""

    _fields_ = [
        *_fields(_NUMBER, "tokens columns threads cache_is_bf16"),
        *_fields(_POINTER, "rows slots starts positions ancestors"),
        *_fields(_POINTER, "cosines sines rotated keys values row_strides"),
        *_fields(_POINTER, "x normed states read"),
    ]


def declared(found: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions. Raises AttributeError where one is missing."""
    p, n, r = _POINTER, _NUMBER, _REAL
    functions: dict[str, list[type]] = {
        "pass": [ctypes.POINTER(Model), ctypes.POINTER(Pass)],
        "multiply": [ctypes.POINTER(Product), p, p, n, n, n],
        "pack": [p, p, n, n, p, p, n],
        "add_norm": [p, p, p, r, p, p, n, n, r],
        "gate": [p, p, n, n, n],
        "attend": [ctypes.POINTER(Attention), p, p, p, p, p, n, n],
    }
    for name, types in functions.items():
        function = getattr(found, f"foresay_{name}")
        function.argtypes, function.restype = types, None
    return found
