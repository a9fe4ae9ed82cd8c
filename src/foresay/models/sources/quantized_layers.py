"""Folders whose linear layers are quantized: AWQ, GPTQ, compressed-tensors and FP8, without another package.

Layers are those for which the folder has quantized tensors. Their weights stay in 8 or 4 bits where our kernels read them, and
become numbers elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from foresay.models.cpu.product import NativeProduct, Product
from foresay.models.hardware import Hardware
from foresay.models.huggingface.frozen import FrozenLinear
from foresay.models.huggingface.linears import JOINT_LAYERS, replace_jointly
from foresay.models.levels import E4M3, Levels
from foresay.models.sources.kept_weights import Reader, kept, reader
from foresay.models.sources.multimodal import own_name
from foresay.models.sources.quantized_facts import LISTS
from foresay.models.sources.quantized_forms import Form, Matrix, form_of, matrix_of, rounded_parts, stacked
from foresay.tensor_files import stored_tensors

logger = logging.getLogger("foresay")

_METHOD = "foresay_layers"
_GROUP = 32
"""Weights of a group of the kernels; scales of larger groups are repeated."""
_DTYPES = {"I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn}


def config_for(
    config: Any, form: Form, name: str, device: torch.device, *, in_blocks: bool, is_trained: bool, is_part: bool
) -> Any:
    """Return the configuration with which transformers calls this reader.

    name: of the model, for messages. device: of the weights. in_blocks: False for numbers. is_trained: True if these are trained.
    is_part: True for the language model of a checkpoint with other parts.
    """
    if parts := rounded_parts(config.quantization_config):
        logger.warning(
            "%s states how %s are rounded; foresay uses the weights alone, and rounds others by activations= and kv_cache_dtype=",
            name,
            " and ".join(parts),
        )
    stored = dict(config.quantization_config)
    given = {"name": name, "device": str(device), "in_blocks": in_blocks, "is_trained": is_trained, "is_part": is_part}
    return kept(config, _METHOD, stored=stored, **given)


@reader(_METHOD)
class _Layers(Reader):
    """Reads the tensors of quantized layers, and makes their products after loading."""

    def __init__(self, quantization_config: Any, **given: Any) -> None:
        super().__init__(quantization_config, **given)
        values = quantization_config.given
        self._stored, self._name, self._is_trained = values["stored"], values["name"], bool(values["is_trained"])
        self._is_part = bool(values["is_part"])
        self._device, self._in_blocks = torch.device(values["device"]), bool(values["in_blocks"])
        self._dtype = torch.bfloat16
        self._found: dict[str, nn.Linear] = {}

    def _process_model_before_weight_loading(self, model: Any, **given: Any) -> None:
        """Give each quantized layer parameters for its tensors instead of its weight."""
        files = [one for one in given["checkpoint_files"] or () if str(one).endswith(".safetensors")]
        form, tensors = self._form(model), stored_tensors(files)
        if self._is_part:
            tensors = {own_name(name): one for name, one in tensors.items()}
        plain = {name for name, _ in model.named_parameters()}
        for path, module in model.named_modules():
            main = tensors.get(f"{path}.{form.main}")
            if not isinstance(module, nn.Linear) or main is None or main.floats:
                continue
            del module.weight
            for name in (form.main, *form.parts, "bias"):  # a bias that the configuration does not state is the file's
                one = tensors.get(f"{path}.{name}")
                if one is not None and module._parameters.get(name) is None:
                    dtype = torch.float32 if one.floats else _DTYPES.get(one.dtype)
                    dtype = model.dtype if name == "bias" else dtype
                    if dtype is None:
                        self.problem = f"{path}.{name} is of the type {one.dtype}"
                        self.refuse(model)
                    empty = torch.empty(one.shape, dtype=dtype, device="meta")
                    module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
            if listed := [one for one in LISTS if path in (self._stored.get(one) or ())]:
                self.problem = f"{path} is quantized, and {listed[0]} states that it is not"
            marked: Any = module
            marked._is_hf_initialized = True  # transformers initializes no weights of it
            self._found[path] = module
        for name in sorted(plain & tensors.keys()):
            if not tensors[name].floats and name.removesuffix(f".{form.main}") not in self._found:
                self.problem = f"{name} is of the type {tensors[name].dtype}, and belongs to none of its linear layers"
        if not self._found:
            self.problem = f"it has no tensors named .{form.main}"
        self.refuse(model)

    def _form(self, model: Any) -> Form:
        config = model.config
        own = config.quantization_config
        config.quantization_config = self._stored
        form = form_of(config)
        config.quantization_config = own
        assert form is not None
        return form

    def _process_model_after_weight_loading(self, model: Any, **given: Any) -> None:
        """Replace the layers by products, jointly where they read the same input."""
        form, expanded, self._dtype = self._form(model), 0, model.dtype
        for path, parent in list(model.named_modules()):
            groups = [*JOINT_LAYERS, *((name,) for name, _ in parent.named_children())]
            for names in groups:
                paths = [f"{path}.{name}" if path else name for name in names]
                layers = [self._found.get(one) for one in paths]
                if any(one is None for one in layers):
                    continue
                matrices = [self._matrix(form, *pair) for pair in zip(paths, layers, strict=True)]
                self.refuse(model)
                expanded += self._replace(parent, names, [one for one in matrices if one is not None])
                for one in paths:
                    del self._found[one]
        if self._found:
            self.problem = f"{min(self._found)} was not found after loading"
            self.refuse(model)
        self.remove_quantization_config(model)
        if expanded:
            logger.info("%d quantized layers of %s become numbers of %s", expanded, self._name, self._dtype)

    def _matrix(self, form: Form, path: str, layer: Any) -> Matrix | None:
        """Take a layer's matrix out of its parameters; None for tensors that do not fit together, which is a problem."""
        names = [name for name in (form.main, *form.parts) if name in layer._parameters]
        tensors = {name: layer._parameters.pop(name).detach() for name in names}
        try:
            return matrix_of(form, tensors, self._stored, (layer.out_features, layer.in_features))
        except ValueError as error:
            shapes = ", ".join(f"{name} {[*one.shape]} of {one.dtype}" for name, one in tensors.items())
            self.problem = f"the tensors of {path} ({shapes}) do not make a matrix of {layer.out_features} x "
            self.problem += f"{layer.in_features}: {error}"
            return None

    def _replace(self, parent: Any, names: Sequence[str], matrices: Sequence[Matrix]) -> int:
        """Replace layers by one product of their matrices; return how many became numbers instead."""
        layers = [getattr(parent, name) for name in names]
        biases = [one.bias for one in layers]
        same = len({(one.group, one.zeros is None, one.order is None) for one in matrices}) == 1
        joint = same and len({one is None for one in biases}) == 1
        if joint and (product := self._product(matrices, biases)) is not None:
            if len(names) == 1:
                setattr(parent, names[0], FrozenLinear(product))
            else:
                for layer, one in zip(layers, matrices, strict=True):
                    layer.weight = nn.Parameter(torch.empty(one.levels.shape, device="meta"), requires_grad=False)
                replace_jointly(parent, names, product)
            return 0
        for layer, one in zip(layers, matrices, strict=True):
            layer.weight = nn.Parameter(one.dense().to(self._device, self._dtype), self._is_trained)
        return len(names)

    def _product(self, matrices: Sequence[Matrix], biases: Sequence[Any]) -> Product | None:
        """Return the product of stacked matrices; None for matrices that the kernels do not read."""
        one = stacked(matrices)
        bias = None if biases[0] is None else torch.cat([part.detach() for part in biases])
        if not self._in_blocks or one.order is not None or one.group % _GROUP or one.levels.shape[1] % _GROUP:
            return None
        if (there := Hardware(self._device)).gpu_kernels:
            from foresay.models.gpu.blocks import BlockProduct

            return BlockProduct(_levels(one), self._dtype, self._device, bias)
        if there.cpu_kernels and (blocks := _blocks(one)) is not None:
            with suppress(LookupError):
                return NativeProduct.of_blocks(blocks[0], [blocks[1]], bias)
        return None


