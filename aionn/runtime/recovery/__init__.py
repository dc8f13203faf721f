"""Preparing models again after the death of a driver: a table of states (``states``), its shell (``prepared``)."""
