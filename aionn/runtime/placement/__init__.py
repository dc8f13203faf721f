"""From a model to a plan: the device of each operation, the steps made ready there, and their fallback."""
