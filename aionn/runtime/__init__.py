"""The interface of applications: devices, compilations, executions, bursts."""
