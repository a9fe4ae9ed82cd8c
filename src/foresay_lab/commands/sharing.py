"""Workers that a command's work is distributed over; the feature `workers` of the command `generate`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Any

from foresay.checks import check_int
from foresay.cli.command import Given
from foresay.cli.common import check_threads, load_arguments
from foresay.cli.generate import show_output, show_speed
from foresay.cli.progress import advancing, loading
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError
from foresay_lab.workers.pool import Backend, Pool, in_order


def wanted(given: Given) -> bool:
    """Return True if --workers is given. Raises ConfigError for --ray without it."""
    if given.ray and given.workers is None:
        raise ConfigError("needs --workers, the number of actors", param="ray")
    return given.workers is not None


def pool(given: Given, setup: dict[str, Any]) -> Pool:
    """Start the workers."""
    count = check_int("--workers", given.workers, 1, 1024)
    check_threads(given.threads)
    backend: Backend
    if given.ray:
        from foresay_lab.workers.ray import Actors

        backend = Actors(setup, count, threads=given.threads)
    else:
        from foresay_lab.workers.processes import Processes

        backend = Processes(setup, count, threads=given.threads)
    with loading(f"Starting {count} workers") as progress:
        return Pool(backend, count, on_start=lambda ready: progress(f"{ready} of {count} workers are ready"))


def generate(given: Given, prompts: list[str], params: SamplingParams) -> int:
    """Decode all prompts by workers; print each output once all earlier ones are printed."""
    load = load_arguments(given, max_batch_size=given.batch_size)
    setup = {"kind": "generate", "load": load, "params": params, "raw": given.raw}
    tokens = 0
    # outputs would be written into the bar of a terminal
    with pool(given, setup) as workers, advancing("Decoding", hidden=sys.stdout.isatty()) as advance:
        began = perf_counter()

        def counted() -> Iterator[tuple[int, dict[str, Any]]]:
            nonlocal tokens
            for done, (number, result) in enumerate(workers.run(dict(enumerate(prompts))), 1):
                tokens += len(result["token_ids"])
                advance(done, len(prompts), f"{tokens} tokens")
                yield number, result

        for i, result in enumerate(in_order(counted())):
            show_output(prompts, i, result, as_json=given.json)
        seconds = perf_counter() - began
    show_speed(tokens, seconds)
    return 0
