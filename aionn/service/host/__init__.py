"""The driver process: the clients that it serves, and the objects that it keeps for each."""
