"""Draft models that share the target's weights: its first layers (early exit), or its head over fewer tokens (trimmed head).

Owns the shallow copy of the module tree: only containers on the path to the changed part are copied; all other modules and
tensors are shared. Knows nothing of drafting.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial, update_wrapper
from types import MethodType
from typing import Any

import torch
from torch import nn

from foresay.decoding.devices import is_remote
from foresay.decoding.distributions import VocabularySubset
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.models.huggingface import linears
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.frozen import FrozenLinear
from foresay.models.huggingface.seq2seq import Seq2SeqModel, layers_within


def first_layers(model: CausalModel, count: int) -> CausalModel:
    """Return the model's first `count` layers followed by its final norm and head; weights are shared.

    Raises ConfigError for a count outside [1, layers - 1], and UnsupportedModelError if the layers cannot be located, keep
    recurrent states, which the draft's tokens would change, or depend on their number.
    """
    config = model.model.config.get_text_config(decoder=True)
    if getattr(config, "hidden_size_per_layer_input", 0) or getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(
            f"the first layers of {type(model.model).__name__} are no model: its layers have inputs of their own, or read the "
            "keys and values of others; choose another drafter"
        )
    if model.rewinds_states:
        raise UnsupportedModelError(
            f"self-speculation drafts in the target's cache, and {type(model.model).__name__} has recurrent layers; "
            "choose another drafter"
        )
    short, path = _shorten(model.model, count)
    config = _shorten_config(model.model.config, count)
    for name in ("", *_prefixes(path)):
        part = short.get_submodule(name)
        if hasattr(part, "config"):
            part.config = config
    return _wrap(model, short, model.subset)


def first_decoder_layers(model: Seq2SeqModel, count: int) -> Seq2SeqModel:
    """Return an encoder-decoder with its first `count` decoder layers and the whole encoder. Raises as `first_layers`."""
    # the configuration stays: decoders iterate over their list of layers, and encoders read their number from the same fields
    out = Seq2SeqModel(_shorten(model.model, count)[0], part_of=model)
    out.num_layers = count
    return out


def _shorten(model: nn.Module, count: int) -> tuple[Any, str]:
    """Return a copy of a model with its first `count` decoder layers, and the dotted path of their list."""
    path = _layers_path(model)
    layers = list(model.get_submodule(path).children())
    total = len(layers)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count < total:
        raise ConfigError(
            f"must be an integer in [1, {total - 1}]: the target has {total} layers", param="layers", value=count
        )
    short = _copy_path(model, path.split(".")[:-1])
    _replace(short, path, nn.ModuleList(layers[:count]))
    return short, path


def trimmed_head(model: CausalModel, ids: Sequence[int] | torch.Tensor) -> CausalModel:
    """Return the model with a head that scores only the given tokens; all others have probability zero.

    ids: [m] integers in any order; the new head copies their rows, all other weights are shared. Raises ConfigError if ids are
    empty, outside the vocabulary or not in an already trimmed head, and UnsupportedModelError for a model without a linear
    output layer.
    """
    head = model.model.get_output_embeddings()
    weight = None if head is None else linears.weight_of(head)
    if weight is None:
        raise UnsupportedModelError(
            f"the head of {type(model.model).__name__} cannot be trimmed: it is not a linear output layer"
        )
    wanted = torch.as_tensor(ids, dtype=torch.int64)
    width = int(weight.shape[0]) if model.subset is None else model.vocab_size
    if wanted.ndim != 1 or not len(wanted) or int(wanted.min()) < 0 or int(wanted.max()) >= width:
        raise ConfigError(f"the draft vocabulary must be a non-empty list of token ids in [0, {width - 1}]")
    kept = columns = torch.unique(wanted).to(weight.device)
    if model.subset is not None:  # tokens that were trimmed before have no row
        columns = torch.nonzero(torch.isin(model.subset.token_ids, kept))[:, 0]
        kept = model.subset.token_ids[columns]
        if not len(kept):
            raise ConfigError(
                "the head was trimmed before and has none of the draft vocabulary's tokens; choose ids that it scores"
            )
    path: str = next(name for name, module in model.model.named_modules() if module is head)
    short = _copy_path(model.model, path.split(".")[:-1])
    rows = weight[columns].to(model.model.dtype)
    frozen = isinstance(head, FrozenLinear) and not is_remote(rows.device)
    _replace(short, path, _linear(rows, None if head.bias is None else head.bias[columns], frozen=frozen))
    return _wrap(model, short, VocabularySubset.of(kept, model.vocab_size))


def _wrap(model: CausalModel, part: Any, subset: VocabularySubset | None) -> CausalModel:
    """Wrap a part of a model, with fused layers if the model has them."""
    out = type(model)(part)
    out.subset, out.reproducible = subset, model.reproducible
    if model.fused is not None:
        out.use_fused(model.fused.cache_dtype, None if model.paged is None else model.paged.pool)
    return out


def _linear(weight: torch.Tensor, bias: torch.Tensor | None, *, frozen: bool) -> nn.Module:
    """Return a linear layer with these weights."""
    if frozen:
        return FrozenLinear(linears.unquantized(weight, bias))
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def _layers_path(model: nn.Module) -> str:
    """Return the dotted path of the list of decoder layers. Raises UnsupportedModelError if there is none."""
    config: Any = model.config
    found: list[str] = []
    if config.is_encoder_decoder:
        decoder = model.get_decoder()  # type: ignore[operator]
        path = layers_within(decoder)
        if path is not None:
            found = [f"{name}.{path}" for name, module in model.named_modules() if module is decoder]
    else:
        count = int(config.get_text_config(decoder=True).num_hidden_layers)
        lists = ((name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList))
        found = [name for name, part in lists if len(part) == count]
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of decoder layers, so its first layers cannot draft; use another drafter"
        )
    return sorted(found, key=len)[0]


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _copy_path(model: nn.Module, path: Sequence[str]) -> Any:
    """Return a shallow copy of a module in which the containers along `path` are copied too."""
    out = copy.copy(model)
    out._modules = dict(model._modules)
    wrapped = vars(out).get("forward")
    if isinstance(wrapped, partial):  # wrapped by accelerate and bound to the original
        forward = MethodType(type(out).forward, out)
        vars(out).update(_old_forward=forward, forward=update_wrapper(partial(wrapped.func, out), forward))
    if path:
        out._modules[path[0]] = _copy_path(model._modules[path[0]], path[1:])  # type: ignore[arg-type]
    return out


def _replace(model: nn.Module, path: str, part: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = part


def _shorten_config(config: Any, count: int) -> Any:
    out = copy.copy(config)
    out.num_hidden_layers = count
    if getattr(out, "layer_types", None):
        out.layer_types = out.layer_types[:count]
    return out
