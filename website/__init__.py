"""Builds the documentation as a website: `python -m website`, from the root of a checkout. No part of a wheel."""
