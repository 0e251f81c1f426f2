"""Data: rows -> conversations -> tokens with a loss mask -> packed micro-batches in a fixed order."""
