"""The contract that every device keeps, as cases: ``run`` chooses, runs and counts them."""
