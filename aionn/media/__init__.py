"""Video and sound as async iterators, presented at their natural pace.

Owns sources (files, cameras, microphones, network streams, screens, recordings), the items that they return, and the front end of
the digits model. Refuses to own models and executions; imports nothing of aionn but its errors.

    async with aionn.media.video_file("clip.mp4", size=(96, 96)) as frames:
        async for frame in frames:
            ...  # frame.data, frame.captured_at_ns

Cameras need no further package, unless they compress their pictures. Those, network streams, and files other than 16-bit WAV
need PyAV: ``pip install 'aionn[media]'``.
"""

from aionn.media.audio import audio_file
from aionn.media.cameras.controls import CameraControl
from aionn.media.cameras.in_place import CaptureMemory
from aionn.media.cameras.listing import CameraInfo
from aionn.media.cameras.opening import (
    CameraWatch,
    camera,
    camera_controls,
    list_cameras,
    set_camera_controls,
)
from aionn.media.features import LogMel, log_mel
from aionn.media.joining import Joined, JoinStatistics, Pair, joined
from aionn.media.live.capture import SourceUnavailable
from aionn.media.live.reconnection import Health, Reconnection
from aionn.media.live.source import LiveSource
from aionn.media.live.statistics import LiveStatistics
from aionn.media.live.tee import Branch, Tee, tee
from aionn.media.microphones.listing import MicrophoneInfo, list_microphones
from aionn.media.microphones.opening import microphone, raw_audio
from aionn.media.named import has_sound, named_source, shown_name
from aionn.media.network_streams.opening import network, network_audio
from aionn.media.pacing import Keep
from aionn.media.recording.recorder import Recorder, RecordingStatistics, record
from aionn.media.recording.replay import replay, replay_audio
from aionn.media.records import AudioWindow, Frame, SourceStatistics
from aionn.media.screen import screen
from aionn.media.source import Source
from aionn.media.synthetic import synthetic_audio, synthetic_video
from aionn.media.video import Interpolation, video_file

__all__ = [
    "AudioWindow",
    "Branch",
    "CameraControl",
    "CameraInfo",
    "CameraWatch",
    "CaptureMemory",
    "Frame",
    "Health",
    "Interpolation",
    "JoinStatistics",
    "Joined",
    "Keep",
    "LiveSource",
    "LiveStatistics",
    "LogMel",
    "MicrophoneInfo",
    "Pair",
    "Reconnection",
    "Recorder",
    "RecordingStatistics",
    "Source",
    "SourceStatistics",
    "SourceUnavailable",
    "Tee",
    "audio_file",
    "camera",
    "camera_controls",
    "has_sound",
    "joined",
    "list_cameras",
    "list_microphones",
    "log_mel",
    "microphone",
    "named_source",
    "network",
    "network_audio",
    "raw_audio",
    "record",
    "replay",
    "replay_audio",
    "screen",
    "set_camera_controls",
    "shown_name",
    "synthetic_audio",
    "synthetic_video",
    "tee",
    "video_file",
]
