"""The common part of ``aionn serve``: the processes beside the one of the device, and the figures of its page."""
