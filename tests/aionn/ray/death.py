"""The numbers of ``two_raylets`` and its test."""

FRAMES, DEATH_AT = 60, 15
"""Items of each stream, and the number of those before the death of a node."""
