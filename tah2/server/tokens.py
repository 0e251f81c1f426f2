"""Tokens as clients see them: their bytes, and names that never collide."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any


class TokenTable:
    """The bytes behind every token id."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._added = {token: str(added.content) for token, added in tokenizer.added_tokens_decoder.items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        steps = json.dumps(json.loads(backend.to_str())["decoder"]) if backend is not None else ""
        self._byte_level = '"ByteLevel"' in steps
        self._byte_fallback = '"ByteFallback"' in steps

    def bytes_of(self, token: int) -> bytes:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._read(token)
        return found

    def text_of(self, token: int) -> str:
        """For people: half a character becomes U+FFFD."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def name_of(self, token: int) -> str:
        """Text where it is whole characters, else `bytes:\\xe2\\x96`: different tokens get different names."""
        data = self.bytes_of(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _read(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode("utf-8")
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""  # an id of the model's vocabulary that the tokenizer does not have
        if self._byte_level:
            letters = _letters()
            if all(letter in letters for letter in piece):
                return bytes(letters[letter] for letter in piece)
        if self._byte_fallback and len(piece) == 6 and piece.startswith("<0x"):
            return bytes([int(piece[3:5], 16)])
        if self._byte_fallback:
            return str(piece).replace("\u2581", " ").encode("utf-8")
        text: str = self.tokenizer.decode([token])
        return text.encode("utf-8", "replace")


class Offsets:
    """Characters that begin before each token of a text, half characters counted once."""

    def __init__(self, start: int = 0) -> None:
        self.letters = start

    def before(self, data: bytes) -> int:
        """Where the token of `data` begins; then move behind it."""
        start = self.letters
        self.letters += sum((byte & 0xC0) != 0x80 for byte in data)
        return start


@lru_cache
def _letters() -> dict[str, int]:
    """The letters in which byte-level vocabularies write bytes: printable ones as they are, others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
