"""Small forward passes captured once per shape and replayed, without Python and separate kernel launches between layers.

A GPU needs a few microseconds for most operations of a small pass, and Python takes longer to launch each. A captured pass reads
its tokens and lengths from buffers at fixed addresses, so that one recording runs for other tokens and lengths. Owns the shapes,
the buffers and the comparison of recordings with ordinary passes. The capture function is an argument: CUDA graphs, or a
replacement in tests. Knows no model: the function to capture is an argument too.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar
from weakref import WeakKeyDictionary, ref

import torch

from foresay.decoding.clock import one_time
from foresay.decoding.protocols import Logits, ModelInput
from foresay.models.cache.slot_cache import Placement, SlotCache
from foresay.models.cache.stores import Stores, round_up
from foresay.models.huggingface import attention

logger = logging.getLogger("foresay")
T = TypeVar("T")

SWITCH = "FORESAY_GRAPHS"
"""Environment variable: "0" captures nothing."""
COLUMNS = (1, 2, 4, 8, 16, 32)
"""Columns of captured passes. A pass is padded to the next of these; one with more columns is not captured. They are few, since
each takes a capture of its own, and further tokens cost a GPU little: 8 take 1.09 times as long as one."""
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Rows of captured passes, padded likewise."""
MAX_TOKENS = 512
"""Most tokens of a captured pass, rows times columns: a larger one keeps the GPU busy without a graph."""
MAX_RECORDINGS = 48
"""Most recordings per cache. The least recently used one is dropped for a shape that occurred `_REPLACES` times."""
_OCCURS, _REPLACES = 2, 16
"""Occurrences of a shape before it is captured: where nothing is dropped for it, and otherwise. A capture takes at least the time
of five passes without a graph: two to warm up, one to record, two to compare."""
_TOLERANCE = 2e-2
"""Largest allowed difference from the same pass without a graph, as a share of the range of its scores."""

Outputs = tuple[torch.Tensor | None, Mapping[int, torch.Tensor]]
"""Scores [B, T, V] or None, and hidden states [B, T, H] by layer."""
Replay = Callable[[], Outputs]
Capture = Callable[[Replay], Replay]
"""Turn a pass into a function that repeats it with the current contents of its buffers; may run the pass a few times first."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of the passes that a recording can replay."""

    rows: int
    columns: int
    width: int
    first_row: int
    tree: bool
    hidden: tuple[int, ...]

    @staticmethod
    def of(model_input: ModelInput, cache: SlotCache) -> Shape | None:
        """Return the shape that a pass is padded to, or None if it is not captured (a prefill, or a large pass)."""
        if model_input.logits is Logits.NONE:
            return None
        batch, width = model_input.token_ids.shape
        # padding rows overwrite the rows after the batch, so these must be empty
        last = model_input.first_row + batch >= cache.rows_in_use
        rows, columns = _smallest(ROWS, batch) if last else batch, _smallest(COLUMNS, width)
        if rows is None or columns is None or rows > ROWS[-1] or rows * columns > MAX_TOKENS:
            return None
        longest = max(cache.lengths[model_input.first_row : model_input.first_row + batch])
        kind = (model_input.parents is not None, tuple(model_input.hidden_layers))
        return Shape(rows, columns, _width(longest + columns), model_input.first_row, *kind)


