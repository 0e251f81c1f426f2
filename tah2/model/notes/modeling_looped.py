"""This checkpoint is a looped transformer of the package tah2; the code lives there."""

from transformers import PreTrainedModel

try:
    import tah2

    LoopedForCausalLM = tah2.LoopedForCausalLM
except ImportError:

    class LoopedForCausalLM(PreTrainedModel):
        def __init__(self, *args, **kwargs):
            raise ImportError(
                "This checkpoint is a looped transformer: install the package tah2 and `import tah2` before loading it."
            )
