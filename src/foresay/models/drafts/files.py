"""Drafts on disk: config.json and safetensors, in the layouts that other engines read.

Owns the tensors' names. Tensors are checked against the configuration before their data is read. Knows no target model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors.torch import save_file
from torch import nn

from foresay.errors import ConfigError, ModelLoadError, ModelNotFoundError
from foresay.files import atomic_files
from foresay.json_files import parse_object, read_limited
from foresay.models.drafts.base import StoredDraft
from foresay.models.drafts.block_module import BlockModule
from foresay.models.drafts.config import DraftConfig
from foresay.models.drafts.kinds import new_module, reader
from foresay.models.drafts.layers import DraftModule, rotary_embedding
from foresay.tensor_files import Stored, StoredTensor, check_shapes, load_tensors, stored_tensors

WEIGHTS = "model.safetensors"
Layout = Literal["plain", "speculators"]
LAYOUTS: Mapping[str, Layout] = {"plain": "plain", "speculators": "speculators"}
T = TypeVar("T", bound=Stored)
Read = Callable[[Mapping[str, T]], dict[str, torch.Tensor]]
OFFSETS, DRAFTABLE = "d2t", "t2d"
"""Names of the tensors that list the draft vocabulary: offsets of its ids, and a mask of the target's."""


def read_draft(folder: str | Path) -> StoredDraft:
    """Read a draft from a folder, with its weights in the stored dtype.

    Raises ModelNotFoundError if there is no config.json or no safetensors file, ModelLoadError for weights that are missing, of
    another shape or unknown, and ConfigError for an invalid or unsupported configuration.
    """
    folder = Path(folder)
    values = read_config(folder)
    kind = reader(values)
    stored = {_own_name(name): tensor for name, tensor in _stored_in(folder).items()}
    return assembled(kind, kind.stated(values), stored, load_tensors, f"the {kind.NOUN} in {str(folder)!r}")


