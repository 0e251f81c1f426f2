"""Bytes of tokens, names that never collide, and where tokens begin in their text."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tah2.server.tokens import Offsets, TokenTable
from tests.server.tiny import tokenizer

TEXT = "é <|im_end|> 世🙂\n"


def pieces() -> Any:
    """A vocabulary in SentencePiece's style: blanks are marked, unknown bytes have tokens."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁a": 257, "b": 258}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def test_bytes_of_tokens_are_the_texts():
    table, made = TokenTable(tokenizer()), tokenizer()
    assert b"".join(map(table.bytes_of, made.encode(TEXT))) == TEXT.encode()
    assert table.bytes_of(10_000) == b""


def test_pieces_with_marks_and_fallback_bytes_are_read():
    table = TokenTable(pieces())
    assert table.bytes_of(257) == b" a"
    assert table.bytes_of(258) == b"b"
    assert [table.bytes_of(byte + 1) for byte in "é".encode()] == [b"\xc3", b"\xa9"]


def test_names_do_not_collide_where_texts_do():
    table, made = TokenTable(tokenizer()), tokenizer()
    first, second = made.encode("é")
    assert table.text_of(first) == table.text_of(second) == "\ufffd"
    assert (table.name_of(first), table.name_of(second)) == ("bytes:\\xc3", "bytes:\\xa9")


@pytest.mark.parametrize("start", [0, 5])
def test_offsets_count_a_character_once(start: int):
    table, offsets = TokenTable(tokenizer()), Offsets(start)
    places = [offsets.before(table.bytes_of(token)) for token in tokenizer().encode("aé世b")]
    assert [place - start for place in places] == [0, 1, 2, 2, 3, 3, 3]
