"""The suites that a driver author runs."""
