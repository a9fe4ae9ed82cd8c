"""What a tokenizer's ids mean."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """The sha256 of the tokenizer's (token, id) pairs, as hex: equal where ids mean the same, however it is implemented."""
    pairs = sorted((str(token), int(i)) for token, i in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs).encode("ascii")).hexdigest()


def tokenizer_size(tokenizer: Any) -> int:
    """One more than the tokenizer's highest id: ids may have gaps, and its own length counts names."""
    return int(max(tokenizer.get_vocab().values())) + 1
