"""Features of a model that the engine, drafters and length policies depend on."""

from __future__ import annotations

from dataclasses import dataclass

PREFILL_CHUNK = 256
"""Tokens per row of a prefill pass, by default."""
PAGED_CHUNK = 2048
"""The same over pages: a GPU's tensor cores need many."""
STEP_CHUNK = 511
"""The same where prompts are computed as steps: with the last token as many as the largest captured pass has."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of a model beyond scoring chains, and how to prefill its cache."""

    trees: bool = False
    """The model accepts `ModelInput.parents`."""
    num_layers: int | None = None
    """Hidden states are available of layers 0 to num_layers; None if they are not."""
    scores: bool = True
    """The model returns logits, not only token ids."""
    reads_source: bool = False
    """Each row has a source for an encoder."""
    max_source_length: int | None = None
    """Maximum number of source tokens; None for no limit."""
    prefill_chunk: int = PREFILL_CHUNK
    """Tokens per row of a prefill pass."""
    prefill_together: bool = True
    """Rows may share a prefill pass. False if products over more rows sum in another order."""
    prefill_in_any_pieces: bool = True
    """Prompts that are prefilled in pieces of any size up to `prefill_chunk` give the same bits."""
    ragged: bool = False
    """The time of a pass depends on its real tokens; padding is free."""
    column_cost: float | None = None
    """Cost of one more token in one row as a fraction of a pass, for ragged passes, if known before any pass is timed."""
    max_rows: int | None = None
    """Maximum number of cache rows; None for no limit."""
    runs_ahead: bool = False
    """Passes run next to the host: the last chunk of a prompt returns its scores, and a plain pass begins before the host knows
    its tokens."""
    own_threads: bool = False
    """Passes run on their own threads, which PyTorch's threads would disturb between passes."""
