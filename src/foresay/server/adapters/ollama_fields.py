"""Request fields of Ollama's API, and their conversion to a chat request or to one for a completion.

Owns the fields' names. Knows no engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from foresay.server.embedding import EmbeddingRequest
from foresay.server.errors import FieldError
from foresay.server.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Fields,
    Items,
    Neutral,
    Number,
    Object,
    Tools,
    limit_parts,
    typed,
    validated,
)
from foresay.server.hints import ignore
from foresay.server.option_fields import Drafting, OfferedTool
from foresay.server.requests import ChatRequest, CompletionRequest, as_chat

CHAT_NAMES = {
    "temperature": "options.temperature",
    "top_p": "options.top_p",
    "top_k": "options.top_k",
    "min_p": "options.min_p",
    "seed": "options.seed",
    "stop": "options.stop",
    "typical_p": "options.typical_p",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "presence_penalty": "options.presence_penalty",
    "frequency_penalty": "options.frequency_penalty",
    "response_format": "format",
    "response_format.json_schema": "format",
    "enable_thinking": "think",
    "reasoning_effort": "think",
    "continue_final_message": "messages",
}
"""Names in this API of a chat request's fields."""
GENERATE_NAMES = {**CHAT_NAMES, "messages": "prompt"}
"""The same for /api/generate."""
UNLIMITED = (1 << 31) - 1
"""Number of tokens of a completion that only the context limits."""
_DURATION = r"^-?(\d+(\.\d+)?(ns|us|ms|s|m|h)?)+$"
_INDEX: Neutral = {"index": tuple(range(MAX_TOOLS))}


class Options(Fields):
    """Sampling parameters, and settings of Ollama's runner, which are hints."""

    neutral: ClassVar[Neutral] = {
        "seed": (-1,),
        "num_predict": (-1, -2),
        "mirostat": (0,),
        "tfs_z": (1,),
        "penalize_newline": (True,),
        "vocab_only": (False,),
        "embedding_only": (False,),
        "logits_all": (False,),
    }
    hints: ClassVar[Mapping[str, str]] = {
        name: f"options.{name}"
        for name in (
            *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv"),
            *("use_mmap", "use_mlock", "mirostat_tau", "mirostat_eta"),
        )
    }

    temperature: Number | None = None
    top_k: StrictInt | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    seed: StrictInt | None = None
    stop: StrictStr | Items[StrictStr] | None = None
    num_predict: StrictInt | None = None
    repeat_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repeat_last_n: Annotated[StrictInt, Field(ge=-1)] | None = None
    """Tokens to which the penalties apply: 0 turns them off, -1 is the context; another number is a hint."""

    def sampling(self) -> dict[str, Any]:
        """Return the fields of a chat request."""
        given = self.model_dump(exclude={"num_predict", "repeat_penalty", "repeat_last_n"}, exclude_none=True)
        given |= {"max_tokens": self.num_predict, "repetition_penalty": self.repeat_penalty}
        if self.repeat_last_n == 0:
            given |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        elif self.repeat_last_n not in (None, -1):
            ignore("options.repeat_last_n")
        return given


class _CalledFunction(Fields):
    neutral: ClassVar[Neutral] = _INDEX

    name: StrictStr
    arguments: Object = Field(default_factory=dict)


class _Call(Fields):
    neutral: ClassVar[Neutral] = _INDEX

    id: StrictStr | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction


class OllamaMessage(Fields):
    """One turn. A message of a response may be sent back unchanged."""

    neutral: ClassVar[Neutral] = {"images": ([],), "tool_calls": ([],)}

    role: Literal["system", "user", "assistant", "tool"]
    content: StrictStr = ""
    thinking: StrictStr | None = None
    tool_calls: Items[_Call] | None = None
    tool_name: StrictStr | None = None
    tool_call_id: StrictStr | None = None

    def chat(self) -> dict[str, Any]:
        """Return the message of a chat request."""
        more = {"reasoning_content": self.thinking, "name": self.tool_name, "tool_call_id": self.tool_call_id}
        calls = [one.model_dump(exclude_none=True) for one in self.tool_calls or ()]
        return {"role": self.role, "content": self.content, "tool_calls": calls, **more}


