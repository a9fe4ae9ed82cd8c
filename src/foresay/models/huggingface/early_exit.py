"""Early exit and trimmed heads: a model's first layers, or its head over fewer tokens, as a draft that shares its weights.

Owns the shallow copy of the module tree: containers on the path to the part that changes are copied, everything else is the
same modules and tensors. Knows nothing of drafting.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial, update_wrapper
from types import MethodType
from typing import Any

import torch
from torch import nn

from foresay.decoding.distributions import VocabularySubset
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.models.huggingface import linears
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.seq2seq import Seq2SeqModel, layers_within


def first_layers(model: CausalModel, count: int) -> CausalModel:
    """The model of the first `count` layers, followed by the whole model's final norm and head; weights are shared.

    Raises ConfigError for a count outside [1, layers - 1], and UnsupportedModelError where the layers cannot be located.
    """
    short, path = _shortened(model.model, count)
    config = _shorter(model.model.config, count)
    for name in ("", *_prefixes(path)):
        part = short.get_submodule(name)
        if hasattr(part, "config"):
            part.config = config
    return _like(model, short, model.subset)


def first_decoder_layers(model: Seq2SeqModel, count: int) -> Seq2SeqModel:
    """The same of an encoder-decoder's decoder, whose layers read the whole encoder's output. Raises as `first_layers`."""
    # the configuration stays: decoders go through the layers they have, and encoders count theirs by the same names
    out = Seq2SeqModel(_shortened(model.model, count)[0], part_of=model)
    out.num_layers = count
    return out


def _shortened(model: nn.Module, count: int) -> tuple[Any, str]:
    """A copy of a model with its first `count` decoder layers, and the path of the list of them."""
    path = _layers_path(model)
    layers = list(model.get_submodule(path).children())
    total = len(layers)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count < total:
        raise ConfigError(f"layers={count!r} must be an integer in [1, {total - 1}]: the target has {total} layers")
    short = _copied(model, path.split(".")[:-1])
    _replace(short, path, nn.ModuleList(layers[:count]))
    return short, path


def trimmed_head(model: CausalModel, ids: Sequence[int] | torch.Tensor) -> CausalModel:
    """The model whose head scores only the given tokens; all others have probability zero.

    ids: [m] integers in any order, of which the head keeps the rows; other weights are shared. Raises ConfigError for ids that
    are empty, outside the vocabulary or trimmed away before, and UnsupportedModelError for a model without an output layer of
    its own.
    """
    head = model.model.get_output_embeddings()
    weight = None if head is None else linears.weight_of(head)
    if weight is None:
        raise UnsupportedModelError(
            f"{type(model.model).__name__} has no output embeddings of its own that could be trimmed"
        )
    wanted = torch.as_tensor(ids, dtype=torch.int64)
    width = int(weight.shape[0]) if model.subset is None else model.vocab_size
    if wanted.ndim != 1 or not len(wanted) or int(wanted.min()) < 0 or int(wanted.max()) >= width:
        raise ConfigError(f"a draft vocabulary needs token ids in [0, {width - 1}]")
    kept = columns = torch.unique(wanted).to(weight.device)
    if model.subset is not None:  # what was trimmed away is gone
        columns = torch.nonzero(torch.isin(model.subset.token_ids, kept))[:, 0]
        kept = model.subset.token_ids[columns]
        if not len(kept):
            raise ConfigError("none of the draft vocabulary is left in a head that was trimmed before")
    path: str = next(name for name, module in model.model.named_modules() if module is head)
    short = _copied(model.model, path.split(".")[:-1])
    rows, frozen = weight[columns].to(model.model.dtype), isinstance(head, linears.FrozenLinear)
    _replace(short, path, _linear(rows, None if head.bias is None else head.bias[columns], frozen=frozen))
    return _like(model, short, VocabularySubset.of(kept, model.vocab_size))


def _like(model: CausalModel, part: Any, subset: VocabularySubset | None) -> CausalModel:
    """A part of a model, whose passes are made as the whole model's are."""
    out = CausalModel(part)
    out.subset = subset
    if model.lean is not None:
        out.use_fused()
    return out


def _linear(weight: torch.Tensor, bias: torch.Tensor | None, *, frozen: bool) -> nn.Module:
    """A linear layer of these weights."""
    if frozen:
        return linears.FrozenLinear(linears.unchanged(weight, bias))
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def _layers_path(model: nn.Module) -> str:
    """The dotted path of the list of decoder layers. Raises UnsupportedModelError where there is none."""
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
            f"{type(model).__name__} keeps its layers where they cannot be told from other parts"
        )
    return sorted(found, key=len)[0]


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _copied(model: nn.Module, path: Sequence[str]) -> Any:
    """A copy of a module in which the containers along `path` are copies too."""
    out = copy.copy(model)
    out._modules = dict(model._modules)
    hooked = vars(out).get("forward")
    if isinstance(hooked, partial):  # by accelerate, and bound to the original
        own = MethodType(type(out).forward, out)
        vars(out).update(_old_forward=own, forward=update_wrapper(partial(hooked.func, out), own))
    if path:
        out._modules[path[0]] = _copied(model._modules[path[0]], path[1:])  # type: ignore[arg-type]
    return out


def _replace(model: nn.Module, path: str, part: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = part


def _shorter(config: Any, count: int) -> Any:
    out = copy.copy(config)
    out.num_hidden_layers = count
    if getattr(out, "layer_types", None):
        out.layer_types = out.layer_types[:count]
    return out
