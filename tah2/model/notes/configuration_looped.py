"""This checkpoint is a looped transformer of the package tah2; the code lives there."""

from transformers import PreTrainedConfig

try:
    import tah2

    LoopedConfig = tah2.LoopedConfig
except ImportError:

    class LoopedConfig(PreTrainedConfig):
        model_type = "looped"

        def __init__(self, *args, **kwargs):
            raise ImportError(
                "This checkpoint is a looped transformer: install the package tah2 and `import tah2` before loading it."
            )
