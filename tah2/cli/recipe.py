"""Recipes as commands read them; how they are composed is told in `tah2.config.recipe`."""

from tah2.config.recipe import load_recipe, parse_overrides

__all__ = ["load_recipe", "parse_overrides"]
