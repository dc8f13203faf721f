"""Bursts: repeated executions of a prepared model over two queues in shared memory.

``packets`` and ``session`` decide and know no I/O; ``controller`` (client) and ``server`` (driver) are the shells.
"""
