"""Text in, text out: `load`, the Generator, and the session it runs on."""
