"""The stress tests of a device: what they do, each in a process of its own, and what is measured meanwhile."""
