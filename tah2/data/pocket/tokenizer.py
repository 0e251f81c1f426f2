"""The pocket world's tokenizer in Hugging Face format: one word, one token; text and ids are each other's inverse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tah2.data.pocket.vocabulary import BOS, EOS, MARKS, PAD, Vocabulary


def make_tokenizer(vocabulary: Vocabulary) -> Any:
    """A `PreTrainedTokenizerFast` whose ids are the vocabulary's."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    model = WordLevel({word: index for index, word in enumerate(vocabulary.words)}, unk_token=MARKS[PAD])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=MARKS[BOS],
        eos_token=MARKS[EOS],
        pad_token=MARKS[PAD],
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(vocabulary: Vocabulary, folder: Path) -> None:
    make_tokenizer(vocabulary).save_pretrained(folder)
