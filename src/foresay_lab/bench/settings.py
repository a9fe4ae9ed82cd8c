"""The settings of a benchmark: methods, data sets, sampling, batch sizes and repeats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from foresay.checks import check_int
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.generation.method import Method
from foresay_lab.bench.runners import PromptBlock, sampling_name
from foresay_lab.data.requests import PromptRequest, digest, recorded_params_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """The settings of a benchmark. Raises ConfigError for empty data sets, invalid numbers and duplicate sampling settings."""

    methods: Sequence[Method]
    datasets: Mapping[str, Sequence[PromptRequest]]
    params: Sequence[SamplingParams] = (SamplingParams(max_new_tokens=96),)
    batch_sizes: Sequence[int] = (1,)
    repeats: int = 3
    between: int = 3
    """Maximum number of runs between two runs of plain decoding."""
    warm_up: int = 1
    """Number of prompts that each method and engine decodes before it is timed."""

    def __post_init__(self) -> None:
        if not self.datasets or any(not requests for requests in self.datasets.values()):
            raise ConfigError("need at least one prompt each", param="datasets")
        check_int("repeats", self.repeats, 1)
        check_int("between", self.between, 1)
        for size in self.batch_sizes:
            check_int("batch_size", size, 1)
        if any(params.processors for params in self.params):
            raise ConfigError("cannot be stored in a results file; run without them", param="processors")
        names = [sampling_name(params) for params in self.params]
        for name in names:
            if names.count(name) > 1:
                text = "is in the results the name of two params; write each to a separate file"
                raise ConfigError(text, param="params", value=name)

    def blocks(self) -> Iterator[PromptBlock]:
        """Yield a block for every combination of sampling, data set and batch size."""
        for params, (name, requests), size in product(self.params, self.datasets.items(), self.batch_sizes):
            yield PromptBlock(name, requests, size, params)

    def header(self, target: Generator) -> dict[str, Any]:
        """Return the settings that must be equal to resume a file. Methods, engines and repeats may be added."""
        return {
            "model": target.target.name,
            "dtype": target.target.precision,
            "datasets": {name: {"prompts": len(some), "digest": digest(some)} for name, some in self.datasets.items()},
            "params": [recorded_params_of(params) for params in self.params],
        }
