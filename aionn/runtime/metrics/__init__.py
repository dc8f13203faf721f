"""Figures of a runtime for a monitoring system: the counts (``figures``), and their names and readers (``exposed``)."""
