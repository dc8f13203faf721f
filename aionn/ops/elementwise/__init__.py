"""Families whose result has the shape of their operands: arithmetic, comparisons, activations, normalizations."""
