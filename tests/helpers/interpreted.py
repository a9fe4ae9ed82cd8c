"""Triton's interpreter with tables of types, shapes and constants, which it would make for each operation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def look_up_types(patch: pytest.MonkeyPatch) -> None:
    """Operations give what they gave, and refuse what they refused."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic as Semantic
    from triton.runtime import interpreter

    dtype_of, init, unwrap = interpreter._get_np_dtype, core.block_type.__init__, core._unwrap_if_constexpr
    operands, broadcast = Semantic.binary_op_type_checking_impl, Semantic.broadcast_impl_value
    dtypes, blocks, constants = dict[str, Any](), dict[Any, dict[str, Any]](), dict[Any, Any]()
    scalar = {"shape": core.tuple([]), "numel": core.constexpr(1)}
    plain, exact = (core.dtype, core.tensor, int, str), ("fp32", "int1", "int32", "int64")

    def block_type(self: Any, element: Any, shape: Any) -> None:
        key = (element.name, *(one.value if type(one) is core.constexpr else one for one in shape))
        if key not in blocks:
            init(self, element, shape)
            sizes = core.tuple([core.constexpr(one) for one in self.shape])
            blocks[key] = {**vars(self), "of_tensor": {"shape": sizes, "numel": core.constexpr(self.numel)}}
        self.__dict__.update(blocks[key])

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        self.__dict__.update(kind.of_tensor if kind.is_block() else scalar, handle=handle, type=kind, dtype=kind.scalar)

    def known_operands(self: Any, one: Any, other: Any, *given: Any, **named: Any) -> Any:
        if type(one) is core.tensor and type(other) is int:
            key = (one.type.name, other, *given, *named.items())
            if key not in constants and (found := operands(self, one, other, *given, **named))[0] is not one:
                return found
            return one, constants[key] if key in constants else constants.setdefault(key, found[1])
        alike = type(one) is type(other) is core.tensor and one.dtype is other.dtype and one.dtype.name in exact
        return self.broadcast_impl_value(one, other) if alike else operands(self, one, other, *given, **named)

    def stretched(self: Any, one: Any, other: Any) -> Any:
        shapes = [tuple(each.type.shape.values) if each.type.is_block() else () for each in (one, other)]
        if shapes[0] == shapes[1]:
            return one, other
        if len(shapes[0]) != len(shapes[1]):
            return broadcast(self, one, other)
        sizes = np.broadcast_shapes(*shapes)
        kinds = [core.block_type(each.dtype, list(sizes)) for each in (one, other)]
        made = zip((one, other), shapes, kinds, strict=True)
        return [a if b == sizes else core.tensor(self.builder.create_broadcast(a.handle, sizes), c) for a, b, c in made]

    known = lambda kind: dtypes.get(kind.name) or dtypes.setdefault(kind.name, dtype_of(kind))  # noqa: E731
    patch.setattr(interpreter, "_get_np_dtype", known)
    patch.setattr(core, "_unwrap_if_constexpr", lambda value: value if isinstance(value, plain) else unwrap(value))
    patch.setattr(core.block_type, "__init__", block_type)
    patch.setattr(core.tensor, "__init__", tensor)
    patch.setattr(Semantic, "binary_op_type_checking_impl", known_operands)
    patch.setattr(Semantic, "broadcast_impl_value", stretched)
