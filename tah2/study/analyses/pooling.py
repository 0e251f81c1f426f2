"""The same analysis of several trained models as one: counts add up, means are weighted by tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Json = Mapping[str, Any]


def pooled_gains(parts: Sequence[Json]) -> dict[str, Any]:
    """`Gains` of several models (as JSON) over all their tokens."""
    weights = _weights([part["tokens"] for part in parts])
    pooled = {name: _mean([part[name] for part in parts], weights) for name in ("worse", "little", "better", "mean")}
    pooled |= {name: _mean([part[name] for part in parts], weights) for name in ("lost", "won")}
    counts = np.sum([part["counts"] for part in parts], axis=0).tolist()
    alike = {name: parts[0][name] for name in ("first", "final", "edges")}
    return {**pooled, **alike, "counts": counts, "tokens": sum(part["tokens"] for part in parts)}


def pooled_alignment(parts: Sequence[Json]) -> dict[str, Any]:
    """`Alignment` of several models (as JSON), depth by depth."""
    depths = sorted({found["depth"] for part in parts for found in part["depths"]})
    by_depth = [[found for part in parts for found in part["depths"] if found["depth"] == depth] for depth in depths]
    return {"threshold": parts[0]["threshold"], "depths": [_pooled_depth(found) for found in by_depth]}


def _pooled_depth(found: Sequence[Json]) -> dict[str, Any]:
    bands = [pooled_bands(bands) for bands in zip(*(part["bands"] for part in found), strict=True)]
    groups = {name: pooled_bands([part[name] for part in found]) for name in ("near_threshold", "stopped", "continued")}
    known = [part["correlation"] for part in found if part["correlation"] is not None]
    return {
        "depth": found[0]["depth"],
        "tokens": sum(part["tokens"] for part in found),
        "bands": bands,
        **groups,
        "correlation": float(np.mean(known)) if known else None,
    }


def pooled_bands(bands: Sequence[Json]) -> dict[str, Any]:
    """One band over several models. Its interval is the weighted mean of theirs: they saw the same documents, so
    nothing is gained by taking their errors for independent."""
    filled = [band for band in bands if band["tokens"]]
    pooled: dict[str, Any] = {"low": bands[0]["low"], "high": bands[0]["high"]}
    pooled["tokens"] = sum(band["tokens"] for band in filled)
    if not filled:
        return {**pooled, "probability": None, "gain": None, "interval": None}
    weights = _weights([band["tokens"] for band in filled])
    pooled |= {name: _mean([band[name] for band in filled], weights) for name in ("probability", "gain")}
    pooled["interval"] = [_mean([band["interval"][end] for band in filled], weights) for end in (0, 1)]
    return pooled


def _weights(tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray(tokens, dtype=np.float64) / sum(tokens)


def _mean(values: Sequence[float], weights: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    return float(np.asarray(values, dtype=np.float64) @ weights)


def pooled_classes(parts: Sequence[Json]) -> dict[str, dict[str, Any]]:
    """`Depths.by_class` of several models of one ceiling (as JSON)."""
    pooled: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for part in parts for name in part["by_class"]):
        found = [part["by_class"][name] for part in parts if name in part["by_class"]]
        weights = _weights([each["tokens"] for each in found])
        shares = np.asarray([each["shares"] for each in found]).T @ weights
        mean = _mean([each["mean"] for each in found], weights)
        pooled[name] = {"tokens": sum(each["tokens"] for each in found), "mean": mean, "shares": shares.tolist()}
    return pooled
