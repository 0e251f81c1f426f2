import pytest

from tah2.config.strict import ConfigError, build
from tah2.data.budget import BudgetConfig, DataSize, resolve_steps

SIZE = DataSize(tokens_per_sample=100.0, samples=1000)


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        ({"steps": 7}, 7),
        ({"epochs": 3}, 24),
        ({"epochs": 0.5}, 4),
        ({"tokens": "1e5"}, 8),
        ({"tokens": 12_800}, 1),
        ({"tokens_per_parameter": 2}, 16),
    ],
)
def test_budgets_become_steps_rounded_up(budget, steps):
    assert resolve_steps(build(BudgetConfig, budget), SIZE, global_batch=128, parameters=100_000) == steps


def test_two_tokens_per_parameter_of_the_paper():
    paper = DataSize(tokens_per_sample=3.4e9 / (3 * 273_000), samples=273_000)
    by_tpp = resolve_steps(BudgetConfig(tokens_per_parameter=2), paper, 128, parameters=1_700_000_000)
    assert by_tpp == resolve_steps(BudgetConfig(epochs=3), paper, 128)


@pytest.mark.parametrize("budget", [{}, {"steps": 1, "epochs": 1}, {"steps": 0}, {"tokens": -1}])
def test_a_budget_is_exactly_one_positive_number(budget):
    with pytest.raises(ConfigError):
        build(BudgetConfig, budget)


def test_what_a_budget_needs_to_know_is_asked_for():
    with pytest.raises(ConfigError, match="streamed"):
        resolve_steps(BudgetConfig(epochs=1), DataSize(10.0), 4)
    with pytest.raises(ConfigError, match="parameters"):
        resolve_steps(BudgetConfig(tokens_per_parameter=1), SIZE, 4)
    with pytest.raises(ConfigError, match="steps"):
        resolve_steps(BudgetConfig(tokens=10), DataSize(0.0), 4)
