"""The configuration and the tokenizer that a GGUF file describes, as transformers makes them.

Owns how they are had without reading the vocabulary three times over, which takes half a minute for 150,000 tokens: the
configuration from the head's short values alone, the tokenizer by its own class. Reads no weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foresay.files import work_folder
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.values import check_values

_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the models, of 27 billion weights, whose queries are not scaled by the size of a head."""


def config_of(head: GgufHeader) -> Any:
    """The transformers configuration. Raises ModelLoadError for values that no model has, see `check_values`.

    Raises what transformers raises for an architecture that it does not know.
    """
    from transformers import AutoConfig

    check_values(head)
    with work_folder("foresay-gguf") as folder:
        (folder / "head.gguf").write_bytes(head.short)
        config = AutoConfig.from_pretrained(folder, gguf_file="head.gguf")
    config.name_or_path = ""
    # what transformers reads off the tensors and the vocabulary
    config.tie_word_embeddings = "output.weight" not in head.tensors
    if f"{head.architecture}.vocab_size" not in head.values and "token_embd.weight" in head.tensors:
        config.vocab_size = head.tensors["token_embd.weight"].shape[0]
    if f"{head.architecture}.attention.key_length" in head.values and hasattr(config, "head_dim"):
        config.head_dim = head.values[
            f"{head.architecture}.attention.key_length"
        ]  # which is read for some families only
    for name in (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ):  # where the file has none, those of a model of the family
        one = getattr(config, name, None)
        if isinstance(one, int) and one >= config.vocab_size:
            setattr(config, name, None)
    if head.architecture in _LARGEST:
        # no key says it: llama.cpp knows the largest model of a family by its layers
        largest = config.num_hidden_layers == _LARGEST[head.architecture]
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if largest else config.head_dim
    return config


def tokenizer_of(path: Path, config: Any) -> Any:
    """The transformers tokenizer, of the class that AutoTokenizer would choose."""
    from transformers import TOKENIZER_MAPPING, AutoTokenizer, PreTrainedTokenizerFast

    if (path.parent / "tokenizer_config.json").exists():  # which may name another class
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    kind = TOKENIZER_MAPPING.get(type(config), None) or PreTrainedTokenizerFast
    return kind.from_pretrained(path.parent, gguf_file=path.name)
