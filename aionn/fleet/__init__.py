"""Devices of other machines: ``aionn serve --listen`` at one end, ``aionn.open(fleet=[...])`` at the other."""
