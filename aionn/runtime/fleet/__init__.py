"""Streams over the devices of several nodes: each runs on one, and goes on elsewhere when that is lost or drains."""
