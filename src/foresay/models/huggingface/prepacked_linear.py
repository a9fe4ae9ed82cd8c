"""Linear layers whose weights are laid out once for the CPU's matrix kernels.

A decoding step on a CPU reads every weight once, so its floor is bytes / bandwidth. PyTorch's bf16 linear re-derives a
layout on every call and reaches about half of that floor; oneDNN's packed layout, made once, reaches most of it. The
products are the same bits, for one row or many. Knows nothing of models but that they hold `nn.Linear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import nn

_LINEAR = torch.ops.mkldnn._linear_pointwise.default
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q", "k", "v"), ("wi_0", "wi_1"))
"""Names of layers that most families apply to one and the same input."""
_CROSS = ("encoder_attn", "EncDecAttention")
"""Names of attention that reads an encoder's output: its query layer is used without the two others."""


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return packed


class PackedLinear(nn.Module):
    """A frozen linear layer in oneDNN's own layout."""

    weight: torch.Tensor | None = None
    """None: T5 reads the dtype of its layers' weights where they have any."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = _pack(linear.weight.detach())
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in] -> [..., out]."""
        out: torch.Tensor = _LINEAR(x, self.packed, self.bias, "none", [], "")
        return out


def weight_of(layer: nn.Module) -> torch.Tensor | None:
    """A linear layer's weight in plain layout, [out, in]; None for a layer of another kind."""
    if isinstance(layer, PackedLinear):
        return layer.packed.to_dense()
    return layer.weight.detach() if isinstance(layer, nn.Linear) else None


class _Joint:
    """Linear layers that read the same input, multiplied as one: fewer, wider products reach more of the bandwidth.

    The first layer to be called with an input computes for all and keeps the others' outputs for them. A layer that is called
    with another input, or twice, computes again, so the result does not depend on the order of the calls.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._sizes = [layer.out_features for layer in layers]
        self.packed = _pack(torch.cat([layer.weight.detach() for layer in layers]))
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        # (input, outputs not taken yet); one attribute, so that threads see the two together
        self._waiting: tuple[torch.Tensor, dict[int, torch.Tensor]] | None = None

    def output(self, x: torch.Tensor, index: int) -> torch.Tensor:
        waiting = self._waiting
        if waiting is None or waiting[0] is not x or index not in waiting[1]:
            parts = _LINEAR(x, self.packed, self._bias, "none", [], "").split(self._sizes, -1)
            waiting = (x, dict(enumerate(parts)))
        out = waiting[1].pop(index)
        self._waiting = waiting if waiting[1] else None
        return out


class JointLinear(nn.Module):
    """One of several linear layers that are multiplied together."""

    def __init__(self, joint: _Joint, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._joint, self._index = joint, index

    @property
    def packed(self) -> torch.Tensor:
        """The weights of all of them."""
        return self._joint.packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in] -> [..., out]."""
        return self._joint.output(x, self._index)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of weights that one pass reads: everything but embeddings, of which it reads a few rows.

    An embedding that is also the head's weight counts, once.
    """
    sizes: dict[int, int] = {}
    looked_up: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            looked_up.add(id(module.weight))
            continue
        packed = module.packed if isinstance(module, PackedLinear) else None
        if isinstance(module, JointLinear):
            packed = module.packed
        for weight in [*module.parameters(recurse=False), *([] if packed is None else [packed])]:
            sizes[id(weight)] = weight.numel() * weight.element_size()
    return sum(size for key, size in sizes.items() if key not in looked_up or _is_head(model, key))


def _is_head(model: nn.Module, key: int) -> bool:
    return any(isinstance(m, nn.Linear) and id(m.weight) == key for m in model.modules())


def available(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packing helps: bf16 on a CPU whose oneDNN has bf16 kernels."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module) -> int:
    """Replace every bf16 CPU `nn.Linear` of `model` by a packed one, freeing its weight where nothing else uses it.

    Returns how many were replaced. A weight tied to an embedding stays, since the embedding reads it in plain layout.
    """
    count = 0
    for path, parent in list(model.named_modules()):
        for names in () if path.endswith(_CROSS) else _TOGETHER:
            count += _pack_together(parent, names)
        for name, child in list(parent.named_children()):
            if _packable(child):
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count


def _packable(module: object) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and available(module.weight.dtype, module.weight.device)


def _pack_together(parent: nn.Module, names: Sequence[str]) -> int:
    layers = [getattr(parent, name, None) for name in names]
    plain = [layer for layer in layers if _packable(layer)]
    if len(plain) < len(names) or len({(layer.in_features, layer.bias is None) for layer in plain}) > 1:
        return 0
    joint = _Joint(plain)
    for i, (name, layer) in enumerate(zip(names, plain, strict=True)):
        setattr(parent, name, JointLinear(joint, i, layer))
    return len(names)
