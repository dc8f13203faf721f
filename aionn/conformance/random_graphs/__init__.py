"""Random graphs of operations: drawn, run on a device, and compared with plain definitions."""
