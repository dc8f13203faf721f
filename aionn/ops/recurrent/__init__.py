"""Families with a state, one time step after the other, and what they share."""
