"""What a message through fmq costs, beside other queues: `python -m benchmarks.fmq`."""
