"""The HTTP face of the engine: an OpenAI-compatible API, the live page, metrics."""
