"""The configuration and the tokenizer that transformers makes from a GGUF file.

The plain calls parse the vocabulary three times, half a minute for 150,000 tokens. Here the configuration comes from the header's
short values alone, and the tokenizer's class is called directly. Reads no weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foresay.files import work_folder
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.values import check_values

_LARGEST_MODEL_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Number of layers of each family's 27-billion-parameter model, whose queries are not scaled by the attention head size."""


def config_of(header: GgufHeader) -> Any:
    """Return the transformers configuration. Raises ModelLoadError for invalid values; see `check_values`.

    Errors of transformers for an unknown architecture pass through.
    """
    from transformers import AutoConfig

    check_values(header)
    with work_folder("foresay-gguf") as folder:
        (folder / "header.gguf").write_bytes(header.short_values)
        config = AutoConfig.from_pretrained(folder, gguf_file="header.gguf")
    config.name_or_path = ""
    # transformers derives these from the tensors and the vocabulary
    config.tie_word_embeddings = "output.weight" not in header.tensors
    if f"{header.architecture}.vocab_size" not in header.values and "token_embd.weight" in header.tensors:
        config.vocab_size = header.tensors["token_embd.weight"].shape[0]
    if f"{header.architecture}.attention.key_length" in header.values and hasattr(config, "head_dim"):
        # transformers reads this value for some families only
        config.head_dim = header.values[f"{header.architecture}.attention.key_length"]
    if f"{header.architecture}.expert_feed_forward_length" in header.values:
        # which transformers does not read
        config.moe_intermediate_size = header.values[f"{header.architecture}.expert_feed_forward_length"]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # a missing id defaults to that of some model of the family, which may exceed this vocabulary
        one = getattr(config, name, None)
        if isinstance(one, int) and one >= config.vocab_size:
            setattr(config, name, None)
    if header.architecture in _LARGEST_MODEL_LAYERS:
        # no key stores the scale: like llama.cpp, recognize the largest model of a family by its number of layers
        largest = config.num_hidden_layers == _LARGEST_MODEL_LAYERS[header.architecture]
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if largest else config.head_dim
    return config


def tokenizer_of(path: Path, config: Any) -> Any:
    """Return the transformers tokenizer, of the class that AutoTokenizer would choose."""
    from transformers import TOKENIZER_MAPPING, AutoTokenizer, PreTrainedTokenizerFast

    if (path.parent / "tokenizer_config.json").exists():  # it may name another class
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    kind = TOKENIZER_MAPPING.get(type(config), None) or PreTrainedTokenizerFast
    return kind.from_pretrained(path.parent, gguf_file=path.name)
