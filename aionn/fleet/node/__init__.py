"""The node's end: serves its device to clients of other machines."""
