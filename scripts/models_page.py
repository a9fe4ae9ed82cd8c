"""Print docs/reference/models.md with its tables of families and of GGUF architectures written from the code."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from foresay.models.families.family import Architecture, Kinds
from foresay.models.families.table import ARCHITECTURES, FAMILIES
from foresay.models.huggingface.self_check import VERIFIED, VERIFIED_SEQ2SEQ

PAGE = Path(__file__).parents[1] / "docs/reference/models.md"
MODELS = {
    "llama": "Llama, Mistral, SmolLM2 and others; with experts: Mixtral",
    "mistral3": "Ministral 3, Devstral Small 2; Mistral Small 3 in files of this name",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3moe": "Qwen3's mixtures",
    "qwen2vl": "Qwen2-VL, Qwen2.5-VL, text only",
    "qwen3vl": "Qwen3-VL, text only",
    "qwen3vlmoe": "Qwen3-VL's mixtures, text only",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3, text only",
    "gemma4": "Gemma 4, text only; the mixture (26B-A4B), too",
    "phi3": "Phi-3, Phi-4",
    "olmo2": "OLMo-2, OLMo-3",
    "exaone4": "EXAONE-4",
    "granite": "Granite 3; Granite 4 without recurrent layers",
    "granitehybrid": "Granite 4 H, dense and as mixtures",
    "smollm3": "SmolLM3",
    "glm4moe": "GLM-4.5, GLM-4.5-Air",
    "lfm2": "LFM2, LFM2.5",
    "lfm2moe": "LFM2's mixtures",
    "qwen3next": "Qwen3-Next, Qwen3-Coder-Next",
    "qwen35": "Qwen3.5",
    "qwen35moe": "Qwen3.5's mixtures",
    "gpt-oss": "gpt-oss, its experts in MXFP4",
}
"""The names under which people know the models of an architecture."""


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def families() -> str:
    """Return the table of the families whose output the tests compare with transformers'."""
    mixed = {name for name, one in FAMILIES.items() if one.kinds is Kinds.MIXED}
    of_experts = {name for name, one in FAMILIES.items() if one.has_experts}
    rows = [
        ("attention in every layer", FAMILIES.keys() - of_experts - mixed, "kernels", "pages"),
        ("mixtures of experts", of_experts, "kernels", "pages"),
        ("hybrids", mixed, "kernels", "the family's own code"),
        ("others", VERIFIED - FAMILIES.keys(), "the family's own code", "the family's own code"),
        ("encoder-decoders", VERIFIED_SEQ2SEQ, "the family's own code", "the family's own code"),
    ]
    lines = [f"| {kind} | {_codes(names)} | {cpu} | {gpu} |\n" for kind, names, cpu, gpu in rows]
    return "| | `model_type` | on a CPU | on a GPU |\n|---|---|---|---|\n" + "".join(lines)


def _every(one: Architecture) -> list[Architecture]:
    return [one, *one.variants.values()]


def _positions(forms: list[Architecture]) -> str:
    found = {
        "a tensor of divisors": any(one.scaled_by_tensor for one in forms),
        "linear": any(one.scaled_linearly is not None for one in forms),
        "YaRN": any(one.yarn is not None for one in forms),
    }
    return ", ".join(name for name, is_read in found.items() if is_read) or "-"


def architectures() -> str:
    """Return the table of the GGUF architectures that foresay reads."""
    rows = []
    for name, one in ARCHITECTURES.items():
        forms = _every(one)
        types = _codes({form.model_type for form in forms})
        drafts = "yes" if any("nextn_predict_layers" in form.derived for form in forms) else "-"
        rows.append(f"| `{name}` | {MODELS[name]} | {types} | {_positions(forms)} | {drafts} |\n")
    head = "| architecture | models | `model_type` | scaled positions that are read | layers that draft |\n"
    return head + "|---|---|---|---|---|\n" + "".join(rows)


def page() -> str:
    """Return the page: the one that is there, with new tables."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in (("families", families()), ("architectures", architectures())):
        begin, end = f"<!-- {name}: written by scripts/models_page.py -->", f"<!-- end of {name} -->"
        new = f"{begin}\n\n{table}\n{end}"
        text, count = re.subn(f"(?s){begin}.*?{end}", lambda _, new=new: new, text)
        assert count == 1, f"docs/reference/models.md has no table of {name}"
    return text


if __name__ == "__main__":
    print(page(), end="")
