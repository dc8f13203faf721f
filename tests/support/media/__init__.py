"""Servers and cameras that tests of media read from."""
