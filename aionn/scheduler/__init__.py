"""Who runs next on which device, and who is told early that it cannot be done."""
