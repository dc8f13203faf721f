"""Video and sound as async iterators, presented at their natural pace.

Owns sources, what they hand out, and the front end of the digits model. Refuses to own models and executions; imports nothing of
aionn but its errors.

    async with aionn.media.video_file("clip.mp4", size=(96, 96)) as frames:
        async for frame in frames:
            ...  # frame.data, frame.captured_at_ns

Files other than 16-bit WAV need PyAV: ``pip install 'aionn[media]'``.
"""

from aionn.media.audio import audio_file
from aionn.media.features import LogMel, log_mel
from aionn.media.pacing import Keep
from aionn.media.records import AudioWindow, Frame, SourceStatistics
from aionn.media.source import Source
from aionn.media.synthetic import synthetic_audio, synthetic_video
from aionn.media.video import Interpolation, video_file

__all__ = [
    "AudioWindow",
    "Frame",
    "Interpolation",
    "Keep",
    "LogMel",
    "Source",
    "SourceStatistics",
    "audio_file",
    "log_mel",
    "synthetic_audio",
    "synthetic_video",
    "video_file",
]
