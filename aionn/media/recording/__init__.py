"""Items of a source in a file with their times, and a source that presents them again at these times.

Refuses to own where the items come from and what is done with them.
"""
