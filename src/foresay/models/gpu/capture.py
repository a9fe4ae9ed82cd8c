"""Passes that are captured once and replayed, without Python and separate kernel launches between layers.

A GPU needs a few microseconds for most operations of a small pass, and Python takes longer to launch each. Owns the capture
function of CUDA graphs. Knows no pass: the function to capture is an argument.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from threading import Lock
from typing import Any, TypeVar

import torch

from foresay.decoding.clock import one_time

logger = logging.getLogger("foresay")
T = TypeVar("T")

SWITCH = "FORESAY_GRAPHS"
"""Environment variable: "0" captures nothing."""
Capture = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Turn a pass into a function that repeats it with the current contents of its buffers; may run the pass a few times first."""
_CAPTURING = Lock()
"""PyTorch captures one graph of a process at a time."""


def capture_on(device: torch.device) -> Capture:
    """Return the capture function of a device; a pass that is not captured is repeated as it is."""
    if device.type != "cuda" or os.environ.get(SWITCH) == "0":
        return lambda run: run
    graphs = CudaGraphs(device)

    def capture(run: Callable[[], Any]) -> Callable[[], Any]:
        try:
            return graphs(run)
        except Exception as error:  # operations may fail to be captured in any way
            logger.warning("a pass is not captured as a CUDA graph: %s: %s", type(error).__name__, error)
            return run

    return capture


class CudaGraphs:
    """A capture function by CUDA graphs on one device that share a memory pool and a stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None
        self._holder: torch.cuda.CUDAGraph | None = None
        """PyTorch discards a pool with its last graph, and a model may drop its passes."""

    def __call__(self, run: Callable[[], T]) -> Callable[[], T]:
        """Capture a pass; see Capture."""
        with one_time(), _CAPTURING, torch.cuda.device(self._device):
            if self._stream is None:  # a library's workspace for each stream would take memory
                self._stream = torch.cuda.Stream()
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):  # warm-up: one-time initialization must not be recorded
                    for _ in range(2):
                        run()
            finally:  # a caller goes on with the same buffers
                current.wait_stream(self._stream)
            try:
                if self._holder is None:
                    self._holder, _ = self._graph_of(lambda: torch.zeros(1, device=self._device))
                graph, out = self._graph_of(run)
            except BaseException:  # PyTorch may stay on the stream of the capture, and the pool in recording mode
                torch.cuda.set_stream(current)
                self._pool, self._holder = torch.cuda.graph_pool_handle(), None
                raise

        def replay() -> T:
            graph.replay()
            return out

        return replay

    def _graph_of(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = run()
        return graph, out
