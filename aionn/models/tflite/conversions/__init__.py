"""Conversion of each builtin operator to operations of the HAL, one file for related operators."""
