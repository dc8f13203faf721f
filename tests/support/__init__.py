"""Only our own tests use this package: drivers that break the contract, divided devices, data in the conformance format, a browser,
a mutator of records, native cancellation. ``aionn.testing`` has what other people's tests use.
"""
