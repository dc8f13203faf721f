"""The stress tests of a device: their work, each in a process of its own, and the measurements during it."""
