"""Requests in the shapes that coding agents send: their fields, blocks, items and schemas, with texts of our own."""

from __future__ import annotations

from typing import Any

SCHEMA = "https://json-schema.org/draft/2020-12/schema"
CACHED = {"cache_control": {"type": "ephemeral"}}
WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_STEP = {"content": {"type": "string"}, "status": {"enum": ["pending", "done"]}}
_STEPS: dict[str, Any] = {"type": "array", "items": {
    "type": "object", "properties": _STEP, "required": ["content", "status"], "additionalProperties": False}}  # fmt: skip
_READ: dict[str, Any] = {
    "$schema": SCHEMA,
    "type": "object",
    "properties": {
        "file_path": {"description": "An absolute path", "type": "string", "minLength": 1},
        "offset": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
        "pages": {"anyOf": [{"type": "string", "pattern": "^[0-9-]+$"}, {"type": "null"}], "default": None},
        "url": {"type": "string", "format": "uri"},
        "todos": _STEPS,
        "answers": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}},
    },
    "required": ["file_path"],
    "additionalProperties": False,
}
"""The dialect of Claude Code's tools: a schema with its draft, bounds, formats and defaults."""
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "user-agent": "claude-cli/2.1 (external, cli)",
}
_CLAUDE_TOOLS: list[dict[str, Any]] = [
    {"name": "weather", "description": "The weather.", "input_schema": {"$schema": SCHEMA, **WEATHER}},
    {"name": "Read", "description": "Read a file.", "input_schema": _READ, "eager_input_streaming": True, **CACHED},
]
_CLAUDE_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": [
        {"type": "text", "text": "<system-reminder>\nThe list is empty.\n</system-reminder>"},
        {"type": "text", "text": "Is it raining in Rome?", **CACHED}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "I read the file first.", "signature": "c2lnbmVk"},
        {"type": "redacted_thinking", "data": "b3BhcXVl"},
        {"type": "text", "text": "One moment."},
        {"type": "tool_use", "id": "toolu_01", "name": "Read", "input": {"file_path": "/a/b.txt"}},
        {"type": "tool_use", "id": "toolu_02", "name": "Read", "input": {"file_path": "/a/c.txt"}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_01", "content": "1\train"},
        {"type": "tool_result", "tool_use_id": "toolu_02", "is_error": True, **CACHED,
         "content": [{"type": "text", "text": "no such file"}]}]},
]  # fmt: skip
CLAUDE: dict[str, Any] = {
    "model": "tiny", "max_tokens": 32_000, "temperature": 0, "stream": True,
    "metadata": {"user_id": "user_1_account__session_2"},
    "system": [
        {"type": "text", "text": "You are an agent."},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}},
    ],
    "messages": _CLAUDE_TURNS, "tools": _CLAUDE_TOOLS,
    "thinking": {"type": "enabled", "budget_tokens": 31_999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
}  # fmt: skip

_COMMAND = {"type": "array", "items": {"type": "string"}, "description": "The command"}
_CODEX_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "weather", "description": "The weather.", "strict": False, "parameters": WEATHER},
    {"type": "function", "name": "shell", "description": "Run a command.", "strict": False, "parameters": {
        "type": "object", "required": ["command"], "additionalProperties": False,
        "properties": {"command": _COMMAND, "timeout_ms": {"type": "number"}, "plan": _STEPS}}},
]  # fmt: skip
CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are an agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "The sandbox is on."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<cwd>/a</cwd>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Is it raining in Rome?"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I look."}], "content": None,
         "encrypted_content": None},
        {"type": "message", "role": "assistant", "phase": "commentary",
         "content": [{"type": "output_text", "text": "One moment."}]},
        {"type": "function_call", "name": "shell", "arguments": '{"command": ["cat", "b.txt"]}', "call_id": "call_1"},
        {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "b.txt"}]},
    ],
    "tools": _CODEX_TOOLS, "tool_choice": "auto", "parallel_tool_calls": True, "store": False, "stream": True,
    "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"},
    "include": ["reasoning.encrypted_content"], "service_tier": "priority", "prompt_cache_key": "0199-thread",
    "client_metadata": {"x-codex-installation-id": "1"},
}  # fmt: skip

_CHAT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "strict": False, "parameters": WEATHER},
}
_CALL = {
    "id": "call_1", "type": "function", "index": 0, "function": {"name": "weather", "arguments": '{"city": "Bari"}'},
}  # fmt: skip
_CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": [{"type": "text", "text": "Is it raining in Bari?", **CACHED}]},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "no"},
    {"role": "user", "content": [{"type": "text", "text": "And in Rome?"}]},
]
_STREAM: dict[str, Any] = {"model": "tiny", "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
_DEFAULTS = {"top_p": 1, "frequency_penalty": 0, "presence_penalty": 0}
CHATS: dict[str, dict[str, Any]] = {
    "aider": {**_STREAM, "messages": [
        {"role": "system", "content": "Act as a programmer. Reply with whole files."},
        {"role": "user", "content": "I have added b.txt to the chat.\n\nb.txt\n```\nrain\n```\n"},
        {"role": "assistant", "content": "Ok, any changes I propose will be to those files."},
        {"role": "user", "content": "Is it raining?"}]},
    "Cline": {**_STREAM, "messages": _CHAT, "reasoning_effort": "medium", "tools": [_CHAT_TOOL], "tool_choice": "auto",
              "parallel_tool_calls": False},
    "Continue": {**_STREAM, **_DEFAULTS, "messages": _CHAT, "max_tokens": 4096, "stop": ["<|im_end|>", "<|endoftext|>"],
                 "tools": [{**_CHAT_TOOL, **CACHED}],
                 "prediction": {"type": "content", "content": "It rains in Rome."}},
}  # fmt: skip
FIM_STOPS = [
    *(f"<|{name}|>" for name in ("endoftext", "fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name")),
    *("<|file_sep|>", "<|im_start|>", "<|im_end|>", "/src/", "#- coding: utf-8", "```"),
    *(f"\n{word}" for word in ("function", "class", "module", "export ", "import ")),
]
FILL_IN: dict[str, Any] = {
    **_DEFAULTS, "model": "tiny", "prompt": "hello", "suffix": " you", "max_tokens": 8, "temperature": 0,
    "stop": FIM_STOPS, "stream": True,
}  # fmt: skip
"""Continue's completion of code between two texts."""
