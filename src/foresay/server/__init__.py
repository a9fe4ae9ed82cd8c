"""HTTP server with an OpenAI-compatible API."""
