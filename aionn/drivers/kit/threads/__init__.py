"""Threads of a device beside those of its slots, and the scheduling of all of them."""
