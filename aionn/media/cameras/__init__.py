"""Cameras by the kernel's Video4Linux2 interface, without any library.

Refuses to own the queue and reconnection, which live sources share (`aionn/media/live`).
"""
