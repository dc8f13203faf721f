"""Microphones: the sound server's own recorder, PortAudio, and raw samples from a pipe or a socket.

Refuses to own the queue and reconnection, which live sources share (`aionn/media/live`), and the cutting into windows.
"""
