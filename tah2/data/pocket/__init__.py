"""The pocket world: procedural reasoning with chains of thought in which few tokens are hard (see `world`)."""

from tah2.data.pocket.world import PocketConfig, PocketProblem, PocketVerdict, PocketWorld

__all__ = ["PocketConfig", "PocketProblem", "PocketVerdict", "PocketWorld"]
