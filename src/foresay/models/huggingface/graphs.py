"""Small forward passes captured once per shape and replayed, without Python and separate kernel launches between layers.

A GPU needs a few microseconds for most operations of a small pass, and Python takes longer to launch each. A captured pass reads
its tokens and lengths from buffers at fixed addresses, so that one recording runs for other tokens and lengths. Owns the shapes,
the buffers and the comparison of recordings with ordinary passes. The capture function is an argument: CUDA graphs, or a
replacement in tests. Knows no model: the function to capture is an argument too.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch

from foresay.decoding.protocols import Logits, ModelInput
from foresay.models.cache.slot_cache import Placement, SlotCache
from foresay.models.cache.stores import Stores, round_up
from foresay.models.huggingface import attention

logger = logging.getLogger("foresay")

SWITCH = "FORESAY_GRAPHS"
"""Environment variable: "1" captures passes. Off by default: no published figure was measured with captured passes."""
COLUMNS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Columns of captured passes. A pass is padded to the next of these; one with more columns is not captured."""
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Rows of captured passes, padded likewise."""
MAX_RECORDINGS = 48
"""Most recordings per cache; the least recently used one is dropped."""
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
    head: bool
    hidden: tuple[int, ...]

    @staticmethod
    def of(model_input: ModelInput, cache: SlotCache) -> Shape | None:
        """Return the shape that a pass is padded to, or None if it is not captured (a prefill, or a large pass)."""
        batch, width = model_input.token_ids.shape
        # padding rows overwrite the rows after the batch, so these must be empty
        last = model_input.first_row + batch >= cache.rows_in_use
        rows, columns = _smallest(ROWS, batch) if last else batch, _smallest(COLUMNS, width)
        if rows is None or columns is None or rows > ROWS[-1]:
            return None
        longest = max(cache.lengths[model_input.first_row : model_input.first_row + batch])
        kind = (
            model_input.parents is not None,
            model_input.logits is not Logits.NONE,
            tuple(model_input.hidden_layers),
        )
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
        self.by_shape: OrderedDict[Shape, _Recording | None] = OrderedDict()
        """Recordings in order of use; None for a shape that occurred only once."""

    def get(self, shape: Shape) -> _Recording | None:
        """Return the recording of a shape, which becomes the most recently used; None if there is none yet."""
        self.by_shape.setdefault(shape, None)
        self.by_shape.move_to_end(shape)
        while len(self.by_shape) > MAX_RECORDINGS:
            self.by_shape.popitem(last=False)
        return self.by_shape[shape]


class GraphedPasses:
    """Forward passes over a cache, captured when their shape occurs for the second time."""

    def __init__(
        self,
        run: Callable[[torch.Tensor, Placement, SlotCache, Sequence[int], bool], Outputs],
        capture: Capture,
        device: torch.device,
    ) -> None:
        """run: computes a pass from (token_ids [B, T], placement, cache, hidden layers to return, True to compute scores)."""
        self._run, self._capture, self._device = run, capture, device
        self._recordings: WeakKeyDictionary[Stores, _Recordings] = WeakKeyDictionary()
        self.off: str | None = None if os.environ.get(SWITCH) == "1" else f"{SWITCH}=1 is not set"
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
        seen_before, recording = shape in recordings.by_shape, recordings.get(shape)
        if not seen_before:
            return None
        try:
            if recording is None:
                recording = recordings.by_shape[shape] = self._record(shape, model_input, cache)
            recording.buffers.fill(model_input, cache)
            out = recording.replay()
            if recording.compared < 2:
                self._compare(out, self._run_eagerly(recording.buffers, cache))
                recording.compared += 1
        except Exception as error:  # a model's operations may fail to be captured in any way
            self.off = f"{type(error).__name__}: {error}"
            self._recordings.clear()
            logger.warning("passes are not captured as CUDA graphs: %s", self.off)
            return None
        self.replays += 1
        return _cut(out, *model_input.token_ids.shape)

    def _record(self, shape: Shape, model_input: ModelInput, cache: SlotCache) -> _Recording:
        assert isinstance(cache.tensors, Stores)
        buffers, stores_ref = Buffers(shape, self._device), ref(cache.tensors)
        buffers.fill(model_input, cache)

        def run() -> Outputs:
            stores = stores_ref()
            assert stores is not None
            return self._run_eagerly(buffers, SlotCache.over(stores))

        return _Recording(buffers, self._capture(run))

    def _run_eagerly(self, buffers: Buffers, cache: SlotCache) -> Outputs:
        """Run the pass without a graph, with the current contents of the buffers."""
        at, shape = buffers.placement(), buffers.shape
        with attention.during(at):
            return self._run(buffers.token_ids, at, cache, shape.hidden, shape.head)

    @staticmethod
    def _compare(out: Outputs, expected: Outputs) -> None:
        """Raise ValueError if the scores differ from those of the pass without a graph."""
        if out[0] is None or expected[0] is None:
            return
        replayed, eager = out[0].float(), expected[0].float()
        spread = (eager.amax() - eager.amin()).clamp(min=1e-6)
        difference = float((replayed - eager).abs().amax() / spread)
        if not difference <= _TOLERANCE:
            raise ValueError(
                f"scores of a captured pass differ from those without a graph by {difference:.1e} of their range"
            )


def cuda_graphs(device: torch.device) -> Capture:
    """Return a capture function by CUDA graphs that share one memory pool."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Replay) -> Replay:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # warm-up: one-time initialization must not be recorded
            for _ in range(2):
                run()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            out = run()

        def replay() -> Outputs:
            graph.replay()
            return out

        return replay

    return capture


def _smallest(sizes: Sequence[int], needed: int) -> int | None:
    return next((size for size in sizes if size >= needed), None)


def _width(needed: int) -> int:
    """Round the number of slots read up by at most about an eighth, so that a growing row rarely changes its shape."""
    return round_up(needed, max(128, 1 << max(0, needed.bit_length() - 4)))


def _cut(out: Outputs, batch: int, columns: int) -> Outputs:
    """Copy the input's rows and columns out: the next replay overwrites the buffers."""
    scores, states = out
    return (
        None if scores is None else scores[:batch, :columns].clone(),
        {layer: state[:batch, :columns].clone() for layer, state in states.items()},
    )