class Buffers:
    """Inputs of a captured pass: token ids [B, T], row lengths before them [B], and the parents [B, T] of a draft tree."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        size = (shape.rows, shape.columns)
        self.token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.starts = torch.zeros(shape.rows, dtype=torch.int64, device=device)
        self.parents = torch.full(size, -1, dtype=torch.int64, device=device) if shape.tree else None

    def fill(self, model_input: ModelInput, cache: SlotCache) -> None:
        """Copy the inputs of the next pass into the buffers, without waiting for the device."""
        batch, columns = model_input.token_ids.shape
        starts = cache.lengths[model_input.first_row : model_input.first_row + batch]
        pinned = self.starts.device.type == "cuda"
        lengths = torch.tensor(starts + [0] * (self.shape.rows - batch), pin_memory=pinned)
        self.starts.copy_(lengths, non_blocking=True)
        self.token_ids[:batch, :columns].copy_(model_input.token_ids, non_blocking=True)
        if self.parents is not None and model_input.parents is not None:
            self.parents.fill_(-1)
            self.parents[:batch, :columns].copy_(model_input.parents, non_blocking=True)

    def placement(self) -> Placement:
        """Return the placement of the tokens, computed from the buffers only."""
        return Placement.after(self.starts, self.shape.columns, self.shape.first_row, self.shape.width, self.parents)


class _Results:
    """Memory for the outputs of all recordings over a cache: each replay's are copied before the next one."""

    def __init__(self) -> None:
        self._memory: dict[object, torch.Tensor] = {}

    def keep(self, outputs: Outputs) -> Outputs:
        """Return copies of the outputs in this memory. It grows by a new allocation; recordings keep what they write to."""
        scores, states = outputs
        return (
            None if scores is None else self._copied("scores", scores),
            {layer: self._copied(layer, state) for layer, state in states.items()},
        )

    def _copied(self, name: object, value: torch.Tensor) -> torch.Tensor:
        memory = self._memory.get(name)
        if memory is None or memory.numel() < value.numel() or memory.dtype != value.dtype:
            memory = self._memory[name] = torch.empty_like(value, memory_format=torch.contiguous_format).view(-1)
        return memory[: value.numel()].view(value.shape).copy_(value)


@dataclass(slots=True)
class _Recording:
    buffers: Buffers
    replay: Replay
    compared: int = 0
    """Number of replays compared with an ordinary pass: the first two, the second one with other tokens."""


