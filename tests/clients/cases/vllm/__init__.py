"""Cases of vLLM's tests/entrypoints and tests/tool_use, one module per file or group of files."""
