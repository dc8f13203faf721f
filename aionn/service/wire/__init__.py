"""What runtime and driver process say to each other, and how it travels: messages, their sizes, and calls over one socket."""
