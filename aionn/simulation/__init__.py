"""Scheduling under simulated time: workloads, the engine, policies to compare with, and the bound that none can exceed."""
