"""Arithmetic and shapes that the families share: integer multipliers, windows, axes, broadcasting. No operation is here."""
