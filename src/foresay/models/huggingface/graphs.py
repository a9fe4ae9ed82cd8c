"""Passes of few columns captured once for each shape and replayed: no Python, and no launch by launch, between the layers.

A GPU takes a few microseconds for most of a small pass's operations and Python takes more to ask for each. Here a pass reads its
tokens and lengths from buffers that stay where they are, so that what was recorded once runs for other tokens and lengths. Owns
the shapes, the buffers and the trust in a recording. How one is made is a function: a CUDA graph's, or in tests another's. Knows
no model: what a pass computes is given.
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
"""Columns of captured passes; one with others is filled up with pads, one with more is not captured."""
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Rows of captured passes, likewise."""
HELD = 48
"""Recordings of a cache; the one that was not used for longest makes room."""
_TOLERANCE = 2e-2
"""Largest difference to the same pass unrecorded, as a share of its scores' spread."""

Outputs = tuple[torch.Tensor | None, Mapping[int, torch.Tensor]]
"""Scores [B, T, V], or None, and hidden states [B, T, H] by layer."""
Replay = Callable[[], Outputs]
Capture = Callable[[Replay], Replay]
"""Makes of a pass something that repeats it over whatever its buffers hold then; the pass may be run some times first."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a recording is good for."""

    rows: int
    columns: int
    width: int
    first_row: int
    tree: bool
    head: bool
    hidden: tuple[int, ...]

    @staticmethod
    def of(model_input: ModelInput, cache: SlotCache) -> Shape | None:
        """The shape that a pass is captured in; None where it is not: it fills a prompt, or is too large."""
        batch, width = model_input.token_ids.shape
        last = (
            model_input.first_row + batch >= cache.rows_in_use
        )  # no row but one that holds nothing may be filled up with
        rows, columns = _least(ROWS, batch) if last else batch, _least(COLUMNS, width)
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
    """What a captured pass reads: tokens [B, T], the length of each row before them [B], and the parents [B, T] of a tree."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        size = (shape.rows, shape.columns)
        self.token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.starts = torch.zeros(shape.rows, dtype=torch.int64, device=device)
        self.parents = torch.full(size, -1, dtype=torch.int64, device=device) if shape.tree else None

    def fill(self, model_input: ModelInput, cache: SlotCache) -> None:
        """The pass to come. Nothing here waits for the device."""
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
        """Where the tokens go, computed from the buffers alone."""
        return Placement.after(self.starts, self.shape.columns, self.shape.first_row, self.shape.width, self.parents)


@dataclass(slots=True)
class _Recording:
    buffers: Buffers
    replay: Replay
    compared: int = 0
    """Replays that were compared with the pass itself: the first, and one of other tokens."""


class _Recordings:
    """Those over the tensors of one cache, while they stay where they are."""

    def __init__(self, made: int) -> None:
        self.made = made
        self.by_shape: OrderedDict[Shape, _Recording | None] = OrderedDict()
        """None: the shape was seen once."""

    def found(self, shape: Shape) -> _Recording | None:
        """The recording; None for a shape that has none."""
        self.by_shape.setdefault(shape, None)
        self.by_shape.move_to_end(shape)
        while len(self.by_shape) > HELD:
            self.by_shape.popitem(last=False)
        return self.by_shape[shape]


class GraphedPasses:
    """Passes over a cache, captured when their shape comes a second time."""

    def __init__(
        self,
        run: Callable[[torch.Tensor, Placement, SlotCache, Sequence[int], bool], Outputs],
        capture: Capture,
        device: torch.device,
    ) -> None:
        """run: a pass over token_ids [B, T] at a placement, of which hidden layers, and the scores where asked for."""
        self._run, self._capture, self._device = run, capture, device
        self._held: WeakKeyDictionary[Stores, _Recordings] = WeakKeyDictionary()
        self.off: str | None = None if os.environ.get(SWITCH) == "1" else f"{SWITCH}=1 is not set"
        """The reason why nothing is captured, or None."""
        self.replays = 0
        """Passes that were replayed."""

    def __call__(self, model_input: ModelInput, cache: SlotCache) -> Outputs | None:
        """The pass, if it can be replayed, [B, T, .] of the feed's rows and columns; None where it is to be made as ever.

        Writes to the cache; the lengths are the caller's.
        """
        shape = None if self.off is not None else Shape.of(model_input, cache)
        stores = cache.tensors
        if shape is None or not isinstance(stores, Stores) or not stores.layers:
            return None
        stores.reserve(shape.first_row + shape.rows, shape.first_row, [shape.width] * shape.rows)
        held = self._held.get(stores)
        if held is None or held.made != stores.made:
            held = self._held[stores] = _Recordings(stores.made)
        known, recording = shape in held.by_shape, held.found(shape)
        if not known:
            return None
        try:
            if recording is None:
                recording = held.by_shape[shape] = self._recorded(shape, model_input, cache)
            recording.buffers.fill(model_input, cache)
            out = recording.replay()
            if recording.compared < 2:
                self._compare(out, self._bare(recording.buffers, cache))
                recording.compared += 1
        except Exception as error:  # whatever a model's operations cannot do while they are recorded
            self.off = f"{type(error).__name__}: {error}"
            self._held.clear()
            logger.warning("passes are not captured as graphs: %s", self.off)
            return None
        self.replays += 1
        return _cut(out, *model_input.token_ids.shape)

    def _recorded(self, shape: Shape, model_input: ModelInput, cache: SlotCache) -> _Recording:
        assert isinstance(cache.tensors, Stores)
        buffers, held = Buffers(shape, self._device), ref(cache.tensors)
        buffers.fill(model_input, cache)

        def one() -> Outputs:
            stores = held()
            assert stores is not None
            return self._bare(buffers, SlotCache.over(stores))

        return _Recording(buffers, self._capture(one))

    def _bare(self, buffers: Buffers, cache: SlotCache) -> Outputs:
        """The pass itself, over what the buffers hold."""
        at, shape = buffers.placement(), buffers.shape
        with attention.during(at):
            return self._run(buffers.token_ids, at, cache, shape.hidden, shape.head)

    @staticmethod
    def _compare(out: Outputs, wanted: Outputs) -> None:
        """Raises ValueError for scores that are not those of the pass itself."""
        if out[0] is None or wanted[0] is None:
            return
        ours, theirs = out[0].float(), wanted[0].float()
        spread = (theirs.amax() - theirs.amin()).clamp(min=1e-6)
        difference = float((ours - theirs).abs().amax() / spread)
        if not difference <= _TOLERANCE:
            raise ValueError(f"a captured pass differs from itself by {difference:.1e} of its scores' spread")


def cuda_graphs(device: torch.device) -> Capture:
    """Captures by CUDA graphs that share their scratch memory."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Replay) -> Replay:
        aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):  # what is set up in a first run must not be recorded
            for _ in range(2):
                run()
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            out = run()

        def replay() -> Outputs:
            graph.replay()
            return out

        return replay

    return capture


def _least(sizes: Sequence[int], needed: int) -> int | None:
    return next((size for size in sizes if size >= needed), None)


def _width(needed: int) -> int:
    """Slots in sight: an eighth more than needed at most, so that a growing row changes its shape seldom."""
    return round_up(needed, max(128, 1 << max(0, needed.bit_length() - 4)))


def _cut(out: Outputs, batch: int, columns: int) -> Outputs:
    """The feed's rows and columns, copied: the next replay writes to the same place."""
    scores, states = out
    return (
        None if scores is None else scores[:batch, :columns].clone(),
        {layer: state[:batch, :columns].clone() for layer, state in states.items()},
    )
