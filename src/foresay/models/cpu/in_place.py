"""Matrix products that read weights directly from a model's tensors.

For a model that the caller also uses: nothing is copied, and changes of the weights take effect. Owns the address of each
output's weights, which dots.h reads. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresay.models.cpu import structs
from foresay.models.cpu.product import BFLOAT16_ROWS, FLOAT32_ROWS, CompiledProduct, row_addresses

_FORMATS = {torch.float32: FLOAT32_ROWS, torch.bfloat16: BFLOAT16_ROWS}


class InPlaceProduct(CompiledProduct):
    """The product with several weights stacked vertically. Sums run in another order than in NativeProduct."""

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> None:
        """weights: [out, in] each, float32 or bf16 on the CPU. biases: [out] each in the same dtype, or None for all.

        Raises LookupError for other weights or biases, and without compiled kernels.
        """
        with_bias = [one for one in biases if one is not None]
        dtype = weights[0].dtype
        if len(with_bias) not in (0, len(weights)) or not all(_plain(one, dtype) for one in (*weights, *with_bias)):
            raise LookupError(f"the kernels cannot read weights of {dtype} in their current layout")
        if len({one.shape[1:] for one in weights}) > 1 or weights[0].dim() != 2:
            raise LookupError(
                f"weights of shapes {', '.join(str(list(one.shape)) for one in weights)} cannot be multiplied together"
            )
        if with_bias and [one.shape for one in with_bias] != [one.shape[:1] for one in weights]:
            raise LookupError("the lengths of the biases differ from those of their weights")
        self._weights = [one.detach() for one in weights]  # keep the memory alive
        self._biases = [one.detach() for one in with_bias]
        self._rows = torch.cat([_addresses(one) for one in weights])
        self._bias_addresses = torch.cat([_addresses(one[:, None]) for one in with_bias]) if with_bias else None
        shape = (len(self._rows), int(weights[0].shape[1]))
        bias = None if self._bias_addresses is None else self._bias_addresses.data_ptr()
        super().__init__(structs.Product(_FORMATS[dtype], *shape, 0, 0, 0, self._rows.data_ptr(), None, bias))
        self.bits = 8.0 * weights[0].element_size()

    @property
    def bias(self) -> torch.Tensor | None:
        """The current values of the biases, [out]; None without biases."""
        return torch.cat(self._biases) if self._biases else None

    @property
    def nbytes(self) -> int:
        """See Product."""
        return sum(one.numel() * one.element_size() for one in self._weights)

    def dense(self) -> torch.Tensor:
        """See Product."""
        return torch.cat(self._weights)


def _plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """True for a plain CPU tensor of this dtype whose last dimension is contiguous."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return False
    return tensor.dtype == dtype and dtype in _FORMATS and tensor.device.type == "cpu" and tensor.stride(-1) == 1


def _addresses(weight: torch.Tensor) -> torch.Tensor:
    """Return the address of each row of [rows, columns], [rows] int64."""
    return row_addresses(weight.data_ptr(), weight.stride(0) * weight.element_size(), len(weight))
