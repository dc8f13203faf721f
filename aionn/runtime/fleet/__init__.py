"""Streams over the devices of several nodes: each runs on one, and continues elsewhere when that is lost or drains."""
