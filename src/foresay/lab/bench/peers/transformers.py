"""transformers' own `generate`, in this process, on a copy of the model that foresay has not modified.

Owns the call of transformers with its best settings: sdpa, a cache, left padding with masks, and a generation config with the
request's parameters only. Knows nothing about foresay's engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from foresay.checks import check_int
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, ForesayError
from foresay.lab.bench.peers.base import PeerRun, PeerSpec, check_length, check_run, count_setting, torch_dtype
from foresay.lab.bench.peers.base import transformers_source as source_of
from foresay.models.sources.packaged import ALIASES, dequantize
from foresay.models.sources.transformers_errors import load_errors, quiet_transformers
from foresay.models.sources.wrapping import end_tokens


class TransformersPeer:
    """transformers: plain, with an assistant, or with its prompt lookup. Raises ConfigError and the errors of loading."""

    def __init__(self, spec: PeerSpec, *, model: str, dtype: str, threads: int | None) -> None:
        self._assistant_name = spec.settings.get("assistant")
        self._lookup = count_setting(spec, "lookup")
        self._cache = spec.settings.get("cache")
        self.name = _name(spec)
        self._threads = None if threads is None else check_int("threads", threads, 1)
        self._dtype = torch_dtype(dtype)
        self._source = source_of(model)[0]
        self._model = load(model, self._dtype)
        self._eos = end_tokens(self._model, None)
        self._assistant = None if self._assistant_name is None else load(self._assistant_name, self._dtype)
        for loaded in (self._model, self._assistant):
            _clear_defaults(loaded)

    def describe(self) -> dict[str, str]:
        """Return versions, dtype and settings."""
        import transformers

        out = {
            "engine": f"transformers {transformers.__version__}",
            "torch": torch.__version__,
            "model": self._source,
            "dtype": str(self._dtype).removeprefix("torch."),
            "threads": str(self._threads or torch.get_num_threads()),
            "attention": "sdpa",
            "cache": self._cache or "dynamic",
            "batches": "left-padded, in the order of the prompts",
        }
        if self._model is not None:
            out["device"] = str(self._model.device)
        if self._assistant_name is not None:
            out["assistant"] = self._assistant_name
        if self._lookup is not None:
            out["prompt_lookup_num_tokens"] = str(self._lookup)
        return out

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams, batch_size: int) -> PeerRun:
        """Decode the prompts batch by batch; with an assistant or prompt lookup only one prompt at a time.

        Raises ConfigError for settings that transformers does not support, and ForesayError if it fails or the peer is closed.
        """
        if self._model is None:
            raise ForesayError(f"{self.name} is closed; open it again")
        check_run(self.name, prompts, params, batch_size)
        self._check(prompts, params.max_new_tokens, batch_size)
        eos = frozenset() if params.ignore_eos else self._eos
        config = self._config(params, eos)
        outputs: list[list[int]] = []
        with _quiet(), self._with_threads(), _seeded(params.seed), _one_line(self.name):
            start = perf_counter()
            for begin in range(0, len(prompts), batch_size):
                outputs += self._batch(prompts[begin : begin + batch_size], config)
            seconds = perf_counter() - start
        return PeerRun([_cut(row, eos) for row in outputs], seconds)

    def close(self) -> None:
        """Release the models."""
        self._model = self._assistant = None

    def _check(self, prompts: Sequence[Sequence[int]], new: int, batch_size: int) -> None:
        if batch_size > 1 and (self._assistant is not None or self._lookup is not None):
            method = "an assistant" if self._assistant is not None else "prompt lookup"
            raise ConfigError(
                f"transformers decodes with {method} one prompt at a time, not {batch_size}; use batch size 1"
            )
        for model in (self._model, self._assistant):
            if model is not None:
                config = model.config.get_text_config(decoder=True)
                check_length(self.name, prompts, new, getattr(config, "max_position_embeddings", None))

    def _config(self, params: SamplingParams, eos: frozenset[int]) -> Any:
        from transformers import GenerationConfig

        settings: dict[str, Any] = {
            "max_new_tokens": params.max_new_tokens,
            "eos_token_id": sorted(eos) or None,
            "pad_token_id": self._pad(),
            "use_cache": True,
            "do_sample": not params.greedy,
        }
        if not params.greedy:
            settings |= {name: getattr(params, name) for name in ("temperature", "top_k", "top_p")}
        if self._lookup is not None:
            settings["prompt_lookup_num_tokens"] = self._lookup
        if self._cache is not None:
            settings["cache_implementation"] = self._cache
        return GenerationConfig(**settings)

    def _pad(self) -> int:
        return min(self._eos, default=0)

    def _batch(self, prompts: Sequence[Sequence[int]], config: Any) -> list[list[int]]:
        width = max(map(len, prompts))
        rows = [[self._pad()] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self._model.device
        extra = {} if self._assistant is None else {"assistant_model": self._assistant}
        out = self._model.generate(
            torch.tensor(rows, device=device),
            attention_mask=torch.tensor(mask, device=device),
            generation_config=config,
            **extra,
        )
        new: list[list[int]] = out[:, width:].tolist()
        return new

    @contextmanager
    def _with_threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        if self._threads is not None and self._threads != before:
            torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)


def load(name: str, dtype: torch.dtype) -> Any:
    """Load a model with transformers alone, without foresay's changes. Raises ModelLoadError or ModelNotFoundError."""
    from transformers import AutoModelForCausalLM

    source, extra = source_of(name)
    if extra:
        extra.update(dequantize())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with quiet_transformers(), load_errors(name, name in ALIASES), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="sdpa", **extra)
        return model.to(device).eval()


def _name(spec: PeerSpec) -> str:
    given = [key for key in ("assistant", "lookup", "cache") if key in spec.settings]
    if len(given) > 1:
        raise ConfigError(f"transformers cannot combine {' and '.join(given)}; give one of them, or open two peers")
    if spec.settings.get("cache", "static") != "static":
        raise ConfigError(
            f"transformers' cache={spec.settings['cache']!r} must be static; leave it out for the dynamic one"
        )
    return "+".join(["transformers", *("static" if key == "cache" else key for key in given)])


def _clear_defaults(model: Any) -> None:
    """Remove the model's default generation settings, such as a penalty, which would be added to the request's."""
    from transformers import GenerationConfig

    if model is not None:
        model.generation_config = GenerationConfig()


def _cut(row: list[int], eos: frozenset[int]) -> list[int]:
    """Cut a row after its first end token, which removes the padding."""
    end = next((i for i, token in enumerate(row) if token in eos), len(row))
    return row[: end + 1]


@contextmanager
def _quiet() -> Iterator[None]:
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seed the random generator temporarily; None leaves it unchanged."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    try:
        yield
    except ForesayError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise ForesayError(f"{name} failed: {type(error).__name__}: {text}") from error
