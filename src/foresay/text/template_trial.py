"""Chat templates of model files, each rendered once on trial: a template is a program, and may take any time and memory.

Owns the trial's chat. The process with its limits is that of `grammar_process`; a template that raises is not refused here.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from foresay.errors import ModelLoadError

logger = logging.getLogger("foresay")
LIMITS = {"cpu_s": 2.0, "wall_s": 20.0, "memory_bytes": 128 << 20}
_WAIT_S = 90.0
_COMMAND = [sys.executable, "-m", "foresay.text.grammar_process"]
_TOOL = {"name": "look", "description": "Look", "parameters": {"type": "object", "properties": {}}}
CHAT = [
    {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "And now?"},
]  # fmt: skip


def check_template(name: str, tokenizer: Any) -> None:
    """Render a tokenizer's chat templates in a process with limits. name: of the model.

    Raises ModelLoadError for one that takes more time or memory than a short chat may.
    """
    found = getattr(tokenizer, "chat_template", None)
    special = {key: one for key, one in getattr(tokenizer, "special_tokens_map", {}).items() if isinstance(one, str)}
    for template in found.values() if isinstance(found, Mapping) else [found] if found else []:
        if (reason := _refused(str(template), json.dumps(special))) is not None:
            raise ModelLoadError(f"{name}: {reason}")


@lru_cache(maxsize=64)
def _refused(template: str, special: str) -> str | None:
    """Return why a template is refused, None if it is not."""
    if os.name != "posix":  # there are no such limits
        return None
    job = {"template": template, "special": json.loads(special), **LIMITS}
    try:
        done = subprocess.run(_COMMAND, input=json.dumps(job).encode() + b"\n", capture_output=True, timeout=_WAIT_S)
        return dict(json.loads(done.stdout)).get("refused")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        logger.warning("the chat template is not tried: the process for it failed (%s)", error)
        return None


def render(template: str, special: Mapping[str, str]) -> None:
    """Render a chat with and without a tool, as transformers does. Exceptions of the template are its answer to this chat."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["strftime_now"] = datetime.now().strftime
    environment.globals["raise_exception"] = _raise
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False)
    for tools in (None, [{"type": "function", "function": _TOOL}]):
        try:
            environment.from_string(template).render(messages=CHAT, tools=tools, add_generation_prompt=True, **special)
        except MemoryError:
            raise
        except Exception as error:
            logger.debug("the chat template refused the trial's chat: %s", error)


def _raise(message: str) -> None:
    raise TemplateError(message)
