"""The protocol between runtime and driver process: messages, their sizes, and calls over one socket."""
