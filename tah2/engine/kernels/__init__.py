"""CPU kernels for decoding: packed linear layers, paged attention and a whole block in one call.

They are compiled at first use with the system's C++ compiler. Without one, on another device or with
`TAH2_NO_KERNELS=1` the same functions run on stock PyTorch and give the same results up to rounding.
Everything here is for inference: no gradient flows, and packed weights do not follow later changes of a model.
"""

from tah2.engine.kernels.attention import Visible, attend, paged_attention, reference_attend
from tah2.engine.kernels.bandwidth import Reader
from tah2.engine.kernels.block import PackedBlock, PackedBlocks, Step
from tah2.engine.kernels.build import available
from tah2.engine.kernels.linear import STORAGES, PackedLinear, Storage, pack_linear, packed_swiglu, stored
from tah2.engine.kernels.memory import huge_empty
from tah2.engine.kernels.mixture import Row, gather, mix, reference_mix
from tah2.engine.kernels.norm import reference_rms_norm, rms_norm
from tah2.engine.kernels.part import PackedPart
from tah2.engine.kernels.summary import Best, largest, most_probable, reference_most_probable

__all__ = [
    "STORAGES",
    "Best",
    "PackedBlock",
    "PackedBlocks",
    "PackedLinear",
    "PackedPart",
    "Reader",
    "Row",
    "Step",
    "Storage",
    "Visible",
    "attend",
    "available",
    "gather",
    "huge_empty",
    "largest",
    "mix",
    "most_probable",
    "pack_linear",
    "packed_swiglu",
    "paged_attention",
    "reference_attend",
    "reference_mix",
    "reference_most_probable",
    "reference_rms_norm",
    "rms_norm",
    "stored",
]
