"""Streams with a guarantee: their terms, the measurement of their frames, the reservations of a device, and their results."""
