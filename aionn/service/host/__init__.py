"""The driver process: which clients it serves, and what it keeps for each."""
