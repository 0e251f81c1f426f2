"""The paper's published results, as its tables and text print them, to stand beside ours. Accuracies in percent.

Costs of the paper (parameters, FLOPs per call, training FLOPs) are in `tah2.compute.published`.
"""

from __future__ import annotations

from typing import NamedTuple

Key = tuple[str, int]
"""(loop kind, M)"""


class MainColumn(NamedTuple):
    """One model of the paper's main table at 1.7B."""

    accuracy: tuple[float, ...]
    average: float
    flops_per_token: float
    """Relative to Standard"""


BENCHMARKS = ("AIME24", "AIME25", "AIME26", "AMC23", "MATH500", "Olympiad", "HumanEval", "MBPP", "GPQA", "BFCL")
MAIN: dict[Key, MainColumn] = {
    ("standard", 1): MainColumn((11.0, 13.0, 11.9, 45.3, 75.2, 40.4, 63.6, 70.2, 31.5, 15.3), 37.7, 1.00),
    ("huginn", 3): MainColumn((13.9, 14.2, 11.8, 45.8, 74.4, 40.6, 61.7, 70.3, 33.7, 15.6), 38.2, 1.90),
    ("huginn", 7): MainColumn((10.6, 14.0, 13.3, 49.0, 75.2, 40.4, 64.2, 69.3, 33.4, 14.8), 38.4, 3.72),
    ("ouro", 2): MainColumn((10.5, 13.9, 11.0, 45.9, 75.1, 37.9, 61.2, 69.6, 34.0, 14.3), 37.3, 1.91),
    ("ouro", 4): MainColumn((14.5, 13.4, 10.3, 45.9, 73.5, 37.6, 58.2, 67.3, 31.2, 12.1), 36.4, 3.75),
    ("tah2-fixed", 2): MainColumn((15.7, 15.0, 13.2, 51.1, 76.1, 42.1, 63.8, 70.8, 31.9, 14.6), 39.4, 1.99),
    ("tah2-fixed", 4): MainColumn((14.3, 15.4, 13.8, 52.2, 78.5, 44.0, 65.2, 71.3, 32.8, 15.5), 40.3, 3.97),
    ("tah2", 2): MainColumn((15.7, 16.5, 14.3, 50.7, 78.1, 43.8, 66.8, 71.8, 33.1, 15.3), 40.6, 1.21),
    ("tah2", 4): MainColumn((16.3, 16.9, 14.2, 50.9, 78.6, 44.1, 65.2, 72.3, 33.0, 17.4), 40.9, 1.47),
    ("tah2", 8): MainColumn((16.3, 17.9, 14.5, 52.8, 79.3, 47.4, 72.6, 74.4, 32.0, 17.9), 42.5, 2.37),
}

SLOPES: dict[Key, float] = {
    ("standard", 1): 1.79,
    ("ouro", 2): 2.12,
    ("ouro-adaptive", 2): 2.27,
    ("huginn", 3): 2.26,
    ("tah2", 2): 2.74,
}
"""AIME24-26 points per doubling of decoding FLOPs, cutoffs of 4K to 16K tokens"""
R_SQUARED: dict[Key, float] = {("ouro", 2): 0.997, ("huginn", 3): 0.994, ("standard", 1): 0.955}

AIME: dict[Key, float] = {("standard", 1): 12.0, ("tah2", 2): 15.5, ("tah2", 4): 15.8, ("tah2", 8): 16.2}
"""Mean AIME24-26 accuracy within 32K tokens"""
GAIN_BY_DEPTH = {2: 2.8, 8: 3.9}
"""Points over Standard on AIME24-26 at 16K tokens, by M"""
MATCHED_TFLOPS, MATCHED_STANDARD, MATCHED_TAH2 = 191.7, 12.0, 15.4
LOSS_DIFFERENCE = {8: -0.0106}
"""TaH2's validation loss less Standard's, by M"""

GAIN_SHARES: dict[Key, tuple[float, float, float]] = {
    ("ouro", 2): (21.7, 52.3, 26.0),
    ("huginn", 3): (15.9, 33.5, 50.6),
}
"""Percent of tokens that become worse, change little, become better; the last is what the first two leave"""


class Runtime(NamedTuple):
    gflops_per_token: float
    latency_seconds: float
    tokens_per_second: float


RUNTIME: dict[int, dict[Key, Runtime]] = {
    1: {
        ("standard", 1): Runtime(7.04, 139.8, 202.3),
        ("tah2-fixed", 2): Runtime(14.09, 328.7, 89.8),
        ("tah2", 2): Runtime(8.59, 187.0, 144.3),
    },
    4: {
        ("standard", 1): Runtime(7.04, 220.3, 507.6),
        ("tah2-fixed", 2): Runtime(14.09, 483.3, 229.9),
        ("tah2", 2): Runtime(8.59, 285.4, 376.2),
    },
}
"""By batch size; AIME26, 32K tokens, one A800"""

SIZES: dict[str, tuple[float, float]] = {"4B": (46.4, 49.6), "8B": (56.1, 58.5)}
"""Average accuracy of Standard and of TaH2 at M = 2"""

ABLATIONS: dict[str, tuple[str, float, float]] = {
    "tah2": ("TaH2", 15.5, 0.0),
    "labels": ("Top-1 mismatch", 14.4, -1.1),
    "weights": ("Uniform", 11.9, -3.6),
    "coverage": ("Coverage 1", 13.6, -1.9),
    "decisions": ("Sampled", 14.2, -1.3),
    "updater": ("Top-100 embedding", 13.4, -2.1),
    "output": ("Final iteration", 14.5, -1.0),
}
"""aspect -> (variant, mean AIME24-26 accuracy, points against TaH2)"""

CEILINGS: tuple[tuple[int, int, float, float], ...] = ((8, 4, 13.4, 1.55), (8, 8, 16.2, 2.22), (8, 12, 16.2, 2.72))
"""(M, inference ceiling, mean AIME24-26 accuracy, mean depth)"""

CONSENSUS = {("standard", 1): (21.9, 21.9), ("tah2", 2): (27.3, 27.3), ("tah2", 8): (27.3, 29.3)}
"""cons@32 on AIME24-26; the paper gives 27.3 to 29.3 for TaH2 at M = 2 to 8"""


class TrainFlops(NamedTuple):
    """In units of 10^18."""

    forward_backward: float
    label: float
    total: float
    ratio: float


TRAIN_FLOPS: dict[Key, TrainFlops] = {
    ("standard", 1): TrainFlops(41.8, 0.0, 41.8, 1.00),
    ("huginn", 3): TrainFlops(77.7, 0.0, 77.7, 1.86),
    ("huginn", 7): TrainFlops(149.3, 0.0, 149.3, 3.57),
    ("ouro", 2): TrainFlops(83.6, 0.0, 83.6, 2.00),
    ("ouro", 4): TrainFlops(167.1, 0.0, 167.1, 4.00),
    ("tah2-fixed", 2): TrainFlops(84.0, 0.0, 84.0, 2.01),
    ("tah2-fixed", 4): TrainFlops(168.4, 0.0, 168.4, 4.03),
    ("tah2", 2): TrainFlops(62.8, 15.2, 78.1, 1.87),
    ("tah2", 4): TrainFlops(87.6, 26.7, 114.3, 2.73),
    ("tah2", 8): TrainFlops(164.2, 52.0, 216.2, 5.17),
}
MEAN_DEPTHS = {"OlympiadBench": (2.46, 1.29), "HumanEval": (3.31, 1.04)}
"""Mean depth at the beginning and at the end of the shown responses"""
