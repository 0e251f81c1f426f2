"""The shapes of requests (pydantic, checked at the edge) and answers (msgspec, fast to write)."""
