"""transformers' own `generate` in a benchmark, on a copy of the model that foresay has not modified.

Owns the call of transformers with its best settings: sdpa, a cache, left padding with masks, and a generation config with the
request's parameters only. Other engines run in interpreters of their own: benchmarks/engines.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from foresay.checks import check_int
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.models.hardware import Hardware
from foresay.models.sources.load_options import DTYPES, LoadOptions
from foresay.models.sources.packaged import ALIASES, converted, dequantize
from foresay.models.sources.transformers_errors import load_errors, quiet_transformers
from foresay.spec.expressions import apply, parse
from foresay_lab.bench.runners import PromptBlock
from foresay_lab.data.requests import PromptRequest, recorded_params_of
from foresay_lab.measure.live_run import Outcome

PASSED_ON = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos")
"""The sampling parameters that other engines receive."""


class TransformersRunner:
    """transformers: plain, with a static cache, an assistant, or prompt lookup. Raises ConfigError and the errors of loading."""

    exact, shares_noise = True, False

    def __init__(self, expression: str, target: Generator, dtype: str = "") -> None:
        """expression: transformers, or with one of cache=static, assistant=MODEL, lookup=N. target: names the weights.

        dtype: by default that of the target.
        """
        call = parse(expression)
        self.name, self._eos = str(call), target.target.eos_token_ids
        settings = apply("engine", call, {"transformers": _settings})
        assistant = settings.pop("assistant_model", None)
        self._settings, self._single = settings, assistant or "prompt_lookup_num_tokens" in settings
        device = target.target.model.device
        kind = DTYPES.get(dtype or target.target.dtype) or Hardware(device).native_dtype
        self._model = load(target.target.name, kind, device)
        self._extra = {} if assistant is None else {"assistant_model": load(assistant, kind, device)}

    def prepare(self, block: PromptBlock) -> None:
        """Raise ConfigError for a batch or sampling parameters that transformers does not support."""
        for name, value in recorded_params_of(block.params).items():
            if name not in PASSED_ON:
                text = f"is not supported by {self.name}, only {', '.join(PASSED_ON)}; leave it out"
                raise ConfigError(text, param=name, value=value)
        if self._single and block.batch_size > 1:
            text = f"must be 1: {self.name} decodes one prompt at a time"
            raise ConfigError(text, param="batch_size", value=block.batch_size)

    def run(self, block: PromptBlock, requests: Sequence[PromptRequest]) -> Outcome:
        """Decode the requests batch by batch. The seed is set temporarily; None leaves the random generator unchanged."""
        from transformers import GenerationConfig

        params, size, outputs = block.params, block.batch_size, list[list[int]]()
        eos = frozenset() if params.ignore_eos else self._eos
        sampled = {} if params.greedy else {name: getattr(params, name) for name in ("temperature", "top_k", "top_p")}
        config = GenerationConfig(
            max_new_tokens=params.max_new_tokens,
            eos_token_id=sorted(eos) or None,
            pad_token_id=min(self._eos, default=0),
            use_cache=True,
            do_sample=not params.greedy,
            **sampled,
            **self._settings,
        )
        with quiet_transformers(), warnings.catch_warnings(), torch.random.fork_rng(enabled=params.seed is not None):
            warnings.simplefilter("ignore")
            if params.seed is not None:
                torch.manual_seed(params.seed)
            start = perf_counter()
            for begin in range(0, len(requests), size):
                outputs += self._batch([list(one.token_ids) for one in requests[begin : begin + size]], config)
            seconds = perf_counter() - start
        ends = [next((i for i, token in enumerate(row, 1) if token in eos), len(row)) for row in outputs]
        return Outcome(seconds, [row[:end] for row, end in zip(outputs, ends, strict=True)])  # without padding

    def _batch(self, prompts: Sequence[list[int]], config: Any) -> list[list[int]]:
        width = max(map(len, prompts))
        rows = [[config.pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ids, mask_ids = (torch.tensor(values, device=self._model.device) for values in (rows, mask))
        out = self._model.generate(ids, attention_mask=mask_ids, generation_config=config, **self._extra)
        new: list[list[int]] = out[:, width:].tolist()
        return new


def _settings(cache: str | None = None, assistant: str | None = None, lookup: int | None = None) -> dict[str, Any]:
    """Return transformers' names of the settings. Raises ConfigError for a wrong value and for several settings."""
    if cache not in (None, "static"):
        raise ConfigError("must be static; leave it out for the dynamic one", param="cache", value=cache)
    if lookup is not None:
        check_int("lookup", lookup, 1, 1000)
    given = {"cache_implementation": cache, "assistant_model": assistant, "prompt_lookup_num_tokens": lookup}
    out = {name: value for name, value in given.items() if value is not None}
    if len(out) > 1:
        raise ConfigError("cannot be combined by transformers; give one of them", param=" and ".join(out))
    return out


def load(name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
    """Load a model with transformers alone, without its default generation settings, such as a penalty.

    name: as for `foresay.load`. Raises ModelLoadError or ModelNotFoundError.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    path, extra = Path(name).expanduser(), {}
    source = str(converted(name, LoadOptions())) if name in ALIASES else str(path) if path.exists() else name
    if path.is_file():
        source, extra = str(path.parent), {"gguf_file": path.name, **dequantize()}
    with quiet_transformers(), load_errors(name, name in ALIASES), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="sdpa", **extra)
    model.generation_config = GenerationConfig()
    return model.to(device).eval()
