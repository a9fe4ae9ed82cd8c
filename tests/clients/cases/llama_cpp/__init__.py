"""Cases of llama.cpp's tools/server/tests/unit, one module per file or group of files."""
