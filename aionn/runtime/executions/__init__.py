"""The ways to execute a plan, and the life of each execution: on its own, again and again, in bursts and streams."""