class _Recordings:
    """Recordings over the tensors of one cache, valid while their addresses do not change."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.results = _Results()
        self.by_shape: OrderedDict[Shape, _Recording] = OrderedDict()
        """In order of use."""
        self._occurred: Counter[Shape] = Counter()

    def get(self, shape: Shape) -> _Recording | None:
        """Return the recording of a shape, which becomes the most recently used; None if there is none."""
        if shape in self.by_shape:
            self.by_shape.move_to_end(shape)
        return self.by_shape.get(shape)

    def is_due(self, shape: Shape) -> bool:
        """Count an occurrence of a shape without a recording; True if it is to be captured."""
        self._occurred[shape] += 1
        return self._occurred[shape] >= (_OCCURS if len(self.by_shape) < MAX_RECORDINGS else _REPLACES)

    def add(self, shape: Shape, recording: _Recording) -> None:
        """Add the recording of a shape, for which the least recently used one may be dropped."""
        if len(self.by_shape) == MAX_RECORDINGS:
            self.by_shape.popitem(last=False)
        self.by_shape[shape], self._occurred[shape] = recording, 0


class GraphedPasses:
    """Forward passes over a cache, captured when their shape has occurred before."""

    def __init__(
        self,
        run: Callable[[torch.Tensor, Placement, SlotCache, Sequence[int]], Outputs],
        capture: Capture,
        device: torch.device,
    ) -> None:
        """run: computes a pass with scores from (token_ids [B, T], placement, cache, hidden layers to return)."""
        self._run, self._device = run, device
        self._capture: Capture | None = capture
        self._recordings: WeakKeyDictionary[Stores, _Recordings] = WeakKeyDictionary()
        self.off: str | None = f"{SWITCH}=0 is set" if os.environ.get(SWITCH) == "0" else None
        """Reason why nothing is captured, or None."""
        self.replays = 0
        """Number of replayed passes."""

    def __call__(self, model_input: ModelInput, cache: SlotCache) -> Outputs | None:
        """Replay the pass and return its outputs [B, T, .]; None if the caller must run it without a graph.

        Writes to the cache but does not change its lengths.
        """
        shape = None if self.off is not None else Shape.of(model_input, cache)
        stores = cache.tensors
        if shape is None or not isinstance(stores, Stores) or not stores.layers:
            return None
        stores.reserve(shape.first_row + shape.rows, shape.first_row, [shape.width] * shape.rows)
        recordings = self._recordings.get(stores)
        if recordings is None or recordings.version != stores.version:
            recordings = self._recordings[stores] = _Recordings(stores.version)
        recording = recordings.get(shape)
        if recording is None and not recordings.is_due(shape):
            return None
        try:
            if recording is None:
                recording = self._record(shape, model_input, cache, recordings.results)
                recordings.add(shape, recording)
            recording.buffers.fill(model_input, cache)
            out = recording.replay()
            if recording.compared < 2:
                self._compare(out, self._run_eagerly(recording.buffers, cache))
                recording.compared += 1
        except Exception as error:  # a model's operations may fail to be captured in any way
            self.off = f"{type(error).__name__}: {error}"
            self._recordings.clear()
            self._capture = None  # and its memory
            logger.warning("passes are not captured as CUDA graphs: %s", self.off)
            return None
        self.replays += 1
        return _cut(out, *model_input.token_ids.shape)

    def _record(self, shape: Shape, model_input: ModelInput, cache: SlotCache, results: _Results) -> _Recording:
        assert isinstance(cache.tensors, Stores)
        buffers, stores_ref = Buffers(shape, self._device), ref(cache.tensors)
        buffers.fill(model_input, cache)

        def run() -> Outputs:
            stores = stores_ref()
            assert stores is not None
            return results.keep(self._run_eagerly(buffers, SlotCache(stores)))

        assert self._capture is not None
        return _Recording(buffers, self._capture(run))

    def _run_eagerly(self, buffers: Buffers, cache: SlotCache) -> Outputs:
        """Run the pass without a graph, with the current contents of the buffers."""
        at, shape = buffers.placement(), buffers.shape
        with attention.during(at):
            return self._run(buffers.token_ids, at, cache, shape.hidden)

    @staticmethod
    def _compare(out: Outputs, expected: Outputs) -> None:
        """Raise ValueError if scores or hidden states differ from those of the pass without a graph."""
        assert out[0] is not None and expected[0] is not None
        pairs = {"scores": (out[0], expected[0])}
        pairs |= {f"hidden states of layer {n}": (out[1][n], state) for n, state in expected[1].items()}
        for name, (replayed, eager) in pairs.items():
            replayed, eager = replayed.float(), eager.float()
            spread = (eager.amax() - eager.amin()).clamp(min=1e-6)
            difference = float((replayed - eager).abs().amax() / spread)
            if not difference <= _TOLERANCE:
                raise ValueError(
                    f"{name} of a captured pass differ from those without a graph by {difference:.1e} of their range"
                )


_CAPTURING = Lock()
"""PyTorch captures one graph of a process at a time."""


class CudaGraphs:
    """A capture function by CUDA graphs on one device that share a memory pool and a stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None
        self._holder: torch.cuda.CUDAGraph | None = None
        """PyTorch discards a pool with its last graph, and recordings are dropped with their cache."""

    def __call__(self, run: Replay) -> Replay:
        """Capture a pass; see Capture."""
        with one_time(), _CAPTURING, torch.cuda.device(self._device):
            if self._stream is None:  # a library's workspace for each stream would take memory
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):  # warm-up: one-time initialization must not be recorded
                for _ in range(2):
                    run()
            torch.cuda.current_stream().wait_stream(self._stream)
            if self._holder is None:
                self._holder, _ = self._graph_of(lambda: torch.zeros(1, device=self._device))
            graph, out = self._graph_of(run)

        def replay() -> Outputs:
            graph.replay()
            return out

        return replay

    def _graph_of(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = run()
        return graph, out


def _smallest(sizes: Sequence[int], needed: int) -> int | None:
    return next((size for size in sizes if size >= needed), None)


def _width(needed: int) -> int:
    """Round the number of slots read up, to at least 256 and by at most a quarter from 1,024 on: each width takes a capture."""
    return round_up(needed, max(256, 1 << max(0, needed.bit_length() - 3)))


def _cut(out: Outputs, batch: int, columns: int) -> Outputs:
    """Copy the input's rows and columns out: the next replay overwrites the buffers."""
    scores, states = out
    return (
        None if scores is None else scores[:batch, :columns].clone(),
        {layer: state[:batch, :columns].clone() for layer, state in states.items()},
    )
