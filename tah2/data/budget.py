"""How long to train, in the unit that a recipe likes, as a number of optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tah2.config.strict import ConfigError


@dataclass(frozen=True)
class BudgetConfig:
    """Exactly one of the four. Tokens are all tokens of the samples, with or without a loss."""

    steps: int | None = None
    epochs: float | None = None
    tokens: float | None = None
    tokens_per_parameter: float | None = None
    """TPP: tokens = TPP x parameters of the backbone that is post-trained."""

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            listed = " and ".join(sorted(given)) or "none"
            raise ConfigError(
                f"Give the training budget as exactly one of steps, epochs, tokens, tokens_per_parameter, not {listed}."
            )
        ((name, value),) = given.items()
        if value <= 0:
            raise ConfigError(f"The training budget '{name}' must be positive, not {value}.")


@dataclass(frozen=True)
class DataSize:
    """What a budget needs to know of the data; a streamed data set does not know its `samples`."""

    tokens_per_sample: float
    samples: int | None = None


def resolve_steps(budget: BudgetConfig, size: DataSize, global_batch: int, parameters: int | None = None) -> int:
    """Optimizer steps of `global_batch` samples that spend the budget, rounded up."""
    if budget.steps is not None:
        return budget.steps
    if budget.epochs is not None:
        if size.samples is None:
            raise ConfigError("A streamed data set has no known size: give the budget in steps or tokens, not epochs.")
        return max(1, math.ceil(round(budget.epochs * size.samples, 6) / global_batch))
    if budget.tokens is not None:
        tokens = budget.tokens
    else:
        assert budget.tokens_per_parameter is not None
        if parameters is None:
            raise ConfigError("A budget in tokens per parameter needs the number of parameters of the model.")
        tokens = budget.tokens_per_parameter * parameters
    if not size.tokens_per_sample > 0:
        raise ConfigError("A budget in tokens needs data whose mean sample length is known: give it in steps.")
    return max(1, math.ceil(round(tokens / (size.tokens_per_sample * global_batch), 6)))
