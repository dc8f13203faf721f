"""The cost of a message through fmq, beside other queues: `python -m benchmarks.fmq`."""
