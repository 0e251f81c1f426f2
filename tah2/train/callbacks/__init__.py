"""Who listens to a training run: log files, trackers, the progress bar, and whatever a user adds.

A listener is a `Callback`; `Callbacks` tells all of them and survives any of them. `make_callbacks` builds the usual
set from names.
"""

from tah2.train.callbacks.base import Callback, Callbacks, RunInfo
from tah2.train.callbacks.table import LOGGERS, make_callbacks

__all__ = ["LOGGERS", "Callback", "Callbacks", "RunInfo", "make_callbacks"]
