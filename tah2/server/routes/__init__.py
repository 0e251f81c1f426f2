"""One small module per family of routes; each has a `router`."""
