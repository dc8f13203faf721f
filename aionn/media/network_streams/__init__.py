"""Cameras and microphones behind a network: RTSP, RTMP, HTTP and what else FFmpeg reads, decoded in a process of their own.

Refuses to own the queue and reconnection, which live sources share (`aionn/media/live`).
"""
