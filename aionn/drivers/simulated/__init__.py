"""Simulated devices: described hardware that takes its time on the event loop's clock. Used where it is named."""
