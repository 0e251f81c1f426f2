"""What a loop costs: FLOPs of decoding and training, and parameter counts.

Every number derives from the loop kind's row (visibility rule, parts, output, looped layers); no kind is asked for
by name, so a newly registered one is accounted for at once.
"""

from tah2.compute.decode import DecodeMeter, decode_flops, decode_per_token
from tah2.compute.parameters import ParameterCounts, parameter_counts
from tah2.compute.percall import Breakdown, PerCall, Work, per_call
from tah2.compute.train import TrainCounts, TrainFlops, train_flops, train_flops_recorded

__all__ = [
    "Breakdown",
    "DecodeMeter",
    "ParameterCounts",
    "PerCall",
    "TrainCounts",
    "TrainFlops",
    "Work",
    "decode_flops",
    "decode_per_token",
    "parameter_counts",
    "per_call",
    "train_flops",
    "train_flops_recorded",
]