def _levels(matrix: Matrix) -> Levels:
    """Return a matrix for the kernels of GPUs."""
    per, scales = matrix.group // _GROUP, matrix.scales.cpu()
    if matrix.zeros is None:
        return Levels(
            bits=8, group=_GROUP, levels=_bytes(matrix.levels), scales=(scales * E4M3).numpy(), per=per, is_float=True
        )
    is_small = int(matrix.levels.max()) < 16 and int(matrix.zeros.max()) <= 16  # 16 stands for 0 in GPTQ at most
    bits = 4 if is_small else 8
    least = 0 if bits == 4 else 128  # bytes are integers from -128 to 127
    levels, zeros = matrix.levels - least if bits == 8 else matrix.levels, matrix.zeros.cpu() - least
    exact = scales.half() if bool((scales.half().float() == scales).all()) else scales
    same = bool((zeros == zeros.flatten()[0]).all())
    zero = int(zeros.flatten()[0]) if same else 0
    own = None if same else zeros.to(torch.int8).numpy()
    return Levels(bits=bits, group=_GROUP, levels=_bytes(levels), scales=exact.numpy(), per=per, zero=zero, zeros=own)


def _bytes(levels: torch.Tensor) -> Any:
    return levels.cpu().contiguous().view(torch.uint8).numpy()


def _blocks(matrix: Matrix) -> tuple[str, Any] | None:
    """Return a matrix as blocks of a type of GGUF for the kernels of CPUs, and the type; None if there is none for it.

    Scales, and offsets of levels that stand for 0, are rounded to float16.
    """
    if matrix.zeros is None:
        return None
    groups, per = matrix.levels.shape[1] // _GROUP, matrix.group // _GROUP
    scales, zeros = (one.repeat_interleave(per, 1)[:, :groups, None] for one in (matrix.scales, matrix.zeros))
    grouped = matrix.levels.view(len(matrix.levels), groups, _GROUP)
    halves = scales.half()
    if bool(((halves.float() - scales).abs() > scales.abs() / 2048).any()):  # too small for float16
        return None
    if int(matrix.levels.max()) > 15:
        if bool((zeros != 128).any()):
            return None
        return "Q8_0", torch.cat([_as_bytes(halves), grouped - 128], -1).flatten(1).numpy()
    two = grouped[..., : _GROUP // 2] | grouped[..., _GROUP // 2 :] << 4
    if bool((zeros == 8).all()):
        return "Q4_0", torch.cat([_as_bytes(halves), two], -1).flatten(1).numpy()
    offsets = (-halves.float() * zeros).half()
    return "Q4_1", torch.cat([_as_bytes(halves), _as_bytes(offsets), two], -1).flatten(1).numpy()


def _as_bytes(one: torch.Tensor) -> torch.Tensor:
    return one.contiguous().view(torch.uint8)
