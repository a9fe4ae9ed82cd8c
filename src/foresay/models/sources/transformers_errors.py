"""transformers' errors and output while loading a model: translated to foresay's errors, and silenced.

Owns the messages of load errors. Loads nothing.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from foresay.errors import ForesayError, ModelLoadError, ModelNotFoundError


@contextmanager
def load_errors(name: str, owned: bool) -> Iterator[None]:
    """Turn exceptions of transformers into ModelNotFoundError or ModelLoadError that name a remedy.

    owned: True for foresay's own conversion, where a missing file is not a wrong name.
    """
    try:
        yield
    except ForesayError:
        raise
    except BaseException as error:
        if (
            not isinstance(error, Exception) and type(error).__name__ != "PanicException"
        ):  # of the tokenizers' Rust code
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        first = lines[0] if not lines[0].rstrip().endswith(":") else " ".join(" ".join(lines).split())
        if not Path(name).expanduser().exists() and not owned and isinstance(error, OSError):
            raise ModelNotFoundError(
                f"{name!r} is neither a file nor a folder here, and the hub did not give it: {first} "
                "(check the spelling, your network, and `hf auth login` for gated models)"
            ) from error
        if "trust_remote_code" in str(error):
            raise ModelLoadError(
                f"{name!r} contains code to run; pass trust_remote_code=True (--trust-remote-code) if you trust it"
            ) from error
        raise ModelLoadError(f"{name!r} cannot be loaded: {type(error).__name__}: {first}") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' messages and all progress bars while loading.

    foresay's own messages are emitted afterwards, because a logger without handlers writes to the redirected standard error.
    """
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel(logging.ERROR)
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    own, later = logging.getLogger("foresay"), _Later()
    own.addFilter(later)
    try:
        with redirect_stderr(io.StringIO()):  # some bars are drawn by tqdm itself, independent of the settings
            yield
    finally:
        own.removeFilter(later)
        for record in later.records:
            own.handle(record)
        hf_logging.set_verbosity(level)
        hub.setLevel(hub_level)
        if bars:
            hf_logging.enable_progress_bar()


class _Later(logging.Filter):
    """Delays a logger's records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        self.records.append(record)
        return False
