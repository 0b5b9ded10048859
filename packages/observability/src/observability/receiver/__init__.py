"""An OTLP endpoint that stores requests in memory, optionally on disk, and forwards them."""

from __future__ import annotations

from observability.receiver.frames import BrokenRecording, read_folder
from observability.receiver.receiver import Receiver, ReceiverCounts

__all__ = ["BrokenRecording", "Receiver", "ReceiverCounts", "read_folder"]
