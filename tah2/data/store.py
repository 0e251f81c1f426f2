"""Tokenised documents, flat: one array of ids for all of them, and where each begins."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tah2.config.strict import ConfigError

Scalar = TypeVar("Scalar", bound=np.generic)

STORED = {"ids", "mask", "starts", "source", "texts"}
LENGTHS_IN_ZIP = 26
"""Where the header before a zip file's member says how long its name and its extra field are, which follow."""


@dataclass(frozen=True)
class Sample:
    """One document: `ids` int32 `[n]`; `mask` bool `[n]`, true for a token with a loss (it is a target).

    `tags` int16 `[n]`, where given, says of each token what kind it is (0: nothing to tell apart). The first token of
    a document has no predictor, so its mask is false.
    """

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    name: str = ""
    tags: NDArray[np.int16] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def supervised_tokens(self) -> int:
        return int(self.mask.sum())


@dataclass(frozen=True)
class TokenStore:
    """D documents of T tokens in all; document i is `[starts[i], starts[i + 1])`."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    starts: NDArray[np.int64]
    """int64 `[D + 1]`, from 0 to T."""
    names: tuple[str, ...]
    source: NDArray[np.int16]
    """int16 `[D]`: the index of the source of each document."""
    tags: NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        tokens, documents = len(self.ids), len(self.names)
        assert len(self.mask) == tokens
        assert len(self.starts) == documents + 1
        assert len(self.source) == documents
        assert self.starts[0] == 0
        assert self.starts[-1] == tokens
        assert documents == 0 or (np.diff(self.starts) > 0).all(), "a document has at least one token"
        assert not self.mask[self.starts[:-1]].any(), "the first token of a document is never a target"

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, int64 `[D]`."""
        return np.diff(self.starts)

    @cached_property
    def supervised(self) -> NDArray[np.int64]:
        """Tokens with a loss of each document, int64 `[D]`."""
        return np.diff(np.concatenate([[0], np.cumsum(self.mask, dtype=np.int64)])[self.starts])

    def sample(self, index: int) -> Sample:
        part = slice(int(self.starts[index]), int(self.starts[index + 1]))
        tags = None if self.tags is None else self.tags[part]
        return Sample(self.ids[part], self.mask[part], self.names[index], tags)

    def select(self, indices: ArrayLike) -> TokenStore:
        """A copy with the documents `indices`, in that order."""
        chosen = [int(i) for i in np.asarray(indices, np.int64)]
        return TokenStore.of((self.sample(i) for i in chosen), [int(self.source[i]) for i in chosen])

    @staticmethod
    def of(samples: Iterable[Sample], sources: Iterable[int] | None = None) -> TokenStore:
        kept = list(samples)
        lengths = np.asarray([len(sample) for sample in kept], np.int64)
        tagged = bool(kept) and all(sample.tags is not None for sample in kept)
        return TokenStore(
            ids=_flat([sample.ids for sample in kept], np.int32),
            mask=_flat([sample.mask for sample in kept], np.bool_),
            starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
            names=tuple(sample.name for sample in kept),
            source=np.asarray([0] * len(kept) if sources is None else list(sources), np.int16),
            tags=_flat([s.tags for s in kept if s.tags is not None], np.int16) if tagged else None,
        )


def save_store(store: TokenStore, path: Path, notes: str = "") -> None:
    """Write all of `store` to one file, or nothing: readers never see half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = np.frombuffer(json.dumps([notes, *store.names]).encode(), np.uint8)
    arrays = {"ids": store.ids, "mask": store.mask, "starts": store.starts, "source": store.source, "texts": texts}
    if store.tags is not None:
        arrays["tags"] = store.tags
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_store(path: Path) -> tuple[TokenStore, str]:
    """The store and the notes written with it.

    Its arrays stay in the file: nothing is read before it is used, and the processes of a machine share one copy.
    """
    try:
        arrays = _mapped(path)
    except zipfile.BadZipFile:
        arrays = {}
    if not arrays.keys() >= STORED:
        raise ConfigError(f"{path} holds no tokenised documents, or is damaged: remove it, or name another file.")
    notes, *names = json.loads(arrays["texts"].tobytes())
    tags = arrays.get("tags")
    store = TokenStore(arrays["ids"], arrays["mask"], arrays["starts"], tuple(names), arrays["source"], tags)
    return store, str(notes)


def _mapped(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file as they lie there; those that are compressed are left out."""
    found = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                continue
            file.seek(member.header_offset + LENGTHS_IN_ZIP)
            file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)
            np.lib.format.read_magic(file)
            shape, _, kind = np.lib.format.read_array_header_1_0(file)
            empty = 0 in shape  # and so cannot be mapped
            array = np.zeros(shape, kind) if empty else np.memmap(path, kind, "r", file.tell(), shape)
            found[member.filename.removesuffix(".npy")] = np.asarray(array)
    return found


def _flat(parts: list[NDArray[Scalar]], kind: type[Scalar]) -> NDArray[Scalar]:
    return np.concatenate(parts).astype(kind, copy=False) if parts else np.zeros(0, kind)