class OllamaRequest(Fields):
    """Fields of both requests that generate. Their stream is on by default."""

    neutral: ClassVar[Neutral] = {
        "format": ("",),
        "truncate": (False,),
        "shift": (False,),
        "_debug_render_only": (False,),
    }
    hints: ClassVar[Mapping[str, str]] = {"truncate": "truncate", "shift": "shift"}

    model: StrictStr | None = None
    stream: StrictBool = True
    format: Literal["json"] | Object | None = None
    """"json" for any object, or a JSON schema."""
    options: Options = Field(default_factory=Options)
    think: StrictBool | Literal["low", "medium", "high"] | None = None
    keep_alive: Number | Annotated[StrictStr, Field(pattern=_DURATION)] | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] = 0
    foresay: Drafting | None = None

    @property
    def is_empty(self) -> bool:
        """True for a request without a prompt."""
        raise NotImplementedError

    def chat(self) -> ChatRequest | CompletionRequest:
        """Return the request of OpenAI's API. Raises ApiError for contradicting fields."""
        raise NotImplementedError

    def only_loads(self) -> bool:
        """True for a request to load the model: it has no prompt. A limited `keep_alive` is an ignored hint.

        Raises ApiError for a request to unload the model.
        """
        given = self.keep_alive is not None
        if self.is_empty and given and not re.search("[1-9]", str(self.keep_alive)):
            raise FieldError(
                "keep_alive", "keep_alive=0 without a prompt unloads a model, which this server does not do"
            )
        if given and not str(self.keep_alive).startswith("-"):
            ignore("keep_alive")
        return self.is_empty

    def _chat(self, **own: Any) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs requires logprobs=true")
        schema = {"type": "json_schema", "json_schema": {"schema": self.format}}
        response_format = {"type": "json_object"} if self.format == "json" else self.format and schema
        is_switch = isinstance(self.think, bool)
        return as_chat(
            self,
            **self.options.sampling(),
            response_format=response_format,
            enable_thinking=self.think if is_switch else None,
            reasoning_effort=None if is_switch else self.think,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            **own,
        )


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True), limit_parts(MAX_MESSAGES, "tool_calls")] = Field(
        default_factory=list
    )
    tools: Tools[Annotated[OfferedTool, typed("function")]] | None = None

    @property
    def is_empty(self) -> bool:
        """See OllamaRequest."""
        return not self.messages

    def chat(self) -> ChatRequest:
        """Return the chat request. A last message of the assistant is continued. Raises ApiError for contradicting fields."""
        last = self.messages[-1]
        return self._chat(
            messages=[one.chat() for one in self.messages],
            tools=[one.plain() for one in self.tools or ()],
            continue_final_message=last.role == "assistant" and not last.tool_calls,
        )


class OllamaGenerateRequest(OllamaRequest):
    """POST /api/generate: a chat of one turn, or a completion without the chat template."""

    neutral: ClassVar[Neutral] = {
        **OllamaRequest.neutral,
        "images": ([],),
        "context": ([],),
        "template": ("",),
        "system": ("",),
        "suffix": ("",),
    }

    prompt: StrictStr = ""
    system: StrictStr | None = None
    suffix: StrictStr | None = None
    """Text after the output: the model fills in the text between prompt and suffix."""
    raw: StrictBool = False
    """True for a prompt that is encoded unchanged."""

    @property
    def is_empty(self) -> bool:
        """See OllamaRequest."""
        return not self.prompt

    def chat(self) -> ChatRequest | CompletionRequest:
        """Return the chat request, or that for a completion if `raw` or a suffix is given.

        Raises ApiError for contradicting fields.
        """
        if self.raw or self.suffix:
            return self._completion()
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self._chat(messages=[*system, {"role": "user", "content": self.prompt}])

    def _completion(self) -> CompletionRequest:
        mode = "raw" if self.raw else "suffix"
        for name in ("system", "format", "think"):
            if getattr(self, name):
                raise FieldError(name, f"{name} cannot be combined with {mode}, which bypasses the chat template")
        chat = self._chat(messages=[{"role": "user", "content": self.prompt}])
        same = CompletionRequest.model_fields.keys() & ChatRequest.model_fields.keys() - {"logprobs"}
        fields = chat.model_dump(include=same, exclude_none=True)
        logprobs = self.top_logprobs if self.logprobs else None
        own = {"prompt": self.prompt, "suffix": self.suffix, "logprobs": logprobs}
        return validated(CompletionRequest, {"max_tokens": UNLIMITED, **fields, **own})


class OllamaEmbeddingsRequest(Fields):
    """POST /api/embeddings, the older form of /api/embed."""

    hints: ClassVar[Mapping[str, str]] = {"keep_alive": "keep_alive", "options": "options"}

    model: StrictStr | None = None
    input: StrictStr = Field(alias="prompt")

    def embedding(self, model: str) -> EmbeddingRequest:
        """Return the request of OpenAI's API. model: its name there."""
        return validated(EmbeddingRequest, {**self.model_dump(exclude_none=True), "model": model})


class OllamaEmbedRequest(OllamaEmbeddingsRequest):
    """POST /api/embed."""

    neutral: ClassVar[Neutral] = {"truncate": (False,)}
    hints: ClassVar[Mapping[str, str]] = {**OllamaEmbeddingsRequest.hints, "truncate": "truncate"}

    input: StrictStr | Items[StrictStr]  # type: ignore[assignment]
    dimensions: StrictInt | None = None


class ShowRequest(Fields):
    """POST /api/show."""

    neutral: ClassVar[Neutral] = {"verbose": (False, True), "system": ("",), "template": ("",), "options": ({},)}

    model: StrictStr | None = None
    name: StrictStr | None = None
    """Older name of `model`."""
