"""Benchmarks as commands: each module measures ratios side by side, in one run on one machine."""