def assembled(
    kind: type[DraftConfig], found: Mapping[str, Any], tensors: Mapping[str, T], read: Read[T], source: str
) -> StoredDraft:
    """Return the draft of a configuration's fields and stored tensors; see `read_draft`.

    found: by the names of Fields. tensors: by their names in safetensors files, not read yet. read: returns the numbers of some.
    source: for errors.
    """
    config = kind.made(_with_shapes(found, tensors), source)
    stored = dict(tensors)
    stored.pop(DRAFTABLE, None)  # redundant: the offsets determine it
    offsets = {OFFSETS: stored.pop(OFFSETS)} if OFFSETS in stored else {}
    ids = _token_ids(offsets, read, config.vocab_size, config.draft_vocab_size, source)
    joint, width = stored.get("fc.weight"), config.target_width
    if joint is None or len(joint.shape) != 2 or not joint.shape[1] or joint.shape[1] % width:
        raise ModelLoadError(f"{source} has no fc.weight [out, in] whose `in` is a multiple of {width}")
    is_tied = found.get("tie_word_embeddings") and "lm_head.weight" not in stored and "embed_tokens.weight" in stored
    if is_tied and config.draft_vocab_size != config.vocab_size:
        text = f"is fewer than the {config.vocab_size} tokens of the tied embeddings of {source}"
        raise ConfigError(text, param="draft_vocab_size", value=config.draft_vocab_size)
    with torch.device("meta"):
        module = new_module(config, joint.shape[1] // width)
        if "lm_head.weight" in stored or is_tied:
            module.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if "embed_tokens.weight" in stored:
            module.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
    wanted = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    wanted |= {name: stored[name].shape for name in module.FLAT if _flat(stored.get(name)) == wanted[name][-1:]}
    names = {_name_in_file(module, name): name for name in wanted if name != "lm_head.weight" or not is_tied}
    check_shapes(stored, {name: wanted[own] for name, own in names.items()}, source, "its config.json gives")
    if width != config.hidden_size and None in (module.lm_head, module.embed_tokens):
        raise ModelLoadError(
            f"{source} has hidden size {config.hidden_size} and its target {width}, so its file must contain embed_tokens and "
            "lm_head"
        )
    weights = {names[name]: tensor for name, tensor in read(stored).items()}
    if found.get("rope_is_neox_style") is False:
        weights = {name: _halves(name, tensor, config) for name, tensor in weights.items()}
    if is_tied:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    weights |= {name: weights[name].view(module.get_parameter(name).shape) for name in module.FLAT}
    module.load_state_dict(weights, assign=True)
    module.rotary = rotary_embedding(config.layer)  # its frequencies are buffers, not weights
    return StoredDraft(config, module, ids)


def _flat(tensor: Stored | None) -> tuple[int, ...]:
    """Return the shape of a stored tensor without dimensions of size one."""
    return () if tensor is None else tuple(n for n in tensor.shape if n != 1)


def _with_shapes(found: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Mapping[str, Any]:
    """Add to the fields whether the confidence head reads the Markov embedding, if that is left to the tensor's shape."""
    head, width = tensors.get("confidence_head.proj.weight"), found.get("hidden_size")
    if head is None or len(head.shape) != 2 or not isinstance(width, int):
        return found
    return {"confidence_head_with_markov": head.shape[1] > width, **found}


def _halves(name: str, weight: torch.Tensor, config: DraftConfig) -> torch.Tensor:
    """Return a weight of queries or keys whose rotated pairs are neighbours with the pairs in two halves; others as they are."""
    heads = int(config.layer["num_attention_heads"])
    shared = int(config.layer.get("num_key_value_heads") or heads)
    counts = {"q_proj": heads, "k_proj": shared, "q_norm": 1, "k_norm": 1}
    count = counts.get(name.split(".")[-2])
    return weight if count is None else halved(weight, count)


def halved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows [heads * dim, ...] with the even ones of each head before its odd ones."""
    return weight.view(heads, len(weight) // heads // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def write_draft(
    draft: StoredDraft,
    folder: str | Path,
    *,
    layout: Layout = "plain",
    lm_head: torch.Tensor | None = None,
    embeddings: torch.Tensor | None = None,
) -> None:
    """Write a draft into an existing folder. Both files are written completely before either is replaced.

    layout: a head has both. lm_head: [K, D], embeddings: [V, D], the target's, for engines that require them in the file. Raises
    ConfigError if the files cannot be written.
    """
    weights = draft.module.state_dict()
    tensors = {
        _name_in_file(draft.module, name): tensor.detach().cpu().contiguous() for name, tensor in weights.items()
    }
    dtype = tensors["fc.weight"].dtype
    for name, given in (("lm_head.weight", lm_head), ("embed_tokens.weight", embeddings)):
        if given is not None and name not in tensors:
            tensors[name] = given.detach().cpu().to(dtype).contiguous()
    if (ids := draft.token_ids) is not None:
        draftable = torch.zeros(draft.config.vocab_size, dtype=torch.bool)
        draftable[ids] = True
        tensors |= {OFFSETS: ids - torch.arange(len(ids)), DRAFTABLE: draftable}
    values = draft.config.as_speculators() if layout == "speculators" else draft.config.as_plain()
    values["torch_dtype"] = str(dtype).removeprefix("torch.")
    with atomic_files(folder) as work:
        save_file(tensors, work / WEIGHTS, metadata={"format": "pt"})
        (work / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read a folder's config.json. Raises ModelNotFoundError if there is none, and ModelLoadError if it cannot be read."""
    path = folder / "config.json"
    try:
        return parse_object(read_limited(path), str(path))
    except FileNotFoundError:
        raise ModelNotFoundError(
            f"the folder {str(path.parent)!r} contains no config.json; give the folder of a draft head"
        ) from None
    except (OSError, ConfigError) as error:
        raise ModelLoadError(f"cannot read {str(path)!r}: {error}") from None


def _stored_in(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a folder's safetensors files. Raises ModelNotFoundError if there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(folder.glob("*.bin"))
        found = (
            "only pickled weights, which can run code; convert them to safetensors"
            if pickled
            else "no safetensors file"
        )
        raise ModelNotFoundError(f"the folder {str(folder)!r} contains {found}")
    return stored_tensors(files)


def _own_name(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def _name_in_file(module: DraftModule, name: str) -> str:
    """Return the name that a parameter has in files."""
    path = module.path if isinstance(module, BlockModule) else None
    return name if path is None or not name.startswith("path.") else path.PREFIX + name.removeprefix("path.")


def _token_ids(
    offsets: Mapping[str, T], read: Read[T], vocab_size: int, count: int, source: str
) -> torch.Tensor | None:
    """Return the ids of a draft vocabulary of `count` tokens, [K] int64 ascending; None for the whole vocabulary.

    offsets: the tensor OFFSETS or nothing. source: the draft, for errors. Raises ModelLoadError if it is missing or invalid.
    """
    stored = offsets.get(OFFSETS)
    if stored is None:
        if count != vocab_size:
            raise ModelLoadError(
                f"{source} drafts {count} of {vocab_size} tokens, but its file has no d2t to list them"
            )
        return None
    if stored.shape == (count,) and stored.dtype in ("I64", "I32"):
        ids = torch.arange(count) + read(offsets)[OFFSETS].long()
        if bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size:
            return ids
    raise ModelLoadError(f"{source}: d2t must be integer offsets of {count} ascending token ids below {vocab_size}")
