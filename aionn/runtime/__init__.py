"""What an application uses: devices, compilations, executions, bursts."""
