"""What a benchmark compares, on what, and how often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.generation.method import Method
from foresay.lab.bench.runners import PromptBlock, sampling_name
from foresay.lab.data.requests import PromptRequest, digest, recorded_params_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What is compared, on what, and how often."""

    methods: Sequence[Method]
    datasets: Mapping[str, Sequence[PromptRequest]]
    params: Sequence[SamplingParams] = (SamplingParams(max_new_tokens=96),)
    batch_sizes: Sequence[int] = (1,)
    repeats: int = 3
    between: int = 3
    """Runs between two of plain decoding."""
    warm_up: int = 1
    """Prompts that everyone decodes before being timed."""

    def __post_init__(self) -> None:
        if not self.datasets or any(not asks for asks in self.datasets.values()):
            raise ConfigError("no prompts to run")
        for name, value in (
            ("repeats", self.repeats),
            ("between", self.between),
            *(("batch_size", b) for b in self.batch_sizes),
        ):
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if any(params.processors for params in self.params):
            raise ConfigError("processors cannot be written into a results file; run without them")
        names = [sampling_name(params) for params in self.params]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two of the params are {name!r} in the results; run them into files of their own")

    def blocks(self) -> Iterator[PromptBlock]:
        """Every data set in every setting."""
        for params in self.params:
            for name, asks in self.datasets.items():
                for size in self.batch_sizes:
                    yield PromptBlock(name, asks, size, params)

    def header(self, target: Generator) -> dict[str, Any]:
        """What must be the same for a file to go on. Methods, other engines and repeats may grow."""
        return {
            "model": target.target.name,
            "dtype": target.target.precision,
            "datasets": {name: {"prompts": len(asks), "digest": digest(asks)} for name, asks in self.datasets.items()},
            "params": [recorded_params_of(params) for params in self.params],
        }
