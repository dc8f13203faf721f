"""Things that implement ``aionn.hal.Device``. Nothing is imported before it is asked for: see ``registry``."""
