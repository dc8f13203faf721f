"""The common parts of live sources of all kinds: reconnection, clocks, the queue, and the shell around them.

Refuses to own any device or protocol: those are in the folders beside this one, and give a `Capture`.
"""
