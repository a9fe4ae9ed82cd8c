"""The key of a request's random streams: its seed, and what its drafts can be copied from.

Draft tokens that a drafter samples are drawn and tested with the uniforms of the request's key. Where copied text decides which
tokens are sampled, it must not have been made with the same uniforms, or the output would not have the target's distribution over
seeds. Text that the same seed may have produced, and what the key does about it where the drafter samples:

- Texts, counts or lengths that outlive a request (`Remembers`, `LengthPolicy.remembers`), in memory or in a folder that other
  processes share, and so the texts of other rows of the batch: the key is new for every request.
- The request's prediction, its prompt (a chat history with the seed's own answer), an encoder's source, and what a processor
  forces tokens from: the key is derived from the seed and these.
- Files that the drafter or the length policy was loaded from, which may have been made of the seed's own answers: n-gram tables,
  and weights that were trained on kept texts. The key is derived from the seed and a digest of these files.
- Prefixes of ended rows: keys and values of equal tokens, from which no token is copied. Nothing is needed.

Without a drafter that samples, and under rules that ignore drafts, the key is the seed: the text is that of plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import numpy as np

from foresay.decoding.protocols import Drafter, LengthPolicy, Remembers, Rule, learned_by
from foresay.decoding.randomness import derive
from foresay.decoding.rows import Row


class RequestKeys:
    """Keys of the requests of one engine."""

    def __init__(self, drafter: Drafter | None, rule: Rule, policy: LengthPolicy, draw_seed: Callable[[], int]) -> None:
        """draw_seed: returns a random number that no earlier request had, in this process or another."""
        self._samples = drafter is not None and drafter.samples and not rule.needs.ignores_drafts
        self._is_new = self._samples and (
            policy.remembers or (isinstance(drafter, Remembers) and drafter.repeats_seeds())
        )
        self._draw_seed = draw_seed
        self._learned = learned_by(drafter, policy)

    def key_of(self, row: Row) -> int:
        """Return the key of a request that has not begun, in [0, 2^63)."""
        if self._is_new:
            return derive(row.seed, self._draw_seed())
        return derive(row.seed, _digest(row, self._learned)) if self._samples else row.seed


def _digest(row: Row, learned: bytes) -> int:
    """Return 63 bits that differ between requests with different texts to copy from. learned: see learned_by."""
    source = () if row.source is None else row.source
    forced = [str(getattr(one, "source", "")).encode() for one in row.params.processors]
    parts = [
        *(np.asarray(one, dtype=np.int64).tobytes() for one in (row.tokens, row.params.prediction, source)),
        *forced,
        *([learned] if learned else []),
    ]
    found = blake2b(digest_size=8)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(found.digest(), "little") >> 1
