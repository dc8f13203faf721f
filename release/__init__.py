"""Makes the files of a release: `python -m release`, from the root of a checkout. No part of a wheel."""
