"""The streams of a fleet: which node each runs on, with the transfer of its frames as a part of the admission test. Pure."""
