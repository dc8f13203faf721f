"""Runs one case again: ``python -m aionn.conformance.random_graphs SET SEED``."""

from __future__ import annotations

import sys

from aionn.conformance.random_graphs.graphs import main

sys.exit(main(sys.argv[1:]))
